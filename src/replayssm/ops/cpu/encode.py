"""Rows of a checkpoint between planes and fp32 scratch, and the scales of fixed-point formats.

Decoding computes what ``formats.decode`` computes, and encoding gives the same bits as
``formats.encode``: planes, row scales and column scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayssm.formats import COLUMN_SCALE_MAX, COLUMN_SCALE_MIN, ROW_SCALE_MIN
from replayssm.ops.cpu.common import (
    FMT_BF16,
    FMT_F32,
    FMT_Q24,
    FMT_S32,
    IS_BF16,
    clear,
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
    put_wide_q16,
    put_wide_q24,
    row_scales,
    store_as,
)
from replayssm.ops.cpu.layout import Geometry, HeadAt
from replayssm.ops.cpu.read import fetch_bytes
from replayssm.ops.cpu.vector import (
    LANES,
    absolute,
    at_least,
    at_most,
    device,
    div,
    finite_or_zero,
    get,
    inlined,
    join_halves,
    largest,
    largest_bits,
    load,
    mul,
    single,
    splat,
    store,
    store_some,
    tops8,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.ops.cpu.vector import Vec

    Plane = Callable[[int, int, int, int], Vec]
    PutLanes = Callable[[int, int, int, Vec, int], None]
    PutWide = Callable[[int, int, int, tuple[Vec, Vec, Vec, Vec]], None]

ONE = single(1.0)
INFINITY_BITS = np.uint32(0x7F800000)
SCALE_MIN, SCALE_MAX = single(COLUMN_SCALE_MIN), single(COLUMN_SCALE_MAX)
ROW_MIN = single(ROW_SCALE_MIN)
# numbers that are written at once
WIDE = 4 * LANES
LEVELS_Q24, LEVELS_Q16 = single(2.0**16), single(2.0**8)
UNIT_Q24, UNIT_Q16 = single(2.0**-16), single(2.0**-8)


@device
def set_columns(columns: int, inverse: int, amax: int, keys: int) -> None:
    """Turn column amaxes into column scales (bf16, to nearest even) and their reciprocals."""
    for i in range(0, keys, LANES):
        scale = at_least(at_most(load(amax + 4 * i), SCALE_MAX), SCALE_MIN)
        store_as(columns + 2 * i, IS_BF16, scale, keys - i)
        # lanes behind the last channel load as 0
        scale = at_least(load_as(columns + 2 * i, IS_BF16, keys - i), SCALE_MIN)
        store(inverse + 4 * i, div(splat(ONE), scale))


@inlined
def is_finite(amax: int, row: int) -> bool:
    """Return whether column amaxes, a row of scratch, are all finite."""
    top = zero()
    for i in range(0, row, 4 * LANES):
        top = largest(top, load(amax + i))
    return bool(largest_bits(top) < INFINITY_BITS)


@device
def collect_amax(amax: int, block: int, rows: int, row: int) -> None:
    """Raise column amaxes by the finite magnitudes of decoded rows."""
    for i in range(0, row, 4 * LANES):
        top = load(amax + i)
        for r in range(rows):
            top = largest(top, absolute(finite_or_zero(load(block + r * row + i))))
        store(amax + i, top)


def make_decode(plane: Plane) -> Callable[[int, int, int, int], None]:
    """Return the decoder of one row of an unscaled format."""

    @device
    def decode(to: int, high: int, low: int, keys: int) -> None:
        whole = keys // LANES * LANES
        for i in range(0, whole, LANES):
            store(to + 4 * i, plane(high, low, i, LANES))
        if whole < keys:
            store(to + 4 * whole, plane(high, low, whole, keys - whole))

    return decode


def make_decode_fixed(plane: Plane) -> Callable[[int, int, int, float, int, int], None]:
    """Return the decoder of one fixed-point row; ``unit`` is its row scale times 2^-m."""

    @device
    def decode(to: int, high: int, low: int, unit: float, column: int, keys: int) -> None:
        factor, whole = splat(unit), keys // LANES * LANES
        for i in range(0, whole, LANES):
            store(to + 4 * i, mul(mul(plane(high, low, i, LANES), factor), load(column + 4 * i)))
        if whole < keys:
            last = mul(plane(high, low, whole, keys - whole), factor)
            store(to + 4 * whole, mul(last, load(column + 4 * whole)))

    return decode


def make_encode(put_lanes: PutLanes) -> Callable[[int, int, int, int], None]:
    """Return the encoder of one row of an unscaled format."""

    @device
    def encode(at: int, high: int, low: int, keys: int) -> None:
        whole = keys // LANES * LANES
        for i in range(0, whole, LANES):
            put_lanes(high, low, i, load(at + 4 * i), LANES)
        if whole < keys:
            put_lanes(high, low, whole, load(at + 4 * whole), keys - whole)

    return encode


@inlined
def tops_of_eight(block: int, row: int, inverse: int) -> Vec:
    """Return the largest magnitude of each of eight rows in units of the column scales."""
    o = zero()
    a, b, c, d, e, f, g, h = o, o, o, o, o, o, o, o
    for i in range(0, row, 4 * LANES):
        x, at = load(inverse + i), block + i
        a, b = largest(absolute(mul(load(at), x)), a), largest(absolute(mul(load(at + row), x)), b)
        at += 2 * row
        c, d = largest(absolute(mul(load(at), x)), c), largest(absolute(mul(load(at + row), x)), d)
        at += 2 * row
        e, f = largest(absolute(mul(load(at), x)), e), largest(absolute(mul(load(at + row), x)), f)
        at += 2 * row
        g, h = largest(absolute(mul(load(at), x)), g), largest(absolute(mul(load(at + row), x)), h)
    return tops8(a, b, c, d, e, f, g, h)


@device
def set_rows(scale: int, block: int, row: int, inverse: int, rows: int) -> None:
    """Write the row scales of up to 16 rows of scratch, which has 16."""
    low, high = tops_of_eight(block, row, inverse), tops_of_eight(block + 8 * row, row, inverse)
    scales = row_scales(join_halves(low, high))
    if rows >= LANES:
        store(scale, scales)
    else:
        store_some(scale, scales, rows)


def make_encode_fixed(
    put_lanes: PutLanes, put_wide: PutWide, levels: float
) -> Callable[[int, int, int, float, int, int], None]:
    """Return the encoder of one fixed-point row whose scale is known."""

    @inlined
    def part(at: int, inverse: int, steps: Vec, i: int) -> Vec:
        return mul(mul(load(at + 4 * i), load(inverse + 4 * i)), steps)

    @device
    def encode(at: int, high: int, low: int, scale: float, inverse: int, keys: int) -> None:
        if not scale >= ROW_MIN:
            for i in range(0, keys, LANES):
                put_lanes(high, low, i, zero(), keys - i)
            return
        steps, whole, wide = splat(levels / scale), keys // LANES * LANES, keys // WIDE * WIDE
        for i in range(0, wide, WIDE):
            x, y = part(at, inverse, steps, i), part(at, inverse, steps, i + LANES)
            j = i + 2 * LANES
            z, u = part(at, inverse, steps, j), part(at, inverse, steps, j + LANES)
            put_wide(high, low, i, (x, y, z, u))
        for i in range(wide, whole, LANES):
            put_lanes(high, low, i, part(at, inverse, steps, i), LANES)
        if whole < keys:
            put_lanes(high, low, whole, part(at, inverse, steps, whole), keys - whole)

    return encode


_decode_f32, _encode_f32 = make_decode(plane_f32), make_encode(put_f32)
_decode_bf16, _encode_bf16 = make_decode(plane_bf16), make_encode(put_bf16)
_decode_s32, _encode_s32 = make_decode(plane_s32), make_encode(put_s32)
_decode_q24, _encode_q24 = (
    make_decode_fixed(plane_q24),
    make_encode_fixed(put_q24, put_wide_q24, LEVELS_Q24),
)
_decode_q16, _encode_q16 = (
    make_decode_fixed(plane_q16),
    make_encode_fixed(put_q16, put_wide_q16, LEVELS_Q16),
)


@inlined
def sizes(at: Geometry) -> tuple[int, int]:
    """Return the bytes of an element in the high and in the low plane."""
    fmt = at.format
    if at.is_scaled:
        return 1, 2 if fmt == FMT_Q24 else 1
    return 4 if fmt == FMT_F32 else 2, 2 if fmt == FMT_S32 else 0


@inlined
def fetch_rows(at: Geometry, here: HeadAt, first: int, stop: int) -> None:
    """Fetch rows of both planes, one after another: prefetchers of the machine follow that."""
    high, low = sizes(at)
    for row in range(first, stop):
        fetch_bytes(here.high + row * here.high_row, at.key_dim * high)
        fetch_bytes(here.low + row * here.low_row, at.key_dim * low)


@device
def decode_rows(at: Geometry, here: HeadAt, column: int, first: int, rows: int, block: int) -> None:
    """Decode up to 16 rows from both planes to fp32; rows that do not exist become 0."""
    keys, row, fmt = at.key_dim, at.key_row, at.format
    high, low = here.high + first * here.high_row, here.low + first * here.low_row
    for r in range(LANES):
        to, top, rest = block + r * row, high + r * here.high_row, low + r * here.low_row
        if r >= rows:
            clear(to, keys)
        elif fmt == FMT_F32:
            _decode_f32(to, top, rest, keys)
        elif fmt == FMT_BF16:
            _decode_bf16(to, top, rest, keys)
        elif fmt == FMT_S32:
            _decode_s32(to, top, rest, keys)
        elif fmt == FMT_Q24:
            unit = get(here.scale + 4 * (first + r)) * UNIT_Q24
            _decode_q24(to, top, rest, unit, column, keys)
        else:
            unit = get(here.scale + 4 * (first + r)) * UNIT_Q16
            _decode_q16(to, top, rest, unit, column, keys)


@device
def encode_rows(
    at: Geometry, here: HeadAt, inverse: int, first: int, rows: int, block: int
) -> None:
    """Encode up to 16 fp32 rows; write their planes and row scales.

    Of a scaled format, ``block`` has 16 rows whatever ``rows`` says.
    """
    keys, row, fmt = at.key_dim, at.key_row, at.format
    high, low = here.high + first * here.high_row, here.low + first * here.low_row
    scales = here.scale + 4 * first
    if at.is_scaled:
        set_rows(scales, block, row, inverse, rows)
    for r in range(rows):
        source, top, rest = block + r * row, high + r * here.high_row, low + r * here.low_row
        if fmt == FMT_F32:
            _encode_f32(source, top, rest, keys)
        elif fmt == FMT_BF16:
            _encode_bf16(source, top, rest, keys)
        elif fmt == FMT_S32:
            _encode_s32(source, top, rest, keys)
        elif fmt == FMT_Q24:
            _encode_q24(source, top, rest, get(scales + 4 * r), inverse, keys)
        else:
            _encode_q16(source, top, rest, get(scales + 4 * r), inverse, keys)
