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
    width,
)
from replayssm.ops.cpu.layout import BlockAt, Geometry, HeadAt, Scratch, StandardAt
from replayssm.ops.cpu.vector import (
    IS_ZEN,
    LANES,
    VECTOR,
    Vec,
    device,
    fma,
    inlined,
    keep_order,
    load,
    load_four,
    prefetch,
    put,
    total,
    totals4,
    totals8,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Four = tuple[Vec, Vec, Vec, Vec]
    Eight = tuple[Vec, Vec, Vec, Vec, Vec, Vec, Vec, Vec]

LINE = 64
# rows between those that are read and those that are fetched
ROWS_AHEAD = 16
# keys of a row that are read before the next row
PART = 8 * LANES
# bytes of an element of an fp32 plane
FP32 = 4
# bytes between what is read in the order of memory and what is fetched, by bytes of an element: the
# prefetchers of Zen keep up with fp32 rows by themselves, and beside fetches they take half as long
# again
AHEAD = (0, 16384, 16384, 0, 0) if IS_ZEN else (0, 2048, 4096, 0, 2048)


@inlined
def fetch_bytes(address: int, nbytes: int) -> None:
    """Fetch consecutive bytes into the cache."""
    for line in range(0, nbytes, LINE):
        prefetch(address + line)


@inlined
def ahead(at: Geometry) -> int:
    """Return the bytes of a high plane between those that are read and those that are fetched."""
    if at.is_scaled:
        return AHEAD[1]
    return AHEAD[FP32] if at.format == FMT_F32 else AHEAD[2]


@inlined
def fetch_inputs(at: Geometry | StandardAt, blk: BlockAt, row: int, head: int) -> None:
    """Fetch what a head reads of the block, and where its outputs go, while another is computed."""
    key_head = head // (at.value_heads // at.key_heads)
    for t in range(blk.tokens):
        k = blk.k + row * blk.k_row + t * blk.k_token + key_head * blk.k_head
        q = blk.q + row * blk.q_row + t * blk.q_token + key_head * blk.q_head
        v = blk.v + row * blk.v_row + t * blk.v_token + head * blk.v_head
        g = blk.g + row * blk.g_row + t * blk.g_token + head * blk.g_head
        out = blk.out + row * blk.out_row + t * blk.out_token + head * blk.out_head
        fetch_bytes(k, width(blk.k_kind) * at.key_dim)
        fetch_bytes(q, width(blk.q_kind) * at.key_dim)
        fetch_bytes(v, width(blk.v_kind) * at.value_dim)
        fetch_bytes(g, width(blk.g_kind) * (at.key_dim if at.per_channel else 1))
        prefetch(blk.w + row * blk.w_row + t * blk.w_token + head * blk.w_head)
        fetch_bytes(out, width(blk.out_kind) * at.value_dim)


def make_fetch_rows(high_size: int, low_size: int, is_far: bool) -> Callable[..., None]:
    """Return what fetches some rows further on, once a line."""
    fetches = is_far and AHEAD[high_size] > 0

    @inlined
    def fetch_rows(high: int, step: int, low: int, rest: int, i: int, rows: int) -> None:
        if fetches:
            for r in range(rows):
                if i * high_size % LINE == 0:
                    prefetch(high + (ROWS_AHEAD + r) * step + high_size * i)
                if low_size and i * low_size % LINE == 0:
                    prefetch(low + (ROWS_AHEAD + r) * rest + low_size * i)

    return fetch_rows


@inlined
def load_eight(at: int) -> Eight:
    """Load eight consecutive vectors."""
    return (*load_four(at), *load_four(at + 4 * VECTOR))


def make_parts(
    plane: Callable[[int, int, int, int], Vec], size: int
) -> Callable[[int, int, int, Eight], Eight]:
    """Return eight rows times 128 keys of one query, row by row, in the order of memory."""
    fetched_bytes = PART * size if AHEAD[size] else 0

    @inlined
    def part(row: int, x: Eight, a: Vec) -> Vec:
        for line in range(0, fetched_bytes, LINE):
            prefetch(row + line + AHEAD[size])
        a = fma(plane(row, 0, 0, LANES), x[0], a)
        a = fma(plane(row, 0, LANES, LANES), x[1], a)
        a = fma(plane(row, 0, 2 * LANES, LANES), x[2], a)
        a = fma(plane(row, 0, 3 * LANES, LANES), x[3], a)
        a = fma(plane(row, 0, 4 * LANES, LANES), x[4], a)
        a = fma(plane(row, 0, 5 * LANES, LANES), x[5], a)
        a = fma(plane(row, 0, 6 * LANES, LANES), x[6], a)
        a = fma(plane(row, 0, 7 * LANES, LANES), x[7], a)
        keep_order()
        return a

    @inlined
    def parts(at: int, step: int, x: int, s: Eight) -> Eight:
        y = load_eight(x)
        a, b = part(at, y, s[0]), part(at + step, y, s[1])
        c, d = part(at + 2 * step, y, s[2]), part(at + 3 * step, y, s[3])
        e, f = part(at + 4 * step, y, s[4]), part(at + 5 * step, y, s[5])
        return a, b, c, d, e, f, part(at + 6 * step, y, s[6]), part(at + 7 * step, y, s[7])

    return parts


def make_lines(
    plane: Callable[[int, int, int, int], Vec], high_size: int, low_size: int, is_far: bool
) -> tuple[Callable[..., Vec], Callable[..., None]]:
    """Return (one row, eight rows) times one query.

    Eight rows of one plane in memory (``is_far``) go one after another through 128 keys, in its
    order, while the query stays in registers. Side by side, so that they share its loads, they go
    through what is left of the keys, through two planes, and through scratch.
    """
    in_order = is_far and not low_size
    parts = make_parts(plane, high_size)
    fetch_rows = make_fetch_rows(high_size, low_size, is_far)

    @inlined
    def one(high: int, low: int, x: int, keys: int) -> Vec:
        a = zero()
        for i in range(0, keys, LANES):
            a = fma(plane(high, low, i, keys - i), load(x + 4 * i), a)
        return a

    @inlined
    def chunk(high: int, step: int, low: int, rest: int, x: Vec, i: int, n: int, s: Eight) -> Eight:
        a, b, c, d, e, f, g, h = s
        a = fma(plane(high, low, i, n), x, a)
        b = fma(plane(high + step, low + rest, i, n), x, b)
        c = fma(plane(high + 2 * step, low + 2 * rest, i, n), x, c)
        d = fma(plane(high + 3 * step, low + 3 * rest, i, n), x, d)
        e = fma(plane(high + 4 * step, low + 4 * rest, i, n), x, e)
        f = fma(plane(high + 5 * step, low + 5 * rest, i, n), x, f)
        g = fma(plane(high + 6 * step, low + 6 * rest, i, n), x, g)
        h = fma(plane(high + 7 * step, low + 7 * rest, i, n), x, h)
        return a, b, c, d, e, f, g, h

    @device
    def eight_rows(high: int, step: int, low: int, rest: int, x: int, keys: int, to: int) -> None:
        o, whole = zero(), keys // LANES * LANES
        s, start = (o, o, o, o, o, o, o, o), keys // PART * PART if in_order else 0
        for i in range(0, start, PART):
            s = parts(high + high_size * i, step, x + 4 * i, s)
        for i in range(start, whole, LANES):
            fetch_rows(high, step, low, rest, i, 8)
            s = chunk(high, step, low, rest, load(x + 4 * i), i, LANES, s)
        if whole < keys:
            s = chunk(high, step, low, rest, load(x + 4 * whole), whole, keys - whole, s)
        totals8(to, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7])

    return one, eight_rows


def make_tile(
    plane: Callable[[int, int, int, int], Vec], high_size: int, low_size: int, is_far: bool
) -> Callable[..., None]:
    """Return four rows times four queries."""
    fetch_rows = make_fetch_rows(high_size, low_size, is_far)

    @inlined
    def four(row: Vec, p: Vec, q: Vec, r: Vec, s: Vec, sums: Four) -> Four:
        a, b, c, d = sums
        return fma(row, p, a), fma(row, q, b), fma(row, r, c), fma(row, s, d)

    @inlined
    def chunk(
        high: int,
        step: int,
        low: int,
        rest: int,
        x: int,
        x_step: int,
        i: int,
        n: int,
        sums: tuple[Four, Four, Four, Four],
    ) -> tuple[Four, Four, Four, Four]:
        fetch_rows(high, step, low, rest, i, 4)
        at = x + 4 * i
        p, q, r, s = load(at), load(at + x_step), load(at + 2 * x_step), load(at + 3 * x_step)
        a, b, c, d = sums
        a = four(plane(high, low, i, n), p, q, r, s, a)
        b = four(plane(high + step, low + rest, i, n), p, q, r, s, b)
        c = four(plane(high + 2 * step, low + 2 * rest, i, n), p, q, r, s, c)
        d = four(plane(high + 3 * step, low + 3 * rest, i, n), p, q, r, s, d)
        return a, b, c, d

    @device
    def four_by_four(
        high: int,
        step: int,
        low: int,
        rest: int,
        x: int,
        x_step: int,
        keys: int,
        to: int,
        to_step: int,
    ) -> None:
        o, whole = zero(), keys // LANES * LANES
        sums = ((o, o, o, o), (o, o, o, o), (o, o, o, o), (o, o, o, o))
        for i in range(0, whole, LANES):
            sums = chunk(high, step, low, rest, x, x_step, i, LANES, sums)
        if whole < keys:
            sums = chunk(high, step, low, rest, x, x_step, whole, keys - whole, sums)
        a, b, c, d = sums
        totals4(to, a[0], b[0], c[0], d[0])
        totals4(to + to_step, a[1], b[1], c[1], d[1])
        totals4(to + 2 * to_step, a[2], b[2], c[2], d[2])
        totals4(to + 3 * to_step, a[3], b[3], c[3], d[3])

    return four_by_four


def make_dots(
    plane: Callable[[int, int, int, int], Vec],
    high_size: int,
    low_size: int = 0,
    is_far: bool = True,
) -> Callable[[int, int, int, int, int, int, int, int, int, int, int], None]:
    """Return ``dots`` for one way of reading planes, of so many bytes an element.

    Every result has one accumulator, fed with key chunks in ascending order, whatever the tile: so
    a result does not depend on the number of rows or queries beside it.
    """
    one, eight_rows = make_lines(plane, high_size, low_size, is_far)
    four_by_four = make_tile(plane, high_size, low_size, is_far)

    @device
    def dots(
        high: int,
        step: int,
        low: int,
        rest: int,
        rows: int,
        x: int,
        x_step: int,
        queries: int,
        keys: int,
        to: int,
        to_step: int,
    ) -> None:
        whole, fours = rows // 8 * 8, queries // 4 * 4
        for r in range(0, whole, 8):
            at, below = high + r * step, low + r * rest
            for t in range(0, fours, 4):
                y, z = x + t * x_step, to + t * to_step + 4 * r
                four_by_four(at, step, below, rest, y, x_step, keys, z, to_step)
                at4, below4 = at + 4 * step, below + 4 * rest
                four_by_four(at4, step, below4, rest, y, x_step, keys, z + 16, to_step)
            for t in range(fours, queries):
                eight_rows(at, step, below, rest, x + t * x_step, keys, to + t * to_step + 4 * r)
        for r in range(whole, rows):
            at, below = high + r * step, low + r * rest
            for t in range(queries):
                put(to + t * to_step + 4 * r, total(one(at, below, x + t * x_step, keys)))

    return dots


_dots_f32 = make_dots(plane_f32, FP32)
_dots_bf16 = make_dots(plane_bf16, 2)
_dots_i8 = make_dots(plane_i8, 1)
_dots_s32 = make_dots(plane_s32, 2, 2)
_dots_q24 = make_dots(plane_q24, 1, 2)
_dots_q16 = make_dots(plane_q16, 1, 1)


_dots_scratch = make_dots(plane_f32, FP32, is_far=False)


@device
def dots_scratch(
    rows_at: int,
    step: int,
    rows: int,
    x: int,
    x_step: int,
    queries: int,
    keys: int,
    to: int,
    to_step: int,
) -> None:
    """Write the products of fp32 rows and queries, without a fetch.

    The sums are those of :func:`make_dots`.
    """
    _dots_scratch(rows_at, step, 0, 0, rows, x, x_step, queries, keys, to, to_step)


@device
def read_rows(at: Geometry, s: Scratch, here: HeadAt, tokens: int, is_full: int) -> None:
    """Write ``S_0 x_t`` of every value row and query, without row scales.

    Reads the planes of the head once from memory: 4 bytes an element for ``f32``, 2 for ``bf16``
    and a high ``s32``, 1 for a high ``q24`` or ``q16``; full reads add the low plane (2, 2, 1). The
    x of scaled formats has been multiplied by the column scales.
    """
    high, row, low, rest, rows = here.high, here.high_row, here.low, here.low_row, at.value_dim
    x, x_row, keys, to, to_row = s.x, at.key_row, at.key_dim, s.sums, at.value_row
    fmt = at.format
    if fmt == FMT_F32:
        _dots_f32(high, row, low, rest, rows, x, x_row, tokens, keys, to, to_row)
    elif fmt == FMT_BF16 or (fmt == FMT_S32 and not is_full):
        _dots_bf16(high, row, low, rest, rows, x, x_row, tokens, keys, to, to_row)
    elif fmt == FMT_S32:
        _dots_s32(high, row, low, rest, rows, x, x_row, tokens, keys, to, to_row)
    elif not is_full:
        _dots_i8(high, row, low, rest, rows, x, x_row, tokens, keys, to, to_row)
    elif fmt == FMT_Q24:
        _dots_q24(high, row, low, rest, rows, x, x_row, tokens, keys, to, to_row)
    else:
        _dots_q16(high, row, low, rest, rows, x, x_row, tokens, keys, to, to_row)
