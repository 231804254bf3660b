"""The fold of one chunk of value rows, in fp32, from raw entries and both planes.

Value rows never mix, so a chunk is folded in blocks of ``BF`` rows that stay in registers. With
scalar decays a window is one or two matrix products on the tensor cores; entries with a decay per
channel are folded one at a time. Every decay is a product of those of single entries.

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
    read_rows,
    write_tile,
)

# entries whose part of a column bound is made at a time
GROUP = tl.constexpr(8)


@triton.jit
def _as_scale(bound, old):
    """Return a column bound as a scale that planes can take."""
    # an entry that is not finite must not take the scale with it: its rows show it
    bound = tl.where(bound < float("inf"), bound, old)
    return tl.minimum(tl.maximum(bound, COLUMN_SCALE_MIN), COLUMN_SCALE_MAX).to(tl.bfloat16)


@triton.jit
def _column_bound(
    old, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the column scale ``[K]`` that a chunk takes after folding ``count`` entries."""
    kk, rows = tl.arange(0, BK), row0 + tl.arange(0, BC)
    bound = old
    for j in range(0, count, GROUP):
        e = j + tl.arange(0, GROUP)
        live, more = e < count, (e + 1 < count) & (e + 1 < j + GROUP)
        at = start + e
        at = tl.where(at >= R, at - R, at)
        following = tl.where(at + 1 >= R, at + 1 - R, at + 1)
        k_live = live[:, None] & (kk < K)[None, :]
        keys = tl.load(ring_k + at[:, None] * K + kk[None, :], k_live, 0.0).to(tl.float32)
        values = tl.load(ring_v + at[:, None] * V + rows[None, :],
                         live[:, None] & (rows < row_end)[None, :], 0.0)  # fmt: skip
        largest = tl.max(tl.abs(values.to(tl.float32)), 1)
        largest *= tl.abs(tl.load(ring_w + at, live, 0.0))
        gates = tl.load(ring_g + at[:, None] * K + kk[None, :], k_live, 0.0)
        later = tl.load(ring_g + following[:, None] * K + kk[None, :],
                        k_live & more[:, None], 0.0)  # fmt: skip
        after = tl.cumprod(decay_of(later), 0, reverse=True)
        part = tl.sum(largest[:, None] * after * tl.abs(keys), 0)
        bound = bound * product(decay_of(gates), 0) + part
    return _as_scale(bound, old)


@triton.jit
def _fold_rows(
    state, ring_k, ring_v, ring_g, ring_w, start, count, rows, rows_live,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, DELTA: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Fold ``count`` entries into a block of value rows ``[BF, K]``, oldest first."""
    kk = tl.arange(0, BK)
    k_live = kk < K
    at = start
    next_key = tl.load(ring_k + at * K + kk, k_live, 0.0)
    next_value = tl.load(ring_v + at * V + rows, rows_live, 0.0)
    next_w = tl.load(ring_w + at)
    next_g = tl.load(ring_g + at * K + kk, k_live, 0.0)
    for j in range(count):
        key, value = next_key.to(tl.float32), next_value.to(tl.float32)
        strength, log_decay = next_w, next_g
        # the newer entry is on its way while this one is folded
        at = tl.where(at + 1 >= R, 0, at + 1)
        more = j + 1 < count
        next_key = tl.load(ring_k + at * K + kk, k_live & more, 0.0)
        next_value = tl.load(ring_v + at * V + rows, rows_live & more, 0.0)
        next_w = tl.load(ring_w + at, more, 0.0)
        next_g = tl.load(ring_g + at * K + kk, k_live & more, 0.0)
        state = state * decay_of(log_decay)[None, :]
        if DELTA:
            value -= tl.sum(state * key[None, :], 1)
        state += (strength * value)[:, None] * key[None, :]
    return state


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
def _solve(keys, decay, strength, FE: tl.constexpr, B16: tl.constexpr):
    """Return the transpose of ``(I + A)^-1`` of a window's entries (see :func:`_fold_products`)."""
    e = tl.arange(0, FE)
    newer, older = e[:, None], e[None, :]
    between = tl.cumprod(tl.where(newer > older, decay[:, None], 1.0), 0)
    if B16:
        products = tl.dot(keys, tl.trans(keys))
    else:
        wide = keys.to(tl.float32)
        products = tl.dot(wide, tl.trans(wide), input_precision="ieee")
    lower = strength[:, None] * between * products
    return _inverse_of_unit_lower(tl.where(newer > older, lower, 0.0), FE)


@triton.jit
def _fold_products(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, FE: tl.constexpr,
):  # fmt: skip
    """Fold ``count <= FE`` entries with scalar decays into a chunk: ``S D + U K``.

    An entry's row of U takes the decay behind it. It is ``w v`` of an additive write. For delta
    writes it is that of the UT transform, ``(I + A)^-1 R``, with A strictly lower, ``A_st = w_s
    D_{t+1..s} k_s . k_t`` and ``R_s = w_s (v_s - D_{1..s} S k_s)``.
    """
    kk, e = tl.arange(0, BK), tl.arange(0, FE)
    k_live, e_live = kk < K, e < count
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    B16: tl.constexpr = ASM and ring_k.dtype.element_ty == tl.bfloat16
    at, next_at = start + e, start + e + 1
    at, next_at = tl.where(at >= R, at - R, at), tl.where(next_at >= R, next_at - R, next_at)
    keys = tl.load(ring_k + at[:, None] * K + kk[None, :], e_live[:, None] & k_live[None, :], 0.0)
    # the decay behind an entry is the product of the newer decays, never a quotient of products
    later = tl.load(ring_g + next_at, e + 1 < count, 0.0)
    after = tl.cumprod(decay_of(later), 0, reverse=True)
    decay = decay_of(tl.load(ring_g + at, e_live, 0.0))
    strength = tl.load(ring_w + at, e_live, 0.0)
    weight, carry = strength * after, product(decay, 0)
    if DELTA:
        solve = _solve(keys, decay, strength, FE, B16) * after[None, :]
        upto = strength * tl.cumprod(decay, 0)
    if SCALED:
        every = row0 + tl.arange(0, BC)
        sizes = tl.load(ring_v + at[:, None] * V + every[None, :],
                        e_live[:, None] & (every < row_end)[None, :], 0.0)  # fmt: skip
        size = tl.max(tl.abs(sizes.to(tl.float32)), 1) * tl.abs(weight)
        old = tl.load(columns + kk, k_live, 1.0).to(tl.float32)
        part = tl.sum(size[:, None] * tl.abs(keys.to(tl.float32)), 0)
        fresh = _as_scale(old * carry + part, old)
        inverse = 1.0 / fresh.to(tl.float32)
        # a delta fold needs the state itself before it decays
        carry = tl.broadcast_to(carry, (BK,)) if DELTA else old * carry
    # the bound is known at run time only, so that blocks are not unrolled into each other
    for block in range(0, row_end - row0, BF):
        rows = row0 + block + tl.arange(0, BF)
        rows_live = rows < row_end
        at_s = rows[:, None] * K + kk[None, :]
        live = rows_live[:, None] & k_live[None, :]
        state = read_rows(high, low, scales, at_s, live, rows, rows_live, FORMAT, ASM)
        values = tl.load(ring_v + at[None, :] * V + rows[:, None],
                         e_live[None, :] & rows_live[:, None], 0.0)  # fmt: skip
        if DELTA:
            if SCALED:
                state *= old[None, :]
            known = dot_exact(state, tl.trans(keys), tl.zeros((BF, FE), tl.float32), B16)
            update = values.to(tl.float32) * strength[None, :] - upto[None, :] * known
            update = tl.dot(update, solve, input_precision="ieee")
        else:
            update = values.to(tl.float32) * weight[None, :]
        if SCALED:
            state = dot_exact(update, keys, state * carry[None, :], B16) * inverse[None, :]
        else:
            state = dot_exact(update, keys, state * carry, B16)
        write_tile(state, high, low, scales, at_s, live, rows, rows_live, FORMAT, ASM)
    if SCALED:
        tl.store(columns + kk, fresh, k_live)


@triton.jit
def _fold_entries(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Fold ``count`` entries with a decay per channel into a chunk, one at a time."""
    kk = tl.arange(0, BK)
    k_live = kk < K
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    if SCALED:
        old = tl.load(columns + kk, k_live, 1.0).to(tl.float32)
        fresh = _column_bound(old, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
                              K, V, R, BC, BK)  # fmt: skip
        inverse = 1.0 / fresh.to(tl.float32)
    for block in range(0, row_end - row0, BF):
        rows = row0 + block + tl.arange(0, BF)
        rows_live = rows < row_end
        at = rows[:, None] * K + kk[None, :]
        live = rows_live[:, None] & k_live[None, :]
        state = read_rows(high, low, scales, at, live, rows, rows_live, FORMAT, ASM)
        if SCALED:
            state *= old[None, :]
        state = _fold_rows(state, ring_k, ring_v, ring_g, ring_w, start, count, rows, rows_live,
                           K, V, R, DELTA, BK)  # fmt: skip
        if SCALED:
            state *= inverse[None, :]
        write_tile(state, high, low, scales, at, live, rows, rows_live, FORMAT, ASM)
    if SCALED:
        tl.store(columns + kk, fresh, k_live)


@triton.jit
def fold_chunk(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Bring value rows ``row0 .. row_end - 1`` of a head over ``count`` entries, to a boundary.

    Pointers are those of the slot's head, ``columns`` of its tile. ``start`` is the ring index of
    the oldest entry.
    """
    if CHANNEL:
        _fold_entries(
            high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
            K, V, R, FORMAT, DELTA, ASM, BF, BC, BK,
        )  # fmt: skip
    else:
        # a matrix unit takes 16 entries or more
        FE: tl.constexpr = 16 if WINDOW <= 16 else 1 << (WINDOW - 1).bit_length()
        _fold_products(
            high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
            K, V, R, FORMAT, DELTA, ASM, BF, BC, BK, FE,
        )  # fmt: skip
