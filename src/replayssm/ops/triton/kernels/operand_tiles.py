"""Tiles of 64 value rows that are read where they lie: asked for, and operands of products.

Nothing that is only read passes through a register: tiles and values are operands of the tensor
cores where they are in shared memory. Copies come by the generic way and those operands are read by
the asynchronous one, so every wait for a tile has a fence behind it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared as copy,
)
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from replayssm.ops.triton.kernels.hopper import WARPS, in_ring
from replayssm.ops.triton.kernels.one_pass_system import BLOCK, ENTRIES, F32

ROWS = gl.constexpr(64)  # value rows of a tile

# registers: 16-byte pieces of rows of 16-bit numbers, of bytes and of values; outputs
KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0]))
KEY_ROWS, KEY_COLUMNS = (gl.constexpr(gl.SliceLayout(i, KEYS)) for i in (1, 0))
BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0]))
VALUES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))
VALUE_ROWS, VALUE_COLUMNS = (gl.constexpr(gl.SliceLayout(i, VALUES)) for i in (1, 0))
OUT4 = gl.constexpr(gl.DistributedLinearLayout(
    [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
))  # fmt: skip
OUT8 = gl.constexpr(gl.DistributedLinearLayout(
    [[8, 0], [0, 4]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
))  # fmt: skip


@gluon.jit
def ask_plane(buffer, source):
    """Ask for a tile of a plane."""
    pieces: gl.constexpr = KEYS if source.dtype.element_ty.primitive_bitwidth == 16 else BYTES
    row = gl.arange(0, ROWS, gl.SliceLayout(1, pieces))[:, None]
    column = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, pieces))[None, :]
    copy(buffer, source + (row * buffer.shape[1] + column))


@gluon.jit
def source_of(high, v, v_token, ring_v, start, past, length, own, V: gl.constexpr,
              R: gl.constexpr):  # fmt: skip
    """Return what :func:`ask` takes.

    That is the plane; where the values of entries start, how far the next head's are, and which are
    live; how many tiles there are.
    """
    entry = gl.arange(0, ENTRIES, VALUE_ROWS)
    in_block = entry - BLOCK
    return (
        high,
        gl.where(in_block >= 0, v + in_block * v_token, ring_v + in_ring(start + entry, R) * V),
        gl.where(in_block >= 0, V, R * V),
        gl.where(in_block >= 0, in_block < length, entry < past),
        own,
    )  # fmt: skip


@gluon.jit
def ask(tile, plane_buffer, value_buffer, source, V: gl.constexpr):
    """Ask for a tile of the plane that is read and its values; close the group of copies."""
    high, values, step, live, own = source
    if tile < own:
        value = tile % (V // ROWS) * ROWS + gl.arange(0, ROWS, VALUE_COLUMNS)[None, :]
        ask_plane(plane_buffer, high + tile * (ROWS * plane_buffer.shape[1]))
        copy(value_buffer, (values + tile // (V // ROWS) * step)[:, None] + value, live[:, None])
    commit_group()


@gluon.jit
def arrived(COUNT: gl.constexpr):
    """Wait until at most ``COUNT`` groups of copies are on their way; show products the rest."""
    wait_group(COUNT)
    fence_async_shared()


@gluon.jit
def _columns_of_pairs(y, TOKENS: gl.constexpr, OUT: gl.constexpr):
    """Return the first and second column of each token."""
    first, second = gl.split(gl.reshape(y, (ROWS, TOKENS, 2)))
    return gl.convert_layout(first, OUT), gl.convert_layout(second, OUT)


@gluon.jit
def _read_tile(tile, values, coef, vectors, factor, row_scale, FORMAT: gl.constexpr):
    """Return a head's outputs ``[64, tokens]``: ``vectors`` are its digits or the queries."""
    N: gl.constexpr = coef.shape[0]
    OUT: gl.constexpr = OUT4 if N == 8 else OUT8
    by_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    by_digits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    none = gl.zeros([ROWS, N], F32, by_values)
    y_values = warpgroup_mma(
        values.permute((1, 0)), coef.permute((1, 0)), none, use_acc=False, is_async=True
    )
    if FORMAT != "bf16":
        none = gl.zeros([ROWS, N], gl.int32, by_digits)
    y_state = warpgroup_mma(tile, vectors.permute((1, 0)), none, use_acc=False, is_async=True)
    factor = factor.load(gl.SliceLayout(0, OUT))[None, :]
    if FORMAT != "bf16":
        factor = factor * row_scale.load(gl.SliceLayout(1, OUT))[:, None]
    y_values, y_state = warpgroup_mma_wait(0, [y_values, y_state])
    first, second = _columns_of_pairs(y_state, N // 2, OUT)
    if FORMAT != "bf16":
        first = ((first << 8) + second).to(F32)
    y = first * factor
    first, second = _columns_of_pairs(y_values, N // 2, OUT)
    return y + (first + second)


@gluon.jit
def _write_outputs(y, out_at, z_at, tokens, length, T: gl.constexpr, HAS_Z: gl.constexpr):
    """Gate and store."""
    if HAS_Z:
        gated = gl.load(z_at, tokens < length, 0.0).to(F32)
        y *= gated / (1.0 + gl.exp(-gated))
    y = gl.where(tokens < length, y, 0.0).to(out_at.dtype.element_ty)
    gl.store(out_at, y, tokens < T)


@gluon.jit
def tile_outputs(i, tile, values, reading, place_of, T: gl.constexpr, V: gl.constexpr,
                 R: gl.constexpr, FORMAT: gl.constexpr, HAS_Z: gl.constexpr):  # fmt: skip
    """Write the outputs of tile ``i`` of a program's heads and append its block's values.

    ``place_of``: where outputs and their gates are, of which tokens, how many there are; the ring
    of values and, less than two rings on, where the first token's is.
    """
    coef, vectors, factors, row_scales = reading
    out_at, z_at, tokens, length, ring_v, first = place_of
    head = i // (V // ROWS)
    token, value = gl.arange(0, 8, VALUE_ROWS), gl.arange(0, ROWS, VALUE_COLUMNS)
    append_at = in_ring(first + token, R)[:, None] * V + value[None, :]
    if FORMAT != "bf16":
        vectors, row_scales = vectors.index(head), row_scales.index(i)
    y = _read_tile(tile, values, coef.index(head), vectors, factors.index(head), row_scales,
                   FORMAT)  # fmt: skip
    gl.store(ring_v + (head * (R * V) + i % (V // ROWS) * ROWS) + append_at,
             values.slice(BLOCK, 8, 0).load(VALUES), (token < length)[:, None])  # fmt: skip
    _write_outputs(y, out_at + i * ROWS, z_at + i * ROWS, tokens, length, T, HAS_Z)


@gluon.jit
def read_row(buffers, source, reading, place_of, T: gl.constexpr, V: gl.constexpr,
             R: gl.constexpr, FORMAT: gl.constexpr, HAS_Z: gl.constexpr, TILES: gl.constexpr,
             BUFFERS: gl.constexpr):  # fmt: skip
    """Read the tiles of a row that folds nothing; unrolled, so that addresses are constants."""
    for i in gl.static_range(TILES):
        arrived(min(BUFFERS + max(i - 1, 0), TILES) - 1 - i)
        if i >= 1 and i - 1 + BUFFERS < TILES:
            ask(i - 1 + BUFFERS, buffers[0].index((i - 1) % BUFFERS),
                buffers[1].index((i - 1) % BUFFERS), source, V)  # fmt: skip
        if i < source[4]:
            tile_outputs(i, buffers[0].index(i % BUFFERS), buffers[1].index(i % BUFFERS), reading,
                         place_of, T, V, R, FORMAT, HAS_Z)  # fmt: skip


@gluon.jit
def write_nothing(out, out_token, own, T: gl.constexpr, TILES: gl.constexpr):
    """Write zeros: the outputs of a pad row's tiles."""
    OUT: gl.constexpr = OUT4 if T <= 4 else OUT8
    tokens = gl.arange(0, 4 if T <= 4 else 8, gl.SliceLayout(0, OUT))[None, :]
    out_at = out + tokens * out_token + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))[:, None]
    for i in gl.static_range(TILES):
        nothing = gl.zeros([ROWS, tokens.shape[1]], out.dtype.element_ty, OUT)
        gl.store(out_at + i * ROWS, nothing, (tokens < T) & (i < own))
