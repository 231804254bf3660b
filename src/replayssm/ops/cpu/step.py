"""One call over a batch: per row and group of value heads fold what is due, append, and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba

from replayssm.ops.cpu.common import copy_in
from replayssm.ops.cpu.entries import (
    append_keys,
    append_values,
    block_keys,
    fetch_head,
    gather_gates,
    gather_keys,
    next_at,
    zero_outputs,
)
from replayssm.ops.cpu.exact import run_exactly
from replayssm.ops.cpu.fold import fold_head
from replayssm.ops.cpu.layout import (
    HEADS_PER_ITEM,
    BlockAt,
    Geometry,
    HeadAt,
    NextAt,
    PlanesAt,
    RingsAt,
    Scratch,
    StandardAt,
)
from replayssm.ops.cpu.outputs import read_head
from replayssm.ops.cpu.pullback import match_keys
from replayssm.ops.cpu.read import fetch_bytes, fetch_inputs
from replayssm.ops.cpu.spread import call_at
from replayssm.ops.cpu.vector import device, inlined, merged

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    Parents = NDArray[np.int64]

# rows of ``counts``
SLOT, BASE, FOLDED, COMMITTED, LENGTH, IS_FULL = range(6)


@inlined
def folded_to(at: Geometry, base: int, count: int) -> int:
    """Return the newest boundary at or before ``count - keep``, or ``base``."""
    return max(base, (count - at.keep) // at.window * at.window)


@inlined
def head_at(planes: PlanesAt, rings: RingsAt, slot: int, head: int) -> HeadAt:
    """Locate one value head of one slot."""
    return HeadAt(
        planes.high + slot * planes.high_slot + head * planes.high_head,
        planes.high_row,
        planes.low + slot * planes.low_slot + head * planes.low_head,
        planes.low_row,
        planes.scale + slot * planes.scale_slot + head * planes.scale_head,
        planes.columns + slot * planes.columns_slot + head * planes.columns_head,
        rings.v + slot * rings.v_slot + head * rings.v_head,
        rings.v_entry,
        rings.g + slot * rings.g_slot + head * rings.g_head,
        rings.g_entry,
        rings.w + slot * rings.w_slot + head * rings.w_head,
        rings.w_entry,
        rings.kind,
    )


@device
def scratch_at(s: Scratch, base: int) -> Scratch:
    """Turn offsets into addresses."""
    return Scratch(
        base + s.keys,
        base + s.decay,
        base + s.strength,
        base + s.queries,
        base + s.x,
        base + s.matches,
        base + s.c,
        base + s.y,
        base + s.sums,
        base + s.before,
        base + s.after,
        base + s.lower,
        base + s.values,
        base + s.block,
        base + s.total,
        base + s.column,
        base + s.inverse,
        base + s.amax,
        base + s.spare,
        base + s.exact,
    )


@inlined
def first_head(at: Geometry, unit: int) -> int:
    """Return the first value head of a row's work item."""
    per_key = at.value_heads // at.key_heads
    groups = (per_key + HEADS_PER_ITEM - 1) // HEADS_PER_ITEM
    return unit // groups * per_key + unit % groups * HEADS_PER_ITEM


@inlined
def fetch_next(
    at: Geometry,
    planes: PlanesAt,
    rings: RingsAt,
    blk: BlockAt,
    counts: Counts,
    row: int,
    head: int,
    is_new_row: int,
    is_single: int,
) -> None:
    """Fetch the small pieces that the next head of this thread reads.

    Not its entries where the pull-back of a single query fetches them.
    """
    slot = counts[SLOT, row]
    if slot >= 0:
        base, committed = counts[BASE, row], counts[COMMITTED, row]
        start = folded_to(at, base, counts[FOLDED, row])
        # the entries that will be appended too: their lines are read before they are written
        n = 0 if is_single else max(committed - start, 0) + counts[LENGTH, row]
        here = head_at(planes, rings, slot, head)
        fetch_head(at, planes, rings, here, slot, head, start, n, is_new_row)
        fetch_inputs(at, blk, row, head)
        if at.is_scaled:
            fetch_bytes(here.columns, 2 * at.key_dim)


@inlined
def gather_row(
    at: Geometry,
    rings: RingsAt,
    blk: BlockAt,
    s: Scratch,
    row: int,
    slot: int,
    key_head: int,
    start: int,
    known: int,
    length: int,
) -> None:
    """Gather keys and queries of one key head, and what all its value heads share."""
    ring = rings.k + slot * rings.k_slot + key_head * rings.k_head
    gather_keys(at, s, rings, ring, start % at.ring_len, known)
    if length:
        source = blk.k + row * blk.k_row + key_head * blk.k_head
        block_keys(at, blk, s.keys + known * at.key_row, source, rings.kind, length)
        source = blk.q + row * blk.q_row + key_head * blk.q_head
        for t in range(length):
            copy_in(s.queries + t * at.key_row, source + t * blk.q_token, blk.q_kind, at.key_dim)
        if not at.is_delta and not at.per_channel:
            match_keys(at, s, known + length, length)


@merged
def run_head(
    at: Geometry,
    s: Scratch,
    here: HeadAt,
    then: NextAt,
    blk: BlockAt,
    out: int,
    parents: Parents,
    row: int,
    spans: tuple[int, int, int, int, int, int],
    full: int,
) -> None:
    """Fold one head and write its outputs; its new entries are in the rings.

    ``spans``: where it stands, where it will, entries to fold, past them, both, and the block's.
    """
    start, position, skip, past, known, length = spans
    # a single query reads the channel decays of unfolded entries where they are
    decays = skip if length == 1 else known + length
    gather_gates(at, s, here, start % at.ring_len, known + length, decays)
    fold_head(at, s, here, start, position)
    if length:
        read_head(at, s, here, then, blk, out, parents, row, position, skip, past, length, full)


@merged
def run_item(
    at: Geometry,
    planes: PlanesAt,
    rings: RingsAt,
    blk: BlockAt,
    s: Scratch,
    counts: Counts,
    parents: Parents,
    own: StandardAt | None,
    row: int,
    unit: int,
    then_row: int,
    then_unit: int,
    has_block: int,
) -> None:
    """Fold, append and read some value heads of one row that share a key head.

    ``then_row`` and ``then_unit`` are what this thread runs next, -1 when nothing.
    """
    per_key, head = at.value_heads // at.key_heads, first_head(at, unit)
    key_head, slot = head // per_key, counts[SLOT, row]
    stop_head = min(head + HEADS_PER_ITEM, (key_head + 1) * per_key)
    # of a pad row a variable 0: a literal one would be a second specialisation to compile
    length = counts[LENGTH, row] if has_block and slot >= 0 else 0
    if slot < 0:
        if has_block:
            for h in range(head, stop_head):
                zero_outputs(at, blk, row, h, length)
        return
    base, folded, first = counts[BASE, row], counts[FOLDED, row], counts[COMMITTED, row]
    start, position = folded_to(at, base, folded), folded_to(at, base, max(folded, first))
    if not has_block and position == start:
        return
    skip, past = position - start, max(first - position, 0)
    known = skip + past if has_block else skip
    gather_row(at, rings, blk, s, row, slot, key_head, start, known, length)
    if head == key_head * per_key:
        # the block's entries are none of those that other items gather, whatever their order
        append_keys(at, rings, blk, row, slot, key_head, first, length)
    # one query, nothing to fold: its pull-back fetches for the next head
    is_serial = length == 1 and skip == 0 and own is None
    for h in range(head, stop_head):
        next_row, next_head = row, h + 1
        if next_head == stop_head:
            next_row, next_head = then_row, first_head(at, then_unit)
        is_single = is_serial and next_row == row
        if next_row >= 0:
            is_new_row = next_row != row
            fetch_next(at, planes, rings, blk, counts, next_row, next_head, is_new_row, is_single)
        here, then = head_at(planes, rings, slot, h), next_at(at, rings, slot, next_head, is_single)
        append_values(at, here, blk, row, h, first, length)
        out = blk.out + row * blk.out_row + h * blk.out_head
        if own is not None:
            ring = start % at.ring_len
            run_exactly(at, own, s, here, blk, out, parents, row, ring, skip, known, length)
        else:
            spans = (start, position, skip, past, known, length)
            run_head(at, s, here, then, blk, out, parents, row, spans, counts[IS_FULL, row])
        if has_block:
            zero_outputs(at, blk, row, h, length)


@numba.njit(nogil=True, error_model="numpy", cache=True)
def run_share(
    at: Geometry,
    planes: PlanesAt,
    rings: RingsAt,
    blk: BlockAt,
    scratch: Scratch,
    counts: Counts,
    parents: Parents,
    own: StandardAt | None,
    has_block: int,
    base: int,
    share: int,
    shares: int,
) -> None:
    """Run one share: a run of neighbouring heads of every row, so that folds are spread evenly.

    Where a row has fewer work items than there are shares, they are dealt out in turn. ``counts``
    is ``[6, B]``: slots, base, folded, committed, lengths and whether a read is full. ``parents``
    is ``[B, T]``, of chains too. ``own`` is where exact mode prepares entries, or None.
    """
    s = scratch_at(scratch, base)
    groups = (at.value_heads // at.key_heads + HEADS_PER_ITEM - 1) // HEADS_PER_ITEM
    per_row, rows = at.key_heads * groups, counts.shape[1]
    is_dealt = per_row < shares
    for row in range(rows):
        part, then = (share + row) % shares, (share + row + 1) % shares
        start, stop, step = per_row * part // shares, per_row * (part + 1) // shares, 1
        if is_dealt:
            start, stop, step = (share - row * per_row) % shares, per_row, shares
        for unit in range(start, stop, step):
            then_row, then_unit = row, unit + 1
            if is_dealt:
                then_row = -1
            elif then_unit == stop:
                then_row = row + 1 if row + 1 < rows else -1
                then_unit = per_row * then // shares
            run_item(
                at,
                planes,
                rings,
                blk,
                s,
                counts,
                parents,
                own,
                row,
                unit,
                then_row,
                then_unit,
                has_block,
            )


@numba.njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def run_shares(
    address: int,
    at: Geometry,
    planes: PlanesAt,
    rings: RingsAt,
    blk: BlockAt,
    scratch: Scratch,
    counts: Counts,
    parents: Parents,
    own: StandardAt | None,
    has_block: int,
    base: int,
    size: int,
    shares: int,
) -> None:
    """Run all shares of a call, spread over threads, with ``size`` bytes of scratch each."""
    for share in numba.prange(shares):
        mine = (base + share * size, share, shares)
        call_at(address, (at, planes, rings, blk, scratch, counts, parents, own, has_block, *mine))
