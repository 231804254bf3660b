"""The standard step: the whole state is read and rewritten for every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from replayssm.ops.cpu.common import copy_in, copy_out, load_as, scalar_as, width
from replayssm.ops.cpu.layout import BlockAt, StandardAt
from replayssm.ops.cpu.read import fetch_inputs
from replayssm.ops.cpu.rows import advance
from replayssm.ops.cpu.spread import call_at
from replayssm.ops.cpu.vector import (
    LANES,
    device,
    exp,
    fma,
    load,
    mul,
    put,
    splat,
    store,
    total,
    zero,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]


@device
def prepare_token(at: StandardAt, blk: BlockAt, base: int, row: int, head: int, t: int) -> None:
    """Fill key, decay, decayed key, decayed query, value, strength and k . q of one token."""
    key_head, step = head // (at.value_heads // at.key_heads), at.key_row
    key = base + at.key + t * step
    copy_in(
        key,
        blk.k + row * blk.k_row + t * blk.k_token + key_head * blk.k_head,
        blk.k_kind,
        at.key_dim,
    )
    query = base + at.query + t * step
    copy_in(
        query,
        blk.q + row * blk.q_row + t * blk.q_token + key_head * blk.q_head,
        blk.q_kind,
        at.key_dim,
    )
    value = base + at.value + t * at.value_row
    copy_in(
        value,
        blk.v + row * blk.v_row + t * blk.v_token + head * blk.v_head,
        blk.v_kind,
        at.value_dim,
    )
    g = blk.g + row * blk.g_row + t * blk.g_token + head * blk.g_head
    w = blk.w + row * blk.w_row + t * blk.w_token + head * blk.w_head
    put(base + at.strength + 8 * t, scalar_as(w, blk.w_kind))
    match = zero()
    one = zero()
    if not at.per_channel:
        one = exp(splat(scalar_as(g, blk.g_kind)))
    for i in range(0, step, 4 * LANES):
        d = one
        if at.per_channel:
            d = exp(load_as(g + width(blk.g_kind) * (i // 4), blk.g_kind, at.key_dim - i // 4))
        match = fma(load(key + i), load(query + i), match)
        store(base + at.decay + t * step + i, d)
        store(base + at.seen + t * step + i, mul(d, load(key + i)))
        store(query + i, mul(d, load(query + i)))
    put(base + at.strength + 8 * t + 4, total(match))


@device
def standard_item(
    at: StandardAt, blk: BlockAt, base: int, counts: Counts, length: int, row: int, head: int
) -> None:
    """Advance one head of one row through its block, four rows at a time for all tokens."""
    for t in range(length):
        prepare_token(at, blk, base, row, head, t)
    whole, heads = at.value_dim // 4 * 4, at.state + head * at.state_head
    for r in range(0, whole, 4):
        state = heads + counts[0, row] * at.state_slot + r * at.state_row
        for t in range(length):
            to = heads + counts[2 + t, row] * at.state_slot + r * at.state_row
            advance(at, state, to, base, t, r, 4)
            state = to
    for r in range(whole, at.value_dim):
        state = heads + counts[0, row] * at.state_slot + r * at.state_row
        for t in range(length):
            to = heads + counts[2 + t, row] * at.state_slot + r * at.state_row
            advance(at, state, to, base, t, r, 1)
            state = to
    for t in range(blk.tokens):
        to = blk.out + row * blk.out_row + t * blk.out_token + head * blk.out_head
        y = base + at.y + t * at.value_row
        if t >= length:
            for i in range(0, at.value_row, 4 * LANES):
                store(y + i, zero())
        copy_out(to, blk.out_kind, y, at.value_dim)


@numba.njit(nogil=True, error_model="numpy", cache=True)
def standard_share(
    at: StandardAt, blk: BlockAt, counts: Counts, base: int, share: int, shares: int
) -> None:
    """Run one share of a standard step: a run of neighbouring heads of every row.

    ``counts`` is ``[2 + T, B]``: slots, lengths, and the slot that each token's state goes to.
    Memory per step and element: 4 bytes read and 4 written for fp32, 2 and 2 for bf16.
    """
    rows, heads = counts.shape[1], at.value_heads
    for row in range(rows):
        part, then = (share + row) % shares, (share + row + 1) % shares
        length = counts[1, row] if counts[0, row] >= 0 else 0
        first, stop = heads * part // shares, heads * (part + 1) // shares
        for head in range(first, stop):
            if head + 1 < stop:
                fetch_inputs(at, blk, row, head + 1)
            elif row + 1 < rows:
                fetch_inputs(at, blk, row + 1, heads * then // shares)
            standard_item(at, blk, base, counts, length, row, head)


@numba.njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def standard_shares(
    address: int, at: StandardAt, blk: BlockAt, counts: Counts, base: int, size: int, shares: int
) -> None:
    """Run all shares of a standard step, spread over threads, with scratch for every share."""
    for share in numba.prange(shares):
        call_at(address, (at, blk, counts, base + share * size, share, shares))
