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
    s = tl.load(state + slot * state_slot + at, live & (slot >= 0), 0.0).to(tl.float32)
    rate, bias, skip = 0.0, 0.0, 0.0
    if GATES != "none":
        rate = tl.load(rates + head).to(tl.float32)
        if CHANNEL:
            bias = tl.load(biases + head * K + kk, k_live, 0.0).to(tl.float32)
        else:
            bias = tl.load(biases + head).to(tl.float32)
    if SKIP:
        skip = tl.load(skips + head).to(tl.float32)
    for t in range(length):
        query = tl.load(q + row * q_row + t * q_token + h * K + kk, k_live, 0.0).to(tl.float32)
        key = tl.load(k + row * k_row + t * k_token + h * K + kk, k_live, 0.0).to(tl.float32)
        value = tl.load(v + row * v_row + t * v_token + head * V + r, r_live, 0.0).to(tl.float32)
        raw_w = 0.0
        if GATES != "dt":
            raw_w = tl.load(w + row * w_row + t * w_token + head).to(tl.float32)
        if CHANNEL:
            raw_g = tl.load(g + row * g_row + t * g_token + head * K + kk, k_live, 0.0)
        else:
            raw_g = tl.load(g + row * g_row + t * g_token + head)
        log_decay, strength = gate(raw_g.to(tl.float32), raw_w, rate, bias, w_low, w_high, GATES)
        query, key = unit(query, eps, NORM) * q_scale, unit(key, eps, NORM)
        if CHANNEL:
            s *= decay_of(log_decay)[None, :]
        else:
            s *= decay_of(log_decay)
        u = value
        if DELTA:
            u -= tl.sum(s * key[None, :], 1)
        s += (strength * u)[:, None] * key[None, :]
        y = tl.sum(s * query[None, :], 1) + skip * value
        if HAS_Z:
            z = tl.load(gate_z + row * z_row + t * z_token + head * V + r, r_live, 0.0)
            y *= z.to(tl.float32) / (1.0 + tl.exp(-z.to(tl.float32)))
        at_y = out + row * out_row + t * out_token + head * V + r
        tl.store(at_y, y.to(out.dtype.element_ty), r_live)
        rounded = s.to(state.dtype.element_ty)
        if SNAPSHOTS:
            target = tl.load(targets + row * T + t)
            tl.store(state + target * state_slot + at, rounded, live)
        # what is read again is what was stored
        s = rounded.to(tl.float32)
    if not SNAPSHOTS:
        tl.store(state + slot * state_slot + at, s.to(state.dtype.element_ty), live & (slot >= 0))
    for t in range(length, T):
        tl.store(out + row * out_row + t * out_token + head * V + r, 0.0, r_live)
