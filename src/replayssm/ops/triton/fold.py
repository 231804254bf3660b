"""The fold of one chunk of value rows, in fp32, from raw entries and both planes.

Value rows never mix, so a chunk is folded in blocks of ``BF`` rows that stay in registers. With
scalar decays a window is two matrix products on the tensor cores: additive ``S' = S D + U K``, and
for delta writes the UT transform ``U = (I + A)^-1 R`` first, with A strictly lower,
``A_st = w_s D_{t+1..s} k_s . k_t`` and ``R_s = w_s (v_s - D_{1..s} S k_s)``. Decays of channels are
folded entry by entry. Every decay is the exponential of a sum of its own gates.

Scaled formats need a column scale before a block can be encoded, and no block sees the others: it
is the bound ``c' = c D + sum_j D_j w_j max|v_j| |k_j|`` on the new state's columns, from the old
scale and the entries alone (docs/decisions/0004).
"""

import triton
import triton.language as tl

from replayssm.ops.triton.common import dot_exact
from replayssm.ops.triton.planes import (
    COLUMN_SCALE_MAX,
    COLUMN_SCALE_MIN,
    read_rows,
    write_tile,
)


@triton.jit
def _as_scale(bound, old):
    # an entry that is not finite must not take the scale with it: its rows show it
    bound = tl.where(bound < float("inf"), bound, old)
    return tl.minimum(tl.maximum(bound, COLUMN_SCALE_MIN), COLUMN_SCALE_MAX).to(tl.bfloat16)


@triton.jit
def _largest_values(ring_v, at, live, row0, row_end, V: tl.constexpr, BC: tl.constexpr):
    """Return the largest magnitude ``[entries]`` of each value over a chunk's rows."""
    rows = row0 + tl.arange(0, BC)
    values = tl.load(ring_v + at[:, None] * V + rows[None, :],
                     live[:, None] & (rows < row_end)[None, :], 0.0)  # fmt: skip
    return tl.max(tl.abs(values.to(tl.float32)), 1)


@triton.jit
def _inverse_of_unit_lower(a, FE: tl.constexpr):
    """Return the transpose of ``(I + a)^-1`` for a strictly lower ``a [FE, FE]``, row by row."""
    i, j = tl.arange(0, FE)[:, None], tl.arange(0, FE)[None, :]
    x = tl.where(i == j, 1.0, 0.0)
    for s in range(1, FE):
        row = tl.sum(tl.where(i == s, a, 0.0), 0)
        column = tl.sum(x * row[None, :], 1)
        x = tl.where(j == s, x - column[:, None], x)
    return x


@triton.jit
def fold_products(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, ASM: tl.constexpr,
    CHUNK: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, FE: tl.constexpr,
):  # fmt: skip
    """Fold ``count`` entries with scalar decays into a chunk; see :func:`fold_chunk`."""
    kk, e = tl.arange(0, BK), tl.arange(0, FE)
    k_live, e_live = kk < K, e < count
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    B16: tl.constexpr = ASM and ring_k.dtype.element_ty == tl.bfloat16
    at, next_at = start + e, start + e + 1
    at, next_at = tl.where(at >= R, at - R, at), tl.where(next_at >= R, next_at - R, next_at)
    keys = tl.load(ring_k + at[:, None] * K + kk[None, :], e_live[:, None] & k_live[None, :], 0.0)
    strength = tl.load(ring_w + at, e_live, 0.0)
    gates = tl.load(ring_g + at, e_live, 0.0)
    later = tl.load(ring_g + next_at, e + 1 < count, 0.0)
    after = tl.exp(tl.cumsum(later, 0, reverse=True))
    total = tl.exp(tl.sum(gates, 0))
    if DELTA:
        earlier, behind = e[None, :], e[:, None]
        between = tl.cumsum(tl.where(behind > earlier, gates[:, None], 0.0), 0)
        if B16:
            products = tl.dot(keys, tl.trans(keys))
        else:
            wide = keys.to(tl.float32)
            products = tl.dot(wide, tl.trans(wide), input_precision="ieee")
        lower = strength[:, None] * tl.exp(between) * products
        solve = _inverse_of_unit_lower(tl.where(behind > earlier, lower, 0.0), FE)
        upto = strength * tl.exp(tl.cumsum(gates, 0))
    inverse = tl.full((BK,), 1.0, tl.float32)
    old = inverse
    if SCALED:
        old = tl.load(columns + kk, k_live, 1.0).to(tl.float32)
        size = _largest_values(ring_v, at, e_live, row0, row_end, V, BC) * tl.abs(strength) * after
        bound = old * total + tl.sum(size[:, None] * tl.abs(keys.to(tl.float32)), 0)
        fresh = _as_scale(bound, old)
        inverse = 1.0 / fresh.to(tl.float32)
    # the bound is known at run time only, so that blocks are not unrolled into each other
    carry = old * total * inverse
    for block in range(0, row_end - row0, BF):
        rows = row0 + block + tl.arange(0, BF)
        rows_live = rows < row_end
        at_s = rows[:, None] * K + kk[None, :]
        live = rows_live[:, None] & k_live[None, :]
        # keys and planes come from the cache once more rather than staying in registers
        keys = tl.load(ring_k + at[:, None] * K + kk[None, :],
                       e_live[:, None] & k_live[None, :], 0.0)  # fmt: skip
        values = tl.load(ring_v + at[None, :] * V + rows[:, None],
                         e_live[None, :] & rows_live[:, None], 0.0)  # fmt: skip
        u = values.to(tl.float32) * strength[None, :]
        if DELTA:
            state = read_rows(high, low, scales, at_s, live, rows, rows_live, FORMAT)
            if SCALED:
                state *= old[None, :]
            known = dot_exact(state, tl.trans(keys), tl.zeros((BF, FE), tl.float32), B16)
            u = tl.dot(u - upto[None, :] * known, solve, input_precision="ieee")
        update = dot_exact(u * after[None, :], keys, tl.zeros((BF, BK), tl.float32), B16)
        state = read_rows(high, low, scales, at_s, live, rows, rows_live, FORMAT)
        if SCALED:
            state = state * carry[None, :] + update * inverse[None, :]
        else:
            state = state * total + update
        write_tile(state, high, low, scales, at_s, live, rows, rows_live, FORMAT, ASM)
    if SCALED:
        tl.store(columns + kk, fresh, k_live)


@triton.jit
def fold_entries(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, ASM: tl.constexpr,
    CHUNK: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, FE: tl.constexpr,
):  # fmt: skip
    """Fold ``count`` entries with a decay per channel, one at a time; see :func:`fold_chunk`."""
    kk, e = tl.arange(0, BK), tl.arange(0, FE)
    k_live, e_live = kk < K, e < count
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    inverse = tl.full((BK,), 1.0, tl.float32)
    old = inverse
    if SCALED:
        old = tl.load(columns + kk, k_live, 1.0).to(tl.float32)
        bound = old
        for j in range(count):
            at = start + j
            at = tl.where(at >= R, at - R, at)
            every = row0 + tl.arange(0, BC)
            value = tl.load(ring_v + at * V + every, every < row_end, 0.0).to(tl.float32)
            size = tl.max(tl.abs(value), 0) * tl.abs(tl.load(ring_w + at))
            key = tl.load(ring_k + at * K + kk, k_live, 0.0).to(tl.float32)
            decay = tl.exp(tl.load(ring_g + at * K + kk, k_live, 0.0))
            bound = bound * decay + size * tl.abs(key)
        fresh = _as_scale(bound, old)
        inverse = 1.0 / fresh.to(tl.float32)
    # the bound is known at run time only, so that blocks are not unrolled into each other
    for block in range(0, row_end - row0, BF):
        rows = row0 + block + tl.arange(0, BF)
        rows_live = rows < row_end
        at_s = rows[:, None] * K + kk[None, :]
        live = rows_live[:, None] & k_live[None, :]
        key = tl.load(ring_k + start * K + kk, k_live, 0.0)
        gates = tl.load(ring_g + start * K + kk, k_live, 0.0)
        state = read_rows(high, low, scales, at_s, live, rows, rows_live, FORMAT)
        if SCALED:
            state *= old[None, :]
        for j in range(count):
            at, following = start + j, start + j + 1
            at = tl.where(at >= R, at - R, at)
            following = tl.where(following >= R, following - R, following)
            # the next entry is on its way while this one is folded
            more = k_live & (j + 1 < count)
            next_key = tl.load(ring_k + following * K + kk, more, 0.0)
            next_gates = tl.load(ring_g + following * K + kk, more, 0.0)
            value = tl.load(ring_v + at * V + rows, rows_live, 0.0).to(tl.float32)
            strength = tl.load(ring_w + at)
            state = state * tl.exp(gates)[None, :]
            k32 = key.to(tl.float32)
            if DELTA:
                value -= tl.sum(state * k32[None, :], 1)
            state += (strength * value)[:, None] * k32[None, :]
            key, gates = next_key, next_gates
        if SCALED:
            state *= inverse[None, :]
        write_tile(state, high, low, scales, at_s, live, rows, rows_live, FORMAT, ASM)
    if SCALED:
        tl.store(columns + kk, fresh, k_live)


@triton.jit
def fold_chunk(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr,
    CHUNK: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, FE: tl.constexpr,
):  # fmt: skip
    """Bring value rows ``row0 .. row_end - 1`` of a head over ``count`` entries, to a boundary.

    Pointers are those of the slot's head, ``columns`` of its tile. ``start`` is the ring index of
    the oldest entry; ``FE >= count`` entries fit the products.
    """
    if CHANNEL:
        fold_entries(
            high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
            K, V, R, FORMAT, DELTA, ASM, CHUNK, BF, BC, BK, FE,
        )  # fmt: skip
    else:
        fold_products(
            high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
            K, V, R, FORMAT, DELTA, ASM, CHUNK, BF, BC, BK, FE,
        )  # fmt: skip
