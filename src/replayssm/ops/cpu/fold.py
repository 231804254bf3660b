"""The fold: the oldest window of entries moves into the checkpoint of one head.

Blocked, from the raw ring and both planes in fp32. Additive writes are one small matrix product; delta
writes first solve ``(I + A) U = R`` with A strictly lower, ``A_st = w_s k_s . D_{t+1..s} k_t`` and
``R_s = w_s (v_s - S_0 D_{1..s} k_s)``. Value rows never mix, so 16 rows go through all stages while
they are in the nearest cache: memory is read and written once, both planes of every element (4 + 4
bytes for ``f32`` and ``s32``, 3 + 3 for ``q24``, 2 + 2 for ``q16`` and ``bf16``).

What a fold writes depends on the planes, the entries and their boundary only, never on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayssm.formats import COLUMN_SCALE_MAX, COLUMN_SCALE_MIN, HIGH_MAX, ROW_SCALE_MIN
from replayssm.ops.cpu.common import (
    FMT_BF16,
    FMT_F32,
    FMT_Q16,
    FMT_Q24,
    FMT_S32,
    IS_BF16,
    clear,
    copy_in,
    load_as,
    plane_bf16,
    plane_f32,
    plane_q16,
    plane_q24,
    plane_s32,
    put_bf16,
    put_f32,
    put_q16,
    put_q24,
    put_s32,
    store_as,
    width,
)
from replayssm.ops.cpu.layout import Geometry
from replayssm.ops.cpu.read import dots_f32
from replayssm.ops.cpu.vector import (
    LANES,
    absolute,
    at_least,
    at_most,
    bits_to_float,
    device,
    div,
    finite_or_zero,
    fma,
    get,
    largest,
    largest_bits,
    load,
    mul,
    positive_or,
    put,
    splat,
    store,
    sub,
    total,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.ops.cpu.vector import Vec

ONE = np.float32(1.0)
NAN = np.float32(np.nan)
ZERO = np.float32(0.0)
INFINITY_BITS = np.uint32(0x7F800000)
SCALE_MIN = np.float32(COLUMN_SCALE_MIN)
SCALE_MAX = np.float32(COLUMN_SCALE_MAX)
ROW_MIN = np.float32(ROW_SCALE_MIN)
HIGHEST = np.float32(HIGH_MAX)
BF16_MAX = np.float32(3.3895313892515355e38)
UNIT_Q24 = np.float32(2.0**-16)
UNIT_Q16 = np.float32(2.0**-8)
LEVELS_Q24 = np.float32(2.0**16)
LEVELS_Q16 = np.float32(2.0**8)


@device
def renew_columns(columns: int, fresh: int, inverse: int, amax: int, keys: int) -> None:
    """Turn collected column amaxes (bf16, in place) into column scales; clear the next collection."""
    top = zero()
    for i in range(0, keys, LANES):
        top = largest(top, load_as(columns + 2 * i, IS_BF16, keys - i))
    other = bits_to_float(largest_bits(top))
    if not other > ZERO:
        other = ONE
    for i in range(0, keys, LANES):
        scale = positive_or(load_as(columns + 2 * i, IS_BF16, keys - i), other)
        scale = at_least(at_most(scale, SCALE_MAX), SCALE_MIN)
        store_as(columns + 2 * i, IS_BF16, scale, keys - i)
        store(fresh + 4 * i, scale)
        store(inverse + 4 * i, div(splat(ONE), scale))
    clear(amax, keys)


@device
def prepare_scalar(
    before: int, after: int, lower: int, keys: int, decay: int, strength: int, n: int, dim: int, row: int, is_delta: int
) -> np.float32:
    """Fill decays up to and behind every entry, and A, for one decay a head; return the whole decay."""
    run = ONE
    for j in range(n):
        run = run * get(decay + 4 * j)
        put(before + 4 * j, run)
    behind = ONE
    for j in range(n - 1, -1, -1):
        put(after + 4 * j, behind)
        behind = behind * get(decay + 4 * j)
    if is_delta:
        step = 4 * ((n + LANES - 1) // LANES * LANES)
        dots_f32(keys, row, 0, 0, n, keys, row, n, dim, lower, step)
        for t in range(n):
            between = ONE
            for s in range(t + 1, n):
                between = between * get(decay + 4 * s)
                at = lower + t * step + 4 * s
                put(at, get(strength + 4 * s) * between * get(at))
    return run


@device
def prepare_channel(
    before: int, after: int, lower: int, whole: int, keys: int, decay: int, strength: int, n: int, row: int, is_delta: int
) -> None:
    """Fill keys decayed up to and behind every entry, A and the whole decay, for one decay a channel."""
    step = 4 * ((n + LANES - 1) // LANES * LANES)
    for i in range(0, row, 4 * LANES):
        run = splat(ONE)
        for j in range(n):
            run = mul(run, load(decay + j * row + i))
            if is_delta:
                store(before + j * row + i, mul(load(keys + j * row + i), run))
        store(whole + i, run)
    for t in range(n):
        for i in range(0, row, 4 * LANES):
            store(after + t * row + i, load(keys + t * row + i))
        for s in range(t + 1, n):
            seen = zero()
            for i in range(0, row, 4 * LANES):
                decayed = mul(load(after + t * row + i), load(decay + s * row + i))
                store(after + t * row + i, decayed)
                seen = fma(decayed, load(keys + s * row + i), seen)
            if is_delta:
                put(lower + t * step + 4 * s, get(strength + 4 * s) * total(seen))


def make_decode(plane: Callable[[int, int, int, int], Vec]) -> Callable[..., None]:
    """Return the decoder of one row of an unscaled format."""

    @device
    def decode(to: int, high: int, low: int, keys: int) -> None:
        whole = keys // LANES * LANES
        for i in range(0, whole, LANES):
            store(to + 4 * i, plane(high, low, i, LANES))
        if whole < keys:
            store(to + 4 * whole, plane(high, low, whole, keys - whole))

    return decode


def make_decode_fixed(plane: Callable[[int, int, int, int], Vec]) -> Callable[..., None]:
    """Return the decoder of one row of a fixed-point format; ``unit`` is its row scale times 2^-m."""

    @device
    def decode(to: int, high: int, low: int, unit: float, column: int, keys: int) -> None:
        factor, whole = splat(unit), keys // LANES * LANES
        for i in range(0, whole, LANES):
            store(to + 4 * i, mul(mul(plane(high, low, i, LANES), factor), load(column + 4 * i)))
        if whole < keys:
            last = mul(mul(plane(high, low, whole, keys - whole), factor), load(column + 4 * whole))
            store(to + 4 * whole, last)

    return decode


def make_encode(put_lanes: Callable[[int, int, int, Vec, int], None]) -> Callable[..., None]:
    """Return the encoder of one row of an unscaled format."""

    @device
    def encode(at: int, high: int, low: int, keys: int) -> None:
        whole = keys // LANES * LANES
        for i in range(0, whole, LANES):
            put_lanes(high, low, i, load(at + 4 * i), LANES)
        if whole < keys:
            put_lanes(high, low, whole, load(at + 4 * whole), keys - whole)

    return encode


def make_encode_fixed(
    put_lanes: Callable[[int, int, int, Vec, int], None], levels: float
) -> Callable[..., None]:
    """Return the encoder of one row of a fixed-point format; integers equal ``formats.encode``'s."""

    @device
    def encode(at: int, high: int, low: int, scale: int, inverse: int, keys: int) -> None:
        top, whole = zero(), keys // LANES * LANES
        for i in range(0, keys, LANES):
            top = largest(top, absolute(mul(load(at + 4 * i), load(inverse + 4 * i))))
        bits = largest_bits(top)
        row_scale = bits_to_float(bits) / HIGHEST
        if bits >= INFINITY_BITS or row_scale < ROW_MIN:
            put(scale, NAN if bits >= INFINITY_BITS else ZERO)
            for i in range(0, keys, LANES):
                put_lanes(high, low, i, zero(), keys - i)
            return
        put(scale, row_scale)
        steps = splat(levels / row_scale)
        for i in range(0, whole, LANES):
            normal = mul(load(at + 4 * i), load(inverse + 4 * i))
            put_lanes(high, low, i, mul(normal, steps), LANES)
        if whole < keys:
            normal = mul(load(at + 4 * whole), load(inverse + 4 * whole))
            put_lanes(high, low, whole, mul(normal, steps), keys - whole)

    return encode


_decode_f32, _encode_f32 = make_decode(plane_f32), make_encode(put_f32)
_decode_bf16, _encode_bf16 = make_decode(plane_bf16), make_encode(put_bf16)
_decode_s32, _encode_s32 = make_decode(plane_s32), make_encode(put_s32)
_decode_q24, _encode_q24 = make_decode_fixed(plane_q24), make_encode_fixed(put_q24, LEVELS_Q24)
_decode_q16, _encode_q16 = make_decode_fixed(plane_q16), make_encode_fixed(put_q16, LEVELS_Q16)


@device
def decode_rows(
    fmt: int, block: int, high: int, high_row: int, low: int, low_row: int, scale: int, column: int, rows: int, keys: int, row: int
) -> None:
    """Decode up to 16 rows of both planes to fp32; rows that do not exist become 0."""
    for r in range(LANES):
        to, top, rest = block + r * row, high + r * high_row, low + r * low_row
        if r >= rows:
            clear(to, keys)
        elif fmt == FMT_F32:
            _decode_f32(to, top, rest, keys)
        elif fmt == FMT_BF16:
            _decode_bf16(to, top, rest, keys)
        elif fmt == FMT_S32:
            _decode_s32(to, top, rest, keys)
        elif fmt == FMT_Q24:
            _decode_q24(to, top, rest, get(scale + 4 * r) * UNIT_Q24, column, keys)
        else:
            _decode_q16(to, top, rest, get(scale + 4 * r) * UNIT_Q16, column, keys)


@device
def written_values(
    values: int, v: int, v_entry: int, kind: int, first: int, ring_len: int, before: int, after: int, lower: int, strength: int, n: int, rows: int, is_delta: int, channel: int
) -> None:
    """Fill ``U [n, 16]``; for delta writes ``values`` holds ``S_0 (decayed) k_s`` on entry."""
    step = 4 * ((n + LANES - 1) // LANES * LANES)
    at = first
    for s in range(n):
        value = load_as(v + at * v_entry, kind, rows)
        if is_delta:
            seen = load(values + 64 * s)
            if not channel:
                seen = mul(seen, splat(get(before + 4 * s)))
            value = sub(value, seen)
        value = mul(value, splat(get(strength + 4 * s)))
        if is_delta:
            for t in range(s):
                factor = splat(-get(lower + t * step + 4 * s))
                value = fma(factor, load(values + 64 * t), value)
        store(values + 64 * s, value)
        at = 0 if at + 1 == ring_len else at + 1
    if not channel:
        for s in range(n):
            store(values + 64 * s, mul(load(values + 64 * s), splat(get(after + 4 * s))))


@device
def update_rows(block: int, whole: int, keys: int, values: int, n: int, row: int) -> None:
    """Write ``S D + sum_j u_j k_j`` over 16 decoded rows, 8 at a time, one key chunk in registers."""
    for r in range(0, LANES, 8):
        for i in range(0, row, 4 * LANES):
            at = block + r * row + i
            d = load(whole + i)
            s0, s1 = mul(load(at), d), mul(load(at + row), d)
            s2, s3 = mul(load(at + 2 * row), d), mul(load(at + 3 * row), d)
            s4, s5 = mul(load(at + 4 * row), d), mul(load(at + 5 * row), d)
            s6, s7 = mul(load(at + 6 * row), d), mul(load(at + 7 * row), d)
            for j in range(n):
                k, u = load(keys + j * row + i), values + 64 * j + 4 * r
                s0, s1 = fma(splat(get(u)), k, s0), fma(splat(get(u + 4)), k, s1)
                s2, s3 = fma(splat(get(u + 8)), k, s2), fma(splat(get(u + 12)), k, s3)
                s4, s5 = fma(splat(get(u + 16)), k, s4), fma(splat(get(u + 20)), k, s5)
                s6, s7 = fma(splat(get(u + 24)), k, s6), fma(splat(get(u + 28)), k, s7)
            store(at, s0)
            store(at + row, s1)
            store(at + 2 * row, s2)
            store(at + 3 * row, s3)
            store(at + 4 * row, s4)
            store(at + 5 * row, s5)
            store(at + 6 * row, s6)
            store(at + 7 * row, s7)


@device
def collect_amax(amax: int, block: int, rows: int, row: int) -> None:
    """Raise column amaxes by the finite magnitudes of decoded rows."""
    for i in range(0, row, 4 * LANES):
        top = load(amax + i)
        for r in range(rows):
            top = largest(top, absolute(finite_or_zero(load(block + r * row + i))))
        store(amax + i, top)


@device
def encode_rows(
    fmt: int, block: int, high: int, high_row: int, low: int, low_row: int, scale: int, inverse: int, rows: int, keys: int, row: int
) -> None:
    """Encode fp32 rows and write their planes and row scales."""
    for r in range(rows):
        at, top, rest = block + r * row, high + r * high_row, low + r * low_row
        if fmt == FMT_F32:
            _encode_f32(at, top, rest, keys)
        elif fmt == FMT_BF16:
            _encode_bf16(at, top, rest, keys)
        elif fmt == FMT_S32:
            _encode_s32(at, top, rest, keys)
        elif fmt == FMT_Q24:
            _encode_q24(at, top, rest, scale + 4 * r, inverse, keys)
        else:
            _encode_q16(at, top, rest, scale + 4 * r, inverse, keys)


@device
def fold_head(
    at: Geometry, high: int, high_row: int, low: int, low_row: int, scale: int, old_columns: int, new_columns: int, next_columns: int, keys: int, decay: int, strength: int, v: int, v_entry: int, kind: int, first: int, n: int, before: int, after: int, lower: int, values: int, block: int, whole: int, column: int, fresh: int, inverse: int, amax: int
) -> None:
    """Fold n entries into one head: ``keys``, ``decay`` and ``strength`` are gathered, v is in the ring."""
    dim, row, fmt = at.key_dim, 4 * at.padded_key, at.format
    scaled = fmt == FMT_Q24 or fmt == FMT_Q16
    if scaled:
        copy_in(column, old_columns, IS_BF16, dim)
        renew_columns(new_columns, fresh, inverse, amax, dim)
    if at.per_channel:
        prepare_channel(before, after, lower, whole, keys, decay, strength, n, row, at.is_delta)
        seen_keys, written_keys = before, after
    else:
        d = prepare_scalar(before, after, lower, keys, decay, strength, n, dim, row, at.is_delta)
        for i in range(0, row, 4 * LANES):
            store(whole + i, splat(d))
        seen_keys, written_keys = keys, keys
    for r in range(0, at.value_dim, LANES):
        rows = min(LANES, at.value_dim - r)
        top, rest, row_scale = high + r * high_row, low + r * low_row, scale + 4 * r
        decode_rows(fmt, block, top, high_row, rest, low_row, row_scale, column, rows, dim, row)
        if at.is_delta:
            dots_f32(block, row, 0, 0, LANES, seen_keys, row, n, dim, values, 64)
        values_at = v + r * width(kind)
        written_values(values, values_at, v_entry, kind, first, at.ring_len, before, after, lower, strength, n, rows, at.is_delta, at.per_channel)
        update_rows(block, whole, written_keys, values, n, row)
        if scaled:
            collect_amax(amax, block, rows, row)
        encode_rows(fmt, block, top, high_row, rest, low_row, row_scale, inverse, rows, dim, row)
    if scaled:
        for i in range(0, dim, LANES):
            store_as(next_columns + 2 * i, IS_BF16, at_most(load(amax + 4 * i), BF16_MAX), dim - i)
