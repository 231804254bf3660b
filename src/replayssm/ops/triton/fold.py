"""The fold of one chunk of value rows: the standard recurrence forwards, in fp32, from raw entries.

Value rows never mix, so a chunk is folded in blocks of ``BF`` rows that stay in registers. A scalar
decay is not multiplied into a block but kept beside it as one number, until it grows small.

Scaled formats need a column scale before a block can be encoded, and no block sees the others: it
is the bound ``c' = c D + sum_j D_j w_j max|v_j| |k_j|`` on the new state's columns, from the old
scale and the entries alone (docs/decisions/0004).
"""

import triton
import triton.language as tl

from replayssm.ops.triton.planes import (
    COLUMN_SCALE_MAX,
    COLUMN_SCALE_MIN,
    read_rows,
    write_tile,
)

# entries whose part of a column bound is made at a time
GROUP = tl.constexpr(8)
# a decay kept beside a block is multiplied into it before it leaves the range of its reciprocal
DECAY_MIN = tl.constexpr(2.0**-60)


@triton.jit
def _column_bound(
    old, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr,
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
        if CHANNEL:
            gates = tl.load(ring_g + at[:, None] * K + kk[None, :], k_live, 0.0)
            later = tl.load(ring_g + following[:, None] * K + kk[None, :],
                            k_live & more[:, None], 0.0)  # fmt: skip
            after = tl.exp(tl.cumsum(later, 0, reverse=True))
        else:
            gates = tl.load(ring_g + at, live, 0.0)
            later = tl.load(ring_g + following, more, 0.0)
            after = tl.exp(tl.cumsum(later, 0, reverse=True))[:, None]
        part = tl.sum(largest[:, None] * after * tl.abs(keys), 0)
        bound = bound * tl.exp(tl.sum(gates, 0)) + part
    # an entry that is not finite must not take the scale with it: its rows show it
    bound = tl.where(bound < float("inf"), bound, old)
    return tl.minimum(tl.maximum(bound, COLUMN_SCALE_MIN), COLUMN_SCALE_MAX).to(tl.bfloat16)


@triton.jit
def _fold_rows(
    state, ring_k, ring_v, ring_g, ring_w, start, count, rows, rows_live,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Fold ``count`` entries into a block of value rows ``[BF, K]``, oldest first."""
    kk = tl.arange(0, BK)
    k_live = kk < K
    at = start
    next_key = tl.load(ring_k + at * K + kk, k_live, 0.0)
    next_value = tl.load(ring_v + at * V + rows, rows_live, 0.0)
    next_w = tl.load(ring_w + at)
    if CHANNEL:
        next_g = tl.load(ring_g + at * K + kk, k_live, 0.0)
    else:
        next_g = tl.load(ring_g + at)
    decay = 1.0
    for j in range(count):
        key, value = next_key.to(tl.float32), next_value.to(tl.float32)
        strength, log_decay = next_w, next_g
        # the newer entry is on its way while this one is folded
        at = tl.where(at + 1 >= R, 0, at + 1)
        more = j + 1 < count
        next_key = tl.load(ring_k + at * K + kk, k_live & more, 0.0)
        next_value = tl.load(ring_v + at * V + rows, rows_live & more, 0.0)
        next_w = tl.load(ring_w + at, more, 0.0)
        if CHANNEL:
            next_g = tl.load(ring_g + at * K + kk, k_live & more, 0.0)
            state = state * tl.exp(log_decay)[None, :]
            if DELTA:
                value -= tl.sum(state * key[None, :], 1)
            state += (strength * value)[:, None] * key[None, :]
        else:
            next_g = tl.load(ring_g + at, more, 0.0)
            decay *= tl.exp(log_decay)
            if decay < DECAY_MIN:
                state = state * decay
                decay = 1.0
            if DELTA:
                value -= decay * tl.sum(state * key[None, :], 1)
            state += (strength / decay * value)[:, None] * key[None, :]
    if not CHANNEL:
        state = state * decay
    return state


@triton.jit
def fold_chunk(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Bring value rows ``row0 .. row_end - 1`` of a head over ``count`` entries, to a boundary.

    Pointers are those of the slot's head, ``columns`` of its tile. ``start`` is the ring index of
    the oldest entry.
    """
    kk = tl.arange(0, BK)
    k_live = kk < K
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    if SCALED:
        old = tl.load(columns + kk, k_live, 1.0).to(tl.float32)
        fresh = _column_bound(old, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
                              K, V, R, CHANNEL, BC, BK)  # fmt: skip
    for block in range(0, row_end - row0, BF):
        rows = row0 + block + tl.arange(0, BF)
        rows_live = rows < row_end
        at = rows[:, None] * K + kk[None, :]
        live = rows_live[:, None] & k_live[None, :]
        state = read_rows(high, low, scales, at, live, rows, rows_live, FORMAT)
        if SCALED:
            state *= old[None, :]
        state = _fold_rows(state, ring_k, ring_v, ring_g, ring_w, start, count, rows, rows_live,
                           K, V, R, DELTA, CHANNEL, BK)  # fmt: skip
        if SCALED:
            state *= (1.0 / fresh.to(tl.float32))[None, :]
        write_tile(state, high, low, scales, at, live, rows, rows_live, FORMAT, ASM)
    if SCALED:
        tl.store(columns + kk, fresh, k_live)
