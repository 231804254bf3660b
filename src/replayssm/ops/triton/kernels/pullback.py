"""The pull-back: append a block's entries, then carry its queries back to the checkpoint.

What arrives per row, value head and token is one weight per entry, ``coef [B, HV, T, NE]`` (entry e
is the token at position ``oldest + e``), and one key-side vector per value tile. For additive
writes with scalar decays that vector is the query times one number, ``scale [B, HV, T, TILES]``;
otherwise it is ``x [B, HV, TILES, T, K]``. The skip connection D is a part of the weight of a
token's own entry.

A program carries ``BL`` lines, a value head and a token each, of one row and key head, and appends
their entries. A token's ancestors in its block are a bit mask, ``ancestors [B, T]`` int64. A pad
row has no entries and no tokens: every mask is empty. ``EARLY``: what follows may start before the
kernel ends, and waits by itself for what it needs.
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
    fetch_entries,
    folded_to,
    gate,
    oldest_needed,
    unit,
    unit_key,
)


@triton.jit
def on_path(ancestors, row, token, entry, T: tl.constexpr):
    """Whether block token ``entry`` is an ancestor of ``token`` or itself; the past always is."""
    if T == 1:
        acts = entry <= 0
    else:
        path = tl.load(ancestors + row * T + tl.minimum(token, T - 1))
        near = tl.minimum(tl.maximum(entry, 0), T - 1).to(tl.int64)
        acts = (entry < 0) | (((path >> near) & 1) != 0)
    return acts


@triton.jit
def entries_of(
    row, head, t, live, v, g, w, rates, biases,
    v_row, v_token, g_row, g_token, w_row, w_token, w_low, w_high,
    K: tl.constexpr, V: tl.constexpr, GATES: tl.constexpr, CHANNEL: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Return the values, log-decays and write strengths of a program's lines."""
    kk, vv = tl.arange(0, BK), tl.arange(0, BV)
    value = tl.load(v + row * v_row + t[:, None] * v_token + head[:, None] * V + vv[None, :],
                    live[:, None] & (vv < V)[None, :], 0.0)  # fmt: skip
    raw_w = tl.zeros_like(head).to(tl.float32)
    if GATES != "dt":
        raw_w = tl.load(w + row * w_row + t * w_token + head, live, 0.0).to(tl.float32)
    rate, bias = raw_w, raw_w
    if GATES != "none":
        rate = tl.load(rates + head, live, 0.0).to(tl.float32)
    if CHANNEL:
        k_live = live[:, None] & (kk < K)[None, :]
        at_g = head[:, None] * K + kk[None, :]
        if GATES != "none":
            bias = tl.load(biases + at_g, k_live, 0.0).to(tl.float32)
        else:
            bias = bias[:, None]
        raw_g = tl.load(g + row * g_row + t[:, None] * g_token + at_g, k_live, 0.0)
        log_decay, strength = gate(raw_g.to(tl.float32), raw_w[:, None], rate[:, None], bias,
                                   w_low, w_high, GATES)  # fmt: skip
        strength = tl.reshape(strength, head.shape)
    else:
        if GATES != "none":
            bias = tl.load(biases + head, live, 0.0).to(tl.float32)
        raw_g = tl.load(g + row * g_row + t * g_token + head, live, 0.0).to(tl.float32)
        log_decay, strength = gate(raw_g, raw_w, rate, bias, w_low, w_high, GATES)
    return value, log_decay, strength


@triton.jit
def append_gates(
    head, at, live, log_decay, strength, ring_g, ring_w,
    K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write log-decays and strengths of lines to ring indices ``at [lines]``."""
    if CHANNEL:
        kk = tl.arange(0, BK)
        k_live = live[:, None] & (kk < K)[None, :]
        tl.store(ring_g + (head * R + at)[:, None] * K + kk[None, :], log_decay, k_live)
    else:
        tl.store(ring_g + head * R + at, log_decay, live)
    tl.store(ring_w + head * R + at, strength, live)


@triton.jit
def append_values(
    head, at, live, value, ring_v, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Write values of lines to ring indices ``at [lines]``."""
    vv = tl.arange(0, BV)
    tl.store(ring_v + (head * R + at)[:, None] * V + vv[None, :],
             value.to(ring_v.dtype.element_ty), live[:, None] & (vv < V)[None, :])  # fmt: skip


@triton.jit
def keys_of(k, tokens, live, k_token, eps, NORM: tl.constexpr, KIND: tl.constexpr):
    """Return the keys of block ``tokens`` as the ring keeps them; ``k`` points at the channels."""
    key = tl.load(k + tokens * k_token, live, 0.0)
    return unit_key(key.to(tl.float32), eps, NORM).to(KIND)


@triton.jit
def chain_kernel(
    listed, plan, ancestors, q, k, v, g, w, rates, biases, skips,
    ring_k, ring_v, ring_g, ring_w, coef, scale, x_out,
    rows, q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, w_row, w_token,
    k_slot, v_slot, g_slot, w_slot, q_scale, w_low, w_high, eps,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, GATES: tl.constexpr, SKIP: tl.constexpr, NORM: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
    LISTED: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Any write and decay: entry by entry, newest first.

    The lines of a program are the value heads of a key head with all their tokens; with decays of
    channels they are the tokens of one value head. ``LISTED``: of the rows that are ``listed``,
    their number and then each, and not of all.
    """
    row = tl.program_id(0).to(tl.int64)
    per: tl.constexpr = 1 if CHANNEL else HV // H
    if EARLY:
        gdc_launch_dependents()
    if LISTED:
        if row >= tl.load(listed):
            return
        row = tl.load(listed + 1 + row).to(tl.int64)
    line = tl.arange(0, BL)
    kk, t = tl.arange(0, BK), line % T
    head, k_live = tl.program_id(1) * per + line // T, kk < K
    h = tl.program_id(1) * per // (HV // H)
    slot = tl.maximum(tl.load(plan + SLOT * rows + row), 0)
    base = tl.load(plan + BASE * rows + row)
    first = tl.load(plan + COMMITTED * rows + row)
    before = tl.load(plan + FOLDED * rows + row)
    length = tl.load(plan + LENGTH * rows + row).to(tl.int32)
    live = (line < per * T) & (t < length)
    both = live[:, None] & k_live[None, :]
    x = tl.load(q + row * q_row + h * K + t[:, None] * q_token + kk[None, :], both, 0.0)
    x = unit(x.to(tl.float32), eps, NORM) * q_scale
    folded = tl.maximum(before, first)
    oldest = oldest_needed(base, folded, WINDOW, KEEP, TILES)
    past, start = (first - oldest).to(tl.int32), (oldest % R).to(tl.int32)
    ring_k, ring_v = ring_k + slot * k_slot, ring_v + slot * v_slot
    ring_g, ring_w = ring_g + slot * g_slot, ring_w + slot * w_slot
    if CHANNEL:
        at_g = ring_g + tl.program_id(1) * R * K + kk[None, :]
        g_step: tl.constexpr = K
        g_live = k_live[None, :]
    else:
        at_g = ring_g + head * R
        g_step: tl.constexpr = 1
        g_live = live
    k, ring_k = k + row * k_row + h * K + kk, ring_k + h * R * K
    if ASM:
        fetch_entries(ring_k, start, past, R, K)
        if CHANNEL:
            fetch_entries(ring_g + tl.program_id(1) * R * K, start, past, R, K)
    own_at = (start + past + t) % R
    value, log_decay, strength = entries_of(
        row, head, t, live, v, g, w, rates, biases,
        v_row, v_token, g_row, g_token, w_row, w_token, w_low, w_high,
        K, V, GATES, CHANNEL, BK, BV,
    )  # fmt: skip
    if T == 1:
        own = keys_of(k, 0, k_live & (length > 0), 0, eps, NORM, ring_k.dtype.element_ty)
    else:
        own = keys_of(k[None, :], t[:, None], both, k_token, eps, NORM, ring_k.dtype.element_ty)
    skip = tl.zeros((BL,), tl.float32)
    if SKIP:
        skip = tl.load(skips + head, live, 0.0).to(tl.float32)
    # lines of a program are neighbours
    first_line = (row * HV + tl.program_id(1) * per) * T
    coef, x_out = coef + first_line * NE, x_out + first_line * TILES * K
    if T > 1:
        append_gates(head, own_at, live, log_decay, strength, ring_g, ring_w, K, R, CHANNEL, BK)
        tl.store(ring_k + own_at[:, None] * K + kk[None, :], own, both)
        # what follows reads what other lanes have just written
        tl.debug_barrier()
    # the one entry of a block of one token is passed from registers
    entries = past if T == 1 else past + length
    older = (start + entries + R - 1) % R
    next_key = tl.load(ring_k + older * K + kk, k_live & (entries > 0), 0.0)
    next_g = tl.load(at_g + older * g_step, g_live & (entries > 0), 0.0)
    next_w = tl.load(ring_w + head * R + older, live & (entries > 0), 0.0)
    # a decay of the whole vector is kept beside it
    decay = tl.zeros((BL,), tl.float32) + 1.0
    if T == 1:
        wide = own.to(tl.float32)[None, :]
        passed = strength * tl.sum(x * wide, 1)
        if DELTA:
            x -= passed[:, None] * wide
        if CHANNEL:
            x *= decay_of(log_decay)
        else:
            decay = decay_of(log_decay)
        tl.store(coef + line * NE + past, passed + skip, live)
        append_gates(head, own_at, live, log_decay, strength, ring_g, ring_w, K, R, CHANNEL, BK)
        tl.store(ring_k + (start + past) % R * K + kk, own, k_live & (length > 0))
    append_values(head, own_at, live, value, ring_v, V, R, BV)
    for i in range(entries):
        entry = entries - 1 - i
        key, gates, write = next_key.to(tl.float32), next_g, next_w
        # the older entry is on its way while this one is passed
        older = tl.where(older > 0, older - 1, R - 1)
        next_key = tl.load(ring_k + older * K + kk, k_live & (entry > 0), 0.0)
        next_g = tl.load(at_g + older * g_step, g_live & (entry > 0), 0.0)
        next_w = tl.load(ring_w + head * R + older, live & (entry > 0), 0.0)
        if TILES > 1:
            for tile in tl.static_range(TILES):
                stands = folded_to(tile, base, folded, WINDOW, KEEP, TILES) - oldest
                if stands == entry + 1:
                    at_x = x_out + ((line // T * TILES + tile) * T + t)[:, None] * K + kk[None, :]
                    tl.store(at_x, x * decay[:, None], both)
        passed = write * tl.sum(x * key[None, :], 1)
        if T > 1:
            acts = on_path(ancestors, row, t, entry - past, T)
            passed = tl.where(acts, passed, 0.0)
            gates = tl.where(acts[:, None] if CHANNEL else acts, gates, 0.0)
        weight = passed * decay
        if T > 1:
            weight += tl.where(entry - past == t, skip, 0.0)
        tl.store(coef + line * NE + entry, weight, live)
        if DELTA:
            x -= passed[:, None] * key[None, :]
        if CHANNEL:
            x *= decay_of(gates)
        else:
            decay *= decay_of(gates)
    x *= decay[:, None]
    for tile in tl.static_range(TILES):
        stands = folded_to(tile, base, folded, WINDOW, KEEP, TILES) - oldest
        at_x = x_out + ((line // T * TILES + tile) * T + t)[:, None] * K + kk[None, :]
        tl.store(at_x, x, both & (stands == 0))
