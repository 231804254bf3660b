"""The standard step: the whole state is read and rewritten for every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from replayssm.ops.cpu.common import (
    IS_BF16,
    IS_F16,
    IS_F32,
    copy_in,
    copy_out,
    load_as,
    scalar_as,
    store_as,
    width,
)
from replayssm.ops.cpu.layout import BlockAt, StandardAt
from replayssm.ops.cpu.read import AHEAD, LINE
from replayssm.ops.cpu.vector import (
    LANES,
    device,
    exp,
    fma,
    get,
    inlined,
    load,
    mul,
    prefetch,
    put,
    splat,
    store,
    total,
    totals4,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from replayssm.ops.cpu.vector import Vec

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


def make_rows(kind: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return (four rows, one row) for one element type of the state.

    Both advance rows by one token: ``y = (S D) q + u (k . q)``, and ``S D + u k`` is written to
    ``to``, which may be S itself. An additive write knows u beforehand and needs one sweep; a delta
    write sweeps twice, the second time in the nearest cache. A row is summed in the same order in
    both.
    """
    size = 4 if kind == IS_F32 else 2

    @inlined
    def see(p: int, query: int, seen: int, keys: int) -> tuple[Vec, Vec]:
        a, e, whole = zero(), zero(), keys // LANES * LANES
        for i in range(0, whole, LANES):
            if size * i % LINE == 0:
                prefetch(p + size * i + AHEAD)
            s = load_as(p + size * i, kind, LANES)
            a, e = fma(s, load(query + 4 * i), a), fma(s, load(seen + 4 * i), e)
        if whole < keys:
            s = load_as(p + size * whole, kind, keys - whole)
            a, e = fma(s, load(query + 4 * whole), a), fma(s, load(seen + 4 * whole), e)
        return a, e

    @inlined
    def rewrite(
        p: int, to: int, u: Vec, key: int, decay: int, query: int, i: int, n: int, a: Vec
    ) -> Vec:
        s = load_as(p + size * i, kind, n)
        new = fma(u, load(key + 4 * i), mul(s, load(decay + 4 * i)))
        store_as(to + size * i, kind, new, n)
        return fma(s, load(query + 4 * i), a)

    @inlined
    def sweep(p: int, to: int, u: float, key: int, decay: int, query: int, keys: int) -> Vec:
        a, factor, whole = zero(), splat(u), keys // LANES * LANES
        for i in range(0, whole, LANES):
            if size * i % LINE == 0:
                prefetch(p + size * i + AHEAD)
            a = rewrite(p, to, factor, key, decay, query, i, LANES, a)
        if whole < keys:
            a = rewrite(p, to, factor, key, decay, query, whole, keys - whole, a)
        return a

    @device
    def four_rows(at: StandardAt, p: int, to: int, base: int, t: int, r: int) -> None:
        step, row, keys = at.state_row, t * at.key_row, at.key_dim
        key, query, seen = base + at.key + row, base + at.query + row, base + at.seen + row
        decay, sums = base + at.decay + row, base + at.sums
        place = t * at.value_row + 4 * r
        value, y = base + at.value + place, base + at.y + place
        w, match = get(base + at.strength + 8 * t), get(base + at.strength + 8 * t + 4)
        written = sums + 16
        if at.is_delta:
            a, e = see(p, query, seen, keys)
            b, f = see(p + step, query, seen, keys)
            c, g = see(p + 2 * step, query, seen, keys)
            d, h = see(p + 3 * step, query, seen, keys)
            totals4(sums, a, b, c, d)
            totals4(written, e, f, g, h)
        for j in range(0, 16, 4):
            u = get(value + j)
            if at.is_delta:
                u = u - get(written + j)
            put(written + j, w * u)
        a = sweep(p, to, get(written), key, decay, query, keys)
        b = sweep(p + step, to + step, get(written + 4), key, decay, query, keys)
        c = sweep(p + 2 * step, to + 2 * step, get(written + 8), key, decay, query, keys)
        d = sweep(p + 3 * step, to + 3 * step, get(written + 12), key, decay, query, keys)
        if not at.is_delta:
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
            u = u - total(see(p, query, seen, keys)[1])
        u = w * u
        a = sweep(p, to, u, key, base + at.decay + row, query, keys)
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


@device
def standard_share(
    at: StandardAt, blk: BlockAt, base: int, counts: Counts, share: int, shares: int
) -> None:
    """Run one share: a run of neighbouring heads of every row."""
    for row in range(counts.shape[1]):
        part = (share + row) % shares
        length = counts[1, row] if counts[0, row] >= 0 else 0
        for head in range(at.value_heads * part // shares, at.value_heads * (part + 1) // shares):
            standard_item(at, blk, base, counts, length, row, head)


@numba.njit(nogil=True, error_model="numpy", cache=True)
def standard_serial(at: StandardAt, blk: BlockAt, base: int, counts: Counts) -> None:
    """Run a standard step in the calling thread.

    ``counts`` is ``[2 + T, B]``: slots, lengths, and the slot that each token's state goes to.
    """
    standard_share(at, blk, base, counts, 0, 1)


@numba.njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def standard_parallel(
    at: StandardAt, blk: BlockAt, base: int, size: int, counts: Counts, shares: int
) -> None:
    """Run a standard step in ``shares`` shares, with scratch for every share.

    Memory per step and element: 4 bytes read and 4 written for fp32, 2 and 2 for bf16.
    """
    for share in numba.prange(shares):
        standard_share(at, blk, base + share * size, counts, share, shares)
