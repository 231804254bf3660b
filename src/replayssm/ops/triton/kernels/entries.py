"""The fold of a chunk whose entries have a decay per key channel: one at a time, oldest first."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replayssm.ops.triton.kernels.common import below, decay_of, dot_near, product
from replayssm.ops.triton.kernels.planes import (
    as_read,
    column_scale_of,
    join_rows,
    load_rows,
    write_rows,
    write_scales,
)
from replayssm.ops.triton.kernels.read import (
    load_values,
    load_vectors,
    load_weights,
    read_one,
    tokens_of,
    write_outputs,
)

# entries whose part of a column bound is made at a time
GROUP = tl.constexpr(8)


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
    return column_scale_of(bound, old)


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
def fold_by_entries(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    reading, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    FORMAT: tl.constexpr, DELTA: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    T: tl.constexpr, NE: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr,
    SHARED_X: tl.constexpr, HAS_Z: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Fold entries with a decay per channel into a chunk, one at a time."""
    kk = tl.arange(0, BK)
    k_live = kk < K
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    if SCALED:
        old = tl.load(columns + kk, k_live, 1.0).to(tl.float32)
        fresh = _column_bound(old, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
                              K, V, R, BC, BK)  # fmt: skip
        tl.store(columns + kk, fresh, k_live)
        inverse = 1.0 / fresh.to(tl.float32)
    if reading is not None:
        out, x, scale, coef, gate_z, out_token, z_token, x_token, at_e, unread, length, full = (
            reading
        )
        NT: tl.constexpr = tokens_of(T)
        NEAR: tl.constexpr = ASM and out.dtype.element_ty.primitive_bitwidth == 16
        # the new scales are read where other lanes wrote them
        tl.debug_barrier()
    for block in range(0, row_end - row0, BF):
        rows = row0 + block + tl.arange(0, BF)
        rows_live = below(rows, row_end, EVEN)
        at = rows[:, None] * K + kk[None, :]
        live = rows_live[:, None] & k_live[None, :]
        top, rest, unit = load_rows(high, low, scales, at, live, rows[:, None],
                                    rows_live[:, None], FORMAT)  # fmt: skip
        state = join_rows(top, rest, unit, FORMAT, ASM)
        if SCALED:
            state *= old[None, :]
        state = _fold_rows(state, ring_k, ring_v, ring_g, ring_w, start, count, rows, rows_live,
                           K, V, R, DELTA, BK)  # fmt: skip
        if reading is not None:
            if WAITS:
                gdc_wait()
            newer = load_values(ring_v, at_e, unread, rows, rows_live, V)
        row_scale = 1.0
        if SCALED:
            state *= inverse[None, :]
            row_scale, per_unit = write_scales(state[None, :, :], scales, rows, rows_live, FORMAT)
            state *= per_unit[:, None]
        top, rest = write_rows(state, high, low, at, live, FORMAT, ASM)
        if reading is not None:
            numbers = as_read(top, rest, full, FORMAT, DEPTH)
            if T == 1:
                y = read_one(numbers, x, columns, length > 0, K, False, SCALED, ASM, BK)
            else:
                if numbers.dtype == tl.int8:
                    numbers = numbers.to(tl.bfloat16 if NEAR else tl.float32)
                vectors = load_vectors(x, columns, x_token, length, K, NT, SCALED, BK)
                y = dot_near(numbers, vectors, tl.zeros((BF, NT), tl.float32), NEAR)
            c, factor = load_weights(coef, scale, unread, length, NE, NT, TILES, SHARED_X, T > 1)
            write_outputs(y, newer, c, factor, row_scale, rows, rows_live, length, out, gate_z,
                          out_token, z_token, T, NT, SCALED, HAS_Z, NEAR, T > 1)  # fmt: skip
