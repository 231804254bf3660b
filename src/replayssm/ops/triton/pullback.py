"""The pull-back: append a block's entries, then carry its queries back to the checkpoint.

What arrives per row, value head and token is one weight per entry, ``coef [B, HV, T, NE]`` (entry e
is the token at position ``oldest + e``), and one key-side vector per value tile. For additive
writes with scalar decays that vector is the query times one number, ``scale [B, HV, T, TILES]``;
otherwise it is ``x [B, HV, TILES, T, K]``. The skip connection D is a part of the weight of a
token's own entry.

With scalar decays (:func:`scalar_kernel`) the chain needs only products of keys. For the vector x
that has come past the entries newer than j let ``z_j = k_j . x``: passing entry i is
``c_i = w_i z_i`` and, for delta writes, ``z_j = D_i (z_j - c_i k_i . k_j)``. Keys are read once for
all value heads of a key head, and the serial part is on numbers.

A token's ancestors in its block are a bit mask, ``ancestors [B, T]`` int64. A pad row has no
entries and no tokens, so that every mask is empty.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.common import (
    BASE,
    COMMITTED,
    FOLDED,
    LENGTH,
    SLOT,
    dot_exact,
    folded_to,
    gate,
    oldest_needed,
    unit,
)


@triton.jit
def acts_on(ancestors, row, token, entry, T: tl.constexpr):
    """Whether the entry of block token ``entry`` lies on the path to ``token``."""
    if T == 1:
        acts = entry == token
    else:
        near = tl.minimum(tl.maximum(entry, 0), T - 1)
        path = tl.load(ancestors + row * T + tl.minimum(token, T - 1))
        acts = (entry >= 0) & (entry < T) & (((path >> near.to(tl.int64)) & 1) != 0)
    return acts


@triton.jit
def _line_gates(
    ring_g, ring_w, g, w, rate, bias, w_low, w_high, head, line_live, entry, start, past, length,
    g_token, w_token, R: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Return log-decays and write strengths ``[lines, entries]``; 0 where there is no entry."""
    token = entry - past
    is_past = line_live[:, None] & (entry < past)[None, :]
    is_new = line_live[:, None] & ((entry >= past) & (token < length))[None, :]
    at = start + entry
    at = tl.where(at >= R, at - R, at)
    old_g = tl.load(ring_g + head[:, None] * R + at[None, :], is_past, 0.0)
    old_w = tl.load(ring_w + head[:, None] * R + at[None, :], is_past, 0.0)
    raw_g = tl.load(g + token[None, :] * g_token + head[:, None], is_new, 0.0).to(tl.float32)
    raw_w = raw_g
    if GATES != "dt":
        raw_w = tl.load(w + token[None, :] * w_token + head[:, None], is_new, 0.0).to(tl.float32)
    new_g, new_w = gate(raw_g, raw_w, rate[:, None], bias[:, None], w_low, w_high, GATES)
    log_decay = tl.where(is_past, old_g, tl.where(is_new, new_g, 0.0))
    return log_decay, tl.where(is_past, old_w, tl.where(is_new, new_w, 0.0))


@triton.jit
def scalar_kernel(
    plan, ancestors, q, k, v, g, w, rates, biases, skips,
    ring_k, ring_v, ring_g, ring_w, coef, scale, x_out,
    rows, q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, w_row, w_token,
    k_slot, v_slot, g_slot, w_slot, q_scale, w_low, w_high, eps,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, GATES: tl.constexpr, SKIP: tl.constexpr, NORM: tl.constexpr,
    DELTA: tl.constexpr, ASM: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Scalar decays: one program per row, key head and ``BL`` lines, a value head and token each."""
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    per: tl.constexpr = HV // H
    B16: tl.constexpr = ASM and ring_k.dtype.element_ty == tl.bfloat16
    Q16: tl.constexpr = B16 and q.dtype.element_ty == tl.bfloat16
    line = tl.program_id(2) * BL + tl.arange(0, BL)
    e, kk, vv = tl.arange(0, NE), tl.arange(0, BK), tl.arange(0, BV)
    j, t = line // T, line % T
    head, k_live = h * per + j, kk < K
    slot = tl.maximum(tl.load(plan + SLOT * rows + row), 0)
    base = tl.load(plan + BASE * rows + row)
    first = tl.load(plan + COMMITTED * rows + row)
    before = tl.load(plan + FOLDED * rows + row)
    length = tl.load(plan + LENGTH * rows + row).to(tl.int32)
    live = (j < per) & (t < length)
    both = live[:, None] & k_live[None, :]
    queries = tl.load(q + row * q_row + h * K + t[:, None] * q_token + kk[None, :], both, 0.0)
    value = tl.load(v + row * v_row + t[:, None] * v_token + head[:, None] * V + vv[None, :],
                    live[:, None] & (vv < V)[None, :], 0.0)  # fmt: skip
    rate, bias, skip = (tl.zeros((BL,), tl.float32),) * 3
    if GATES != "none":
        rate = tl.load(rates + head, j < per, 0.0).to(tl.float32)
        bias = tl.load(biases + head, j < per, 0.0).to(tl.float32)
    if SKIP:
        skip = tl.load(skips + head, j < per, 0.0).to(tl.float32)

    folded = tl.maximum(before, first)
    oldest = oldest_needed(base, folded, WINDOW, KEEP, TILES)
    past, start = (first - oldest).to(tl.int32), (oldest % R).to(tl.int32)
    token = e - past
    at = start + e
    at = tl.where(at >= R, at - R, at)
    ring_k += slot * k_slot + h * R * K
    ring_v += slot * v_slot
    ring_g += slot * g_slot
    ring_w += slot * w_slot
    g += row * g_row
    w += row * w_row
    is_new = (token >= 0) & (token < length)
    old = tl.load(ring_k + at[:, None] * K + kk[None, :],
                  (token < 0)[:, None] & k_live[None, :], 0.0)  # fmt: skip
    new = tl.load(k + row * k_row + h * K + token[:, None] * k_token + kk[None, :],
                  is_new[:, None] & k_live[None, :], 0.0)  # fmt: skip
    new = unit(new.to(tl.float32), eps, NORM).to(ring_k.dtype.element_ty)
    keys = tl.where((token < 0)[:, None], old, new)
    gs, ws = _line_gates(ring_g, ring_w, g, w, rate, bias, w_low, w_high, head, live, e,
                         start, past, length, g_token, w_token, R, GATES)  # fmt: skip
    if not DELTA:
        # the decay behind an entry is the sum of the newer gates, never a difference of sums
        later, _ = _line_gates(ring_g, ring_w, g, w, rate, bias, w_low, w_high, head, live, e + 1,
                               start, past, length, g_token, w_token, R, GATES)  # fmt: skip

    own = token[None, :] == t[:, None]
    tl.store(ring_g + head[:, None] * R + at[None, :], gs, live[:, None] & own)
    tl.store(ring_w + head[:, None] * R + at[None, :], ws, live[:, None] & own)
    here = (start + past + t) % R
    tl.store(ring_v + (head * R + here)[:, None] * V + vv[None, :],
             value.to(ring_v.dtype.element_ty), live[:, None] & (vv < V)[None, :])  # fmt: skip
    if tl.program_id(2) == 0:
        tl.store(ring_k + at[:, None] * K + kk[None, :], new, is_new[:, None] & k_live[None, :])

    factor = tl.full((BL,), 1.0, tl.float32) * q_scale
    if NORM:
        wide = queries.to(tl.float32)
        factor *= tl.rsqrt(tl.sum(wide * wide, 1) + eps)
    dots = tl.zeros((BL, NE), tl.float32)
    if Q16:
        dots = tl.dot(queries, tl.trans(keys), dots)
    else:
        dots = dot_exact(queries.to(tl.float32), tl.trans(keys), dots, B16)
    dots *= factor[:, None]
    path = (token < 0)[None, :] | acts_on(ancestors, row, t[:, None], token[None, :], T)
    gates, strength = tl.where(path, gs, 0.0), tl.where(path, ws, 0.0)
    out = (row * HV + head) * T + t
    if DELTA:
        if B16:
            gram = tl.dot(keys, tl.trans(keys))
        else:
            gram = tl.dot(keys.to(tl.float32), tl.trans(keys.to(tl.float32)),
                          input_precision="ieee")  # fmt: skip
        decay, c = tl.exp(gates), tl.zeros((BL, NE), tl.float32)
        for i in range(past + length):
            newest = past + length - 1 - i
            is_it = (e == newest)[None, :]
            c_i = tl.sum(tl.where(is_it, dots * strength, 0.0), 1)
            d_i = tl.sum(tl.where(is_it, decay, 0.0), 1)
            k_i = tl.sum(tl.where((e == newest)[:, None], gram, 0.0), 0)
            c = tl.where(is_it, c_i[:, None], c)
            dots = d_i[:, None] * (dots - c_i[:, None] * k_i[None, :])
    else:
        later_path = (token + 1 < 0)[None, :] | acts_on(
            ancestors, row, t[:, None], token[None, :] + 1, T
        )
        behind = tl.cumsum(tl.where(later_path, later, 0.0), 1, reverse=True)
        c = strength * tl.exp(behind) * dots
    tl.store(coef + out[:, None] * NE + e[None, :], tl.where(own, c + skip[:, None], c),
             live[:, None])  # fmt: skip
    for tile in tl.static_range(TILES):
        begin = (folded_to(tile, base, folded, WINDOW, KEEP, TILES) - oldest).to(tl.int32)
        passed = tl.where((e >= begin)[None, :], gates, 0.0)
        total = tl.exp(tl.sum(passed, 1)) * factor
        if DELTA:
            share = tl.where((e >= begin)[None, :], c, 0.0) * tl.exp(tl.cumsum(passed, 1))
            x = queries.to(tl.float32) * total[:, None]
            x = dot_exact(-share, keys, x, B16)
            at_x = ((row * HV + head) * TILES + tile) * T + t
            tl.store(x_out + at_x[:, None] * K + kk[None, :], x, both)
        else:
            tl.store(scale + out * TILES + tile, total, live)


@triton.jit
def channel_kernel(
    plan, ancestors, q, k, v, g, w, rates, biases, skips,
    ring_k, ring_v, ring_g, ring_w, coef, scale, x_out,
    rows, q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, w_row, w_token,
    k_slot, v_slot, g_slot, w_slot, q_scale, w_low, w_high, eps,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, GATES: tl.constexpr, SKIP: tl.constexpr, NORM: tl.constexpr,
    DELTA: tl.constexpr, ASM: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A decay per channel: one program per row and value head, entry by entry, newest first."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = head // (HV // H)
    kk, vv, t = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BL)
    k_live = kk < K
    slot = tl.maximum(tl.load(plan + SLOT * rows + row), 0)
    base = tl.load(plan + BASE * rows + row)
    first = tl.load(plan + COMMITTED * rows + row)
    before = tl.load(plan + FOLDED * rows + row)
    length = tl.load(plan + LENGTH * rows + row).to(tl.int32)
    live = t < length
    both = live[:, None] & k_live[None, :]
    x = tl.load(q + row * q_row + h * K + t[:, None] * q_token + kk[None, :], both, 0.0)
    x = unit(x.to(tl.float32), eps, NORM) * q_scale
    rate, skip = 0.0, 0.0
    bias = tl.zeros((BK,), tl.float32)
    if GATES != "none":
        rate = tl.load(rates + head).to(tl.float32)
        bias = tl.load(biases + head * K + kk, k_live, 0.0).to(tl.float32)
    if SKIP:
        skip = tl.load(skips + head).to(tl.float32)
    folded = tl.maximum(before, first)
    oldest = oldest_needed(base, folded, WINDOW, KEEP, TILES)
    past, start = (first - oldest).to(tl.int32), (oldest % R).to(tl.int32)
    ring_k += slot * k_slot + h * R * K
    ring_v += slot * v_slot + head * R * V
    ring_w += slot * w_slot + head * R
    ring_g += slot * g_slot + head * R * K
    coef += (row * HV + head) * T * NE
    at_x = x_out + (row * HV + head) * TILES * T * K + t[:, None] * K + kk[None, :]

    # the first of the past is on its way while the block is passed
    at = (start + past + R - 1) % R
    next_key = tl.load(ring_k + at * K + kk, k_live & (past > 0), 0.0)
    next_g = tl.load(ring_g + at * K + kk, k_live & (past > 0), 0.0)
    next_w = tl.load(ring_w + at, past > 0, 0.0)
    for i in range(length):
        n = length - 1 - i
        here = (start + past + n) % R
        key = tl.load(k + row * k_row + n * k_token + h * K + kk, k_live, 0.0).to(tl.float32)
        raw_g = tl.load(g + row * g_row + n * g_token + head * K + kk, k_live, 0.0)
        raw_w = 0.0
        if GATES != "dt":
            raw_w = tl.load(w + row * w_row + n * w_token + head).to(tl.float32)
        value = tl.load(v + row * v_row + n * v_token + head * V + vv, vv < V, 0.0)
        key = unit(key, eps, NORM).to(ring_k.dtype.element_ty)
        log_decay, strength = gate(raw_g.to(tl.float32), raw_w, rate, bias, w_low, w_high, GATES)
        # the value heads of a key head store the same key
        tl.store(ring_k + here * K + kk, key, k_live)
        tl.store(ring_g + here * K + kk, log_decay, k_live)
        tl.store(ring_w + here, strength)
        tl.store(ring_v + here * V + vv, value.to(ring_v.dtype.element_ty), vv < V)
        acts = live & acts_on(ancestors, row, t, n, T)
        c = tl.where(acts, strength * tl.sum(x * key.to(tl.float32)[None, :], 1), 0.0)
        tl.store(coef + t * NE + past + n, tl.where(t == n, c + skip, c), live)
        if DELTA:
            x -= c[:, None] * key.to(tl.float32)[None, :]
        x = tl.where(acts[:, None], x * tl.exp(log_decay)[None, :], x)
    for i in range(past):
        entry = past - 1 - i
        key, log_decay, strength = next_key.to(tl.float32), next_g, next_w
        at = tl.where(at > 0, at - 1, R - 1)
        next_key = tl.load(ring_k + at * K + kk, k_live & (entry > 0), 0.0)
        next_g = tl.load(ring_g + at * K + kk, k_live & (entry > 0), 0.0)
        next_w = tl.load(ring_w + at, entry > 0, 0.0)
        if TILES > 1:
            for tile in tl.static_range(TILES):
                stands = folded_to(tile, base, folded, WINDOW, KEEP, TILES) - oldest
                tl.store(at_x + tile * T * K, x, both & (stands == entry + 1))
        c = strength * tl.sum(x * key[None, :], 1)
        tl.store(coef + t * NE + entry, c, live)
        if DELTA:
            x -= c[:, None] * key[None, :]
        x *= tl.exp(log_decay)[None, :]
    for tile in tl.static_range(TILES):
        stands = folded_to(tile, base, folded, WINDOW, KEEP, TILES) - oldest
        tl.store(at_x + tile * T * K, x, both & (stands == 0))
