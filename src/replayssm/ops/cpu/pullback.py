"""The pull-back: queries carried through the entries of one head to the checkpoint.

Works on gathered entries and writes scratch only. The entries behind the checkpoint are ``past``
committed ones, then the nodes of the block; a query walks its own ancestors among those, then all
of the past. What else is in the block is not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.cpu.common import IS_F32, load_as
from replayssm.ops.cpu.entries import fetch_entry
from replayssm.ops.cpu.layout import GROUP, Geometry, HeadAt, NextAt, Scratch
from replayssm.ops.cpu.read import ahead, dots_scratch, fetch_bytes
from replayssm.ops.cpu.vector import (
    LANES,
    Vec,
    device,
    exp,
    fma,
    get,
    inlined,
    load,
    mul,
    put,
    single,
    splat,
    store,
    total,
    totals4,
    zero,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Parents = NDArray[np.int64]

ONE = single(1.0)
# bytes of a plane fetched beside every entry that is passed
PLANE_BYTES = 256


@inlined
def before(parents: Parents, row: int, past: int, entry: int) -> int:
    """Return the entry that an entry continues, -1 for the checkpoint."""
    return past + parents[row, entry - past] if entry >= past else entry - 1


@inlined
def ring_index(at: Geometry, first: int, entry: int) -> int:
    """Return the ring index of the ``entry``-th entry from ring index ``first`` on."""
    index = first + entry
    return index - at.ring_len if index >= at.ring_len else index


@inlined
def fetch_beside(at: Geometry, here: HeadAt, then: NextAt, first: int, passed: int) -> None:
    """Fetch an entry of the next head and a little of this head's plane, beside one that is passed.

    Little by little: a burst takes all lines that may be in flight, and what follows waits for it.
    Oldest first while newest are passed: prefetchers of the machine follow ascending addresses.
    """
    fetch_entry(at, here, then, ring_index(at, first, passed))
    plane = here.high + ahead(at)
    fetch_bytes(plane + passed * PLANE_BYTES, PLANE_BYTES)


@inlined
def pull_additive(
    at: Geometry,
    s: Scratch,
    here: HeadAt,
    then: NextAt,
    parents: Parents,
    row: int,
    past: int,
    first: int,
    skip: int,
    token: int,
) -> None:
    """Pull one query back through additive entries with one decay a head.

    ``s.matches`` holds ``k_j . q``, which all value heads of a key head share.
    """
    strength, decay = s.strength + 4 * skip, s.decay + 4 * skip
    match, c = s.matches + token * at.entry_row + 4 * skip, s.c + token * at.entry_row
    run, j = ONE, past + token
    while j >= 0:
        if token == 0:
            fetch_beside(at, here, then, first, past - j)
        put(c + 4 * j, get(strength + 4 * j) * run * get(match + 4 * j))
        run = run * get(decay + 4 * j)
        j = before(parents, row, past, j)
    factor, x, q = splat(run), s.x + token * at.key_row, s.queries + token * at.key_row
    for i in range(0, at.key_row, 4 * LANES):
        store(x + i, mul(factor, load(q + i)))


@device
def match_keys(at: Geometry, s: Scratch, n: int, tokens: int) -> None:
    """Write ``k_j . q_t`` of every query and gathered key."""
    row = at.key_row
    dots_scratch(s.keys, row, n, s.queries, row, tokens, at.key_dim, s.matches, at.entry_row)


@inlined
def copy_row(to: int, source: int, row: int) -> None:
    """Copy one row of scratch."""
    for i in range(0, row, 4 * LANES):
        store(to + i, load(source + i))


@inlined
def carry(at: Geometry, x: Vec, key: Vec, back: Vec, gate: Vec) -> Vec:
    """Return 16 lanes of ``D (x - c k)``, or ``D x`` for additive writes; ``back`` is -c."""
    new = x
    if at.is_delta:
        new = fma(back, key, new)
    return mul(gate, new)


@inlined
def pull_one(
    at: Geometry,
    s: Scratch,
    here: HeadAt,
    then: NextAt,
    parents: Parents,
    row: int,
    past: int,
    first: int,
    skip: int,
    token: int,
) -> None:
    """Pull one query back entry by entry: delta writes, or one decay per key channel.

    Channel decays come from the ring: their exp is computed while a match is summed, for which the
    carry has to wait.
    """
    step, strength = at.key_row, s.strength + 4 * skip
    keys, decay = s.keys + skip * step, s.decay + 4 * skip
    x, c, j = s.x + token * step, s.c + token * at.entry_row, past + token
    copy_row(x, s.queries + token * step, step)
    while j >= 0:
        key, a, gate = keys + j * step, zero(), splat(ONE)
        gates = here.g + ring_index(at, first, j) * here.g_entry
        fetch_beside(at, here, then, first, past + token - j)
        for i in range(0, step, 4 * LANES):
            a = fma(load(key + i), load(x + i), a)
        match = get(strength + 4 * j) * total(a)
        put(c + 4 * j, match)
        back = splat(-match)
        if not at.per_channel:
            gate = splat(get(decay + 4 * j))
        for i in range(0, step, 4 * LANES):
            if at.per_channel:
                gate = exp(load_as(gates + i, IS_F32, at.key_dim - i // 4))
            store(x + i, carry(at, load(x + i), load(key + i), back, gate))
        j = before(parents, row, past, j)


@device
def pass_entry(
    at: Geometry,
    s: Scratch,
    entry: int,
    x: int,
    to: tuple[int, int, int, int],
    c: tuple[int, int, int, int],
) -> None:
    """Carry four queries back over one gathered entry, each with the operations of a single one.

    ``x`` is the first of four consecutive rows; results and coefficients go to ``to`` and ``c``.
    """
    step, w = at.key_row, get(s.strength + 4 * entry)
    key, y, z, u = s.keys + entry * step, x + step, x + 2 * step, x + 3 * step
    p, q, r, t = zero(), zero(), zero(), zero()
    for i in range(0, step, 4 * LANES):
        k = load(key + i)
        p, q = fma(k, load(x + i), p), fma(k, load(y + i), q)
        r, t = fma(k, load(z + i), r), fma(k, load(u + i), t)
    totals4(s.spare, p, q, r, t)
    a, b = w * get(s.spare), w * get(s.spare + 4)
    d, e = w * get(s.spare + 8), w * get(s.spare + 12)
    put(c[0], a)
    put(c[1], b)
    put(c[2], d)
    put(c[3], e)
    p, q, r, t = splat(-a), splat(-b), splat(-d), splat(-e)
    gates, gate = s.decay + entry * step, splat(ONE)
    if not at.per_channel:
        gate = splat(get(s.decay + 4 * entry))
    for i in range(0, step, 4 * LANES):
        k = load(key + i)
        if at.per_channel:
            gate = load(gates + i)
        store(to[0] + i, carry(at, load(x + i), k, p, gate))
        store(to[1] + i, carry(at, load(y + i), k, q, gate))
        store(to[2] + i, carry(at, load(z + i), k, r, gate))
        store(to[3] + i, carry(at, load(u + i), k, t, gate))


@device
def pull_four(
    at: Geometry,
    s: Scratch,
    parents: Parents,
    row: int,
    past: int,
    skip: int,
    token: int,
    last: int,
) -> None:
    """Pull four queries back together, so that a key is loaded once for all that see it.

    Every turn takes the newest entry that one of them has yet to pass; what the others would get
    goes to spare memory. Queries behind ``last`` repeat it.
    """
    step, wide, no = at.key_row, at.entry_row, s.spare
    x, c = s.x + token * step, s.c + token * wide
    e, f = past + token, past + min(token + 1, last)
    g, h = past + min(token + 2, last), past + min(token + 3, last)
    for i in range(GROUP):
        copy_row(x + i * step, s.queries + min(token + i, last) * step, step)
    j = max(max(e, f), max(g, h))
    while j >= 0:
        then, at_c = before(parents, row, past, j), c + 4 * j
        x_e, x_f, x_g, x_h = no, no, no, no
        c_e, c_f, c_g, c_h = no, no, no, no
        if e == j:
            x_e, c_e, e = x, at_c, then
        if f == j:
            x_f, c_f, f = x + step, at_c + wide, then
        if g == j:
            x_g, c_g, g = x + 2 * step, at_c + 2 * wide, then
        if h == j:
            x_h, c_h, h = x + 3 * step, at_c + 3 * wide, then
        pass_entry(at, s, skip + j, x, (x_e, x_f, x_g, x_h), (c_e, c_f, c_g, c_h))
        j = max(max(e, f), max(g, h))


@inlined
def pull_all(
    at: Geometry,
    s: Scratch,
    here: HeadAt,
    then: NextAt,
    parents: Parents,
    row: int,
    past: int,
    first: int,
    skip: int,
    length: int,
) -> None:
    """Fill ``s.x`` and ``s.c``: every query of a block pulled back through its own entries.

    ``skip`` gathered entries are folded already; ``past`` follow before the block's own, from ring
    index ``first`` on.
    """
    if not at.is_delta and not at.per_channel:
        for t in range(length):
            pull_additive(at, s, here, then, parents, row, past, first, skip, t)
        return
    for t in range(0, length, GROUP):
        if length - t == 1:
            pull_one(at, s, here, then, parents, row, past, first, skip, t)
        else:
            pull_four(at, s, parents, row, past, skip, t, length - 1)
