"""One call over a batch: per (row, group of value heads) fold what is due, append, pull back, read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from replayssm.ops.cpu.common import FMT_Q16, FMT_Q24, copy_in, load_as, scalar_as, store_as, width
from replayssm.ops.cpu.fold import fold_head
from replayssm.ops.cpu.layout import (
    HEADS_PER_ITEM,
    BlockAt,
    Geometry,
    PlanesAt,
    RingsAt,
    Scratch,
)
from replayssm.ops.cpu.pullback import (
    block_keys,
    entry_part,
    finish,
    gather_gates,
    gather_keys,
    match_keys,
    pull_additive,
    pull_serial,
)
from replayssm.ops.cpu.read import AHEAD, read_rows
from replayssm.ops.cpu.vector import LANES, device, inlined, load, mul, prefetch, put, store, zero

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

GENERATIONS = 3
LINE = 64
UNIT_Q24 = np.float32(2.0**-16)
UNIT_Q16 = np.float32(2.0**-8)
ONE = np.float32(1.0)


@device
def folded_to(at: Geometry, base: int, count: int) -> int:
    """Return the newest boundary at or before ``count - keep``, or ``base``."""
    return max(base, (count - at.keep) // at.window * at.window)


@inlined
def move(to: int, kind: int, source: int, from_kind: int, n: int) -> None:
    """Convert up to 16 elements from one element type to another."""
    store_as(to, kind, load_as(source, from_kind, n), n)


@device
def append_values(at: Geometry, rings: RingsAt, blk: BlockAt, row: int, slot: int, head: int, first: int, length: int) -> None:
    """Write a block's v, g and w of one value head to the rings."""
    v = rings.v + slot * rings.v_slot + head * rings.v_head
    g = rings.g + slot * rings.g_slot + head * rings.g_head
    w = rings.w + slot * rings.w_slot + head * rings.w_head
    size, from_size = width(rings.kind), width(blk.v_kind)
    for t in range(length):
        index = (first + t) % at.ring_len
        source = blk.v + row * blk.v_row + t * blk.v_token + head * blk.v_head
        to = v + index * rings.v_entry
        for i in range(0, at.value_dim, LANES):
            n = at.value_dim - i
            move(to + size * i, rings.kind, source + from_size * i, blk.v_kind, n)
        source = blk.w + row * blk.w_row + t * blk.w_token + head * blk.w_head
        put(w + index * rings.w_entry, scalar_as(source, blk.w_kind))
        source = blk.g + row * blk.g_row + t * blk.g_token + head * blk.g_head
        to = g + index * rings.g_entry
        if at.per_channel:
            for i in range(0, at.key_dim, LANES):
                move(to + 4 * i, 0, source + width(blk.g_kind) * i, blk.g_kind, at.key_dim - i)
        else:
            put(to, scalar_as(source, blk.g_kind))



@device
def append_keys(at: Geometry, rings: RingsAt, blk: BlockAt, row: int, slot: int, first: int, length: int) -> None:
    """Write a block's keys to the ring."""
    size, from_size = width(rings.kind), width(blk.k_kind)
    for head in range(at.key_heads):
        for t in range(length):
            source = blk.k + row * blk.k_row + t * blk.k_token + head * blk.k_head
            index = (first + t) % at.ring_len
            to = rings.k + slot * rings.k_slot + head * rings.k_head + index * rings.k_entry
            for i in range(0, at.key_dim, LANES):
                n = at.key_dim - i
                move(to + size * i, rings.kind, source + from_size * i, blk.k_kind, n)


@device
def zero_outputs(at: Geometry, blk: BlockAt, row: int, head: int, start: int) -> None:
    """Write 0 to the outputs of a head from token ``start`` on."""
    size = width(blk.out_kind)
    for t in range(start, blk.tokens):
        to = blk.out + row * blk.out_row + t * blk.out_token + head * blk.out_head
        for i in range(0, at.value_dim, LANES):
            store_as(to + size * i, blk.out_kind, zero(), at.value_dim - i)


@device
def fold_due(at: Geometry, planes: PlanesAt, rings: RingsAt, s: Scratch, base: int, slot: int, head: int, start: int, stop: int) -> None:
    """Fold one head window by window from ``start`` to ``stop``; its entries are gathered."""
    high = planes.high + slot * planes.high_slot + head * planes.high_head
    low = planes.low + slot * planes.low_slot + head * planes.low_head
    scale = planes.scale + slot * planes.scale_slot + head * planes.scale_head
    columns = planes.columns + slot * planes.columns_slot + head * planes.columns_head
    v = rings.v + slot * rings.v_slot + head * rings.v_head
    row = 4 * at.padded_key
    gate = row if at.per_channel else 4
    position = start
    while position < stop:
        boundary = (position // at.window + 1) * at.window
        done, cycle = position - start, boundary // at.window
        fold_head(
            at, high, planes.high_row, low, planes.low_row, scale,
            columns + (position // at.window) % GENERATIONS * planes.columns_generation,
            columns + cycle % GENERATIONS * planes.columns_generation,
            columns + (cycle + 1) % GENERATIONS * planes.columns_generation,
            base + s.keys + done * row, base + s.decay + done * gate, base + s.strength + 4 * done,
            v, rings.v_entry, rings.kind, position % at.ring_len, boundary - position,
            base + s.before, base + s.after, base + s.lower, base + s.values, base + s.block,
            base + s.total, base + s.column, base + s.fresh, base + s.inverse, base + s.amax,
        )  # fmt: skip
        position = boundary


@device
def read_head(
    at: Geometry, planes: PlanesAt, rings: RingsAt, blk: BlockAt, s: Scratch, base: int, row: int, slot: int, head: int, position: int, skip: int, past: int, length: int, full: int
) -> None:
    """Write the outputs of one head: pull back every query, read the planes once, add the entries.

    ``skip`` gathered entries are already folded; ``past`` follow them, then the block's own.
    """
    step, n = 4 * at.padded_key, past + length
    matches = 4 * ((at.ring_len + LANES - 1) // LANES * LANES)
    values = 4 * at.padded_value
    keys = base + s.keys + skip * step
    decay = base + s.decay + skip * (step if at.per_channel else 4)
    strength = base + s.strength + 4 * skip
    v = rings.v + slot * rings.v_slot + head * rings.v_head
    first = position % at.ring_len
    scaled = at.format == FMT_Q24 or at.format == FMT_Q16
    for t in range(length):
        x, q, c = base + s.x + t * step, base + s.queries + t * step, base + s.c + t * matches
        entries = past + t + 1
        if at.is_delta or at.per_channel:
            pull_serial(x, q, keys, decay, strength, c, entries, step, at.is_delta, at.per_channel)
        else:
            match = base + s.matches + t * matches + 4 * skip
            pull_additive(x, q, decay, strength, match, c, entries, step)
        entry_part(base + s.y + t * values, c, v, rings.v_entry, rings.kind, first, entries, at.ring_len, at.value_dim)
    scale, unit = 0, ONE
    if scaled:
        scale = planes.scale + slot * planes.scale_slot + head * planes.scale_head
        unit = (UNIT_Q24 if at.format == FMT_Q24 else UNIT_Q16) if full else ONE
        generation = (position // at.window) % GENERATIONS * planes.columns_generation
        columns = planes.columns + slot * planes.columns_slot + head * planes.columns_head
        for i in range(0, at.key_dim, LANES):
            column = load_as(columns + generation + 2 * i, 1, at.key_dim - i)
            for t in range(length):
                x = base + s.x + t * step + 4 * i
                store(x, mul(load(x), column))
    read_rows(
        at.format, full,
        planes.high + slot * planes.high_slot + head * planes.high_head, planes.high_row,
        planes.low + slot * planes.low_slot + head * planes.low_head, planes.low_row,
        at.value_dim, base + s.x, step, length, at.key_dim, base + s.sums, values,
    )  # fmt: skip
    for t in range(length):
        to = blk.out + row * blk.out_row + t * blk.out_token + head * blk.out_head
        finish(to, blk.out_kind, base + s.sums + t * values, base + s.y + t * values, scale, unit, at.value_dim)


@device
def fetch_entries(address: int, entry: int, first: int, n: int, ring_len: int, nbytes: int) -> None:
    """Fetch ring entries into the cache."""
    index = first
    for _ in range(n):
        for line in range(0, nbytes, LINE):
            prefetch(address + index * entry + line)
        index = 0 if index + 1 == ring_len else index + 1


@device
def fetch_head(at: Geometry, planes: PlanesAt, rings: RingsAt, counts: Counts, row: int, head: int, is_new_row: int) -> None:
    """Fetch what the next head reads in many small pieces, while this one is computed.

    Its planes follow this head's in memory and are fetched with them, except at the start of a row.
    """
    slot = counts[0, row]
    if slot < 0:
        return
    start, size = folded_to(at, counts[1, row], counts[2, row]), width(rings.kind)
    first, n = start % at.ring_len, max(counts[3, row] - start, 0)
    v = rings.v + slot * rings.v_slot + head * rings.v_head
    fetch_entries(v, rings.v_entry, first, n, at.ring_len, size * at.value_dim)
    g = rings.g + slot * rings.g_slot + head * rings.g_head
    if at.per_channel:
        fetch_entries(g, rings.g_entry, first, n, at.ring_len, 4 * at.key_dim)
    else:
        fetch_entries(g, 0, 0, 1, at.ring_len, 4 * at.ring_len)
    fetch_entries(rings.w + slot * rings.w_slot + head * rings.w_head, 0, 0, 1, at.ring_len, 4 * at.ring_len)
    per_key = at.value_heads // at.key_heads
    if is_new_row or head % per_key == 0:
        k = rings.k + slot * rings.k_slot + head // per_key * rings.k_head
        fetch_entries(k, rings.k_entry, first, n, at.ring_len, size * at.key_dim)
    if planes.scale:
        scale = planes.scale + slot * planes.scale_slot + head * planes.scale_head
        fetch_entries(scale, 0, 0, 1, at.ring_len, 4 * at.value_dim)
    if is_new_row:
        high = planes.high + slot * planes.high_slot + head * planes.high_head
        fetch_entries(high, 0, 0, 1, at.ring_len, AHEAD)


@device
def run_item(
    at: Geometry, planes: PlanesAt, rings: RingsAt, blk: BlockAt, s: Scratch, base: int, counts: Counts, row: int, key_head: int, head: int, stop_head: int, then_row: int, then_head: int, has_block: int
) -> None:
    """Fold, append and read value heads ``head .. stop_head - 1`` of one row; all share a key head.

    ``then_row`` and ``then_head`` are what this thread runs next.
    """
    slot = counts[0, row]
    if slot < 0:
        if has_block:
            for h in range(head, stop_head):
                zero_outputs(at, blk, row, h, 0)
        return
    start = folded_to(at, counts[1, row], counts[2, row])
    first = counts[3, row]
    position = folded_to(at, counts[1, row], max(counts[2, row], first))
    if not has_block and position == start:
        return
    length = counts[4, row] if has_block else 0
    skip, past, step = position - start, max(first - position, 0), 4 * at.padded_key
    known = skip + past if has_block else skip
    ring = rings.k + slot * rings.k_slot + key_head * rings.k_head
    gather_keys(base + s.keys, ring, rings.k_entry, rings.kind, start % at.ring_len, known, at.ring_len, at.key_dim, step)
    if length:
        source = blk.k + row * blk.k_row + key_head * blk.k_head
        block_keys(base + s.keys + known * step, source, blk.k_token, blk.k_kind, rings.kind, length, at.key_dim, step)
        source = blk.q + row * blk.q_row + key_head * blk.q_head
        for t in range(length):
            copy_in(base + s.queries + t * step, source + t * blk.q_token, blk.q_kind, at.key_dim)
        if not at.is_delta and not at.per_channel:
            matches = 4 * ((at.ring_len + LANES - 1) // LANES * LANES)
            match_keys(base + s.matches, matches, base + s.keys, base + s.queries, known + length, length, at.key_dim, step)
    for h in range(head, stop_head):
        if has_block and (h + 1 < stop_head or then_row >= 0):
            is_last = h + 1 == stop_head
            next_row, next_head = (then_row, then_head) if is_last else (row, h + 1)
            fetch_head(at, planes, rings, counts, next_row, next_head, next_row != row)
        if length:
            append_values(at, rings, blk, row, slot, h, first, length)
        g = rings.g + slot * rings.g_slot + h * rings.g_head
        w = rings.w + slot * rings.w_slot + h * rings.w_head
        channels = at.key_dim if at.per_channel else 0
        gather_gates(base + s.decay, base + s.strength, g, rings.g_entry, w, rings.w_entry, start % at.ring_len, known + length, at.ring_len, channels, step)
        fold_due(at, planes, rings, s, base, slot, h, start, position)
        if length:
            read_head(at, planes, rings, blk, s, base, row, slot, h, position, skip, past, length, counts[5, row])
        if has_block:
            zero_outputs(at, blk, row, h, length)


@device
def first_head(at: Geometry, unit: int) -> int:
    """Return the first value head of a row's work item."""
    per_key = at.value_heads // at.key_heads
    groups = (per_key + HEADS_PER_ITEM - 1) // HEADS_PER_ITEM
    return unit // groups * per_key + unit % groups * HEADS_PER_ITEM


@device
def run_unit(
    at: Geometry, planes: PlanesAt, rings: RingsAt, blk: BlockAt, s: Scratch, base: int, counts: Counts, row: int, unit: int, then_row: int, then_unit: int, has_block: int
) -> None:
    """Run one work item of a row."""
    per_key, head = at.value_heads // at.key_heads, first_head(at, unit)
    key_head = head // per_key
    stop = min(head + HEADS_PER_ITEM, (key_head + 1) * per_key)
    run_item(at, planes, rings, blk, s, base, counts, row, key_head, head, stop, then_row, first_head(at, then_unit), has_block)


@device
def run_share(
    at: Geometry, planes: PlanesAt, rings: RingsAt, blk: BlockAt, s: Scratch, base: int, counts: Counts, share: int, shares: int, has_block: int
) -> None:
    """Run one share: a run of neighbouring heads of every row, so that folds are spread evenly.

    Where a row has fewer work items than there are shares, they are dealt out in turn.
    """
    groups = (at.value_heads // at.key_heads + HEADS_PER_ITEM - 1) // HEADS_PER_ITEM
    per_row, rows = at.key_heads * groups, counts.shape[1]
    if per_row < shares:
        for unit in range(share, rows * per_row, shares):
            run_unit(at, planes, rings, blk, s, base, counts, unit // per_row, unit % per_row, -1, 0, has_block)
        return
    for row in range(rows):
        part, then = (share + row) % shares, (share + row + 1) % shares
        start, stop = per_row * part // shares, per_row * (part + 1) // shares
        next_row = row + 1 if row + 1 < rows else -1
        for unit in range(start, stop):
            if unit + 1 < stop:
                run_unit(at, planes, rings, blk, s, base, counts, row, unit, row, unit + 1, has_block)
            else:
                run_unit(at, planes, rings, blk, s, base, counts, row, unit, next_row, per_row * then // shares, has_block)


@device
def run_keys(at: Geometry, rings: RingsAt, blk: BlockAt, counts: Counts, share: int, shares: int) -> None:
    """Append the keys of every ``shares``-th row."""
    for row in range(share, counts.shape[1], shares):
        if counts[0, row] >= 0:
            append_keys(at, rings, blk, row, counts[0, row], counts[3, row], counts[4, row])


@numba.njit(nogil=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def run_serial(
    at: Geometry, planes: PlanesAt, rings: RingsAt, blk: BlockAt, s: Scratch, base: int, counts: Counts, has_block: int
) -> None:
    """Run a call in the calling thread.

    ``counts`` is ``[6, B]``: slots, base, folded, committed, lengths and whether the read is full.
    """
    run_share(at, planes, rings, blk, s, base, counts, 0, 1, has_block)
    if has_block:
        run_keys(at, rings, blk, counts, 0, 1)


@numba.njit(nogil=True, error_model="numpy", cache=True, parallel=True)  # type: ignore[untyped-decorator]
def run_parallel(
    at: Geometry, planes: PlanesAt, rings: RingsAt, blk: BlockAt, s: Scratch, base: int, counts: Counts, has_block: int, shares: int
) -> None:
    """Run a call in ``shares`` shares; as :func:`run_serial`, with scratch for every share.

    The rings' keys come last: all value heads of a key head read them, so they may change only when
    the last of them is done.
    """
    for share in numba.prange(shares):
        run_share(at, planes, rings, blk, s, base + share * s.size, counts, share, shares, has_block)
    if has_block:
        for share in numba.prange(shares):
            run_keys(at, rings, blk, counts, share, shares)
