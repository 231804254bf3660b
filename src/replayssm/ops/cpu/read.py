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
from replayssm.ops.cpu.vector import LANES, Vec, device, fma, inlined, load, prefetch, put, total, totals4, totals8, zero

if TYPE_CHECKING:
    from collections.abc import Callable

    Four = tuple[Vec, Vec, Vec, Vec]
    Eight = tuple[Vec, Vec, Vec, Vec, Vec, Vec, Vec, Vec]


# bytes between what is read and what is fetched: about a memory latency of work
AHEAD = 4096


def make_dots(
    plane: Callable[[int, int, int, int], Vec], high_size: int, low_size: int = 0
) -> Callable[..., None]:
    """Return ``dots`` for one way of reading planes, of so many bytes an element.

    Every result has one accumulator, fed with key chunks in ascending order, whatever the tile: so a
    result does not depend on the number of rows or queries beside it.
    """

    @inlined
    def eight(high: int, step: int, low: int, low_step: int, q: Vec, i: int, n: int, sums: Eight) -> Eight:
        a, b, c, d, e, f, g, h = sums
        a = fma(plane(high, low, i, n), q, a)
        b = fma(plane(high + step, low + low_step, i, n), q, b)
        c = fma(plane(high + 2 * step, low + 2 * low_step, i, n), q, c)
        d = fma(plane(high + 3 * step, low + 3 * low_step, i, n), q, d)
        e = fma(plane(high + 4 * step, low + 4 * low_step, i, n), q, e)
        f = fma(plane(high + 5 * step, low + 5 * low_step, i, n), q, f)
        g = fma(plane(high + 6 * step, low + 6 * low_step, i, n), q, g)
        h = fma(plane(high + 7 * step, low + 7 * low_step, i, n), q, h)
        return a, b, c, d, e, f, g, h

    @inlined
    def fetch(high: int, low: int, i: int) -> None:
        # a block of rows is read along several lines at once, which no hardware prefetcher follows
        for line in range(2 * high_size):
            prefetch(high + AHEAD + 8 * high_size * i + 64 * line)
        for line in range(2 * low_size):
            prefetch(low + AHEAD + 8 * low_size * i + 64 * line)

    @inlined
    def eight_rows(high: int, step: int, low: int, low_step: int, x: int, keys: int, to: int) -> None:
        whole = keys // LANES * LANES
        o = zero()
        sums = (o, o, o, o, o, o, o, o)
        for i in range(0, whole, LANES):
            fetch(high, low, i)
            sums = eight(high, step, low, low_step, load(x + 4 * i), i, LANES, sums)
        if whole < keys:
            sums = eight(high, step, low, low_step, load(x + 4 * whole), whole, keys - whole, sums)
        a, b, c, d, e, f, g, h = sums
        totals8(to, a, b, c, d, e, f, g, h)

    @inlined
    def four(row: Vec, p: Vec, q: Vec, r: Vec, s: Vec, sums: Four) -> Four:
        a, b, c, d = sums
        return fma(row, p, a), fma(row, q, b), fma(row, r, c), fma(row, s, d)

    @inlined
    def four_by_four(
        high: int, step: int, low: int, low_step: int, x: int, x_step: int, keys: int, to: int, to_step: int
    ) -> None:
        o = zero()
        s0, s1, s2, s3 = (o, o, o, o), (o, o, o, o), (o, o, o, o), (o, o, o, o)
        whole = keys // LANES * LANES
        for i in range(0, whole, LANES):
            at = x + 4 * i
            fetch(high, low, i)
            p, q, r, s = load(at), load(at + x_step), load(at + 2 * x_step), load(at + 3 * x_step)
            s0 = four(plane(high, low, i, LANES), p, q, r, s, s0)
            s1 = four(plane(high + step, low + low_step, i, LANES), p, q, r, s, s1)
            s2 = four(plane(high + 2 * step, low + 2 * low_step, i, LANES), p, q, r, s, s2)
            s3 = four(plane(high + 3 * step, low + 3 * low_step, i, LANES), p, q, r, s, s3)
        if whole < keys:
            n, at = keys - whole, x + 4 * whole
            p, q, r, s = load(at), load(at + x_step), load(at + 2 * x_step), load(at + 3 * x_step)
            s0 = four(plane(high, low, whole, n), p, q, r, s, s0)
            s1 = four(plane(high + step, low + low_step, whole, n), p, q, r, s, s1)
            s2 = four(plane(high + 2 * step, low + 2 * low_step, whole, n), p, q, r, s, s2)
            s3 = four(plane(high + 3 * step, low + 3 * low_step, whole, n), p, q, r, s, s3)
        totals4(to, s0[0], s1[0], s2[0], s3[0])
        totals4(to + to_step, s0[1], s1[1], s2[1], s3[1])
        totals4(to + 2 * to_step, s0[2], s1[2], s2[2], s3[2])
        totals4(to + 3 * to_step, s0[3], s1[3], s2[3], s3[3])

    @inlined
    def one_row(high: int, low: int, x: int, keys: int) -> float:
        a = zero()
        whole = keys // LANES * LANES
        for i in range(0, whole, LANES):
            a = fma(plane(high, low, i, LANES), load(x + 4 * i), a)
        if whole < keys:
            a = fma(plane(high, low, whole, keys - whole), load(x + 4 * whole), a)
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


# scratch is in the nearest cache already
dots_f32 = make_dots(plane_f32, 0)
_dots_state = make_dots(plane_f32, 4)
_dots_bf16 = make_dots(plane_bf16, 2)
_dots_i8 = make_dots(plane_i8, 1)
_dots_s32 = make_dots(plane_s32, 2, 2)
_dots_q24 = make_dots(plane_q24, 1, 2)
_dots_q16 = make_dots(plane_q16, 1, 1)


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
        _dots_state(high, high_row, low, low_row, rows, x, x_row, queries, keys, to, to_row)
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
