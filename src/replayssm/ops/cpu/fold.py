"""The fold: the oldest window of entries moves into the checkpoint of one head.

Blocked, from the raw ring and both planes in fp32. Additive writes are one small matrix product;
delta writes first solve ``(I + A) U = R``, A strictly lower, ``A_st = w_s k_s . D_{t+1..s} k_t``
and ``R_s = w_s (v_s - S_0 D_{1..s} k_s)``. Value rows never mix, so 16 rows go through all stages
while they are in the nearest cache: memory is read and written once, both planes of every element
(4 + 4 bytes for ``f32`` and ``s32``, 3 + 3 for ``q24``, 2 + 2 for ``q16`` and ``bf16``).

What a fold writes depends on the planes, the entries and their boundary only, never on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import FMT_F32, IS_BF16, clear, copy_in, load_as, width
from replayssm.ops.cpu.encode import (
    collect_amax,
    decode_rows,
    encode_rows,
    fetch_rows,
    is_finite,
    set_columns,
)
from replayssm.ops.cpu.layout import Geometry, HeadAt, Scratch
from replayssm.ops.cpu.read import dots_scratch
from replayssm.ops.cpu.vector import (
    LANES,
    VECTOR,
    Vec,
    absolute,
    device,
    fma,
    get,
    inlined,
    largest,
    load,
    load_four,
    mul,
    put,
    single,
    splat,
    store,
    sub,
    total,
    zero,
)

if TYPE_CHECKING:
    Four = tuple[Vec, Vec, Vec, Vec]

ONE = single(1.0)
# bytes of 16 written values
VALUES = VECTOR


@device
def prepare_scalar(at: Geometry, s: Scratch, keys: int, decay: int, strength: int, n: int) -> None:
    """Fill decays up to and behind every entry, A and the whole decay, for one decay a head."""
    row = at.key_row
    run = ONE
    for j in range(n):
        run = run * get(decay + 4 * j)
        put(s.before + 4 * j, run)
    for i in range(0, row, 4 * LANES):
        store(s.total + i, splat(run))
    run = ONE
    for j in range(n - 1, -1, -1):
        put(s.after + 4 * j, run)
        run = run * get(decay + 4 * j)
    if at.is_delta:
        dots_scratch(keys, row, n, keys, row, n, at.key_dim, s.lower, at.window_row)
        for t in range(n):
            run = ONE
            for j in range(t + 1, n):
                run = run * get(decay + 4 * j)
                cell = s.lower + t * at.window_row + 4 * j
                put(cell, get(strength + 4 * j) * run * get(cell))


@device
def prepare_channel(at: Geometry, s: Scratch, keys: int, decay: int, strength: int, n: int) -> None:
    """Fill keys decayed up to and behind every entry, A, the whole decay, for channel decays."""
    row = at.key_row
    for i in range(0, row, 4 * LANES):
        run = splat(ONE)
        for j in range(n):
            run = mul(run, load(decay + j * row + i))
            if at.is_delta:
                store(s.before + j * row + i, mul(load(keys + j * row + i), run))
        store(s.total + i, run)
        if not at.is_delta:
            run = splat(ONE)
            for j in range(n - 1, -1, -1):
                store(s.after + j * row + i, mul(load(keys + j * row + i), run))
                run = mul(run, load(decay + j * row + i))
    if not at.is_delta:
        return
    for t in range(n):
        to = s.after + t * row
        for i in range(0, row, 4 * LANES):
            store(to + i, load(keys + t * row + i))
        for j in range(t + 1, n):
            seen = zero()
            for i in range(0, row, 4 * LANES):
                decayed = mul(load(to + i), load(decay + j * row + i))
                store(to + i, decayed)
                seen = fma(decayed, load(keys + j * row + i), seen)
            put(s.lower + t * at.window_row + 4 * j, get(strength + 4 * j) * total(seen))


@device
def written_values(
    at: Geometry, s: Scratch, v: int, here: HeadAt, first: int, strength: int, n: int, rows: int
) -> None:
    """Fill ``U [n, 16]``; for delta writes ``s.values`` holds ``S_0 (decayed) k_s`` on entry."""
    index = first
    for j in range(n):
        to = s.values + VALUES * j
        value = load_as(v + index * here.v_entry, here.kind, rows)
        if at.is_delta:
            seen = load(to)
            if not at.per_channel:
                seen = mul(seen, splat(get(s.before + 4 * j)))
            value = sub(value, seen)
        store(to, mul(value, splat(get(strength + 4 * j))))
        index = 0 if index + 1 == at.ring_len else index + 1
    if at.is_delta:
        for t in range(n):
            value, lower = load(s.values + VALUES * t), s.lower + t * at.window_row
            for j in range(t + 1, n):
                to, factor = s.values + VALUES * j, splat(-get(lower + 4 * j))
                store(to, fma(factor, value, load(to)))
    if not at.per_channel:
        for j in range(n):
            to = s.values + VALUES * j
            store(to, mul(load(to), splat(get(s.after + 4 * j))))


@inlined
def decay_four(at: int, d: Four) -> Four:
    """Load four consecutive vectors times their decays."""
    s0, s1, s2, s3 = load_four(at)
    return mul(s0, d[0]), mul(s1, d[1]), mul(s2, d[2]), mul(s3, d[3])


@inlined
def add_four(factor: Vec, k: Four, s: Four) -> Four:
    """Return ``s + factor k``."""
    return (
        fma(factor, k[0], s[0]),
        fma(factor, k[1], s[1]),
        fma(factor, k[2], s[2]),
        fma(factor, k[3], s[3]),
    )


@inlined
def raise_four(top: Four, s: Four) -> Four:
    """Return the larger magnitudes."""
    a, b = largest(top[0], absolute(s[0])), largest(top[1], absolute(s[1]))
    return a, b, largest(top[2], absolute(s[2])), largest(top[3], absolute(s[3]))


@inlined
def store_four(at: int, s: Four) -> None:
    """Store four consecutive vectors."""
    store(at, s[0])
    store(at + VECTOR, s[1])
    store(at + 2 * VECTOR, s[2])
    store(at + 3 * VECTOR, s[3])


@device
def update_tile(
    to: int, step: int, total: int, keys: int, row: int, u: int, n: int, amax: int
) -> None:
    """Write ``S D + sum_j u_j k_j`` over four rows of 64 keys, which stay in registers.

    Raises the column amaxes at ``amax``, unless that is 0.
    """
    d = load_four(total)
    a, b = decay_four(to, d), decay_four(to + step, d)
    c, e = decay_four(to + 2 * step, d), decay_four(to + 3 * step, d)
    for j in range(n):
        k, v = load_four(keys + j * row), u + VALUES * j
        a, b = add_four(splat(get(v)), k, a), add_four(splat(get(v + 4)), k, b)
        c, e = add_four(splat(get(v + 8)), k, c), add_four(splat(get(v + 12)), k, e)
    store_four(to, a)
    store_four(to + step, b)
    store_four(to + 2 * step, c)
    store_four(to + 3 * step, e)
    if amax:
        top = raise_four(load_four(amax), a)
        store_four(amax, raise_four(raise_four(raise_four(top, b), c), e))


@inlined
def update_lanes(
    to: int, step: int, total: int, keys: int, row: int, u: int, n: int, amax: int
) -> None:
    """Write the same over four rows of 16 keys."""
    d = load(total)
    a, b = mul(load(to), d), mul(load(to + step), d)
    c, e = mul(load(to + 2 * step), d), mul(load(to + 3 * step), d)
    for j in range(n):
        k, v = load(keys + j * row), u + VALUES * j
        a, b = fma(splat(get(v)), k, a), fma(splat(get(v + 4)), k, b)
        c, e = fma(splat(get(v + 8)), k, c), fma(splat(get(v + 12)), k, e)
    store(to, a)
    store(to + step, b)
    store(to + 2 * step, c)
    store(to + 3 * step, e)
    if amax:
        top = largest(largest(load(amax), absolute(a)), absolute(b))
        store(amax, largest(largest(top, absolute(c)), absolute(e)))


@device
def update_rows(
    at: Geometry, s: Scratch, here: HeadAt, then: int, block: int, step: int, keys: int, n: int
) -> None:
    """Write ``S D + sum_j u_j k_j`` over 16 decoded rows, ``step`` bytes apart.

    The 16 rows from row ``then`` on are fetched meanwhile.
    """
    row = at.key_row
    wide = row // (4 * VECTOR) * (4 * VECTOR)
    for r in range(0, LANES, 4):
        to, u = block + r * step, s.values + 4 * r
        ahead = then + r
        for i in range(0, wide, 4 * VECTOR):
            stop = 4 * (i + 4 * VECTOR) // wide
            fetch_rows(at, here, ahead + 4 * i // wide, ahead + stop)
            amax = s.amax + i if at.is_scaled else 0
            update_tile(to + i, step, s.total + i, keys + i, row, u, n, amax)
        if not wide:
            fetch_rows(at, here, ahead, ahead + 4)
        for i in range(wide, row, VECTOR):
            amax = s.amax + i if at.is_scaled else 0
            update_lanes(to + i, step, s.total + i, keys + i, row, u, n, amax)


@device
def fold_window(
    at: Geometry, s: Scratch, here: HeadAt, position: int, stop: int, done: int
) -> None:
    """Fold the entries ``position .. stop - 1`` into one head that stands at ``position``.

    Their keys, decays and strengths are gathered, behind ``done`` others; v is in the ring.
    """
    n, row = stop - position, at.key_row
    keys = s.keys + done * row
    decay = s.decay + done * (row if at.per_channel else 4)
    strength = s.strength + 4 * done
    if at.is_scaled:
        copy_in(s.column, here.columns, IS_BF16, at.key_dim)
        clear(s.amax, at.key_dim)
    fetch_rows(at, here, 0, LANES)
    seen_keys, written_keys = keys, keys
    if at.per_channel:
        prepare_channel(at, s, keys, decay, strength, n)
        seen_keys, written_keys = s.before, s.after
    else:
        prepare_scalar(at, s, keys, decay, strength, n)
    for r in range(0, at.value_dim, LANES):
        rows = min(LANES, at.value_dim - r)
        block, step = s.block + (r * row if at.is_scaled else 0), row
        # whole fp32 rows are updated where they are
        is_in_place = at.format == FMT_F32 and rows == LANES and 4 * at.key_dim == row
        if is_in_place:
            block, step = here.high + r * here.high_row, here.high_row
        else:
            decode_rows(at, here, s.column, r, rows, block)
        if at.is_delta:
            dots_scratch(block, step, LANES, seen_keys, row, n, at.key_dim, s.values, VALUES)
        v = here.v + r * width(here.kind)
        written_values(at, s, v, here, position % at.ring_len, strength, n, rows)
        update_rows(at, s, here, r + LANES, block, step, written_keys, n)
        if not (at.is_scaled or is_in_place):
            encode_rows(at, here, s.inverse, r, rows, block)
    if at.is_scaled:
        if not is_finite(s.amax, row):
            # a column scale looks at finite numbers only
            clear(s.amax, at.key_dim)
            collect_amax(s.amax, s.block, at.value_dim, row)
        set_columns(here.columns, s.inverse, s.amax, at.key_dim)
        for r in range(0, at.value_dim, LANES):
            rows = min(LANES, at.value_dim - r)
            encode_rows(at, here, s.inverse, r, rows, s.block + r * row)


@device
def fold_head(at: Geometry, s: Scratch, here: HeadAt, start: int, stop: int) -> None:
    """Fold one head window by window from ``start`` to ``stop``; its entries are gathered."""
    position = start
    while position < stop:
        boundary = (position // at.window + 1) * at.window
        fold_window(at, s, here, position, boundary, position - start)
        position = boundary
