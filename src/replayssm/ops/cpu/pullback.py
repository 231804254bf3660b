"""The pull-back: a query carried through the entries of one head to the checkpoint.

Works on gathered entries; reads each entry's v once from the ring and writes scratch only.
"""

from __future__ import annotations

from replayssm.ops.cpu.common import FMT_Q24, IS_BF16, copy_out, load_as, width
from replayssm.ops.cpu.encode import UNIT_Q16, UNIT_Q24
from replayssm.ops.cpu.layout import BlockAt, Geometry, HeadAt, Scratch
from replayssm.ops.cpu.read import AHEAD, dots_scratch, fetch_bytes, read_rows
from replayssm.ops.cpu.vector import (
    LANES,
    add,
    device,
    fma,
    get,
    load,
    load_some,
    mul,
    put,
    single,
    splat,
    store,
    total,
    zero,
)

ONE = single(1.0)
# bytes of a plane fetched beside each half of a pull-back, which itself hardly touches memory
BESIDE = 2048


@device
def pull_additive(
    x: int, q: int, decay: int, strength: int, match: int, c: int, n: int, row: int
) -> None:
    """Pull one query back through additive entries with one decay a head.

    ``match`` holds ``k_j . q``, which all value heads of a key head share.
    """
    run = ONE
    for j in range(n - 1, -1, -1):
        put(c + 4 * j, get(strength + 4 * j) * run * get(match + 4 * j))
        run = run * get(decay + 4 * j)
    factor = splat(run)
    for i in range(0, row, 4 * LANES):
        store(x + i, mul(factor, load(q + i)))


@device
def pull_serial(
    at: Geometry, x: int, q: int, keys: int, decay: int, strength: int, c: int, n: int
) -> None:
    """Pull one query back entry by entry: delta writes, or one decay per key channel."""
    row = at.key_row
    for i in range(0, row, 4 * LANES):
        store(x + i, load(q + i))
    for j in range(n - 1, -1, -1):
        key = keys + j * row
        a = zero()
        for i in range(0, row, 4 * LANES):
            a = fma(load(key + i), load(x + i), a)
        match = get(strength + 4 * j) * total(a)
        put(c + 4 * j, match)
        back = splat(-match)
        one = splat(ONE)
        if not at.per_channel:
            one = splat(get(decay + 4 * j))
        for i in range(0, row, 4 * LANES):
            new = load(x + i)
            if at.is_delta:
                new = fma(back, load(key + i), new)
            if at.per_channel:
                store(x + i, mul(load(decay + j * row + i), new))
            else:
                store(x + i, mul(one, new))


@device
def match_keys(at: Geometry, s: Scratch, n: int, tokens: int) -> None:
    """Write ``k_j . q_t`` of every query and gathered key."""
    row = at.key_row
    dots_scratch(
        s.keys, row, 0, 0, n, s.queries, row, tokens, at.key_dim, s.matches, at.entry_row
    )  # fmt: skip


@device
def entry_part(at: Geometry, here: HeadAt, y: int, c: int, first: int, n: int) -> None:
    """Write ``sum_j c_j v_j`` over ring entries, newest first."""
    size, values = width(here.kind), at.value_dim
    newest = first + n - 1
    newest = newest - at.ring_len if newest >= at.ring_len else newest
    for i in range(0, values, LANES):
        a = zero()
        index = newest
        for j in range(n - 1, -1, -1):
            v = load_as(here.v + index * here.v_entry + size * i, here.kind, values - i)
            a = fma(splat(get(c + 4 * j)), v, a)
            index = at.ring_len - 1 if index == 0 else index - 1
        store(y + 4 * i, a)


@device
def scale_queries(at: Geometry, s: Scratch, columns: int, tokens: int) -> None:
    """Multiply pulled-back queries by column scales."""
    for i in range(0, at.key_dim, LANES):
        column = load_as(columns + 2 * i, IS_BF16, at.key_dim - i)
        for t in range(tokens):
            x = s.x + t * at.key_row + 4 * i
            store(x, mul(load(x), column))


@device
def finish(out: int, kind: int, sums: int, y: int, scale: int, unit: float, values: int) -> None:
    """Write ``out = S_0 x (row scale) + sum_j c_j v_j``; ``scale`` 0 means there is none."""
    for i in range(0, values, LANES):
        part = load(sums + 4 * i)
        if scale:
            part = mul(part, mul(load_some(scale + 4 * i, values - i), splat(unit)))
        store(y + 4 * i, add(part, load(y + 4 * i)))
    copy_out(out, kind, y, values)


@device
def read_head(
    at: Geometry,
    s: Scratch,
    here: HeadAt,
    blk: BlockAt,
    out: int,
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
        position: Where the head stands.
        skip: Gathered entries that are already folded.
        past: Entries after those, before the block's own.
        length: Tokens of the block.
        is_full: Whether both planes are read.
    """
    keys, strength = s.keys + skip * at.key_row, s.strength + 4 * skip
    decay = s.decay + skip * (at.key_row if at.per_channel else 4)
    for t in range(length):
        x, q, c = s.x + t * at.key_row, s.queries + t * at.key_row, s.c + t * at.entry_row
        n = past + t + 1
        beside = here.high + AHEAD + 2 * BESIDE * t
        fetch_bytes(beside, BESIDE)
        if at.is_delta or at.per_channel:
            pull_serial(at, x, q, keys, decay, strength, c, n)
        else:
            match = s.matches + t * at.entry_row + 4 * skip
            pull_additive(x, q, decay, strength, match, c, n, at.key_row)
        fetch_bytes(beside + BESIDE, BESIDE)
        entry_part(at, here, s.y + t * at.value_row, c, position % at.ring_len, n)
    unit = ONE
    if at.is_scaled:
        scale_queries(at, s, here.columns, length)
        if is_full:
            unit = UNIT_Q24 if at.format == FMT_Q24 else UNIT_Q16
    read_rows(at, s, here, length, is_full)
    for t in range(length):
        to, sums, y = out + t * blk.out_token, s.sums + t * at.value_row, s.y + t * at.value_row
        finish(to, blk.out_kind, sums, y, here.scale, unit, at.value_dim)
