"""What a program on Hopper asks for before its first tile, and the gates made of it.

Copies go to shared memory, as what is loaded into registers would be waited for before a tile is
asked for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared as copy,
)

from replayssm.ops.triton.kernels.common import gate
from replayssm.ops.triton.kernels.hopper import in_ring
from replayssm.ops.triton.kernels.one_pass_system import (
    BF16,
    BLOCK,
    ENTRIES,
    F32,
    LINE,
    SWIZZLED,
    TABLE,
)
from replayssm.ops.triton.kernels.operand_tiles import KEY_COLUMNS, KEY_ROWS


@gluon.jit
def ask_inputs(q, k, row, h, q_row, q_token, k_row, k_token, T: gl.constexpr, K: gl.constexpr,
               SCALED: gl.constexpr):  # fmt: skip
    """Ask for a block's keys and queries, which need no plan; return where they will be.

    Keys are behind those of the ring, ``[entries, K]``. Columns of queries are as products take
    them and, for digits, plain. Of no tokens, keys alone.
    """
    N: gl.constexpr = 8 if T <= 4 else 16
    keys = gl.allocate_shared_memory(BF16, [ENTRIES, K], SWIZZLED)
    block = (keys,)
    if T > 0:
        q, k = q + row * q_row + h * K, k + row * k_row + h * K
        queries = gl.allocate_shared_memory(BF16, [N, K], SWIZZLED)
        column, token = gl.arange(0, K, KEY_COLUMNS)[None, :], gl.arange(0, 8, KEY_ROWS)[:, None]
        copy(keys.slice(BLOCK, 8, 0), k + token * k_token + column, token < T)
        pair = gl.arange(0, N, KEY_ROWS)[:, None]
        copy(queries, q + pair // 2 * q_token + column, (pair // 2 < T) & (pair % 2 == 0))
        plain = queries
        if SCALED:
            plain = gl.allocate_shared_memory(BF16, [N // 2, K], TABLE)
            token = gl.arange(0, N // 2, KEY_ROWS)[:, None]
            copy(plain, q + token * q_token + column, token < T)
        block = (keys, queries, plain)
    return block


@gluon.jit
def ask_keys(keys, ring_k, start, past, R: gl.constexpr):
    """Ask for the ring's keys; 0 stands where no entry is live."""
    K: gl.constexpr = keys.shape[1]
    column, token = gl.arange(0, K, KEY_COLUMNS)[None, :], gl.arange(0, 8, KEY_ROWS)
    for first in gl.static_range(0, BLOCK, 8):
        key = first + token
        key_at = ring_k + in_ring(start + key, R)[:, None] * K + column
        copy(keys.slice(first, 8, 0), key_at, (key < past)[:, None])


@gluon.jit
def ask_gates(ring_g, ring_w, head, is_own, entry, start, past, length, R: gl.constexpr):
    """Ask for the ring's log-decays and strengths ``[heads, entries]``.

    Return where they will be; where all entries' are in the ring, and which are the block's.
    """
    HEADS: gl.constexpr = head.shape[0]
    at_gate = head * R + in_ring(
        start + gl.where(entry < BLOCK, entry, entry - BLOCK + past), R)[None, :]  # fmt: skip
    is_new = ((entry >= BLOCK) & (entry < BLOCK + length))[None, :] & is_own
    is_old = (entry < past)[None, :] & is_own
    old = (gl.allocate_shared_memory(F32, [HEADS, ENTRIES], TABLE),
           gl.allocate_shared_memory(F32, [HEADS, ENTRIES], TABLE))  # fmt: skip
    copy(old[0], ring_g + at_gate, is_old)
    copy(old[1], ring_w + at_gate, is_old)
    return old, at_gate, is_new


@gluon.jit
def ask_raw(x, row, x_row, x_token, head0, own, T: gl.constexpr, HEADS: gl.constexpr):
    """Ask for what a block's gates are made of, ``[entries, heads]``: the last eight entries."""
    raw = gl.allocate_shared_memory(x.dtype.element_ty, [ENTRIES, HEADS], TABLE)
    by_head: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    token = gl.arange(0, 8, gl.SliceLayout(1, by_head))[:, None]
    head = gl.arange(0, HEADS, gl.SliceLayout(0, by_head))[None, :]
    at = x + row * x_row + token * x_token + (head0 + head)
    copy(raw.slice(BLOCK, 8, 0), at, (token < T) & (head < own))
    return raw


@gluon.jit
def ask_scales(scales, columns, own, V: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr):
    """Ask for the column and row scales of a program's heads."""
    column_scales = gl.allocate_shared_memory(BF16, [HEADS, K], TABLE)
    row_scales = gl.allocate_shared_memory(F32, [HEADS, V], TABLE)
    head, column = gl.arange(0, HEADS, KEY_ROWS)[:, None], gl.arange(0, K, KEY_COLUMNS)[None, :]
    copy(column_scales, columns + (head * K + column), head < own)
    quads: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, quads))[:, None]
    row = gl.arange(0, V, gl.SliceLayout(0, quads))[None, :]
    copy(row_scales, scales + (head * V + row), head < own)
    return column_scales, row_scales._reinterpret(F32, [HEADS, V], LINE)


@gluon.jit
def new_gates(raw, old, rates, biases, head, is_own, is_new, w_low, w_high,
              GATES: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Return the log-decays and strengths of the block's tokens, and those of all entries."""
    raw_g = gl.where(is_new, raw[0].permute((1, 0)).load(LAYOUT).to(F32), 0.0)
    raw_w, rate, bias = raw_g, raw_g, raw_g
    if GATES != "dt":
        raw_w = gl.where(is_new, raw[1].permute((1, 0)).load(LAYOUT).to(F32), 0.0)
    if GATES != "none":
        rate = gl.load(rates + head, is_own, 0.0).to(F32)
        bias = gl.load(biases + head, is_own, 0.0).to(F32)
    g_new, w_new = gate(raw_g, raw_w, rate, bias, w_low, w_high, GATES)
    gates = gl.where(is_new, g_new, old[0].load(LAYOUT))
    return g_new, w_new, gates, gl.where(is_new, w_new, old[1].load(LAYOUT))


@gluon.jit
def unit_keys(raw, is_token, eps, NORM: gl.constexpr):
    """Return a block's keys as the ring keeps them; see :func:`.common.unit_key`."""
    keys = gl.where(is_token, raw.to(F32), 0.0)
    if NORM:
        wide = keys.to(gl.float64)
        keys = keys * gl.rsqrt(gl.sum(wide * wide, 1).to(F32) + eps)[:, None]
    return keys.to(BF16)
