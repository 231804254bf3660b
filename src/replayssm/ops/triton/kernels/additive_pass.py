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

:mod:`.additive_system` has the coefficients, :mod:`.operand_tiles` the tiles that are read,
:mod:`.additive_fold` those that fold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from replayssm.ops.triton.kernels.additive_fold import fold_row, window_of
from replayssm.ops.triton.kernels.additive_system import (
    COEF,
    SWIZZLED_BYTES,
    decays_behind,
    digits_of,
    fold_weights,
    products_of,
    put_coefficients,
)
from replayssm.ops.triton.kernels.block_inputs import (
    ask_gates,
    ask_inputs,
    ask_keys,
    ask_raw,
    ask_scales,
    new_gates,
)
from replayssm.ops.triton.kernels.common import decay_of
from replayssm.ops.triton.kernels.hopper import in_ring, of_entry, place_of_row
from replayssm.ops.triton.kernels.one_pass_system import (
    BF16,
    BLOCK,
    ENTRIES,
    F32,
    LINE,
    SWIZZLED,
    TABLE,
)
from replayssm.ops.triton.kernels.operand_tiles import (
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


@gluon.jit
def first_head(part, H: gl.constexpr, HV: gl.constexpr, HEADS: gl.constexpr):
    """Return the first value head of a program of a row."""
    PER: gl.constexpr = HV // H
    PARTS: gl.constexpr = (PER + HEADS - 1) // HEADS
    return part // PARTS * PER + part % PARTS * HEADS


@gluon.jit
def own_heads(part, H: gl.constexpr, HV: gl.constexpr, HEADS: gl.constexpr):
    """Return how many heads a program has: the last of a key head may have less than ``HEADS``."""
    PER: gl.constexpr = HV // H
    if PER % HEADS == 0:
        return HEADS
    else:  # noqa: RET505 - what is not taken must not be compiled
        PARTS: gl.constexpr = (PER + HEADS - 1) // HEADS
        return gl.minimum(PER - part % PARTS * HEADS, HEADS)


@gluon.jit
def _serve(
    place, row, part, block, inputs, planes, rings, strides, slots, numbers,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, FORMAT: gl.constexpr, TREE: gl.constexpr, GATES: gl.constexpr,
    SKIP: gl.constexpr, HAS_Z: gl.constexpr, HEADS: gl.constexpr, BUFFERS: gl.constexpr,
    FOLDS: gl.constexpr,
):  # fmt: skip
    """Append and read ``HEADS`` heads of a row and key head; fold them, or fold nothing."""
    PARTS: gl.constexpr = (HV // H + HEADS - 1) // HEADS  # programs of a row and key head
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
    h, head0, own = part // PARTS, first_head(part, H, HV, HEADS), own_heads(part, H, HV, HEADS)
    start = (boundary % R).to(gl.int32)
    ring_k += slot * slots[4] + h * (R * K)
    ring_v += slot * slots[5] + head0 * (R * V)
    ring_g, ring_w = ring_g + slot * slots[6], ring_w + slot * slots[7]
    high += slot * slots[0] + head0 * (V * K)
    v += row * v_row + head0 * V
    if SCALED:
        low += slot * slots[1] + head0 * (V * K)

    # the ring's keys, scales and all gates
    keys = block[0]
    column, token = gl.arange(0, K, KEY_COLUMNS)[None, :], gl.arange(0, 8, KEY_ROWS)
    ask_keys(keys, ring_k, start, past, R)
    if SCALED:
        column_scales, row_scales = ask_scales(
            scales + slot * slots[2] + head0 * V, columns + slot * slots[3] + head0 * K,
            own, V, K, HEADS,
        )  # fmt: skip
    head = gl.arange(0, HEADS, gl.SliceLayout(1, heads))[:, None]
    is_own, head = head < own, head0 + head
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, heads))
    old, at_gate, is_new = ask_gates(ring_g, ring_w, head, is_own, entry, start, past, length, R)
    if T > 0:
        raw = (ask_raw(g, row, g_row, g_token, head0, own, T, HEADS),)
        if GATES == "none":
            raw = (raw[0], ask_raw(w, row, w_row, w_token, head0, own, T, HEADS))
    if SKIP:
        skip = gl.load(skips + head, is_own, 0.0).to(F32)
    commit_group()
    gl.thread_barrier()

    # the first tiles
    buffers = (
        gl.allocate_shared_memory(high.dtype.element_ty, [BUFFERS, ROWS, K],
                                  SWIZZLED_BYTES if SCALED else SWIZZLED),
        gl.allocate_shared_memory(BF16, [BUFFERS, ENTRIES, V], SWIZZLED),
    )  # fmt: skip
    given = (high, v, v_token, ring_v, start, past, length, own)
    source = source_of(high, v, v_token, ring_v, start, past, length, own, V, R)
    low_buffer = buffers[0].index(0)
    if FOLDS and SCALED:
        low_layout: gl.constexpr = SWIZZLED_BYTES if FORMAT == "q16" else SWIZZLED
        low_buffer = gl.allocate_shared_memory(low.dtype.element_ty, [ROWS, K], low_layout)
        ask_plane(low_buffer, low)
    for b in gl.static_range(min(BUFFERS, HEADS)):
        ask(b, buffers[0].index(b), buffers[1].index(b), source, V)
    gl.thread_barrier()

    # append gates and keys; values follow tile by tile
    wait_group(min(BUFFERS, HEADS))
    gates, strength = old[0].load(heads), old[1].load(heads)
    if T > 0:
        g_new, w_new, gates, strength = new_gates(raw, old, rates, biases, head, is_own,
                                                  is_new, w_low, w_high, GATES, heads)  # fmt: skip
        gl.store(ring_g + at_gate, g_new, is_new)
        gl.store(ring_w + at_gate, w_new, is_new)
        new_keys = keys.slice(BLOCK, 8, 0).load(KEYS)
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
        products, is_itself = products_of(keys, block[1], ancestors, row, T, MADE, TREE, lanes)
        factors = gl.allocate_shared_memory(F32, [HEADS, TOKENS], TABLE)
        factors.store(whole.broadcast_to((HEADS, TOKENS)))
        vectors, by_row = block[1], factors
        if SCALED:
            vectors, by_row = digits_of(block[2], column_scales, factors, MADE), row_scales
        coef = gl.allocate_shared_memory(BF16, [HEADS, N, ENTRIES], COEF)
        c = strength[:, :, None] * behind * (products * q_scale)[None, :, :]
        if SKIP:
            c += gl.where(is_itself[None, :, :], skip[:, :, None], 0.0)
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
        read_row(buffers, source, reading, place_of, T, V, R, FORMAT, HAS_Z, HEADS, BUFFERS)


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
    PARTS: gl.constexpr = (HV // H + HEADS - 1) // HEADS
    row, part = gl.program_id(0) // (H * PARTS), gl.program_id(0) % (H * PARTS)
    row = row.to(gl.int64)
    place = place_of_row(plan, rows, row, T, WINDOW, KEEP)
    block = ask_inputs(q, k, row, part // PARTS, q_row, q_token, k_row, k_token,
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
            head0, own = first_head(part, H, HV, HEADS), own_heads(part, H, HV, HEADS)
            write_nothing(out + row * out_row + head0 * V, out_token, own, T, HEADS)
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
    PARTS: gl.constexpr = (HV // H + HEADS - 1) // HEADS
    item, part = gl.program_id(0) // (H * PARTS), gl.program_id(0) % (H * PARTS)
    if item < gl.load(listed):
        row = gl.load(listed + 1 + item).to(gl.int64)
        place = place_of_row(plan, rows, row, T, WINDOW, KEEP)
        block = ask_inputs(q, k, row, part // PARTS, q_row, q_token, k_row, k_token,
                           T, K, FORMAT != "bf16")  # fmt: skip
        _serve(
            place, row, part, block, (ancestors, v, g, w, rates, biases, skips, z, out),
            (high, low, scales, columns), (ring_k, ring_v, ring_g, ring_w),
            (v_row, v_token, g_row, g_token, w_row, w_token, z_row, z_token, out_row, out_token),
            (high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot),
            (q_scale, w_low, w_high),
            T, H, HV, K, V, R, FORMAT, TREE, GATES, SKIP, HAS_Z, HEADS, BUFFERS, True,
        )  # fmt: skip
