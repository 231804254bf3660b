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
    Eight = tuple[Vec, Vec, Vec, Vec, Vec, Vec, Vec, Vec]


@device
def prepare_token(at: StandardAt, blk: BlockAt, base: int, row: int, head: int, t: int) -> None:
    """Fill key, decay, decayed key, decayed query, value, strength and k . q of one token."""
    key_head, step = head // (at.value_heads // at.key_heads), 4 * at.padded_key
    key = base + at.key + t * step
    copy_in(key, blk.k + row * blk.k_row + t * blk.k_token + key_head * blk.k_head, blk.k_kind, at.key_dim)
    query = base + at.query + t * step
    copy_in(query, blk.q + row * blk.q_row + t * blk.q_token + key_head * blk.q_head, blk.q_kind, at.key_dim)
    value = base + at.value + t * 4 * at.padded_value
    copy_in(value, blk.v + row * blk.v_row + t * blk.v_token + head * blk.v_head, blk.v_kind, at.value_dim)
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


# bytes between what is read and what is fetched: about a memory latency of work
AHEAD = 4096


def make_rows(kind: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return (four rows, one row) for one element type of the state.

    Both advance rows by one token: ``y = (S D) q + u (k . q)``, ``S <- S D + u k``. The first sweep reads
    a row for both products, the second rewrites it from the nearest cache; each row is summed in the
    same order in both.
    """
    size = 4 if kind == IS_F32 else 2

    @inlined
    def see(p: int, step: int, q: Vec, k: Vec, n: int, is_delta: int, sums: Eight) -> Eight:
        a, b, c, d, e, f, g, h = sums
        s0, s1 = load_as(p, kind, n), load_as(p + step, kind, n)
        s2, s3 = load_as(p + 2 * step, kind, n), load_as(p + 3 * step, kind, n)
        a, b, c, d = fma(s0, q, a), fma(s1, q, b), fma(s2, q, c), fma(s3, q, d)
        if is_delta:
            e, f, g, h = fma(s0, k, e), fma(s1, k, f), fma(s2, k, g), fma(s3, k, h)
        return a, b, c, d, e, f, g, h

    @inlined
    def rewrite(p: int, u: Vec, k: Vec, decay: Vec, n: int) -> None:
        store_as(p, kind, fma(u, k, mul(load_as(p, kind, n), decay)), n)

    @device
    def four_rows(at: StandardAt, state: int, step: int, base: int, t: int, r: int) -> None:
        row, sums = 4 * at.padded_key, base + at.sums
        key, query, seen = base + at.key + t * row, base + at.query + t * row, base + at.seen + t * row
        decay, place = base + at.decay + t * row, t * 4 * at.padded_value + 4 * r
        keys, whole = at.key_dim, at.key_dim // LANES * LANES
        o = zero()
        found = (o, o, o, o, o, o, o, o)
        for i in range(0, whole, LANES):
            q, k = load(query + 4 * i), load(seen + 4 * i)
            for line in range(size):
                prefetch(state + AHEAD + 4 * size * i + 64 * line)
            found = see(state + size * i, step, q, k, LANES, at.is_delta, found)
        if whole < keys:
            q, k = load(query + 4 * whole), load(seen + 4 * whole)
            found = see(state + size * whole, step, q, k, keys - whole, at.is_delta, found)
        totals4(sums, found[0], found[1], found[2], found[3])
        totals4(sums + 16, found[4], found[5], found[6], found[7])
        w, match = get(base + at.strength + 8 * t), get(base + at.strength + 8 * t + 4)
        for j in range(4):
            u = w * (get(base + at.value + place + 4 * j) - get(sums + 16 + 4 * j))
            put(sums + 16 + 4 * j, u)
            put(base + at.y + place + 4 * j, get(sums + 4 * j) + u * match)
        u0, u1 = splat(get(sums + 16)), splat(get(sums + 20))
        u2, u3 = splat(get(sums + 24)), splat(get(sums + 28))
        for i in range(0, whole, LANES):
            p, k, d = state + size * i, load(key + 4 * i), load(decay + 4 * i)
            rewrite(p, u0, k, d, LANES)
            rewrite(p + step, u1, k, d, LANES)
            rewrite(p + 2 * step, u2, k, d, LANES)
            rewrite(p + 3 * step, u3, k, d, LANES)
        if whole < keys:
            p, k, d = state + size * whole, load(key + 4 * whole), load(decay + 4 * whole)
            rewrite(p, u0, k, d, keys - whole)
            rewrite(p + step, u1, k, d, keys - whole)
            rewrite(p + 2 * step, u2, k, d, keys - whole)
            rewrite(p + 3 * step, u3, k, d, keys - whole)

    @device
    def one_row(at: StandardAt, state: int, base: int, t: int, r: int) -> None:
        row, place = 4 * at.padded_key, t * 4 * at.padded_value + 4 * r
        a, e = zero(), zero()
        for i in range(0, at.key_dim, LANES):
            s = load_as(state + size * i, kind, at.key_dim - i)
            a = fma(s, load(base + at.query + t * row + 4 * i), a)
            if at.is_delta:
                e = fma(s, load(base + at.seen + t * row + 4 * i), e)
        u = get(base + at.strength + 8 * t) * (get(base + at.value + place) - total(e))
        put(base + at.y + place, total(a) + u * get(base + at.strength + 8 * t + 4))
        for i in range(0, at.key_dim, LANES):
            k, d = load(base + at.key + t * row + 4 * i), load(base + at.decay + t * row + 4 * i)
            rewrite(state + size * i, splat(u), k, d, at.key_dim - i)

    return four_rows, one_row


_four_f32, _one_f32 = make_rows(IS_F32)
_four_bf16, _one_bf16 = make_rows(IS_BF16)
_four_f16, _one_f16 = make_rows(IS_F16)


@device
def advance(at: StandardAt, state: int, base: int, t: int, r: int, rows: int) -> None:
    """Advance ``rows`` (4 or 1) rows by one token."""
    if rows == 4:
        if at.kind == IS_F32:
            _four_f32(at, state, at.state_row, base, t, r)
        elif at.kind == IS_BF16:
            _four_bf16(at, state, at.state_row, base, t, r)
        else:
            _four_f16(at, state, at.state_row, base, t, r)
    elif at.kind == IS_F32:
        _one_f32(at, state, base, t, r)
    elif at.kind == IS_BF16:
        _one_bf16(at, state, base, t, r)
    else:
        _one_f16(at, state, base, t, r)


@device
def standard_item(at: StandardAt, blk: BlockAt, base: int, slot: int, length: int, row: int, head: int) -> None:
    """Advance one head of one row through its block, four rows at a time for all tokens."""
    for t in range(length):
        prepare_token(at, blk, base, row, head, t)
    state = at.state + slot * at.state_slot + head * at.state_head
    whole = at.value_dim // 4 * 4 if slot >= 0 else 0
    for r in range(0, whole, 4):
        for t in range(length):
            advance(at, state + r * at.state_row, base, t, r, 4)
    for r in range(whole, at.value_dim):
        for t in range(length):
            advance(at, state + r * at.state_row, base, t, r, 1)
    for t in range(blk.tokens):
        to = blk.out + row * blk.out_row + t * blk.out_token + head * blk.out_head
        y = base + at.y + t * 4 * at.padded_value
        if t >= length:
            for i in range(0, 4 * at.padded_value, 4 * LANES):
                store(y + i, zero())
        copy_out(to, blk.out_kind, y, at.value_dim)


@device
def standard_share(at: StandardAt, blk: BlockAt, base: int, counts: Counts, share: int, shares: int) -> None:
    """Run one share: a run of neighbouring heads of every row."""
    for row in range(counts.shape[1]):
        part = (share + row) % shares
        length = counts[1, row] if counts[0, row] >= 0 else 0
        for head in range(at.value_heads * part // shares, at.value_heads * (part + 1) // shares):
            standard_item(at, blk, base, counts[0, row], length, row, head)


@numba.njit(nogil=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def standard_serial(at: StandardAt, blk: BlockAt, base: int, counts: Counts) -> None:
    """Run a standard step in the calling thread; ``counts`` is ``[2, B]``: slots, lengths."""
    standard_share(at, blk, base, counts, 0, 1)


@numba.njit(nogil=True, error_model="numpy", cache=True, parallel=True)  # type: ignore[untyped-decorator]
def standard_parallel(at: StandardAt, blk: BlockAt, base: int, counts: Counts, shares: int) -> None:
    """Run a standard step in ``shares`` shares, with scratch for every share.

    Memory per step and element: 4 bytes read and 4 written for fp32, 2 and 2 for bf16.
    """
    for share in numba.prange(shares):
        standard_share(at, blk, base + share * at.size, counts, share, shares)
