"""The standard step: rewrite the whole state for every token. A path of its own, and the baseline.

One program per row, value head and block of value rows; the block stays in registers over the
tokens. With ``targets`` every token's state is written to a slot of its own (a snapshot).
"""

import triton
import triton.language as tl

from replayssm.ops.triton.kernels.common import LENGTH, SLOT, decay_of, gate, unit


@triton.jit
def standard_kernel(
    plan, targets, out, state, q, k, v, g, w, rates, biases, skips, gate_z,
    rows, state_slot, out_row, out_token, z_row, z_token, q_row, q_token, k_row, k_token,
    v_row, v_token, g_row, g_token, w_row, w_token, q_scale, w_low, w_high, eps,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    GATES: tl.constexpr, SKIP: tl.constexpr, NORM: tl.constexpr, DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, HAS_Z: tl.constexpr, SNAPSHOTS: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write ``out`` and the state of one row, value head and block of ``BR`` value rows."""
    # neighbours take neighbouring rows of a state: memory is read in long runs
    blocks: tl.constexpr = (V + BR - 1) // BR
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    row, head = (pair // HV).to(tl.int64), pair % HV
    h = head // (HV // H)
    r, kk = block * BR + tl.arange(0, BR), tl.arange(0, BK)
    r_live, k_live = r < V, kk < K
    live = r_live[:, None] & k_live[None, :]
    slot = tl.load(plan + SLOT * rows + row)
    length = tl.load(plan + LENGTH * rows + row).to(tl.int32)
    at = head * V * K + r[:, None] * K + kk[None, :]
    held = tl.load(state + slot * state_slot + at, live & (slot >= 0), 0.0)
    rate, bias, skip = _parameters(rates, biases, skips, head, kk, k_live, K, GATES, CHANNEL, SKIP)
    q, k = q + row * q_row + h * K, k + row * k_row + h * K
    g, w = g + row * g_row + head * (K if CHANNEL else 1), w + row * w_row + head
    v, gate_z = v + row * v_row + head * V, gate_z + row * z_row + head * V
    out += row * out_row + head * V
    raw_q, raw_k, raw_v, raw_g, raw_w, raw_z = inputs(
        q, k, v, g, w, gate_z, r, kk, r_live, k_live, GATES, CHANNEL, HAS_Z
    )
    # a conversion waits for its load: the first token's inputs are under way before it
    s = held.to(tl.float32)
    for t in range(1 if T == 1 else length):
        query, key = unit(raw_q.to(tl.float32), eps, NORM) * q_scale, raw_k.to(tl.float32)
        key, value = unit(key, eps, NORM), raw_v.to(tl.float32)
        log_decay, strength = gate(raw_g.to(tl.float32), raw_w.to(tl.float32), rate, bias,
                                   w_low, w_high, GATES)  # fmt: skip
        z = raw_z.to(tl.float32)
        if T > 1:
            ahead = tl.minimum(t + 1, length - 1)
            raw_q, raw_k, raw_v, raw_g, raw_w, raw_z = inputs(
                q + ahead * q_token, k + ahead * k_token, v + ahead * v_token,
                g + ahead * g_token, w + ahead * w_token, gate_z + ahead * z_token,
                r, kk, r_live, k_live, GATES, CHANNEL, HAS_Z,
            )  # fmt: skip
        s = _written(s, key, value, log_decay, strength, DELTA, CHANNEL)
        y = tl.sum(s * query[None, :], 1) + skip * value
        _store(out + t * out_token + r, y, z, length, r_live, HAS_Z)
        rounded = s.to(state.dtype.element_ty)
        if SNAPSHOTS:
            target = tl.load(targets + row * T + t)
            tl.store(state + target * state_slot + at, rounded, live & (length > 0))
        # what is read again is what was stored
        s = rounded.to(tl.float32)
    if not SNAPSHOTS:
        kept = live & (slot >= 0) & (length > 0)
        tl.store(state + slot * state_slot + at, s.to(state.dtype.element_ty), kept)
    if T > 1:
        for t in range(length, T):
            tl.store(out + t * out_token + r, 0.0, r_live)


@triton.jit
def _parameters(
    rates, biases, skips, head, kk, k_live,
    K: tl.constexpr, GATES: tl.constexpr, CHANNEL: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Return a value head's decay rate, gate bias and skip; 0 where a family has none."""
    rate, bias, skip = 0.0, 0.0, 0.0
    if GATES != "none":
        rate = tl.load(rates + head).to(tl.float32)
        if CHANNEL:
            bias = tl.load(biases + head * K + kk, k_live, 0.0).to(tl.float32)
        else:
            bias = tl.load(biases + head).to(tl.float32)
    if SKIP:
        skip = tl.load(skips + head).to(tl.float32)
    return rate, bias, skip


@triton.jit
def _written(
    s, key, value, log_decay, strength, DELTA: tl.constexpr, CHANNEL: tl.constexpr
):  # fmt: skip
    """Return a block of the state ``[BR, K]`` after one token."""
    if CHANNEL:
        s *= decay_of(log_decay)[None, :]
    else:
        s *= decay_of(log_decay)
    u = value
    if DELTA:
        u -= tl.sum(s * key[None, :], 1)
    return s + (strength * u)[:, None] * key[None, :]


@triton.jit
def _store(at, y, z, length, live, HAS_Z: tl.constexpr):
    """Gate and write a token's outputs ``[BR]``; those of a pad row are 0."""
    if HAS_Z:
        y *= z / (1.0 + tl.exp(-z))
    y = tl.where(length > 0, y, 0.0)
    tl.store(at, y.to(at.dtype.element_ty), live)


@triton.jit
def inputs(
    q, k, v, g, w, gate_z, r, kk, r_live, k_live,
    GATES: tl.constexpr, CHANNEL: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Return one token's raw q, k, v, g, w and z; stand-ins where a family has none."""
    raw_q = tl.load(q + kk, k_live, 0.0)
    raw_k = tl.load(k + kk, k_live, 0.0)
    raw_v = tl.load(v + r, r_live, 0.0)
    raw_g = tl.load(g + kk, k_live, 0.0) if CHANNEL else tl.load(g)
    raw_w = tl.load(w) if GATES != "dt" else raw_g
    raw_z = tl.load(gate_z + r, r_live, 0.0) if HAS_Z else raw_v
    return raw_q, raw_k, raw_v, raw_g, raw_w, raw_z
