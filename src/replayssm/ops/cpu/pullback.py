"""The pull-back: entries of one head, and a query carried through them to the checkpoint.

Reads the ring entries of one head once (K + V elements, 4 or 8 + 4K bytes of gates an entry); writes
scratch only.
"""

from __future__ import annotations

import numpy as np

from replayssm.ops.cpu.common import copy_in, copy_out, load_as, width
from replayssm.ops.cpu.read import dots_f32
from replayssm.ops.cpu.vector import (
    LANES,
    add,
    device,
    exp,
    fma,
    get,
    load,
    load_some,
    mul,
    put,
    splat,
    store,
    total,
    zero,
)

ONE = np.float32(1.0)


@device
def gather_keys(
    to: int, ring: int, entry: int, kind: int, first: int, n: int, ring_len: int, keys: int, row: int
) -> None:
    """Copy ring entries ``first .. first + n - 1`` (ring index, wrapping) to fp32 rows."""
    at = first
    for j in range(n):
        copy_in(to + j * row, ring + at * entry, kind, keys)
        at = 0 if at + 1 == ring_len else at + 1


@device
def block_keys(
    to: int, source: int, token: int, kind: int, ring_kind: int, n: int, keys: int, row: int
) -> None:
    """Copy a block's own keys to fp32 rows, rounded as the ring will store them.

    They are taken from the block, because another work item may be about to write the ring.
    """
    for j in range(n):
        at = to + j * row
        copy_in(at, source + j * token, kind, keys)
        if width(ring_kind) < 4:
            # narrow in place, then widen from the last lanes down, so that no byte is read too late
            copy_out(at, ring_kind, at, keys)
            for i in range((keys - 1) // LANES * LANES, -1, -LANES):
                store(at + 4 * i, load_as(at + 2 * i, ring_kind, keys - i))


@device
def gather_gates(
    decay: int,
    strength: int,
    g: int,
    g_entry: int,
    w: int,
    w_entry: int,
    first: int,
    n: int,
    ring_len: int,
    channels: int,
    row: int,
) -> None:
    """Read log-decays and write strengths of ring entries, and take exp of the former.

    ``channels`` is 0 for one decay a head, which are kept as consecutive numbers.
    """
    at = first
    for j in range(n):
        put(strength + 4 * j, get(w + at * w_entry))
        if channels:
            for i in range(0, channels, LANES):
                gate = load_some(g + at * g_entry + 4 * i, channels - i)
                store(decay + j * row + 4 * i, exp(gate))
        else:
            put(decay + 4 * j, get(g + at * g_entry))
        at = 0 if at + 1 == ring_len else at + 1
    if not channels:
        for i in range(0, n, LANES):
            store(decay + 4 * i, exp(load_some(decay + 4 * i, n - i)))


@device
def pull_additive(x: int, q: int, decay: int, strength: int, match: int, c: int, n: int, row: int) -> None:
    """Pull one query back through additive entries with one decay a head.

    ``match`` holds ``k_j . q``, which all value heads of a key head share.
    """
    run = ONE
    for j in range(n - 1, -1, -1):
        put(c + 4 * j, get(strength + 4 * j) * run * get(match + 4 * j))
        run = run * get(decay + 4 * j)
    factor = splat(run)
    for i in range(0, row, 4 * LANES):
        store(x + i, mul(factor, load(q + i)))


@device
def pull_serial(
    x: int, q: int, keys: int, decay: int, strength: int, c: int, n: int, row: int, is_delta: int, channel: int
) -> None:
    """Pull one query back entry by entry: delta writes, or one decay per key channel."""
    for i in range(0, row, 4 * LANES):
        store(x + i, load(q + i))
    for j in range(n - 1, -1, -1):
        key = keys + j * row
        a = zero()
        for i in range(0, row, 4 * LANES):
            a = fma(load(key + i), load(x + i), a)
        match = get(strength + 4 * j) * total(a)
        put(c + 4 * j, match)
        back = splat(-match)
        one = splat(get(decay + 4 * j))
        for i in range(0, row, 4 * LANES):
            new = load(x + i)
            if is_delta:
                new = fma(back, load(key + i), new)
            if channel:
                store(x + i, mul(load(decay + j * row + i), new))
            else:
                store(x + i, mul(one, new))


@device
def match_keys(to: int, to_row: int, keys: int, q: int, n: int, queries: int, dim: int, row: int) -> None:
    """Write ``k_j . q_t`` for every query and entry."""
    dots_f32(keys, row, 0, 0, n, q, row, queries, dim, to, to_row)


@device
def entry_part(
    y: int, c: int, v: int, v_entry: int, kind: int, first: int, n: int, ring_len: int, values: int
) -> None:
    """Write ``sum_j c_j v_j`` over ring entries, newest first."""
    size = width(kind)
    newest = first + n - 1
    newest = newest - ring_len if newest >= ring_len else newest
    for i in range(0, values, LANES):
        a = zero()
        at = newest
        for j in range(n - 1, -1, -1):
            a = fma(splat(get(c + 4 * j)), load_as(v + at * v_entry + size * i, kind, values - i), a)
            at = ring_len - 1 if at == 0 else at - 1
        store(y + 4 * i, a)


@device
def finish(
    out: int, kind: int, sums: int, y: int, scale: int, unit: float, values: int
) -> None:
    """Write ``out = S_0 x (row scale) + sum_j c_j v_j``; ``scale`` 0 means there is none."""
    size = width(kind)
    for i in range(0, values, LANES):
        part = load(sums + 4 * i)
        if scale:
            part = mul(part, mul(load_some(scale + 4 * i, values - i), splat(unit)))
        store(y + 4 * i, add(part, load(y + 4 * i)))
    copy_out(out, kind, y, values)
