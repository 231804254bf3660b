"""The read: rows of a checkpoint times a few key-side vectors, the part all families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import (
    FMT_BF16,
    FMT_F32,
    FMT_Q24,
    FMT_S32,
    plane_bf16,
    plane_f32,
    plane_i8,
    plane_q16,
    plane_q24,
    plane_s32,
)
from replayssm.ops.cpu.vector import LANES, Vec, device, fma, load, put, total, totals4, totals8, zero

if TYPE_CHECKING:
    from collections.abc import Callable

Dots = "Callable[[int, int, int, int, int, int, int, int, int, int, int], None]"


def make_dots(plane: Callable[[int, int, int, int], Vec]) -> Callable[..., None]:
    """Return ``dots`` for one way of reading planes.

    Every result has one accumulator, fed with key chunks in ascending order, whatever the tile: so a
    result does not depend on the number of rows or queries beside it.
    """

    @device
    def eight_rows(high: int, step: int, low: int, low_step: int, x: int, keys: int, to: int) -> None:
        a = b = c = d = zero()
        e = f = g = h = zero()
        for i in range(0, keys, LANES):
            n = keys - i
            q = load(x + 4 * i)
            a = fma(plane(high, low, i, n), q, a)
            b = fma(plane(high + step, low + low_step, i, n), q, b)
            c = fma(plane(high + 2 * step, low + 2 * low_step, i, n), q, c)
            d = fma(plane(high + 3 * step, low + 3 * low_step, i, n), q, d)
            e = fma(plane(high + 4 * step, low + 4 * low_step, i, n), q, e)
            f = fma(plane(high + 5 * step, low + 5 * low_step, i, n), q, f)
            g = fma(plane(high + 6 * step, low + 6 * low_step, i, n), q, g)
            h = fma(plane(high + 7 * step, low + 7 * low_step, i, n), q, h)
        totals8(to, a, b, c, d, e, f, g, h)

    @device
    def four_by_four(
        high: int, step: int, low: int, low_step: int, x: int, x_step: int, keys: int, to: int, to_step: int
    ) -> None:
        a0 = a1 = a2 = a3 = zero()
        b0 = b1 = b2 = b3 = zero()
        c0 = c1 = c2 = c3 = zero()
        d0 = d1 = d2 = d3 = zero()
        for i in range(0, keys, LANES):
            n = keys - i
            p, q = load(x + 4 * i), load(x + x_step + 4 * i)
            r, s = load(x + 2 * x_step + 4 * i), load(x + 3 * x_step + 4 * i)
            row = plane(high, low, i, n)
            a0, b0, c0, d0 = fma(row, p, a0), fma(row, q, b0), fma(row, r, c0), fma(row, s, d0)
            row = plane(high + step, low + low_step, i, n)
            a1, b1, c1, d1 = fma(row, p, a1), fma(row, q, b1), fma(row, r, c1), fma(row, s, d1)
            row = plane(high + 2 * step, low + 2 * low_step, i, n)
            a2, b2, c2, d2 = fma(row, p, a2), fma(row, q, b2), fma(row, r, c2), fma(row, s, d2)
            row = plane(high + 3 * step, low + 3 * low_step, i, n)
            a3, b3, c3, d3 = fma(row, p, a3), fma(row, q, b3), fma(row, r, c3), fma(row, s, d3)
        totals4(to, a0, a1, a2, a3)
        totals4(to + to_step, b0, b1, b2, b3)
        totals4(to + 2 * to_step, c0, c1, c2, c3)
        totals4(to + 3 * to_step, d0, d1, d2, d3)

    @device
    def one_row(high: int, low: int, x: int, keys: int) -> float:
        a = zero()
        for i in range(0, keys, LANES):
            a = fma(plane(high, low, i, keys - i), load(x + 4 * i), a)
        return total(a)

    @device
    def dots(
        high: int,
        step: int,
        low: int,
        low_step: int,
        rows: int,
        x: int,
        x_step: int,
        queries: int,
        keys: int,
        to: int,
        to_step: int,
    ) -> None:
        whole, fours = rows // 8 * 8, queries // 4 * 4
        for row in range(0, whole, 8):
            at, rest = high + row * step, low + row * low_step
            for t in range(0, fours, 4):
                y, z = x + t * x_step, to + t * to_step + 4 * row
                four_by_four(at, step, rest, low_step, y, x_step, keys, z, to_step)
                at4, rest4 = at + 4 * step, rest + 4 * low_step
                four_by_four(at4, step, rest4, low_step, y, x_step, keys, z + 16, to_step)
            for t in range(fours, queries):
                y = x + t * x_step
                eight_rows(at, step, rest, low_step, y, keys, to + t * to_step + 4 * row)
        for row in range(whole, rows):
            at, rest = high + row * step, low + row * low_step
            for t in range(queries):
                put(to + t * to_step + 4 * row, one_row(at, rest, x + t * x_step, keys))

    return dots


dots_f32 = make_dots(plane_f32)
_dots_bf16 = make_dots(plane_bf16)
_dots_i8 = make_dots(plane_i8)
_dots_s32 = make_dots(plane_s32)
_dots_q24 = make_dots(plane_q24)
_dots_q16 = make_dots(plane_q16)


@device
def read_rows(
    fmt: int,
    full: int,
    high: int,
    high_row: int,
    low: int,
    low_row: int,
    rows: int,
    x: int,
    x_row: int,
    queries: int,
    keys: int,
    to: int,
    to_row: int,
) -> None:
    """Write ``S_0 x_t`` of every value row and query, without row scales.

    Reads the planes of ``rows`` rows once from memory: 4 bytes an element for ``f32``, 2 for ``bf16``
    and a high ``s32``, 1 for a high ``q24`` or ``q16``; full reads add the low plane (2, 2, 1). The x
    of scaled formats has been multiplied by the column scales.
    """
    if fmt == FMT_F32:
        dots_f32(high, high_row, low, low_row, rows, x, x_row, queries, keys, to, to_row)
    elif fmt == FMT_BF16 or (fmt == FMT_S32 and not full):
        _dots_bf16(high, high_row, low, low_row, rows, x, x_row, queries, keys, to, to_row)
    elif fmt == FMT_S32:
        _dots_s32(high, high_row, low, low_row, rows, x, x_row, queries, keys, to, to_row)
    elif not full:
        _dots_i8(high, high_row, low, low_row, rows, x, x_row, queries, keys, to, to_row)
    elif fmt == FMT_Q24:
        _dots_q24(high, high_row, low, low_row, rows, x, x_row, queries, keys, to, to_row)
    else:
        _dots_q16(high, high_row, low, low_row, rows, x, x_row, queries, keys, to, to_row)
