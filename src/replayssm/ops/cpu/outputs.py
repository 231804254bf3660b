"""The outputs of one head: its queries pulled back, its planes read once, its entries added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import FMT_Q24, IS_BF16, copy_out, load_as, width
from replayssm.ops.cpu.encode import UNIT_Q16, UNIT_Q24
from replayssm.ops.cpu.layout import GROUP, BlockAt, Geometry, HeadAt, NextAt, Scratch
from replayssm.ops.cpu.pullback import before, pull_all, ring_index
from replayssm.ops.cpu.read import ahead, fetch_bytes, read_rows
from replayssm.ops.cpu.vector import (
    LANES,
    Vec,
    add,
    fma,
    get,
    inlined,
    load,
    load_some,
    mul,
    single,
    splat,
    store,
    zero,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Parents = NDArray[np.int64]

ONE = single(1.0)
# bytes of a plane fetched beside each half of a pull-back, which itself hardly touches memory
BESIDE = 2048


@inlined
def value_at(at: Geometry, here: HeadAt, first: int, entry: int) -> int:
    """Return the address of v of the ``entry``-th entry from ring index ``first`` on."""
    return here.v + ring_index(at, first, entry) * here.v_entry


@inlined
def sum_lanes(
    at: Geometry,
    here: HeadAt,
    parents: Parents,
    row: int,
    past: int,
    first: int,
    token: int,
    stop: int,
    c: int,
    i: int,
) -> Vec:
    """Return ``sum_j c_j v_j`` of one query down to entry ``stop``: 16 value rows from ``i`` on."""
    a, j = zero(), past + token
    while j >= stop:
        v = value_at(at, here, first, j) + width(here.kind) * i
        a = fma(splat(get(c + 4 * j)), load_as(v, here.kind, at.value_dim - i), a)
        j = before(parents, row, past, j)
    return a


@inlined
def sum_wide(
    at: Geometry,
    here: HeadAt,
    parents: Parents,
    row: int,
    past: int,
    first: int,
    token: int,
    stop: int,
    c: int,
    i: int,
) -> tuple[Vec, Vec, Vec, Vec]:
    """Return the same of 64 value rows, which share the walk along the entries."""
    a, b, d, e, j = zero(), zero(), zero(), zero(), past + token
    part, kind = LANES * width(here.kind), here.kind
    while j >= stop:
        v, factor = value_at(at, here, first, j) + width(kind) * i, splat(get(c + 4 * j))
        a = fma(factor, load_as(v, kind, LANES), a)
        b = fma(factor, load_as(v + part, kind, LANES), b)
        d = fma(factor, load_as(v + 2 * part, kind, LANES), d)
        e = fma(factor, load_as(v + 3 * part, kind, LANES), e)
        j = before(parents, row, past, j)
    return a, b, d, e


@inlined
def own_part(
    at: Geometry,
    here: HeadAt,
    parents: Parents,
    row: int,
    past: int,
    first: int,
    token: int,
    stop: int,
    y: int,
    c: int,
) -> None:
    """Write ``sum_j c_j v_j`` over the entries of one query down to ``stop``, newest first."""
    wide = at.value_dim // (4 * LANES) * (4 * LANES)
    for i in range(0, wide, 4 * LANES):
        a, b, d, e = sum_wide(at, here, parents, row, past, first, token, stop, c, i)
        to = y + 4 * i
        store(to, a)
        store(to + 4 * LANES, b)
        store(to + 8 * LANES, d)
        store(to + 12 * LANES, e)
    for i in range(wide, at.value_dim, LANES):
        store(y + 4 * i, sum_lanes(at, here, parents, row, past, first, token, stop, c, i))


@inlined
def past_part(at: Geometry, here: HeadAt, past: int, first: int, y: int, c: int) -> None:
    """Add ``sum_j c_j v_j`` over the committed entries, newest first, for four queries."""
    size, to, wide = width(here.kind), at.value_row, at.entry_row
    for i in range(0, at.value_dim, LANES):
        at_y = y + 4 * i
        p, q = load(at_y), load(at_y + to)
        r, t = load(at_y + 2 * to), load(at_y + 3 * to)
        for j in range(past - 1, -1, -1):
            v = load_as(value_at(at, here, first, j) + size * i, here.kind, at.value_dim - i)
            at_c = c + 4 * j
            p, q = fma(splat(get(at_c)), v, p), fma(splat(get(at_c + wide)), v, q)
            r = fma(splat(get(at_c + 2 * wide)), v, r)
            t = fma(splat(get(at_c + 3 * wide)), v, t)
        store(at_y, p)
        store(at_y + to, q)
        store(at_y + 2 * to, r)
        store(at_y + 3 * to, t)


@inlined
def entry_parts(
    at: Geometry,
    s: Scratch,
    here: HeadAt,
    parents: Parents,
    row: int,
    past: int,
    first: int,
    length: int,
) -> None:
    """Fill ``s.y``: the entries' part of every output; v is in the ring from ``first`` on."""
    for t in range(0, length, GROUP):
        count = min(GROUP, length - t)
        y, c, stop = s.y + t * at.value_row, s.c + t * at.entry_row, 0 if count == 1 else past
        for i in range(count):
            y_i, c_i = y + i * at.value_row, c + i * at.entry_row
            own_part(at, here, parents, row, past, first, t + i, stop, y_i, c_i)
        if count > 1:
            past_part(at, here, past, first, y, c)


@inlined
def scale_queries(at: Geometry, s: Scratch, columns: int, tokens: int) -> None:
    """Multiply pulled-back queries by column scales."""
    for i in range(0, at.key_dim, LANES):
        column = load_as(columns + 2 * i, IS_BF16, at.key_dim - i)
        for t in range(tokens):
            x = s.x + t * at.key_row + 4 * i
            store(x, mul(load(x), column))


@inlined
def finish(out: int, kind: int, sums: int, y: int, scale: int, unit: float, values: int) -> None:
    """Write ``out = S_0 x (row scale) + sum_j c_j v_j``; ``scale`` 0 means there is none."""
    for i in range(0, values, LANES):
        part = load(sums + 4 * i)
        if scale:
            part = mul(part, mul(load_some(scale + 4 * i, values - i), splat(unit)))
        store(y + 4 * i, add(part, load(y + 4 * i)))
    copy_out(out, kind, y, values)


@inlined
def read_head(
    at: Geometry,
    s: Scratch,
    here: HeadAt,
    then: NextAt,
    blk: BlockAt,
    out: int,
    parents: Parents,
    row: int,
    position: int,
    skip: int,
    past: int,
    length: int,
    is_full: int,
) -> None:
    """Write the outputs of one head: pull back every query, read the planes once, add the entries.

    Args:
        at: Geometry.
        s: Scratch with gathered entries, queries and, where they are shared, matches.
        here: The head.
        then: Entries to fetch meanwhile.
        blk: The block, for the strides and element type of its outputs.
        out: Address of the head's first output.
        parents: ``[B, T]`` tree of every row.
        row: Row of the block.
        position: Where the head stands.
        skip: Gathered entries that are already folded.
        past: Entries after those, before the block's own.
        length: Tokens of the block.
        is_full: Whether both planes are read.
    """
    beside = here.high + ahead(at)
    # the pull-back of a single query fetches planes itself
    burst = BESIDE if length > 1 else 0
    fetch_bytes(beside, burst)
    first = position % at.ring_len
    pull_all(at, s, here, then, parents, row, past, first, skip, length)
    fetch_bytes(beside + burst, burst)
    entry_parts(at, s, here, parents, row, past, first, length)
    unit = ONE
    if at.is_scaled:
        scale_queries(at, s, here.columns, length)
        if is_full:
            unit = UNIT_Q24 if at.format == FMT_Q24 else UNIT_Q16
    read_rows(at, s, here, length, is_full)
    for t in range(length):
        to, sums, y = out + t * blk.out_token, s.sums + t * at.value_row, s.y + t * at.value_row
        finish(to, blk.out_kind, sums, y, here.scale, unit, at.value_dim)
