"""The outputs of one head: its queries pulled back, its planes read once, its entries added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import FMT_Q24, IS_BF16, copy_out, load_as, width
from replayssm.ops.cpu.encode import UNIT_Q16, UNIT_Q24
from replayssm.ops.cpu.layout import GROUP, BlockAt, Geometry, HeadAt, Scratch
from replayssm.ops.cpu.pullback import before, pull_all
from replayssm.ops.cpu.read import FAR, fetch_bytes, read_rows
from replayssm.ops.cpu.vector import (
    LANES,
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
    index = first + entry
    return here.v + (index - at.ring_len if index >= at.ring_len else index) * here.v_entry


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
    size = width(here.kind)
    for i in range(0, at.value_dim, LANES):
        a, j = zero(), past + token
        while j >= stop:
            v = load_as(value_at(at, here, first, j) + size * i, here.kind, at.value_dim - i)
            a = fma(splat(get(c + 4 * j)), v, a)
            j = before(parents, row, past, j)
        store(y + 4 * i, a)


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
    beside = here.high + FAR
    fetch_bytes(beside, BESIDE)
    pull_all(at, s, parents, row, past, skip, length)
    fetch_bytes(beside + BESIDE, BESIDE)
    entry_parts(at, s, here, parents, row, past, position % at.ring_len, length)
    unit = ONE
    if at.is_scaled:
        scale_queries(at, s, here.columns, length)
        if is_full:
            unit = UNIT_Q24 if at.format == FMT_Q24 else UNIT_Q16
    read_rows(at, s, here, length, is_full)
    for t in range(length):
        to, sums, y = out + t * blk.out_token, s.sums + t * at.value_row, s.y + t * at.value_row
        finish(to, blk.out_kind, sums, y, here.scale, unit, at.value_dim)
