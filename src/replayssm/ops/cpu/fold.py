"""The fold: the oldest window of entries moves into the checkpoint of one head.

Blocked, from the raw ring and both planes in fp32. Additive writes are one small matrix product;
delta writes first solve ``(I + A) U = R``, A strictly lower, ``A_st = w_s k_s . D_{t+1..s} k_t``
and ``R_s = w_s (v_s - S_0 D_{1..s} k_s)``. Value rows never mix, so 16 rows go through all stages
while they are in the nearest cache: memory is read and written once, both planes of every element
(4 + 4 bytes for ``f32`` and ``s32``, 3 + 3 for ``q24``, 2 + 2 for ``q16`` and ``bf16``).

What a fold writes depends on the planes, the entries and their boundary only, never on the batch.
"""

from __future__ import annotations

from replayssm.ops.cpu.common import IS_BF16, clear, copy_in, load_as, width
from replayssm.ops.cpu.encode import (
    collect_amax,
    decode_rows,
    encode_rows,
    fetch_part,
    fetch_rows,
    set_columns,
)
from replayssm.ops.cpu.layout import Geometry, HeadAt, Scratch
from replayssm.ops.cpu.read import dots_scratch
from replayssm.ops.cpu.vector import (
    LANES,
    device,
    fma,
    get,
    load,
    mul,
    put,
    single,
    splat,
    store,
    sub,
    total,
    zero,
)

ONE = single(1.0)
# bytes of 16 written values
VALUES = 4 * LANES


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
        dots_scratch(keys, n, keys, n, row, at.key_dim, s.lower, at.window_row)
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


@device
def update_rows(
    at: Geometry, s: Scratch, here: HeadAt, then: int, block: int, keys: int, n: int
) -> None:
    """Write ``S D + sum_j u_j k_j`` over 16 decoded rows, 8 at a time, a key chunk in registers.

    The 16 rows from row ``then`` on are fetched meanwhile.
    """
    row = at.key_row
    for r in range(0, LANES, 8):
        for i in range(0, row, 4 * LANES):
            fetch_part(at, here, then + r, 8, i)
            to, u = block + r * row + i, s.values + 4 * r
            d = load(s.total + i)
            s0, s1 = mul(load(to), d), mul(load(to + row), d)
            s2, s3 = mul(load(to + 2 * row), d), mul(load(to + 3 * row), d)
            s4, s5 = mul(load(to + 4 * row), d), mul(load(to + 5 * row), d)
            s6, s7 = mul(load(to + 6 * row), d), mul(load(to + 7 * row), d)
            for j in range(n):
                k = load(keys + j * row + i)
                s0, s1 = fma(splat(get(u)), k, s0), fma(splat(get(u + 4)), k, s1)
                s2, s3 = fma(splat(get(u + 8)), k, s2), fma(splat(get(u + 12)), k, s3)
                s4, s5 = fma(splat(get(u + 16)), k, s4), fma(splat(get(u + 20)), k, s5)
                s6, s7 = fma(splat(get(u + 24)), k, s6), fma(splat(get(u + 28)), k, s7)
                u += VALUES
            store(to, s0)
            store(to + row, s1)
            store(to + 2 * row, s2)
            store(to + 3 * row, s3)
            store(to + 4 * row, s4)
            store(to + 5 * row, s5)
            store(to + 6 * row, s6)
            store(to + 7 * row, s7)


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
    fetch_rows(at, here, 0)
    seen_keys, written_keys = keys, keys
    if at.per_channel:
        prepare_channel(at, s, keys, decay, strength, n)
        seen_keys, written_keys = s.before, s.after
    else:
        prepare_scalar(at, s, keys, decay, strength, n)
    for r in range(0, at.value_dim, LANES):
        rows = min(LANES, at.value_dim - r)
        block = s.block + (r * row if at.is_scaled else 0)
        decode_rows(at, here, s.column, r, rows, block)
        if at.is_delta:
            dots_scratch(block, LANES, seen_keys, n, row, at.key_dim, s.values, VALUES)
        v = here.v + r * width(here.kind)
        written_values(at, s, v, here, position % at.ring_len, strength, n, rows)
        update_rows(at, s, here, r + LANES, block, written_keys, n)
        if at.is_scaled:
            collect_amax(s.amax, block, rows, row)
        else:
            encode_rows(at, here, s.inverse, r, rows, block)
    if at.is_scaled:
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
