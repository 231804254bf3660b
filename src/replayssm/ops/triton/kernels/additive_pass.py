"""One pass over the state for a block of Mamba-2, on Hopper's tensor cores.

The other kernels pull every query back through the ring before they read the state. Additive
writes leave little to pull back, so here a program makes that part itself while the states of its
heads are on their way, and streams them once.

Algebra. S is the checkpoint; entries j are those of the ring that no fold has reached and, behind
them, the block's tokens; D(i, t) is the product of the decays of entries i .. t, of a tree those of
t's ancestors. S meets nothing but the queries:

    y_t = D(0, t) S q_t + sum_j c_jt v_j,   c_jt = w_j D(j + 1, t) (k_j . q_t), + skip for j = t.

The fold of a due head is D S + sum_j u_j k_j^T, u_j = w_j D(j + 1, end) v_j: values take the
weights, so that keys, which all value heads of a group share, are exact operands. Nothing is
divided by a decay. Outputs of a due row are made of the checkpoint as it was, with all entries.

Two launches beside each other, as a fold takes twice the registers of a read and more shared
memory: ``additive_due_kernel`` takes the rows on the plan's list of due ones,
``additive_read_kernel`` the others. Both call :func:`_serve` with ``HEADS`` value heads of one key
head in a program of four warps, a head a tile.

    values   [B, 32, 64]  0 .. 23 the ring's entries, from the boundary on; 24 .. 31 the block's
    tiles    [B, 64, K]   of the plane that is read; a due head's low plane has its own buffer
    queries  [N, K]       two columns a token, the second 0; N = 8, or 16 for more than four tokens
    coef     [heads, N, 32], two bf16 parts of c side by side
    digits   [heads, N, K] of a scaled format: the two signed digits of c_n q_n side by side

A bf16 plane meets the queries, a plane of bytes the digits (exactly, in int32), values the
coefficients. A tile costs a warp 80 instructions, and the 800 to 1100 before the first one are
worth saving: nothing small is loaded to registers before the tiles are asked for (ptxas would wait
for it there), and decays and digits of several heads are made at once, and of no more tokens than
there are. Barriers without a reader keep loads in the order in which they are waited for.

:mod:`.additive_system` has the coefficients, :mod:`.additive_tiles` the tiles that are read,
:mod:`.additive_fold` those that fold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared as copy,
)
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from replayssm.ops.triton.kernels.additive_fold import SWIZZLED, fold_row, window_of
from replayssm.ops.triton.kernels.additive_system import (
    COEF,
    SWIZZLED_BYTES,
    decays_behind,
    digits_of,
    fold_weights,
    products_of,
    put_coefficients,
)
from replayssm.ops.triton.kernels.additive_tiles import (
    KEY_COLUMNS,
    KEY_ROWS,
    KEYS,
    OUT4,
    OUT8,
    ROWS,
    ask,
    ask_plane,
    read_row,
    source_of,
    write_nothing,
)
from replayssm.ops.triton.kernels.common import decay_of, gate
from replayssm.ops.triton.kernels.hopper import in_ring, of_entry, place_of_row
from replayssm.ops.triton.kernels.one_pass_system import BF16, BLOCK, ENTRIES, F32, LINE, TABLE


@gluon.jit
def _ask_inputs(q, k, row, h, q_row, q_token, k_row, k_token, T: gl.constexpr, K: gl.constexpr,
                SCALED: gl.constexpr):  # fmt: skip
    """Ask for a block's keys and queries, which need no plan; return where they will be.

    Columns of queries are as products take them and, for digits, plain. Of no tokens, nothing.
    """
    N: gl.constexpr = 8 if T <= 4 else 16
    block = ()
    if T > 0:
        q, k = q + row * q_row + h * K, k + row * k_row + h * K
        keys = gl.allocate_shared_memory(BF16, [8, K], SWIZZLED)
        queries = gl.allocate_shared_memory(BF16, [N, K], SWIZZLED)
        column, token = gl.arange(0, K, KEY_COLUMNS)[None, :], gl.arange(0, 8, KEY_ROWS)[:, None]
        copy(keys, k + token * k_token + column, token < T)
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
def _ask_raw(x, row, x_row, x_token, head0, T: gl.constexpr, HEADS: gl.constexpr):
    """Ask for what a block's gates are made of, ``[entries, heads]``: the last eight entries."""
    raw = gl.allocate_shared_memory(x.dtype.element_ty, [ENTRIES, HEADS], TABLE)
    by_head: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    token = gl.arange(0, 8, gl.SliceLayout(1, by_head))[:, None]
    head = head0 + gl.arange(0, HEADS, gl.SliceLayout(0, by_head))[None, :]
    copy(raw.slice(BLOCK, 8, 0), x + row * x_row + token * x_token + head, token < T)
    return raw


@gluon.jit
def _ask_scales(scales, columns, V: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr):
    """Ask for the column and row scales of a program's heads."""
    column_scales = gl.allocate_shared_memory(BF16, [HEADS, K], TABLE)
    row_scales = gl.allocate_shared_memory(F32, [HEADS, V], TABLE)
    head, column = gl.arange(0, HEADS, KEY_ROWS)[:, None], gl.arange(0, K, KEY_COLUMNS)[None, :]
    copy(column_scales, columns + (head * K + column))
    quads: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, quads))[:, None]
    copy(row_scales, scales + (head * V + gl.arange(0, V, gl.SliceLayout(0, quads))[None, :]))
    return column_scales, row_scales._reinterpret(F32, [HEADS, V], LINE)


@gluon.jit
def _new_gates(raw, old, rates, biases, head, is_new, w_low, w_high, GATES: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Return the log-decays and strengths of the block's tokens, and those of all entries."""
    raw_g = gl.where(is_new, raw[0].permute((1, 0)).load(LAYOUT).to(F32), 0.0)
    raw_w, rate, bias = raw_g, raw_g, raw_g
    if GATES == "none":
        raw_w = gl.where(is_new, raw[1].permute((1, 0)).load(LAYOUT).to(F32), 0.0)
    else:
        rate, bias = gl.load(rates + head).to(F32), gl.load(biases + head).to(F32)
    g_new, w_new = gate(raw_g, raw_w, rate, bias, w_low, w_high, GATES)
    gates = gl.where(is_new, g_new, old[0].load(LAYOUT))
    return g_new, w_new, gates, gl.where(is_new, w_new, old[1].load(LAYOUT))


@gluon.jit
def _serve(
    place, row, part, block, inputs, planes, rings, strides, slots, numbers,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, FORMAT: gl.constexpr, TREE: gl.constexpr, GATES: gl.constexpr,
    SKIP: gl.constexpr, HAS_Z: gl.constexpr, HEADS: gl.constexpr, BUFFERS: gl.constexpr,
    FOLDS: gl.constexpr,
):  # fmt: skip
    """Append and read ``HEADS`` heads of a row and key head; fold them, or fold nothing."""
    PARTS: gl.constexpr = HV // H // HEADS  # programs of a row and key head
    TOKENS: gl.constexpr = 4 if T <= 4 else 8
    N: gl.constexpr = 2 * TOKENS
    SCALED: gl.constexpr = FORMAT != "bf16"
    OUT: gl.constexpr = OUT4 if TOKENS == 4 else OUT8
    MADE: gl.constexpr = 1 if T <= 1 else TOKENS  # tokens that anything is made for
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, MADE], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    heads: gl.constexpr = gl.SliceLayout(2, lanes)

    slot, boundary, past, due, length = place
    ancestors, v, g, w, rates, biases, skips, z, out = inputs
    high, low, scales, columns = planes
    ring_k, ring_v, ring_g, ring_w = rings
    v_row, v_token, g_row, g_token, w_row, w_token, z_row, z_token, out_row, out_token = strides
    q_scale, w_low, w_high = numbers
    h, head0 = part // PARTS, part * HEADS
    start = (boundary % R).to(gl.int32)
    ring_k += slot * slots[4] + h * (R * K)
    ring_v += slot * slots[5] + head0 * (R * V)
    ring_g, ring_w = ring_g + slot * slots[6], ring_w + slot * slots[7]
    high += slot * slots[0] + head0 * (V * K)
    v += row * v_row + head0 * V
    if SCALED:
        low += slot * slots[1] + head0 * (V * K)

    # the ring's keys, scales and all gates
    column, token = gl.arange(0, K, KEY_COLUMNS)[None, :], gl.arange(0, 8, KEY_ROWS)
    key = gl.arange(0, ENTRIES, KEY_ROWS)
    keys = gl.allocate_shared_memory(BF16, [ENTRIES, K], SWIZZLED)
    copy(keys, ring_k + in_ring(start + key, R)[:, None] * K + column, (key < past)[:, None])
    if SCALED:
        column_scales, row_scales = _ask_scales(
            scales + slot * slots[2] + head0 * V, columns + slot * slots[3] + head0 * K,
            V, K, HEADS,
        )  # fmt: skip
    head = (head0 + gl.arange(0, HEADS, gl.SliceLayout(1, heads)))[:, None]
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, heads))
    at_gate = head * R + in_ring(
        start + gl.where(entry < BLOCK, entry, entry - BLOCK + past), R)[None, :]  # fmt: skip
    is_new = ((entry >= BLOCK) & (entry < BLOCK + length))[None, :]
    is_old = (entry < past)[None, :]
    old = (gl.allocate_shared_memory(F32, [HEADS, ENTRIES], TABLE),
           gl.allocate_shared_memory(F32, [HEADS, ENTRIES], TABLE))  # fmt: skip
    copy(old[0], ring_g + at_gate, is_old)
    copy(old[1], ring_w + at_gate, is_old)
    if T > 0:
        raw = (_ask_raw(g, row, g_row, g_token, head0, T, HEADS),)
        if GATES == "none":
            raw = (raw[0], _ask_raw(w, row, w_row, w_token, head0, T, HEADS))
    if SKIP:
        skip = gl.load(skips + head).to(F32)
    commit_group()
    gl.thread_barrier()

    # the first tiles
    buffers = (
        gl.allocate_shared_memory(high.dtype.element_ty, [BUFFERS, ROWS, K],
                                  SWIZZLED_BYTES if SCALED else SWIZZLED),
        gl.allocate_shared_memory(BF16, [BUFFERS, ENTRIES, V], SWIZZLED),
    )  # fmt: skip
    given = (high, v, v_token, ring_v, start, past, length)
    source = source_of(high, v, v_token, ring_v, start, past, length, V, R)
    low_buffer = buffers[0].index(0)
    if FOLDS and SCALED:
        low_layout: gl.constexpr = SWIZZLED_BYTES if FORMAT == "q16" else SWIZZLED
        low_buffer = gl.allocate_shared_memory(low.dtype.element_ty, [ROWS, K], low_layout)
        ask_plane(low_buffer, low)
    for b in gl.static_range(min(BUFFERS, HEADS)):
        ask(b, buffers[0].index(b), buffers[1].index(b), source)
    gl.thread_barrier()

    # append gates and keys; values follow tile by tile
    wait_group(min(BUFFERS, HEADS))
    gates, strength = old[0].load(heads), old[1].load(heads)
    if T > 0:
        g_new, w_new, gates, strength = _new_gates(raw, old, rates, biases, head, is_new,
                                                   w_low, w_high, GATES, heads)  # fmt: skip
        gl.store(ring_g + at_gate, g_new, is_new)
        gl.store(ring_w + at_gate, w_new, is_new)
        new_keys = block[0].load(KEYS)
        keys.slice(BLOCK, 8, 0).store(new_keys)
        gl.store(ring_k + in_ring(start + past + token, R)[:, None] * K + column, new_keys,
                 (token < length)[:, None] & (part % PARTS == 0))  # fmt: skip

    # what entries and states are multiplied with
    folding = ()
    if FOLDS:
        weights, wholes = fold_weights(gates, strength, entry, due)
        tables = ()
        if SCALED:
            tables = (gl.allocate_shared_memory(F32, [K], LINE),
                      gl.allocate_shared_memory(F32, [K], LINE),
                      column_scales._reinterpret(BF16, [HEADS, K], LINE), row_scales,
                      (scales, columns, slots[2], slots[3], slot.to(gl.int32), head0))  # fmt: skip
        folding = (due, window_of(keys, due), weights, wholes, low_buffer, low, tables)
    reading, place_of = (), ()
    if T > 0:
        decay = decay_of(gates)
        behind = decays_behind(decay, entry, ancestors, row, T, MADE, TREE, lanes)
        whole = gl.max(of_entry(behind * decay[:, :, None], 0), 1) * q_scale
        products, is_own = products_of(keys, block[1], ancestors, row, T, MADE, TREE, lanes)
        factors = gl.allocate_shared_memory(F32, [HEADS, TOKENS], TABLE)
        factors.store(whole.broadcast_to((HEADS, TOKENS)))
        vectors, by_row = block[1], factors
        if SCALED:
            vectors, by_row = digits_of(block[2], column_scales, factors, MADE), row_scales
        coef = gl.allocate_shared_memory(BF16, [HEADS, N, ENTRIES], COEF)
        c = strength[:, :, None] * behind * (products * q_scale)[None, :, :]
        if SKIP:
            c += gl.where(is_own[None, :, :], skip[:, :, None], 0.0)
        put_coefficients(coef, c)
        fence_async_shared()
        reading = (coef, vectors, factors._reinterpret(F32, [HEADS, TOKENS], LINE), by_row)

        out_rows = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))[:, None]
        tokens = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))[None, :]
        out_at = out + row * out_row + head0 * V + tokens * out_token + out_rows
        z_at = z + row * z_row + head0 * V + tokens * z_token + out_rows
        place_of = (out_at, z_at, tokens, length, ring_v, start + past)
    if FOLDS:
        fold_row(buffers, given, reading, place_of, folding, T, R, FORMAT, HAS_Z, HEADS, BUFFERS)
    else:
        read_row(buffers, source, reading, place_of, T, R, FORMAT, HAS_Z, HEADS, BUFFERS)


@gluon.jit
def additive_read_kernel(
    plan, ancestors, q, k, v, g, w, rates, biases, skips, z, out, high, low, scales, columns,
    ring_k, ring_v, ring_g, ring_w, rows, q_row, q_token, k_row, k_token, v_row, v_token,
    g_row, g_token, w_row, w_token, z_row, z_token, out_row, out_token, high_slot, low_slot,
    scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot, q_scale, w_low, w_high,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, WINDOW: gl.constexpr, KEEP: gl.constexpr, FORMAT: gl.constexpr,
    TREE: gl.constexpr, GATES: gl.constexpr, SKIP: gl.constexpr, HAS_Z: gl.constexpr,
    HEADS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Append and read the heads of rows that fold nothing; pad rows get zeros."""
    row, part = gl.program_id(0) // (HV // HEADS), gl.program_id(0) % (HV // HEADS)
    row = row.to(gl.int64)
    place = place_of_row(plan, rows, row, T, WINDOW, KEEP)
    block = _ask_inputs(q, k, row, part // (HV // H // HEADS), q_row, q_token, k_row, k_token,
                        T, K, FORMAT != "bf16")  # fmt: skip
    if (place[0] >= 0) & (place[3] == 0):
        _serve(
            place, row, part, block, (ancestors, v, g, w, rates, biases, skips, z, out),
            (high, low, scales, columns), (ring_k, ring_v, ring_g, ring_w),
            (v_row, v_token, g_row, g_token, w_row, w_token, z_row, z_token, out_row, out_token),
            (high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot),
            (q_scale, w_low, w_high),
            T, H, HV, K, V, R, FORMAT, TREE, GATES, SKIP, HAS_Z, HEADS, BUFFERS, False,
        )  # fmt: skip
    else:
        commit_group()
        if place[0] < 0:
            write_nothing(out + row * out_row + part * (HEADS * V), out_token, T, V, HEADS)
        wait_group(0)


@gluon.jit
def additive_due_kernel(
    listed, plan, ancestors, q, k, v, g, w, rates, biases, skips, z, out, high, low, scales,
    columns, ring_k, ring_v, ring_g, ring_w, rows, q_row, q_token, k_row, k_token, v_row, v_token,
    g_row, g_token, w_row, w_token, z_row, z_token, out_row, out_token, high_slot, low_slot,
    scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot, q_scale, w_low, w_high,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, WINDOW: gl.constexpr, KEEP: gl.constexpr, FORMAT: gl.constexpr,
    TREE: gl.constexpr, GATES: gl.constexpr, SKIP: gl.constexpr, HAS_Z: gl.constexpr,
    HEADS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Append, read and fold the heads of the rows that are ``listed``: their number, then each.

    A block of no tokens (T = 0) folds and reads nothing; its inputs and ``out`` are not touched.
    """
    item, part = gl.program_id(0) // (HV // HEADS), gl.program_id(0) % (HV // HEADS)
    if item < gl.load(listed):
        row = gl.load(listed + 1 + item).to(gl.int64)
        place = place_of_row(plan, rows, row, T, WINDOW, KEEP)
        block = _ask_inputs(q, k, row, part // (HV // H // HEADS), q_row, q_token, k_row, k_token,
                            T, K, FORMAT != "bf16")  # fmt: skip
        _serve(
            place, row, part, block, (ancestors, v, g, w, rates, biases, skips, z, out),
            (high, low, scales, columns), (ring_k, ring_v, ring_g, ring_w),
            (v_row, v_token, g_row, g_token, w_row, w_token, z_row, z_token, out_row, out_token),
            (high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot),
            (q_scale, w_low, w_high),
            T, H, HV, K, V, R, FORMAT, TREE, GATES, SKIP, HAS_Z, HEADS, BUFFERS, True,
        )  # fmt: skip
