"""Blocks of the state as the tensor cores want them.

A block is cut in slices of key channels, ``[slices, rows, channels]``, and the channels of a slice
are put in the order in which a thread finds the numbers that the tensor cores want from it side by
side in memory: blocks go from memory to them and back with no exchange. ``VEC`` numbers lie side by
side, a slice has four times as many channels, and rows come in eights.
"""

import triton
import triton.language as tl


@triton.jit
def offsets(ROWS: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return the row and the channel of a stored block's numbers, for :func:`block_of`."""
    row = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, ROWS // 8)[None, None, :, None] * 8
    channel = tl.arange(0, SLICES)[None, :, None, None] * (4 * VEC)
    channel += tl.arange(0, 4 * VEC)[None, None, None, :]
    return row, channel


@triton.jit
def sliced(x, COUNT: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return ``[K, count]`` as ``[slices, channels, count]``, channels in a block's order."""
    x = tl.permute(tl.reshape(x, (SLICES, 4, VEC // 2, 2, COUNT)), (0, 2, 1, 3, 4))
    return tl.reshape(x, (SLICES, 4 * VEC, COUNT))


@triton.jit
def across(x, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return ``[K]`` as ``[slices, 1, channels]`` in the same order."""
    return tl.permute(sliced(x[:, None], 1, SLICES, VEC), (0, 2, 1))


@triton.jit
def block_of(x, ROWS: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return stored ``[8, slices, rows / 8, channels]`` as ``[slices, rows, channels]``."""
    x = tl.reshape(x, (8, SLICES, ROWS // 8, 4, VEC // 2, 2))
    return tl.reshape(tl.permute(x, (1, 2, 0, 4, 3, 5)), (SLICES, ROWS, 4 * VEC))


@triton.jit
def stored(x, ROWS: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return ``[slices, rows, channels]`` as it is stored: undo :func:`block_of`."""
    x = tl.reshape(x, (SLICES, ROWS // 8, 8, VEC // 2, 4, 2))
    return tl.reshape(tl.permute(x, (2, 0, 1, 4, 3, 5)), (8, SLICES, ROWS // 8, 4 * VEC))
