"""The commit of a tree: a row's kept entries move to the front of its block, in every ring.

Kept nodes come oldest first, so a later one never lies where an earlier one goes: one lane moves
one element of all of them, in order.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.kernels.common import COMMITTED, SLOT


@triton.jit
def compact_kernel(
    plan, paths, k, v, g, w, conv, rows, k_slot, v_slot, g_slot, w_slot, conv_slot,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    GATES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, RC: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One program per row and key head, value head or ``BC`` channels of the convolution."""
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(plan + SLOT * rows + row)
    first = tl.load(plan + COMMITTED * rows + row)
    if slot >= 0:
        if unit < H:
            move(paths + row * T, k + slot * k_slot + unit * R * K, first, T, R, K, K, BC)
        elif unit < H + HV:
            head = unit - H
            move(paths + row * T, v + slot * v_slot + head * R * V, first, T, R, V, V, BC)
            move(paths + row * T, g + slot * g_slot + head * R * GATES, first, T, R, GATES, GATES,
                 BC)  # fmt: skip
            move(paths + row * T, w + slot * w_slot + head * R, first, T, R, 1, 1, BC)
        else:
            start = (unit - H - HV) * BC
            at = conv + slot * conv_slot + start
            move(paths + row * T, at, first, T, RC, C, tl.minimum(C - start, BC), BC)


@triton.jit
def move(
    path, ring, first, T: tl.constexpr, R: tl.constexpr, ENTRY: tl.constexpr, width,
    BC: tl.constexpr,
):  # fmt: skip
    """Move ``width`` elements of every kept entry of one ring; a path ends at -1."""
    lane = tl.arange(0, BC)
    for i in range(T):
        node = tl.load(path + i)
        if node > i:
            source, target = (first + node) % R, (first + i) % R
            for at in range(0, width, BC):
                live = lane + at < width
                x = tl.load(ring + source * ENTRY + at + lane, live)
                tl.store(ring + target * ENTRY + at + lane, x, live)
