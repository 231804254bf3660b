"""The short causal convolution of a block, and the append to the ring of its raw inputs.

As :mod:`replayssm.ops.conv`: inputs are rounded to the ring's dtype before any of them is read, and
a token sees its ancestors in the block, nearest first, then the committed history.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.kernels.common import COMMITTED, LENGTH, SLOT


@triton.jit
def conv_kernel(
    plan, parents, out, x, weight, bias, ring, rows, ring_slot, out_row, out_token, x_row, x_token,
    weight_channel, T: tl.constexpr, C: tl.constexpr, RC: tl.constexpr, WIDTH: tl.constexpr,
    BIAS: tl.constexpr, TREE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One program per row and ``BC`` channels."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = c < C
    slot = tl.maximum(tl.load(plan + SLOT * rows + row), 0)
    first = tl.load(plan + COMMITTED * rows + row)
    length = tl.load(plan + LENGTH * rows + row).to(tl.int32)
    ring += slot * ring_slot
    x += row * x_row
    for t in range(T):
        y = tl.zeros((BC,), tl.float32)
        if BIAS:
            y += tl.load(bias + c, live, 0.0).to(tl.float32)
        node = t
        for back in tl.static_range(WIDTH):
            in_block = (node >= 0) & (t < length)
            in_past = (node < 0) & (t < length)
            new = tl.load(x + node * x_token + c, live & in_block, 0.0)
            at = (first + node + RC) % RC
            old = tl.load(ring + at * C + c, live & in_past, 0.0)
            tap = tl.load(weight + c * weight_channel + (WIDTH - 1 - back), live, 0.0)
            seen = new.to(ring.dtype.element_ty).to(tl.float32) + old.to(tl.float32)
            y += tap.to(tl.float32) * seen
            if TREE:
                above = tl.load(parents + row * T + node, (node >= 0) & (t < length), 0)
                node = tl.where(node >= 0, above.to(tl.int32), node - 1)
            else:
                node -= 1
        y = tl.where(t < length, y, 0.0)
        tl.store(out + row * out_row + t * out_token + c, y.to(out.dtype.element_ty), live)
    # the ring's slots of the block hold nothing that a token of it reads
    for t in range(length):
        new = tl.load(x + t * x_token + c, live, 0.0)
        tl.store(ring + (first + t) % RC * C + c, new.to(ring.dtype.element_ty), live)
