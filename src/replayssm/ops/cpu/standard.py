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
from replayssm.ops.cpu.read import AHEAD, LINE, fetch_inputs
from replayssm.ops.cpu.spread import call_at
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
    Four = tuple[Vec, Vec, Vec, Vec]
    Eight = tuple[Vec, Vec, Vec, Vec, Vec, Vec, Vec, Vec]


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


@inlined
def fetch_two(p: int, step: int) -> None:
    """Fetch one line of each of two rows."""
    prefetch(p)
    prefetch(p + step)


def make_see(kind: int) -> tuple[Callable[..., Eight], Callable[..., tuple[Vec, Vec]]]:
    """Return what a delta write sees of (four rows, one row): lanes of ``S D q`` and of ``S D k``.

    Four rows share every load of a key-side vector.
    """
    size = 4 if kind == IS_F32 else 2

    @inlined
    def chunk(p: int, step: int, query: int, seen: int, i: int, n: int, sums: Eight) -> Eight:
        x, z, at = load(query + 4 * i), load(seen + 4 * i), p + size * i
        a, b, c, d, e, f, g, h = sums
        s = load_as(at, kind, n)
        a, e = fma(s, x, a), fma(s, z, e)
        s = load_as(at + step, kind, n)
        b, f = fma(s, x, b), fma(s, z, f)
        s = load_as(at + 2 * step, kind, n)
        c, g = fma(s, x, c), fma(s, z, g)
        s = load_as(at + 3 * step, kind, n)
        d, h = fma(s, x, d), fma(s, z, h)
        return a, b, c, d, e, f, g, h

    @inlined
    def see_four(p: int, step: int, query: int, seen: int, keys: int) -> Eight:
        o, whole = zero(), keys // LANES * LANES
        sums = (o, o, o, o, o, o, o, o)
        for i in range(0, whole, LANES):
            if size * i % LINE == 0:
                fetch_two(p + size * i + AHEAD, step)
            sums = chunk(p, step, query, seen, i, LANES, sums)
        if whole < keys:
            sums = chunk(p, step, query, seen, whole, keys - whole, sums)
        return sums

    @inlined
    def see_one(p: int, query: int, seen: int, keys: int) -> tuple[Vec, Vec]:
        a, e = zero(), zero()
        for i in range(0, keys, LANES):
            s = load_as(p + size * i, kind, keys - i)
            a, e = fma(s, load(query + 4 * i), a), fma(s, load(seen + 4 * i), e)
        return a, e

    return see_four, see_one


def make_write(kind: int) -> tuple[Callable[..., Four], Callable[..., Vec]]:
    """Return (four rows, one row): ``S D + u k`` to any place, and lanes of ``S D q``."""
    size = 4 if kind == IS_F32 else 2

    @inlined
    def renew(p: int, to: int, u: Vec, k: Vec, d: Vec, x: Vec, a: Vec, n: int) -> Vec:
        s = load_as(p, kind, n)
        store_as(to, kind, fma(u, k, mul(s, d)), n)
        return fma(s, x, a)

    @inlined
    def chunk(
        p: int, to: int, step: int, us: Four, at: tuple[int, int, int], i: int, n: int, sums: Four
    ) -> Four:
        k, f, x = load(at[0] + 4 * i), load(at[1] + 4 * i), load(at[2] + 4 * i)
        a, b, c, d = sums
        p, to = p + size * i, to + size * i
        a = renew(p, to, us[0], k, f, x, a, n)
        b = renew(p + step, to + step, us[1], k, f, x, b, n)
        c = renew(p + 2 * step, to + 2 * step, us[2], k, f, x, c, n)
        d = renew(p + 3 * step, to + 3 * step, us[3], k, f, x, d, n)
        return a, b, c, d

    @inlined
    def write_four(
        p: int, to: int, step: int, written: int, at: tuple[int, int, int], keys: int, is_far: int
    ) -> Four:
        o, whole = zero(), keys // LANES * LANES
        u = (splat(get(written)), splat(get(written + 4)))
        us = (*u, splat(get(written + 8)), splat(get(written + 12)))
        sums = (o, o, o, o)
        for i in range(0, whole, LANES):
            if size * i % LINE == 0:
                if is_far:
                    fetch_two(p + size * i + AHEAD, step)
                fetch_two(p + size * i + AHEAD + 2 * step, step)
            sums = chunk(p, to, step, us, at, i, LANES, sums)
        if whole < keys:
            sums = chunk(p, to, step, us, at, whole, keys - whole, sums)
        return sums

    @inlined
    def write_one(p: int, to: int, u: float, at: tuple[int, int, int], keys: int) -> Vec:
        a, factor = zero(), splat(u)
        for i in range(0, keys, LANES):
            k, f, x = load(at[0] + 4 * i), load(at[1] + 4 * i), load(at[2] + 4 * i)
            a = renew(p + size * i, to + size * i, factor, k, f, x, a, keys - i)
        return a

    return write_four, write_one


def make_rows(kind: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return (four rows, one row) for one element type of the state.

    Both advance rows by one token: ``y = (S D) q + u (k . q)``, and ``S D + u k`` is written to
    ``to``, which may be S itself. An additive write knows u beforehand and needs one sweep; a delta
    write sweeps twice, the second time in the nearest cache. A row is summed in the same order in
    both.
    """
    see_four, see_one = make_see(kind)
    write_four, write_one = make_write(kind)

    @device
    def four_rows(at: StandardAt, p: int, to: int, base: int, t: int, r: int) -> None:
        step, row, keys = at.state_row, t * at.key_row, at.key_dim
        key, query, seen = base + at.key + row, base + at.query + row, base + at.seen + row
        keyed, sums = (key, base + at.decay + row, query), base + at.sums
        place = t * at.value_row + 4 * r
        value, y = base + at.value + place, base + at.y + place
        w, match = get(base + at.strength + 8 * t), get(base + at.strength + 8 * t + 4)
        written = sums + 16
        if at.is_delta:
            a, b, c, d, e, f, g, h = see_four(p, step, query, seen, keys)
            totals4(sums, a, b, c, d)
            totals4(written, e, f, g, h)
            for j in range(0, 16, 4):
                put(written + j, w * (get(value + j) - get(written + j)))
            write_four(p, to, step, written, keyed, keys, 0)
        else:
            for j in range(0, 16, 4):
                put(written + j, w * get(value + j))
            a, b, c, d = write_four(p, to, step, written, keyed, keys, 1)
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
            u = u - total(see_one(p, query, seen, keys)[1])
        u = w * u
        a = write_one(p, to, u, (key, base + at.decay + row, query), keys)
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
