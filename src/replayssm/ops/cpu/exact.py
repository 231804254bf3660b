"""Exact mode: a head rebuilt entry by entry with the standard step's own operations.

Every number that a fold writes and a read returns comes out of the code that the standard step
runs, in its order, on rows of the checkpoint in scratch: so both equal the standard path's bit for
bit. Serves formats that store fp32 whole. A read costs as much arithmetic as that many standard
tokens, but still writes no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import IS_F32, copy_out
from replayssm.ops.cpu.encode import decode_rows, encode_rows, fetch_rows
from replayssm.ops.cpu.entries import after
from replayssm.ops.cpu.layout import BlockAt, Geometry, HeadAt, Scratch, StandardAt
from replayssm.ops.cpu.rows import advance
from replayssm.ops.cpu.standard import prepare_token
from replayssm.ops.cpu.vector import LANES, device, inlined

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Parents = NDArray[np.int64]


@inlined
def token_at(key: int, query: int, here: HeadAt, index: int) -> BlockAt:
    """Locate one entry, its v, g and w at a ring index, as a block of one row, token and head."""
    v, g, w = index * here.v_entry, index * here.g_entry, index * here.w_entry
    return BlockAt(
        query, 0, 0, 0, IS_F32,
        key, 0, 0, 0, IS_F32,
        here.v + v, 0, 0, 0, here.kind,
        here.g + g, 0, 0, 0, IS_F32,
        here.w + w, 0, 0, 0, IS_F32,
        0, 0, 0, 0, IS_F32, 1,
    )  # fmt: skip


@device
def prepare_entries(
    at: Geometry, own: StandardAt, s: Scratch, here: HeadAt, first: int, known: int, length: int
) -> None:
    """Prepare gathered entries as the standard step prepares tokens.

    Committed ones have no query; their key takes its place and nothing reads what it gives.
    """
    index = first
    for e in range(known + length):
        key = s.keys + e * at.key_row
        query = s.queries + (e - known) * at.key_row if e >= known else key
        prepare_token(own, token_at(key, query, here, index), s.exact, 0, 0, e)
        index = after(at, index)


@device
def advance_rows(at: Geometry, own: StandardAt, s: Scratch, first: int, rows: int, e: int) -> None:
    """Advance up to 16 decoded rows by one entry, in the standard step's groups of rows."""
    whole = rows // 4 * 4
    for r in range(0, whole, 4):
        state = s.block + r * at.key_row
        advance(own, state, state, s.exact, e, first + r, 4)
    for r in range(whole, rows):
        state = s.block + r * at.key_row
        advance(own, state, state, s.exact, e, first + r, 1)


@inlined
def is_on_path(parents: Parents, row: int, node: int, leaf: int) -> bool:
    """Return whether a node is ``leaf`` or one of its ancestors."""
    while leaf > node:
        leaf = parents[row, leaf]
    return leaf == node


@inlined
def is_leaf(parents: Parents, row: int, node: int, length: int) -> bool:
    """Return whether no token of the row's block continues ``node``."""
    t = node + 1
    while t < length and parents[row, t] != node:
        t += 1
    return t >= length


@device
def fold_exactly(at: Geometry, own: StandardAt, s: Scratch, here: HeadAt, n: int) -> None:
    """Fold the ``n`` oldest prepared entries into one head, 16 rows at a time."""
    for r in range(0, at.value_dim, LANES):
        rows = min(LANES, at.value_dim - r)
        decode_rows(at, here, s.column, r, rows, s.block)
        fetch_rows(at, here, r + LANES, r + 2 * LANES)
        for e in range(n):
            advance_rows(at, own, s, r, rows, e)
        encode_rows(at, here, s.inverse, r, rows, s.block)


@device
def read_exactly(
    at: Geometry,
    own: StandardAt,
    s: Scratch,
    here: HeadAt,
    parents: Parents,
    row: int,
    skip: int,
    known: int,
    length: int,
) -> None:
    """Compute the outputs of one head, path by path from the checkpoint; planes are not written.

    Args:
        at: Geometry.
        own: Where prepared entries and outputs are.
        s: Scratch.
        here: The head.
        parents: ``[B, T]`` tree of every row.
        row: Row of the block.
        skip: Prepared entries that are already folded.
        known: Prepared entries before the block's own.
        length: Tokens of the block.
    """
    for leaf in range(length):
        if not is_leaf(parents, row, leaf, length):
            continue
        for r in range(0, at.value_dim, LANES):
            rows = min(LANES, at.value_dim - r)
            decode_rows(at, here, s.column, r, rows, s.block)
            fetch_rows(at, here, r + LANES, r + 2 * LANES)
            for e in range(skip, known + leaf + 1):
                if e < known or is_on_path(parents, row, e - known, leaf):
                    advance_rows(at, own, s, r, rows, e)


@device
def run_exactly(
    at: Geometry,
    own: StandardAt,
    s: Scratch,
    here: HeadAt,
    blk: BlockAt,
    out: int,
    parents: Parents,
    row: int,
    first: int,
    skip: int,
    known: int,
    length: int,
) -> None:
    """Fold one head and write its outputs; as ``fold_head`` and ``read_head``, entries gathered.

    ``first`` is the ring index of the oldest gathered entry.
    """
    prepare_entries(at, own, s, here, first, known, length)
    if skip:
        fold_exactly(at, own, s, here, skip)
    read_exactly(at, own, s, here, parents, row, skip, known, length)
    for t in range(length):
        y = s.exact + own.y + (known + t) * at.value_row
        copy_out(out + t * blk.out_token, blk.out_kind, y, at.value_dim)
