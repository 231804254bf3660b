"""The fold of one chunk of value rows, in fp32, from raw entries and both planes.

A window is folded by matrix products on the tensor cores, in blocks of ``BF`` value rows, which
never mix. Every decay is a product of those of single entries. The warps of a program share the key
channels of a block, ``SLICE`` each, so that a thread holds few of its numbers.

Scaled formats need a column scale before a block can be encoded, and no block sees the others: it
is the bound ``c' = c D + sum_j D_j w_j max|v_j| |k_j|`` on the new state's columns, from the old
scale and the entries alone (docs/decisions/0004).
"""

import triton
import triton.language as tl

from replayssm.ops.triton.kernels.common import decay_of, dot_exact, product
from replayssm.ops.triton.kernels.planes import (
    COLUMN_SCALE_MAX,
    COLUMN_SCALE_MIN,
    join_rows,
    load_rows,
    write_rows,
    write_scales,
)


@triton.jit
def _as_scale(bound, old):
    """Return a column bound as a scale that planes can take."""
    # an entry that is not finite must not take the scale with it: its rows show it
    bound = tl.where(bound < float("inf"), bound, old)
    return tl.minimum(tl.maximum(bound, COLUMN_SCALE_MIN), COLUMN_SCALE_MAX).to(tl.bfloat16)


@triton.jit
def _inverse_of_unit_upper(a, FE: tl.constexpr, ASM: tl.constexpr):
    """Return ``(I + a)^-1`` for a strictly upper ``a [FE, FE]``.

    Inverses of diagonal blocks give those of blocks twice their size.
    """
    i, j = tl.arange(0, FE)[:, None], tl.arange(0, FE)[None, :]
    x = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -a, 0.0))
    zero = tl.zeros((FE, FE), tl.float32)
    for level in tl.static_range(1, FE.bit_length() - 1):
        is_beside = (i >> level != j >> level) & (i >> level + 1 == j >> level + 1)
        beside = tl.where(is_beside, -a, 0.0)
        x = dot_exact(dot_exact(x, beside, zero, ASM), x, x, ASM)
    return x


@triton.jit
def _scalar_products(keys, decay, FE: tl.constexpr, ASM: tl.constexpr):
    """Return ``D_{t+1..s} k_s . k_t`` of entries s > t at ``[t, s]``, 0 elsewhere; keys ``[K, FE]``."""
    e = tl.arange(0, FE)
    is_newer = e[None, :] > e[:, None]
    between = tl.cumprod(tl.where(is_newer, decay[None, :], 1.0), 1)
    products = dot_exact(tl.trans(keys), keys, tl.zeros((FE, FE), tl.float32), ASM)
    return tl.where(is_newer, between * products, 0.0)


@triton.jit
def _sliced(x, COUNT: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return ``[K, count]`` as ``[slices, channels, count]``, channels in the order of a block's."""
    x = tl.permute(tl.reshape(x, (SLICES, 4, VEC // 2, 2, COUNT)), (0, 2, 1, 3, 4))
    return tl.reshape(x, (SLICES, 4 * VEC, COUNT))


@triton.jit
def _transposed(x):
    """Return ``[slices, n, m]`` as ``[slices, m, n]``."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def _block(x, ROWS: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return stored ``[8, slices, rows / 8, channels]`` as ``[slices, rows, channels]``."""
    x = tl.reshape(x, (8, SLICES, ROWS // 8, 4, VEC // 2, 2))
    return tl.reshape(tl.permute(x, (1, 2, 0, 4, 3, 5)), (SLICES, ROWS, 4 * VEC))


@triton.jit
def _stored(x, ROWS: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr):
    """Return ``[slices, rows, channels]`` as it is stored: undo :func:`_block`."""
    x = tl.reshape(x, (SLICES, ROWS // 8, 8, VEC // 2, 4, 2))
    return tl.reshape(tl.permute(x, (2, 0, 1, 4, 3, 5)), (8, SLICES, ROWS // 8, 4 * VEC))


@triton.jit
def _channel_products(
    keys, decay, later, FE: tl.constexpr, FK: tl.constexpr, SLICES: tl.constexpr,
    VEC: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the same for a decay per channel, ``decay`` of an entry and ``later`` of the next.

    Entries s and t in neighbouring blocks meet where the blocks do: the decays between them are
    those from there up to s, times those behind t up to there.
    """
    e = tl.arange(0, FE)
    t, s = e[:, None], e[None, :]
    total = tl.zeros((SLICES, FE, FE), tl.float32)
    for level in tl.static_range(0, FE.bit_length() - 1):
        ends = ((e + 1) >> level << level == e + 1)[None, :]
        upto = tl.reshape(decay, (FK, FE >> level, 1 << level))
        behind = tl.reshape(tl.where(ends, 1.0, later), (FK, FE >> level, 1 << level))
        upto, behind = tl.cumprod(upto, 2), tl.cumprod(behind, 2, reverse=True)
        older = _sliced(keys * tl.reshape(behind, (FK, FE)), FE, SLICES, VEC)
        newer = _sliced(keys * tl.reshape(upto, (FK, FE)), FE, SLICES, VEC)
        part = dot_exact(_transposed(older), newer, tl.zeros_like(total), ASM)
        meet = (s >> level == (t >> level) + 1) & (s >> level + 1 == t >> level + 1)
        total += tl.where(meet[None, :, :], part, 0.0)
    return tl.sum(total, 0)


@triton.jit
def fold_chunk(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Bring value rows ``row0 .. row_end - 1`` of a head over ``count`` entries: ``S D + U K``.

    Pointers are those of the slot's head, ``columns`` of its tile. ``start`` is the ring index of
    the oldest entry, and the newest ends at a boundary. An entry's row of U takes the decay behind
    it. It is ``w v`` of an additive write. For delta writes it is that of the UT transform, ``(I +
    A)^-1 R``, with A strictly lower, ``A_st = w_s D_{t+1..s} k_s . k_t`` and ``R_s = w_s (v_s -
    D_{1..s} S k_s)``.
    """
    # a matrix unit takes 16 entries or more
    FE: tl.constexpr = 16 if WINDOW <= 16 else 1 << (WINDOW - 1).bit_length()
    FK: tl.constexpr = BK if BK > 16 else 16
    VEC: tl.constexpr = 4 if FORMAT == "f32" or FK == 16 else 8
    SLICES: tl.constexpr = FK // (4 * VEC)
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    kk, e = tl.arange(0, FK), tl.arange(0, FE)
    k_live, e_live = kk < K, e < count
    at, next_at = start + e, start + e + 1
    at, next_at = tl.where(at >= R, at - R, at), tl.where(next_at >= R, next_at - R, next_at)
    strength = tl.load(ring_w + at, e_live, 0.0)
    at_k, k_e_live = at[None, :] * K + kk[:, None], e_live[None, :] & k_live[:, None]
    if CHANNEL:
        # a thread takes all entries of a channel
        at_k = tl.max_contiguous(at_k, (1, 1))
        at_next = tl.max_contiguous(next_at[None, :] * K + kk[:, None], (1, 1))
        keys = tl.load(ring_k + at_k, k_e_live, 0.0).to(tl.float32)
        decay = decay_of(tl.load(ring_g + at_k, k_e_live, 0.0))
        later = tl.load(ring_g + at_next, (e + 1 < count)[None, :] & k_live[:, None], 0.0)
        later = decay_of(later)
        carry, far = product(decay, 1), keys * tl.cumprod(later, 1, reverse=True)
        upto, weight, after = strength, strength, tl.full((FE,), 1.0, tl.float32)
        if DELTA:
            near = keys * tl.cumprod(decay, 1)
            products = _channel_products(keys, decay, later, FE, FK, SLICES, VEC, ASM)
    else:
        far = tl.load(ring_k + at_k, k_e_live, 0.0)
        # the decay behind an entry is the product of the newer decays, never a quotient of products
        later = tl.load(ring_g + next_at, e + 1 < count, 0.0)
        after = tl.cumprod(decay_of(later), 0, reverse=True)
        decay = decay_of(tl.load(ring_g + at, e_live, 0.0))
        near, weight, carry = far, strength * after, tl.broadcast_to(product(decay, 0), (FK,))
        upto = strength * tl.cumprod(decay, 0)
        if DELTA:
            products = _scalar_products(far, decay, FE, ASM)
    if DELTA:
        solve = _inverse_of_unit_upper(products * strength[None, :], FE, ASM) * after[None, :]
        solve = tl.broadcast_to(solve[None, :, :], (SLICES, FE, FE))
        near = _sliced(near, FE, SLICES, VEC)
    if SCALED:
        every = row0 + tl.arange(0, BC)
        sizes = tl.load(ring_v + at[:, None] * V + every[None, :],
                        e_live[:, None] & (every < row_end)[None, :], 0.0)  # fmt: skip
        size = tl.max(tl.abs(sizes.to(tl.float32)), 1) * tl.abs(weight)
        old = tl.load(columns + kk, k_live, 1.0).to(tl.float32)
        part = tl.sum(size[None, :] * tl.abs(far.to(tl.float32)), 1)
        fresh = _as_scale(old * carry + part, old)
        inverse = _transposed(_sliced((1.0 / fresh.to(tl.float32))[:, None], 1, SLICES, VEC))
        # a delta fold needs the state itself before it decays
        carry = carry if DELTA else old * carry
        old = _transposed(_sliced(old[:, None], 1, SLICES, VEC))
    if not DELTA:
        far = far.to(tl.float32) * weight[None, :]
    far = _transposed(_sliced(far, FE, SLICES, VEC))
    carry = _transposed(_sliced(carry[:, None], 1, SLICES, VEC))
    in_block = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, BF // 8)[None, None, :, None] * 8
    channel = tl.arange(0, SLICES)[None, :, None, None] * (4 * VEC)
    channel += tl.arange(0, 4 * VEC)[None, None, None, :]
    # the bound is known at run time only, so that blocks are not unrolled into each other
    for block in range(0, row_end - row0, BF):
        r = row0 + block + in_block
        rows = row0 + block + tl.arange(0, BF)
        at_s = tl.max_contiguous(r * K + channel, (1, 1, 1, VEC))
        live = (r < row_end) & (channel < K)
        top, rest, unit = load_rows(high, low, scales, at_s, live, r, r < row_end, FORMAT)
        values = tl.load(ring_v + at[None, :] * V + rows[:, None],
                         e_live[None, :] & (rows < row_end)[:, None], 0.0)  # fmt: skip
        state = _block(join_rows(top, rest, unit, FORMAT, ASM), BF, SLICES, VEC)
        values = tl.broadcast_to(values[None, :, :], (SLICES, BF, FE))
        if DELTA:
            if SCALED:
                state *= old
            none = tl.zeros((SLICES, BF, FE), tl.float32)
            known = tl.sum(dot_exact(state, near, none, ASM), 0)
            values = values.to(tl.float32) * strength - (upto * known)[None, :, :]
            values = dot_exact(values, solve, none, ASM)
        state = dot_exact(values, far, state * carry, ASM)
        if SCALED:
            state *= inverse
            per_unit = write_scales(state, scales, rows, rows < row_end, FORMAT)
            state *= per_unit[None, :, None]
        write_rows(_stored(state, BF, SLICES, VEC), high, low, at_s, live, FORMAT, ASM)
    if SCALED:
        tl.store(columns + kk, fresh, k_live)
