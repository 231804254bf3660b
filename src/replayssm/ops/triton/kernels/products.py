"""The pull-back of additive writes with scalar decays: see :mod:`.pullback`.

Nothing of an entry depends on another but by its decay, so a lane takes a line, a value head and a
token, and passes the entries in its registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from replayssm.ops.triton.kernels.common import (
    BASE,
    COMMITTED,
    FOLDED,
    LENGTH,
    SLOT,
    decay_of,
    dot_near,
    folded_to,
    oldest_needed,
)
from replayssm.ops.triton.kernels.pullback import (
    append_gates,
    append_values,
    entries_of,
    keys_of,
    on_path,
)


@triton.jit
def _columns(x, N: tl.constexpr):
    """Return the columns of ``x [lines, N]``, N a power of two, as a tuple of ``[lines]``.

    With a line a lane they are registers: what is done with them takes no shuffle and no barrier.
    """
    if N == 1:
        return (tl.reshape(x, (x.shape[0],)),)
    else:  # noqa: RET505 - what is not taken must not be compiled
        halves = tl.permute(tl.reshape(x, (x.shape[0], 2, N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        return _columns(left, N // 2) + _columns(right, N // 2)


@triton.jit
def _beside(xs, N: tl.constexpr):
    """Return ``[lines, N]`` of N columns, the last one first: what :func:`_columns` took apart."""
    if N == 1:
        return tl.reshape(xs[0], (xs[0].shape[0], 1))
    else:  # noqa: RET505 - as above
        right, left = _beside(xs[: N // 2], N // 2), _beside(xs[N // 2 :], N // 2)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], N))


@triton.jit
def _pass(z, decay, strength, behind, N: tl.constexpr):
    """Pass N entries of each line, newest first; ``behind`` is the decay of what was newer.

    Returns the weights ``[lines, N]`` and a tuple, newest first, of the decay from an entry on.
    """
    zs, decays, strengths = _columns(z, N), _columns(decay, N), _columns(strength, N)
    weights, onwards = (), ()
    for i in tl.static_range(N - 1, -1, -1):
        weights += (strengths[i] * behind * zs[i],)
        # a decay behind an entry is the product of the newer ones, never a quotient of products
        behind *= decays[i]
        onwards += (behind,)
    return _beside(weights, N), onwards


@triton.jit
def _products(
    q, ring_k, at, total, length, products, q_token, q_scale, eps,
    T: tl.constexpr, K: tl.constexpr, NE: tl.constexpr, NORM: tl.constexpr, B16: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Write a key head's ``q . k`` of tokens and entries, ``[T, NE]``, and the queries' factors."""
    # a matrix unit takes 16 rows or more
    NQ: tl.constexpr = 16 if T <= 16 else 1 << (T - 1).bit_length()
    t, e, kk = tl.arange(0, NQ), tl.arange(0, NE), tl.arange(0, BK)
    keys = tl.load(ring_k + at[:, None] * K + kk[None, :],
                   (e < total)[:, None] & (kk < K)[None, :], 0.0)  # fmt: skip
    query = tl.load(q + t[:, None] * q_token + kk[None, :],
                    (t < length)[:, None] & (kk < K)[None, :], 0.0)  # fmt: skip
    z = dot_near(query, tl.trans(keys), tl.zeros((NQ, NE), tl.float32), B16)
    # the norm and the scale of a query are numbers of its line
    factor = tl.zeros((NQ,), tl.float32) + q_scale
    if NORM:
        wide = query.to(tl.float32)
        factor *= tl.rsqrt(tl.sum(wide * wide, 1) + eps)
    tl.store(products + t[:, None] * NE + e[None, :], z * factor[:, None], (t < T)[:, None])
    tl.store(products + T * NE + t, factor, t < T)


@triton.jit
def _append(
    row, head, t, live, next_at, length, k, v, g, w, rates, biases, ring_k, ring_v, ring_g, ring_w,
    k_token, v_row, v_token, g_row, g_token, w_row, w_token, w_low, w_high, eps,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, GATES: tl.constexpr,
    NORM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Append a key head's keys and its lines' values, decays and strengths, from ``next_at`` on."""
    own_at = next_at + t
    own_at = tl.where(own_at >= R, own_at - R, own_at)
    value, log_decay, write = entries_of(
        row, head, t, live, v, g, w, rates, biases,
        v_row, v_token, g_row, g_token, w_row, w_token, w_low, w_high,
        K, V, GATES, False, BK, BV,
    )  # fmt: skip
    NT: tl.constexpr = 1 << (T - 1).bit_length()
    token, kk = tl.arange(0, NT), tl.arange(0, BK)
    at = next_at + token
    at = tl.where(at >= R, at - R, at)
    fresh = (token < length)[:, None] & (kk < K)[None, :]
    own = keys_of(k + kk[None, :], token[:, None], fresh, k_token, eps, NORM,
                ring_k.dtype.element_ty)  # fmt: skip
    tl.store(ring_k + at[:, None] * K + kk[None, :], own, fresh)
    append_gates(head, own_at, live, log_decay, write, ring_g, ring_w, K, R, False, BK)
    append_values(head, own_at, live, value, ring_v, V, R, BV)


@triton.jit
def products_kernel(
    plan, ancestors, q, k, v, g, w, rates, biases, skips,
    ring_k, ring_v, ring_g, ring_w, coef, scale, products,
    rows, q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, w_row, w_token,
    k_slot, v_slot, g_slot, w_slot, q_scale, w_low, w_high, eps,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, GATES: tl.constexpr, SKIP: tl.constexpr, NORM: tl.constexpr,
    ASM: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr, BL: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Additive writes, scalar decays: products of keys and running products of decays alone.

    A program has up to ``LINES`` lines of one key head, a line a lane of ``BL``: whole value heads,
    as a token needs what its own program appended of those before it. ``products`` is memory for
    what tensor cores make and lanes take, ``T * (NE + 1)`` numbers a program.
    """
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    per: tl.constexpr = HV // H
    B16: tl.constexpr = (ASM and ring_k.dtype.element_ty == tl.bfloat16
                         and q.dtype.element_ty == tl.bfloat16)  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    lane = tl.arange(0, BL)
    line = tl.program_id(2) * LINES + lane
    t, head = line % T, h * per + line // T
    slot = tl.maximum(tl.load(plan + SLOT * rows + row), 0)
    base = tl.load(plan + BASE * rows + row)
    first = tl.load(plan + COMMITTED * rows + row)
    before = tl.load(plan + FOLDED * rows + row)
    length = tl.load(plan + LENGTH * rows + row).to(tl.int32)
    live = (lane < LINES) & (line < per * T) & (t < length)
    folded = tl.maximum(before, first)
    oldest = oldest_needed(base, folded, WINDOW, KEEP, TILES)
    past, start = (first - oldest).to(tl.int32), (oldest % R).to(tl.int32)
    total = past + length
    ring_k, ring_v = ring_k + slot * k_slot + h * R * K, ring_v + slot * v_slot
    ring_g, ring_w = ring_g + slot * g_slot, ring_w + slot * w_slot
    q, k = q + row * q_row + h * K, k + row * k_row + h * K
    program = (row * H + h) * tl.num_programs(2) + tl.program_id(2)
    products += program * (T * (NE + 1))
    _append(
        row, head, t, live, start + past, length, k, v, g, w, rates, biases,
        ring_k, ring_v, ring_g, ring_w,
        k_token, v_row, v_token, g_row, g_token, w_row, w_token, w_low, w_high, eps,
        T, K, V, R, GATES, NORM, BK, BV,
    )  # fmt: skip
    # what follows reads what other lanes have just written, here and below
    tl.debug_barrier()
    at = start + tl.arange(0, NE)
    at = tl.where(at >= R, at - R, at)
    _products(q, ring_k, at, total, length, products, q_token, q_scale, eps,
              T, K, NE, NORM, B16, BK)  # fmt: skip
    tl.debug_barrier()
    skip = tl.zeros((BL,), tl.float32)
    if SKIP:
        skip = tl.load(skips + head, live, 0.0).to(tl.float32)
    first_line = (row * HV + h * per) * T
    coef, scale = coef + first_line * NE, scale + first_line * TILES
    behind = tl.zeros((BL,), tl.float32) + 1.0
    arrived = ()
    for _ in tl.static_range(TILES):
        arrived += (behind,)
    # a few columns at a time, the newest first: registers are what limits how many programs run
    for e0 in tl.static_range(NE - 16, -1, -16):
        e = e0 + tl.arange(0, 16)
        at = start + e
        at = tl.where(at >= R, at - R, at)
        path = live[:, None] & (e < total)[None, :]
        path = path & on_path(ancestors, row, t[:, None], (e - past)[None, :], T)
        gates = tl.load(ring_g + head[:, None] * R + at[None, :], path, 0.0)
        strength = tl.load(ring_w + head[:, None] * R + at[None, :], path, 0.0)
        z = tl.load(products + t[:, None] * NE + e[None, :])
        weight, onwards = _pass(z, decay_of(gates), strength, behind, 16)
        behind = onwards[15]
        if SKIP:
            weight = tl.where((e - past)[None, :] == t[:, None], weight + skip[:, None], weight)
        tl.store(coef + line[:, None] * NE + e[None, :], weight, live[:, None])
        if TILES > 1:
            fresh = ()
            for tile in tl.static_range(TILES):
                begin = (folded_to(tile, base, folded, WINDOW, KEEP, TILES) - oldest).to(tl.int32)
                reached = arrived[tile]
                for i in tl.static_range(16):
                    reached = tl.where(begin == e0 + i, onwards[15 - i], reached)
                fresh += (reached,)
            arrived = fresh
        else:
            arrived = (behind,)
    factor = tl.load(products + T * NE + t)
    for tile in tl.static_range(TILES):
        tl.store(scale + line * TILES + tile, arrived[tile] * factor, live)
