"""A whole step in one launch: one token, additive writes, scalar decays, few rows.

At a handful of rows a launch costs as much as the state it reads. So every chunk of value rows
makes the weights of its head's entries itself, while its part of the state is on its way.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.kernels.common import (
    BASE,
    COMMITTED,
    FOLDED,
    FULL,
    LENGTH,
    SLOT,
    decay_of,
    folded_to,
    gate,
    oldest_needed,
    product,
    unit_key,
)
from replayssm.ops.triton.kernels.read import pack_digits, read_numbers, read_words
from replayssm.ops.triton.kernels.step import fold_part


@triton.jit
def _own_entry(
    k, v, g, w, rates, biases, head, r, r_live, here, w_low, w_high, eps,
    K: tl.constexpr, GATES: tl.constexpr, NORM: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Return the token's key as the ring keeps it, values, log-decay and write strength."""
    kk = tl.arange(0, BK)
    key = tl.load(k + kk, (kk < K) & here, 0.0)
    key = unit_key(key.to(tl.float32), eps, NORM).to(KIND)
    value = tl.load(v + r, r_live & here, 0.0)
    raw_w, rate, bias = 0.0, 0.0, 0.0
    if GATES != "dt":
        raw_w = tl.load(w + head, here, 0.0).to(tl.float32)
    if GATES != "none":
        rate = tl.load(rates + head).to(tl.float32)
        bias = tl.load(biases + head).to(tl.float32)
    raw_g = tl.load(g + head, here, 0.0).to(tl.float32)
    log_decay, write = gate(raw_g, raw_w, rate, bias, w_low, w_high, GATES)
    return key, value, log_decay, write


@triton.jit
def _entry_weights(
    query, key, log_decay, write, ring_k, ring_g, ring_w, start, past, begin,
    K: tl.constexpr, R: tl.constexpr, NE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the weights ``[NE]`` of a head's entries and the decay from entry ``begin`` on."""
    e, kk = tl.arange(0, NE), tl.arange(0, BK)
    at, next_at = start + e, start + e + 1
    at, next_at = tl.where(at >= R, at - R, at), tl.where(next_at >= R, next_at - R, next_at)
    keys = tl.load(ring_k + at[:, None] * K + kk[None, :],
                   (e < past)[:, None] & (kk < K)[None, :], 0.0)  # fmt: skip
    gates = tl.load(ring_g + at, e < past, 0.0)
    newer = tl.load(ring_g + next_at, e + 1 < past, 0.0)
    strength = tl.load(ring_w + at, e < past, 0.0)
    keys = tl.where((e == past)[:, None], key[None, :], keys)
    gates = tl.where(e == past, log_decay, gates)
    newer = tl.where(e + 1 == past, log_decay, newer)
    strength = tl.where(e == past, write, strength)
    z = tl.sum(keys.to(tl.float32) * query[None, :], 1)
    # the decay behind an entry is the product of the newer decays, never a quotient of products
    weights = strength * tl.cumprod(decay_of(newer), 0, reverse=True) * z
    return weights, product(tl.where(e >= begin, decay_of(gates), 1.0), 0)


@triton.jit
def _is_due(
    plan, rows, row, tile, WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Whether a row's tile folds in this step."""
    base = tl.load(plan + BASE * rows + row)
    old = tl.load(plan + FOLDED * rows + row)
    new = tl.maximum(old, tl.load(plan + COMMITTED * rows + row))
    is_due = (folded_to(tile, base, old, WINDOW, KEEP, TILES)
              < folded_to(tile, base, new, WINDOW, KEEP, TILES))  # fmt: skip
    return is_due & (tl.load(plan + SLOT * rows + row) >= 0)


@triton.jit
def _rows_of(
    high, low, scales, r, r_live, full,
    K: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the chunk as its read takes it, packed words or numbers, and its row scales."""
    row_scale = 1.0
    if SCALED:
        row_scale = tl.load(scales + r, r_live, 0.0)
    if PACKED:
        at = high.to(tl.pointer_type(tl.int32), bitcast=True) + r[:, None] * (K // 4)
        words = tl.arange(0, BK // 4)
        state = tl.load(at + words[None, :], r_live[:, None] & (words < K // 4)[None, :], 0)
    else:
        kk = tl.arange(0, BK)
        live = r_live[:, None] & (kk < K)[None, :]
        state = read_numbers(high, low, r[:, None] * K + kk[None, :], live, full, FORMAT, DEPTH)
    return state, row_scale


@triton.jit
def _products(
    state, q, query, columns,
    K: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, ASM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Return the products ``[rows]`` of a chunk with the query, without scales of rows."""
    if PACKED:
        top, bottom, unit_size = pack_digits(q, columns, K, BK // 4)
        y = read_words(state, top, bottom, ASM).to(tl.float32) * unit_size
    else:
        kk, vector = tl.arange(0, BK), query
        if SCALED:
            vector *= tl.load(columns + kk, kk < K, 0.0).to(tl.float32)
        y = tl.sum(state.to(tl.float32) * vector[None, :], 1)
    return y


@triton.jit
def _append(
    key, value, log_decay, write, ring_k, ring_v, ring_g, ring_w, at, r, r_live, is_first, has_key,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the token's entry at ring index ``at``, every part of it by one program."""
    kk = tl.arange(0, BK)
    tl.store(ring_v + at * V + r, value, r_live)
    tl.store(ring_g + at, log_decay, is_first)
    tl.store(ring_w + at, write, is_first)
    tl.store(ring_k + at * K + kk, key, (kk < K) & is_first & has_key)


@triton.jit
def whole_kernel(
    plan, out, q, k, v, g, w, rates, biases, skips, gate_z,
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w,
    rows, out_row, z_row, q_row, k_row, v_row, g_row, w_row,
    high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
    q_scale, w_low, w_high, eps,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr,
    FORMAT: tl.constexpr, DEPTH: tl.constexpr, GATES: tl.constexpr, SKIP: tl.constexpr,
    NORM: tl.constexpr, DIGITS: tl.constexpr, HAS_Z: tl.constexpr, ASM: tl.constexpr,
    WHICH: tl.constexpr, CHUNK: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Fold, read and append; the grid is rows x value heads, chunks of value rows.

    ``WHICH``: all chunks, those of tiles that fold in this step (``due``), or the ``rest``.
    """
    row, head = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    part = tl.program_id(1)
    per_tile: tl.constexpr = V // TILES
    chunks: tl.constexpr = (per_tile + CHUNK - 1) // CHUNK
    if WHICH != "all":
        is_due = _is_due(plan, rows, row, part // chunks, WINDOW, KEEP, TILES)
        if is_due != (WHICH == "due"):
            return
    if WHICH != "rest":
        fold_part(
            plan, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, rows,
            high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
            row, head, part, None,
            H, HV, K, V, R, WINDOW, KEEP, TILES, FORMAT, False, False, ASM, CHUNK, BF, BC, BK,
        )  # fmt: skip
    PACKED: tl.constexpr = DIGITS and DEPTH == "high"
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    tile, h = part // chunks, head // (HV // H)
    row0 = tile * per_tile + part % chunks * CHUNK
    r, kk, e = row0 + tl.arange(0, BC), tl.arange(0, BK), tl.arange(0, NE)
    r_live = (r < row0 + CHUNK) & (r < (tile + 1) * per_tile)
    slot = tl.load(plan + SLOT * rows + row)
    here = (slot >= 0) & (tl.load(plan + LENGTH * rows + row) > 0)
    slot = tl.maximum(slot, 0)
    base = tl.load(plan + BASE * rows + row)
    first = tl.load(plan + COMMITTED * rows + row)
    folded = tl.maximum(tl.load(plan + FOLDED * rows + row), first)
    full = tl.load(plan + FULL * rows + row) != 0
    # the state is asked for before anything waits for the ring
    high += slot * high_slot + head * V * K
    if SCALED:
        scales += slot * scales_slot + head * V
        columns += slot * columns_slot + (head * TILES + tile) * K
    if not PACKED and FORMAT != "f32" and FORMAT != "bf16":
        low += slot * low_slot + head * V * K
    state, row_scale = _rows_of(high, low, scales, r, r_live & here, full,
                                K, FORMAT, DEPTH, SCALED, PACKED, BK)  # fmt: skip
    oldest = oldest_needed(base, folded, WINDOW, KEEP, TILES)
    stands = folded_to(tile, base, folded, WINDOW, KEEP, TILES)
    past, start = (first - oldest).to(tl.int32), (oldest % R).to(tl.int32)
    begin = (stands - oldest).to(tl.int32)
    ring_k += slot * k_slot + h * R * K
    ring_v += slot * v_slot + head * R * V
    ring_g += slot * g_slot + head * R
    ring_w += slot * w_slot + head * R
    key, value, log_decay, write = _own_entry(
        k + row * k_row + h * K, v + row * v_row + head * V, g + row * g_row, w + row * w_row,
        rates, biases, head, r, r_live, here, w_low, w_high, eps,
        K, GATES, NORM, BK, ring_k.dtype.element_ty,
    )  # fmt: skip
    q += row * q_row + h * K
    query = tl.load(q + kk, (kk < K) & here, 0.0).to(tl.float32)
    factor = q_scale
    if NORM:
        factor *= tl.rsqrt(tl.sum(query * query, 0) + eps)
    weights, arrived = _entry_weights(query, key, log_decay, write, ring_k, ring_g, ring_w, start,
                                      tl.where(here, past, 0), begin, K, R, NE, BK)  # fmt: skip
    weights *= factor
    if SKIP:
        weights += tl.where(e == past, tl.load(skips + head).to(tl.float32), 0.0)
    at_e = start + e
    at_e = tl.where(at_e >= R, at_e - R, at_e)
    known = (e >= begin) & (e < past) & here
    values = tl.load(ring_v + at_e[:, None] * V + r[None, :],
                     known[:, None] & r_live[None, :], 0.0)  # fmt: skip
    kept = value.to(values.dtype)
    values = tl.where((e == past)[:, None], kept[None, :], values)
    y = _products(state, q, query, columns, K, SCALED, PACKED, ASM, BK)
    y = y * row_scale * (arrived * factor)
    y += tl.sum(tl.where(known | (e == past), weights, 0.0)[:, None] * values.to(tl.float32), 0)
    if HAS_Z:
        gated = tl.load(gate_z + row * z_row + head * V + r, r_live & here, 0.0).to(tl.float32)
        y *= gated / (1.0 + tl.exp(-gated))
    at_out = out + row * out_row + head * V + r
    tl.store(at_out, tl.where(here, y, 0.0).to(out.dtype.element_ty), r_live)
    own_at = start + past
    own_at = tl.where(own_at >= R, own_at - R, own_at)
    _append(key, kept, log_decay, write, ring_k, ring_v, ring_g, ring_w, own_at, r, r_live & here,
            here & (part == 0), head % (HV // H) == 0, K, V, BK)  # fmt: skip
