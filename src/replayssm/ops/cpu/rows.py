"""Rows of a state advanced by one token: what every step of the standard path does.

Four rows are advanced together and 128 keys of one before the next, in the order of memory: a
prefetcher of the machine follows that, and four rows side by side cost half of the bandwidth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import IS_BF16, IS_F16, IS_F32, load_as, store_as
from replayssm.ops.cpu.layout import StandardAt
from replayssm.ops.cpu.read import PART, fetch_bytes, load_eight
from replayssm.ops.cpu.vector import (
    IS_ZEN,
    LANES,
    Vec,
    device,
    fma,
    get,
    inlined,
    keep_order,
    load,
    mul,
    put,
    splat,
    total,
    totals4,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Two = tuple[Vec, Vec]
    Four = tuple[Vec, Vec, Vec, Vec]
    Eight = tuple[Vec, Vec, Vec, Vec, Vec, Vec, Vec, Vec]
    Vectors = tuple[int, int, int]

# bytes between what is rewritten and what is fetched: pages are small, and a prefetcher stops at
# each
AHEAD = 4096


@inlined
def fetch_ahead(address: int, nbytes: int) -> None:
    """Fetch what will be rewritten a little later."""
    if not IS_ZEN:
        fetch_bytes(address + AHEAD, nbytes)


@inlined
def fetch_rest(p: int, row: int, first: int, stop: int) -> None:
    """Fetch the bytes from ``first`` to ``stop`` of four rows, which go side by side."""
    for r in range(4):
        fetch_ahead(p + r * row + first, stop - first)


def make_see_parts(kind: int) -> Callable[[int, int, int, int, Eight], Eight]:
    """Return what :func:`make_see` does with 128 keys of four rows, in the order of memory."""
    size = 4 if kind == IS_F32 else 2
    step = size * LANES

    @inlined
    def part(p: int, x: Eight, z: Eight, sums: Two) -> Two:
        fetch_ahead(p, size * PART // 2)
        a, e = sums
        s = load_as(p, kind, LANES)
        a, e = fma(s, x[0], a), fma(s, z[0], e)
        s = load_as(p + step, kind, LANES)
        a, e = fma(s, x[1], a), fma(s, z[1], e)
        s = load_as(p + 2 * step, kind, LANES)
        a, e = fma(s, x[2], a), fma(s, z[2], e)
        s = load_as(p + 3 * step, kind, LANES)
        a, e = fma(s, x[3], a), fma(s, z[3], e)
        s = load_as(p + 4 * step, kind, LANES)
        a, e = fma(s, x[4], a), fma(s, z[4], e)
        s = load_as(p + 5 * step, kind, LANES)
        a, e = fma(s, x[5], a), fma(s, z[5], e)
        s = load_as(p + 6 * step, kind, LANES)
        a, e = fma(s, x[6], a), fma(s, z[6], e)
        s = load_as(p + 7 * step, kind, LANES)
        keep_order()
        return fma(s, x[7], a), fma(s, z[7], e)

    @inlined
    def parts(p: int, row: int, query: int, seen: int, sums: Eight) -> Eight:
        x, z = load_eight(query), load_eight(seen)
        a, e = part(p, x, z, (sums[0], sums[4]))
        b, f = part(p + row, x, z, (sums[1], sums[5]))
        c, g = part(p + 2 * row, x, z, (sums[2], sums[6]))
        d, h = part(p + 3 * row, x, z, (sums[3], sums[7]))
        return a, b, c, d, e, f, g, h

    return parts


def make_see(kind: int) -> tuple[Callable[..., Eight], Callable[..., Two]]:
    """Return what a delta write sees of (four rows, one row): lanes of ``S D q`` and of ``S D k``.

    Half of the lines of every row are fetched here, half where it is written.
    """
    size, parts = 4 if kind == IS_F32 else 2, make_see_parts(kind)

    @inlined
    def chunk(p: int, row: int, query: int, seen: int, i: int, n: int, sums: Eight) -> Eight:
        x, z, at = load(query + 4 * i), load(seen + 4 * i), p + size * i
        a, b, c, d, e, f, g, h = sums
        s = load_as(at, kind, n)
        a, e = fma(s, x, a), fma(s, z, e)
        s = load_as(at + row, kind, n)
        b, f = fma(s, x, b), fma(s, z, f)
        s = load_as(at + 2 * row, kind, n)
        c, g = fma(s, x, c), fma(s, z, g)
        s = load_as(at + 3 * row, kind, n)
        d, h = fma(s, x, d), fma(s, z, h)
        return a, b, c, d, e, f, g, h

    @inlined
    def see_four(p: int, row: int, query: int, seen: int, keys: int) -> Eight:
        o, start, whole = zero(), keys // PART * PART, keys // LANES * LANES
        sums = (o, o, o, o, o, o, o, o)
        for i in range(0, start, PART):
            sums = parts(p + size * i, row, query + 4 * i, seen + 4 * i, sums)
        fetch_rest(p, row, size * start, size * keys)
        for i in range(start, whole, LANES):
            sums = chunk(p, row, query, seen, i, LANES, sums)
        if whole < keys:
            sums = chunk(p, row, query, seen, whole, keys - whole, sums)
        return sums

    @inlined
    def see_one(p: int, query: int, seen: int, keys: int) -> Two:
        a, e = zero(), zero()
        for i in range(0, keys, LANES):
            s = load_as(p + size * i, kind, keys - i)
            a, e = fma(s, load(query + 4 * i), a), fma(s, load(seen + 4 * i), e)
        return a, e

    return see_four, see_one


def make_renew(kind: int) -> Callable[[int, int, Vec, Vec, Vec, Vec, Vec, int], Vec]:
    """Return what rewrites up to 16 keys of a row, and adds to lanes of ``S D q``."""

    @inlined
    def renew(p: int, to: int, u: Vec, k: Vec, d: Vec, x: Vec, a: Vec, n: int) -> Vec:
        s = load_as(p, kind, n)
        store_as(to, kind, fma(u, k, mul(s, d)), n)
        return fma(s, x, a)

    return renew


def make_write_parts(kind: int) -> Callable[..., Four]:
    """Return what :func:`make_write` does with 128 keys of four rows, in the order of memory."""
    size, renew = 4 if kind == IS_F32 else 2, make_renew(kind)
    step = size * LANES

    @inlined
    def part(p: int, to: int, u: Vec, k: Eight, d: Eight, x: Eight, a: Vec, seen: int) -> Vec:
        fetch_ahead(p + seen, size * PART - seen)
        a = renew(p, to, u, k[0], d[0], x[0], a, LANES)
        a = renew(p + step, to + step, u, k[1], d[1], x[1], a, LANES)
        a = renew(p + 2 * step, to + 2 * step, u, k[2], d[2], x[2], a, LANES)
        a = renew(p + 3 * step, to + 3 * step, u, k[3], d[3], x[3], a, LANES)
        a = renew(p + 4 * step, to + 4 * step, u, k[4], d[4], x[4], a, LANES)
        a = renew(p + 5 * step, to + 5 * step, u, k[5], d[5], x[5], a, LANES)
        a = renew(p + 6 * step, to + 6 * step, u, k[6], d[6], x[6], a, LANES)
        return renew(p + 7 * step, to + 7 * step, u, k[7], d[7], x[7], a, LANES)

    @inlined
    def parts(p: int, to: int, row: int, us: Four, at: Vectors, sums: Four, seen: int) -> Four:
        k, d, x = load_eight(at[0]), load_eight(at[1]), load_eight(at[2])
        a = part(p, to, us[0], k, d, x, sums[0], seen)
        b = part(p + row, to + row, us[1], k, d, x, sums[1], seen)
        c = part(p + 2 * row, to + 2 * row, us[2], k, d, x, sums[2], seen)
        return a, b, c, part(p + 3 * row, to + 3 * row, us[3], k, d, x, sums[3], seen)

    return parts


def make_write(kind: int) -> tuple[Callable[..., Four], Callable[..., Vec]]:
    """Return (four rows, one row): ``S D + u k`` to any place, and lanes of ``S D q``.

    ``at`` are the addresses of k, D and D q.
    """
    size, renew, parts = 4 if kind == IS_F32 else 2, make_renew(kind), make_write_parts(kind)

    @inlined
    def chunk(p: int, to: int, row: int, us: Four, at: Vectors, i: int, n: int, sums: Four) -> Four:
        k, f, x = load(at[0] + 4 * i), load(at[1] + 4 * i), load(at[2] + 4 * i)
        a, b, c, d = sums
        p, to = p + size * i, to + size * i
        a = renew(p, to, us[0], k, f, x, a, n)
        b = renew(p + row, to + row, us[1], k, f, x, b, n)
        c = renew(p + 2 * row, to + 2 * row, us[2], k, f, x, c, n)
        d = renew(p + 3 * row, to + 3 * row, us[3], k, f, x, d, n)
        return a, b, c, d

    @inlined
    def write_four(
        p: int, to: int, row: int, written: int, at: Vectors, keys: int, is_seen: int
    ) -> Four:
        o, start, whole = zero(), keys // PART * PART, keys // LANES * LANES
        u = (splat(get(written)), splat(get(written + 4)))
        us = (*u, splat(get(written + 8)), splat(get(written + 12)))
        sums, seen = (o, o, o, o), size * PART // 2 if is_seen else 0
        for i in range(0, start, PART):
            here = (at[0] + 4 * i, at[1] + 4 * i, at[2] + 4 * i)
            sums = parts(p + size * i, to + size * i, row, us, here, sums, seen)
        if not is_seen:
            fetch_rest(p, row, size * start, size * keys)
        for i in range(start, whole, LANES):
            sums = chunk(p, to, row, us, at, i, LANES, sums)
        if whole < keys:
            sums = chunk(p, to, row, us, at, whole, keys - whole, sums)
        return sums

    @inlined
    def write_one(p: int, to: int, u: float, at: Vectors, keys: int) -> Vec:
        a, factor = zero(), splat(u)
        for i in range(0, keys, LANES):
            k, f, x = load(at[0] + 4 * i), load(at[1] + 4 * i), load(at[2] + 4 * i)
            a = renew(p + size * i, to + size * i, factor, k, f, x, a, keys - i)
        return a

    return write_four, write_one


def make_rows(kind: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return (four rows, one row) for one element type of the state.

    Both advance rows by one token: ``y = (S D) q + u (k . q)``, and ``S D + u k`` is written to
    ``to``, which may be S itself. An additive write knows u beforehand and needs one sweep; a delta
    write sweeps twice, the second time in the nearest cache. A row is summed in the same order in
    both.
    """
    see_four, see_one = make_see(kind)
    write_four, write_one = make_write(kind)

    @device
    def four_rows(at: StandardAt, p: int, to: int, base: int, t: int, r: int) -> None:
        step, row, keys = at.state_row, t * at.key_row, at.key_dim
        key, query, seen = base + at.key + row, base + at.query + row, base + at.seen + row
        keyed, sums = (key, base + at.decay + row, query), base + at.sums
        place = t * at.value_row + 4 * r
        value, y = base + at.value + place, base + at.y + place
        w, match = get(base + at.strength + 8 * t), get(base + at.strength + 8 * t + 4)
        written = sums + 16
        if at.is_delta:
            a, b, c, d, e, f, g, h = see_four(p, step, query, seen, keys)
            totals4(sums, a, b, c, d)
            totals4(written, e, f, g, h)
            for j in range(0, 16, 4):
                put(written + j, w * (get(value + j) - get(written + j)))
            write_four(p, to, step, written, keyed, keys, 1)
        else:
            for j in range(0, 16, 4):
                put(written + j, w * get(value + j))
            a, b, c, d = write_four(p, to, step, written, keyed, keys, 0)
            totals4(sums, a, b, c, d)
        for j in range(0, 16, 4):
            put(y + j, get(sums + j) + get(written + j) * match)

    @device
    def one_row(at: StandardAt, p: int, to: int, base: int, t: int, r: int) -> None:
        row, keys, place = t * at.key_row, at.key_dim, t * at.value_row + 4 * r
        key, query, seen = base + at.key + row, base + at.query + row, base + at.seen + row
        w, match = get(base + at.strength + 8 * t), get(base + at.strength + 8 * t + 4)
        u = get(base + at.value + place)
        if at.is_delta:
            u = u - total(see_one(p, query, seen, keys)[1])
        u = w * u
        a = write_one(p, to, u, (key, base + at.decay + row, query), keys)
        put(base + at.y + place, total(a) + u * match)

    return four_rows, one_row


_four_f32, _one_f32 = make_rows(IS_F32)
_four_bf16, _one_bf16 = make_rows(IS_BF16)
_four_f16, _one_f16 = make_rows(IS_F16)


@device
def advance(at: StandardAt, state: int, to: int, base: int, t: int, r: int, rows: int) -> None:
    """Advance ``rows`` (4 or 1) rows by one token, from ``state`` to ``to``."""
    if rows == 4:
        if at.kind == IS_F32:
            _four_f32(at, state, to, base, t, r)
        elif at.kind == IS_BF16:
            _four_bf16(at, state, to, base, t, r)
        else:
            _four_f16(at, state, to, base, t, r)
    elif at.kind == IS_F32:
        _one_f32(at, state, to, base, t, r)
    elif at.kind == IS_BF16:
        _one_bf16(at, state, to, base, t, r)
    else:
        _one_f16(at, state, to, base, t, r)
