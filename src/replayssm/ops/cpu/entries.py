"""Entries of a row: appended to the rings, gathered to fp32 scratch, fetched ahead of their use.

Bytes an entry: K + V elements of the ring dtype, 4 for w, and 4 or 4K for g.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import (
    IS_F32,
    copy_in,
    copy_out,
    load_as,
    scalar_as,
    store_as,
    width,
)
from replayssm.ops.cpu.layout import BlockAt, Geometry, HeadAt, NextAt, PlanesAt, RingsAt, Scratch
from replayssm.ops.cpu.read import ahead, fetch_bytes
from replayssm.ops.cpu.vector import (
    LANES,
    device,
    exp,
    get,
    inlined,
    load_some,
    put,
    store,
    zero,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]


@inlined
def after(at: Geometry, index: int) -> int:
    """Return the ring index that follows ``index``."""
    return 0 if index + 1 == at.ring_len else index + 1


@inlined
def move(to: int, kind: int, source: int, from_kind: int, n: int) -> None:
    """Convert n elements from one element type to another."""
    for i in range(0, n, LANES):
        x = load_as(source + width(from_kind) * i, from_kind, n - i)
        store_as(to + width(kind) * i, kind, x, n - i)


@inlined
def append_values(
    at: Geometry, here: HeadAt, blk: BlockAt, row: int, head: int, first: int, length: int
) -> None:
    """Write a block's v, g and w of one value head to the rings."""
    for t in range(length):
        index = (first + t) % at.ring_len
        v = blk.v + row * blk.v_row + t * blk.v_token + head * blk.v_head
        w = blk.w + row * blk.w_row + t * blk.w_token + head * blk.w_head
        g = blk.g + row * blk.g_row + t * blk.g_token + head * blk.g_head
        move(here.v + index * here.v_entry, here.kind, v, blk.v_kind, at.value_dim)
        put(here.w + index * here.w_entry, scalar_as(w, blk.w_kind))
        if at.per_channel:
            move(here.g + index * here.g_entry, IS_F32, g, blk.g_kind, at.key_dim)
        else:
            put(here.g + index * here.g_entry, scalar_as(g, blk.g_kind))


@inlined
def append_keys(
    at: Geometry,
    rings: RingsAt,
    blk: BlockAt,
    row: int,
    slot: int,
    key_head: int,
    first: int,
    length: int,
) -> None:
    """Write a block's keys of one key head to its ring."""
    ring = rings.k + slot * rings.k_slot + key_head * rings.k_head
    source = blk.k + row * blk.k_row + key_head * blk.k_head
    for t in range(length):
        to = ring + (first + t) % at.ring_len * rings.k_entry
        move(to, rings.kind, source + t * blk.k_token, blk.k_kind, at.key_dim)


@device
def zero_outputs(at: Geometry, blk: BlockAt, row: int, head: int, start: int) -> None:
    """Write 0 to the outputs of a head from token ``start`` on."""
    size = width(blk.out_kind)
    for t in range(start, blk.tokens):
        to = blk.out + row * blk.out_row + t * blk.out_token + head * blk.out_head
        for i in range(0, at.value_dim, LANES):
            store_as(to + size * i, blk.out_kind, zero(), at.value_dim - i)


@device
def gather_keys(at: Geometry, s: Scratch, rings: RingsAt, ring: int, first: int, n: int) -> None:
    """Copy the keys of n ring entries from ring index ``first`` on, wrapping."""
    index = first
    for j in range(n):
        copy_in(s.keys + j * at.key_row, ring + index * rings.k_entry, rings.kind, at.key_dim)
        index = after(at, index)


@device
def block_keys(
    at: Geometry, blk: BlockAt, to: int, source: int, ring_kind: int, length: int
) -> None:
    """Copy a block's own keys, rounded as the ring will store them.

    They come from the block, because the work item that appends them may not have run yet.
    """
    keys = at.key_dim
    for t in range(length):
        row = to + t * at.key_row
        copy_in(row, source + t * blk.k_token, blk.k_kind, keys)
        if ring_kind != IS_F32:
            # narrow in place, then widen from the last lanes down: no byte is read too late
            copy_out(row, ring_kind, row, keys)
            for i in range((keys - 1) // LANES * LANES, -1, -LANES):
                store(row + 4 * i, load_as(row + 2 * i, ring_kind, keys - i))


@inlined
def gather_gates(at: Geometry, s: Scratch, here: HeadAt, first: int, n: int, decays: int) -> None:
    """Read the write strengths and log-decays of n ring entries; take exp of the latter.

    Of channel decays, only the first ``decays`` entries'.
    """
    index = first
    for j in range(n):
        put(s.strength + 4 * j, get(here.w + index * here.w_entry))
        g = here.g + index * here.g_entry
        if not at.per_channel:
            put(s.decay + 4 * j, get(g))
        elif j < decays:
            for i in range(0, at.key_dim, LANES):
                gate = exp(load_as(g + 4 * i, IS_F32, at.key_dim - i))
                store(s.decay + j * at.key_row + 4 * i, gate)
        index = after(at, index)
    if not at.per_channel:
        for i in range(0, n, LANES):
            store(s.decay + 4 * i, exp(load_some(s.decay + 4 * i, n - i)))


@inlined
def fetch_entries(at: Geometry, address: int, entry: int, first: int, n: int, nbytes: int) -> None:
    """Fetch n ring entries into the cache."""
    index = first
    for _ in range(n):
        fetch_bytes(address + index * entry, nbytes)
        index = after(at, index)


@inlined
def next_at(at: Geometry, rings: RingsAt, slot: int, head: int, is_same_row: int) -> NextAt:
    """Locate the entries of the head that follows; its keys where it has others."""
    if not is_same_row:
        return NextAt(0, 0, 0, 0)
    per_key, k = at.value_heads // at.key_heads, 0
    if head % per_key == 0:
        k = rings.k + slot * rings.k_slot + head // per_key * rings.k_head
    v = rings.v + slot * rings.v_slot + head * rings.v_head
    return NextAt(k, rings.k_entry, v, rings.g + slot * rings.g_slot + head * rings.g_head)


@inlined
def fetch_entry(at: Geometry, here: HeadAt, then: NextAt, index: int) -> None:
    """Fetch one entry of the head that follows."""
    size = width(here.kind)
    if then.v:
        fetch_bytes(then.v + index * here.v_entry, size * at.value_dim)
        if at.per_channel:
            fetch_bytes(then.g + index * here.g_entry, 4 * at.key_dim)
    if then.k:
        fetch_bytes(then.k + index * then.k_entry, size * at.key_dim)


@inlined
def fetch_head(
    at: Geometry,
    planes: PlanesAt,
    rings: RingsAt,
    here: HeadAt,
    slot: int,
    head: int,
    start: int,
    n: int,
    is_new_row: int,
) -> None:
    """Fetch the small pieces that a head reads, while the head before it is computed.

    Its planes follow that head's in memory and are fetched with them, except at a new row. With
    ``n`` 0, its entries are fetched one by one elsewhere.
    """
    first, size = start % at.ring_len, width(rings.kind)
    fetch_entries(at, here.v, here.v_entry, first, n, size * at.value_dim)
    if at.per_channel:
        fetch_entries(at, here.g, here.g_entry, first, n, 4 * at.key_dim)
    else:
        fetch_bytes(here.g, 4 * at.ring_len)
    fetch_bytes(here.w, 4 * at.ring_len)
    per_key = at.value_heads // at.key_heads
    if is_new_row or head % per_key == 0:
        k = rings.k + slot * rings.k_slot + head // per_key * rings.k_head
        fetch_entries(at, k, rings.k_entry, first, n, size * at.key_dim)
    if at.is_scaled:
        fetch_bytes(here.scale, 4 * at.value_dim)
    if is_new_row:
        fetch_bytes(here.high, ahead(at))
