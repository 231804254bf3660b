"""Pull back and read a block of Gated DeltaNet in one program, on Hopper's tensor cores.

For fixed-point states of which the high plane is read. Rows that fold in a step have little to pull
back, as a fold leaves few entries behind it; :mod:`.pullback` and :mod:`.step` serve them. The
others are served here, beside them.

Algebra. S is the checkpoint; entries j are those of the ring that no fold has reached and, behind
them, the block's tokens; D(i, t) is the product of the decays of entries i .. t. With b of
:mod:`.one_pass_system`,

    y_t = S x_t + sum_j b_jt D(j + 1, t) v_j,   x_t = D(0, t) (q_t - sum_j b_jt k_j).

So the state meets one vector a token where :mod:`.one_pass` has it meet all keys beside the
queries: S k is what only a fold needs. The plane's bytes meet the two signed digits of x times the
column scales as those of :mod:`.additive_pass` meet a query's, where they lie in shared memory. A
program takes ``HEADS`` value heads of one key head, 64 value rows a tile; buffers and the order in
which things are asked for are those of that module.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from replayssm.ops.triton.kernels.additive_system import (
    COEF,
    SWIZZLED_BYTES,
    decays_behind,
    products_of,
    put_coefficients,
    put_digits,
)
from replayssm.ops.triton.kernels.block_inputs import (
    ask_gates,
    ask_inputs,
    ask_keys,
    ask_raw,
    ask_scales,
    new_gates,
    unit_keys,
)
from replayssm.ops.triton.kernels.common import decay_of
from replayssm.ops.triton.kernels.hopper import WARPS, in_ring, of_entry, parts_of, place_of_row
from replayssm.ops.triton.kernels.one_pass_system import (
    BF16,
    BLOCK,
    ENTRIES,
    F32,
    LINE,
    PAIRS,
    SWIZZLED,
    TABLE,
    products_of_keys,
    substitute,
)
from replayssm.ops.triton.kernels.operand_tiles import (
    KEY_COLUMNS,
    KEY_ROWS,
    KEYS,
    OUT4,
    OUT8,
    ROWS,
    ask,
    read_row,
    source_of,
    write_nothing,
)

# vectors: a head a warp, tokens one after the other; the products that they are made of
VECTORS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0]))
BY_CHANNEL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8]))
TABLES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def _sum_of_keys(b, keys):
    """Return ``sum_j b_jt k_j`` ``[heads, tokens, K]``: 16 bits of b, all of k."""
    HEADS: gl.constexpr = b.shape[0]
    TOKENS: gl.constexpr = b.shape[2]
    K: gl.constexpr = keys.shape[1]
    LINES: gl.constexpr = HEADS * TOKENS
    M: gl.constexpr = max(16, LINES)  # lines beyond those of b are not looked at again
    top, rest = parts_of(gl.reshape(gl.permute(b, (0, 2, 1)), (LINES, ENTRIES)), 2)
    parts = (gl.allocate_shared_memory(BF16, [M, ENTRIES], TABLE),
             gl.allocate_shared_memory(BF16, [M, ENTRIES], TABLE))  # fmt: skip
    parts[0].slice(0, LINES, 0).store(top)
    parts[1].slice(0, LINES, 0).store(rest)
    left: gl.constexpr = gl.DotOperandLayout(0, BY_CHANNEL, 2)
    keys = keys.load(gl.DotOperandLayout(1, BY_CHANNEL, 2))
    total = mma_v2(parts[1].load(left), keys, gl.zeros([M, K], F32, BY_CHANNEL))
    total = mma_v2(parts[0].load(left), keys, total)
    table = gl.allocate_shared_memory(F32, [M, K], TABLE)
    table.store(total)
    return (
        table._reinterpret(F32, [M // TOKENS, TOKENS, K], TABLES).slice(0, HEADS, 0).load(VECTORS)
    )


@gluon.jit
def _pull_back(keys, block, gates, strength, column_scales, entry, ancestors, row, past, length,
               q_scale, eps, T: gl.constexpr, TREE: gl.constexpr, NORM: gl.constexpr,
               LANES: gl.constexpr):  # fmt: skip
    """Return, in shared memory, the coefficients of values, the digits of x and their units."""
    HEADS: gl.constexpr = gates.shape[0]
    TOKENS: gl.constexpr = 4 if T <= 4 else 8
    MADE: gl.constexpr = LANES.size_per_thread[2]
    query = block[2].slice(0, MADE, 0).load(gl.SliceLayout(0, VECTORS)).to(F32)
    factor = gl.full_like(gl.sum(query, 1), 1.0)
    if NORM:
        factor = gl.rsqrt(gl.sum(query * query, 1) + eps)
    factor *= q_scale
    with_queries, _ = products_of(keys, block[1], ancestors, row, T, MADE, TREE, LANES)
    with_queries *= gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(0, LANES)))[None, :]
    products = products_of_keys(keys, keys.load(gl.DotOperandLayout(0, PAIRS, 2)))
    b = substitute(products, with_queries, strength, past, length, ancestors, row,
                   T, MADE, TREE, LANES)  # fmt: skip
    decay = decay_of(gates)
    behind = decays_behind(decay, entry, ancestors, row, T, MADE, TREE, LANES)
    coef = gl.allocate_shared_memory(BF16, [HEADS, 2 * TOKENS, ENTRIES], COEF)
    put_coefficients(coef, b * behind)
    units = gl.allocate_shared_memory(F32, [HEADS, TOKENS], TABLE)
    whole = gl.max(of_entry(behind * decay[:, :, None], 0), 1)
    units.store(whole.broadcast_to((HEADS, TOKENS)))
    digits = gl.allocate_shared_memory(gl.int8, [HEADS, 2 * TOKENS, keys.shape[1]], SWIZZLED_BYTES)
    x = gl.expand_dims(query * factor[:, None], 0) - _sum_of_keys(b, keys)
    put_digits(digits, units, column_scales, x)
    return coef, digits, units._reinterpret(F32, [HEADS, TOKENS], LINE)


@gluon.jit
def _serve(
    place, row, part, block, inputs, planes, rings, strides, slots, q_scale, eps,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, TREE: gl.constexpr, GATES: gl.constexpr, NORM: gl.constexpr,
    HEADS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Append and read ``HEADS`` heads of a row and key head."""
    PARTS: gl.constexpr = HV // H // HEADS
    TILES: gl.constexpr = HEADS * (V // ROWS)
    TOKENS: gl.constexpr = 4 if T <= 4 else 8
    OUT: gl.constexpr = OUT4 if TOKENS == 4 else OUT8
    # of a single token nothing is made for others
    lanes: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1 if T == 1 else TOKENS], [1, 32, 1], [4, 1, 1], [2, 1, 0])  # fmt: skip
    heads: gl.constexpr = gl.SliceLayout(2, lanes)
    slot, boundary, past, _, length = place
    ancestors, v, g, w, rates, biases, out = inputs
    high, scales, columns = planes
    ring_k, ring_v, ring_g, ring_w = rings
    v_row, v_token, g_row, g_token, w_row, w_token, out_row, out_token = strides
    h, head0 = part // PARTS, part * HEADS
    start = (boundary % R).to(gl.int32)
    ring_k += slot * slots[3] + h * (R * K)
    ring_v += slot * slots[4] + head0 * (R * V)
    ring_g, ring_w = ring_g + slot * slots[5], ring_w + slot * slots[6]

    # the ring's keys, scales and all gates
    keys = block[0]
    column, token = gl.arange(0, K, KEY_COLUMNS)[None, :], gl.arange(0, 8, KEY_ROWS)
    ask_keys(keys, ring_k, start, past, R)
    column_scales, row_scales = ask_scales(
        scales + slot * slots[1] + head0 * V, columns + slot * slots[2] + head0 * K, HEADS, V, K,
        HEADS,
    )  # fmt: skip
    head = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, heads))[:, None]
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, heads))
    is_own = head >= 0
    old, at_gate, is_new = ask_gates(ring_g, ring_w, head, is_own, entry, start, past, length, R)
    raw = (ask_raw(g, row, g_row, g_token, head0, HEADS, T, HEADS),
           ask_raw(w, row, w_row, w_token, head0, HEADS, T, HEADS))  # fmt: skip
    commit_group()
    gl.thread_barrier()

    # the first tiles
    buffers = (gl.allocate_shared_memory(gl.int8, [BUFFERS, ROWS, K], SWIZZLED_BYTES),
               gl.allocate_shared_memory(BF16, [BUFFERS, ENTRIES, ROWS], SWIZZLED))  # fmt: skip
    source = source_of(high + slot * slots[0] + head0 * (V * K), v + row * v_row + head0 * V,
                       v_token, ring_v, start, past, length, TILES, V, R)  # fmt: skip
    for b in gl.static_range(BUFFERS):
        ask(b, buffers[0].index(b), buffers[1].index(b), source, V)
    gl.thread_barrier()

    # append keys and gates; values follow tile by tile
    wait_group(BUFFERS)
    g_new, w_new, gates, strength = new_gates(raw, old, rates, biases, head, is_own, is_new,
                                              0.0, 0.0, GATES, heads)  # fmt: skip
    gl.store(ring_g + at_gate, g_new, is_new)
    gl.store(ring_w + at_gate, w_new, is_new)
    is_token = (token < length)[:, None]
    new_keys = unit_keys(keys.slice(BLOCK, 8, 0).load(KEYS), is_token, eps, NORM)
    keys.slice(BLOCK, 8, 0).store(new_keys)
    gl.store(ring_k + in_ring(start + past + token, R)[:, None] * K + column, new_keys,
             is_token & (part % PARTS == 0))  # fmt: skip

    reading = _pull_back(keys, block, gates, strength, column_scales, entry, ancestors, row, past,
                         length, q_scale, eps, T, TREE, NORM, lanes)  # fmt: skip
    fence_async_shared()
    reading = (reading[0], reading[1], reading[2],
               row_scales._reinterpret(F32, [TILES, ROWS], LINE))  # fmt: skip
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))[None, :]
    out_at = out + row * out_row + head0 * V + tokens * out_token
    out_at += gl.arange(0, ROWS, gl.SliceLayout(1, OUT))[:, None]
    place_of = (out_at, out_at, tokens, length, ring_v, start + past)
    read_row(buffers, source, reading, place_of, T, V, R, "q24", False, TILES, BUFFERS)


@gluon.jit
def pull_and_read_kernel(
    plan, ancestors, q, k, v, g, w, rates, biases, out, high, scales, columns,
    ring_k, ring_v, ring_g, ring_w, rows, q_row, q_token, k_row, k_token, v_row, v_token,
    g_row, g_token, w_row, w_token, out_row, out_token, high_slot, scales_slot, columns_slot,
    k_slot, v_slot, g_slot, w_slot, q_scale, eps,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, WINDOW: gl.constexpr, KEEP: gl.constexpr, TREE: gl.constexpr,
    GATES: gl.constexpr, NORM: gl.constexpr, HEADS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Append and read the heads of rows that fold nothing; pad rows get zeros."""
    PARTS: gl.constexpr = HV // H // HEADS
    row, part = gl.program_id(0) // (H * PARTS), gl.program_id(0) % (H * PARTS)
    row = row.to(gl.int64)
    place = place_of_row(plan, rows, row, T, WINDOW, KEEP)
    block = ask_inputs(q, k, row, part // PARTS, q_row, q_token, k_row, k_token, T, K, True)
    if (place[0] >= 0) & (place[3] == 0):
        _serve(
            place, row, part, block, (ancestors, v, g, w, rates, biases, out),
            (high, scales, columns), (ring_k, ring_v, ring_g, ring_w),
            (v_row, v_token, g_row, g_token, w_row, w_token, out_row, out_token),
            (high_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot), q_scale, eps,
            T, H, HV, K, V, R, TREE, GATES, NORM, HEADS, BUFFERS,
        )  # fmt: skip
    else:
        commit_group()
        if place[0] < 0:
            TILES: gl.constexpr = HEADS * (V // ROWS)
            write_nothing(out + row * out_row + part * (HEADS * V), out_token, TILES, T, TILES)
        wait_group(0)
