"""One pass over the state for a block of Gated DeltaNet, on Hopper's tensor cores.

The other kernels pull every query back through the ring before they read the state. Here a program
streams the states of one row and key head once and needs the ring only for small matrices that it
makes while the states are on their way.

Algebra. S is the checkpoint; entries j are those of the ring that no fold has reached and, behind
them, the block's tokens; D(i, t) is the product of the decays of entries i .. t. A token t sees

    y_t = D(0, t) S q_t + sum_j (k_j . q_t) z_j,
    z_j = w_j (D(j + 1, t) v_j - D(0, t) S k_j - sum_{i < j} (k_j . k_i) z_i),

where z_j is what entry j wrote, decayed up to t. In z the triangular system holds no decay, so one
back substitution over the products of keys serves any gates:

    b_jt = w_j (k_j . q_t - sum_{s > j} b_st (k_s . k_j)),
    y_t = D(0, t) S q_t + sum_j b_jt (D(j + 1, t) v_j - D(0, t) S k_j).

Nothing is divided by a decay: a gate may be 0 or -1000. The fold of a due head is the same with the
unit vectors of its first 16 entries in the place of k . q: that gives z at the boundary, and the
state becomes D S + sum_j z_j k_j^T. So S meets one matrix, [K | Q], and all else is small. Outputs
of a due head are read from the checkpoint before its fold.

Data flow. A program has four warps and takes the 64 value rows x 128 of its tiles in turn.

    keys     [32, K]       0 .. 23 the ring's entries, from the boundary on; 24 .. 31 the block's
    queries  [8, K]        up to four tokens sit in every other column, see below
    tiles    [B, 64, K]    of S, in flight; a due tile goes back through its own buffer
    old, new [B, 16, 64]   values of entries 0 .. 15; of 16 .. 23 and the block's 8
    products [32, 32]      keys with keys, strictly lower triangle, and with queries
    read_*   [heads * 8, 32], fold_* [heads * 16, 16]   coefficients of values and of S k

Inputs are asked for in the order in which they are waited for: the block's own (they need no plan),
the plan, the ring's gates, its keys in one copy, then ``BUFFERS`` tiles with their values. Keys are
waited for first, while the tiles are on their way; the substitution is done, an entry a lane,
before the first tile is. Barriers without a reader keep loads in this order: ptxas would move them
behind the copies. A tile goes from shared memory to registers, and the next is asked for into its
buffer at once, or behind the fold where the head is due; the copy of a tile is the only thing that
its turn waits for. Block values are appended to the ring from shared memory.

Coefficients and products S k are fp32 cut into two bf16 parts, 16 bits, or into three for the fold
of an f32 state; that state is read as two parts, and its third joins where it is folded. For blocks
of up to four tokens both parts of a token's coefficients are neighbouring columns of one operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared as copy,
)
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from replayssm.ops.triton.kernels.block_inputs import unit_keys
from replayssm.ops.triton.kernels.common import FULL, gate
from replayssm.ops.triton.kernels.hopper import as_operands, in_ring, parts_of, place_of_row
from replayssm.ops.triton.kernels.one_pass_system import (
    BF16,
    BLOCK,
    ENTRIES,
    F32,
    LINE,
    SWIZZLED,
    coefficients,
    key_products,
)
from replayssm.ops.triton.kernels.one_pass_tiles import (
    LEFT,
    TILE,
    TILE_COLUMNS,
    add_two,
    ask,
    fold_bf16,
    fold_exactly,
    tile_as_read,
    times_keys_and_queries,
)
from replayssm.ops.triton.kernels.operand_tiles import (
    KEY_COLUMNS,
    KEY_ROWS,
    OUT4,
    ROWS,
    VALUE_COLUMNS,
    VALUE_ROWS,
    VALUES,
)

SWIZZLED_F32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def _shared_queries(raw, is_token, scale, eps, NORM: gl.constexpr):
    """Put a block's queries into shared memory as they are, and what each is multiplied with."""
    queries = gl.allocate_shared_memory(BF16, [8, raw.shape[1]], SWIZZLED)
    factors = gl.allocate_shared_memory(F32, [8], LINE)
    wide = gl.where(is_token, raw.to(F32), 0.0)
    queries.store(wide.to(BF16))
    factor = gl.full([8], 1.0, F32, KEY_ROWS)
    if NORM:
        factor = gl.rsqrt(gl.sum(wide * wide, 1) + eps)
    factors.store(factor * scale)
    return queries, factors


@gluon.jit
def _plane_buffers(planes, COUNT: gl.constexpr, K: gl.constexpr):
    """Allocate buffers of tiles, a plane each."""
    layout: gl.constexpr = SWIZZLED_F32 if planes[0].dtype.element_ty == F32 else SWIZZLED
    buffers = (gl.allocate_shared_memory(planes[0].dtype.element_ty, [COUNT, ROWS, K], layout),)
    if len(planes) == 2:
        kind: gl.constexpr = planes[1].dtype.element_ty
        buffers = (buffers[0], gl.allocate_shared_memory(kind, [COUNT, ROWS, K], SWIZZLED))
    return buffers


@gluon.jit
def _of_tile(planes, offset):
    """Return where a tile is in each plane."""
    targets = (planes[0] + offset,)
    if len(planes) == 2:
        targets = (targets[0], planes[1] + offset)
    return targets


@gluon.jit
def _raw_gates(g, w, rates, biases, head, token, given, g_token, w_token, GATES: gl.constexpr):
    """Ask for what the log-decays and write strengths of a block are made of."""
    g_raw = gl.load(g + token[None, :] * g_token + head, given, 0.0).to(F32)
    w_raw = gl.load(w + token[None, :] * w_token + head, given, 0.0).to(F32)
    rate, bias = w_raw, w_raw
    if GATES == "beta":
        rate, bias = gl.load(rates + head).to(F32), gl.load(biases + head).to(F32)
    return g_raw, w_raw, rate, bias


@gluon.jit
def _output(y, product, product_new, values, values_new, read, head, factors,
            TOKENS: gl.constexpr):  # fmt: skip
    """Return a tile's outputs ``[rows, tokens]`` from its products with queries and keys."""
    read_v, read_p, whole = read
    y = y * (whole.index(head).load(TILE_COLUMNS) * factors)[None, :]
    y = add_two(y, read_v, read_p, head, values, product, 0, 8)
    y = add_two(y, read_v, read_p, head, values_new, product_new, 16, 8)
    if TOKENS == 4:
        y = gl.convert_layout(gl.sum(gl.reshape(y, (ROWS, 4, 2)), 2), OUT4)
    return y


@gluon.jit
def _take_tiles(
    begin, end, buffers, source, keys, queries, coefs, planes, out, out_token, ring_v, next_at,
    length, due, full, T: gl.constexpr, V: gl.constexpr, R: gl.constexpr, DEPTH: gl.constexpr,
    FOLDS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Read tile after tile, append its values, and fold it where it is due."""
    TOKENS: gl.constexpr = 4 if T <= 4 else 8
    WIDE: gl.constexpr = len(planes) == 2 or planes[0].dtype.element_ty == F32
    K: gl.constexpr = keys.shape[1]
    read, fold, factors = coefs
    out_layout: gl.constexpr = TILE if TOKENS == 8 else OUT4
    out_rows = gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))[:, None]
    out_tokens = gl.arange(0, TOKENS, gl.SliceLayout(0, out_layout))[None, :]
    out_at = out + out_tokens * out_token + out_rows
    value, append = gl.arange(0, ROWS, VALUE_COLUMNS)[None, :], gl.arange(0, 8, VALUE_ROWS)
    append_at = in_ring(next_at + append, R)[:, None] * V + value
    for i in range(begin, end):
        each, first = i // (V // ROWS), i % (V // ROWS) * ROWS
        wait_group(BUFFERS - 1)
        gl.thread_barrier()
        at = (i - begin) % BUFFERS
        tile = tile_as_read(buffers[0], at, full, DEPTH)
        v_old = buffers[1].index(at).permute((1, 0)).load(LEFT)
        v_new = buffers[2].index(at).permute((1, 0)).load(LEFT)
        v_block = buffers[2].index(at).slice(8, 8, 0).load(VALUES)
        if not FOLDS or due == 0:
            ask(i + BUFFERS, end, at, buffers, source, V, R)
        p, p_new, y, tile = times_keys_and_queries(tile, keys, queries)
        p_parts = as_operands(parts_of(p, 2), LEFT)
        p_new_parts = as_operands(parts_of(p_new, 2), LEFT)
        y = _output(y, p_parts, p_new_parts, v_old, v_new, read, each, factors, TOKENS)
        gl.store(ring_v + (each * (R * V) + first) + append_at, v_block, (append < length)[:, None])
        y = gl.where(out_tokens < length, y, 0.0).to(BF16)
        gl.store(out_at + (each * V + first), y, out_tokens < T)
        if FOLDS:  # noqa: SIM102 - what does not fold must not be compiled
            if due > 0:
                if WIDE:
                    fold_exactly(buffers[0], at, keys, v_old, fold, each, due,
                                 _of_tile(planes, i * (ROWS * K)))  # fmt: skip
                else:
                    fold_bf16(tile, buffers[0][0].index(at), keys, v_old, p, fold, each, due,
                              planes[0] + i * (ROWS * K))  # fmt: skip
                ask(i + BUFFERS, end, at, buffers, source, V, R)


@gluon.jit
def _serve(
    raw, stands, block, stored, steps, row, h, part, past, due, length, full, q_scale, eps,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, TREE: gl.constexpr, GATES: gl.constexpr, NORM: gl.constexpr,
    DEPTH: gl.constexpr, FOLDS: gl.constexpr, BUFFERS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Append, read and fold a program's tiles, once it is known where the row stands."""
    PER: gl.constexpr = HV // H
    TOKENS: gl.constexpr = 4 if T <= 4 else 8
    EACH: gl.constexpr = 8 // TOKENS  # columns of a token
    planes, ring_k, ring_v, ring_g, ring_w = stored
    # an f32 state, or both planes of s32
    WIDE: gl.constexpr = len(planes) == 2 or planes[0].dtype.element_ty == F32
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, TOKENS], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    heads: gl.constexpr = gl.SliceLayout(2, lanes)
    k_raw, q_raw, raw_gates = raw
    start, begin, end = stands
    v, out, ancestors = block
    v_token, out_token = steps
    column, token = gl.arange(0, K, KEY_COLUMNS), gl.arange(0, 8, KEY_ROWS)
    query = token // EACH
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, heads))
    head = (h * PER + gl.arange(0, PER, gl.SliceLayout(1, heads)))[:, None]

    # the ring's gates and keys
    at_gate = head * R + in_ring(
        start + gl.where(entry < BLOCK, entry, entry - BLOCK + past), R)[None, :]  # fmt: skip
    is_new = ((entry >= BLOCK) & (entry < BLOCK + length))[None, :]
    is_old = (entry < past)[None, :]
    g_old, w_old = gl.load(ring_g + at_gate, is_old, 0.0), gl.load(ring_w + at_gate, is_old, 0.0)
    keys = gl.allocate_shared_memory(BF16, [ENTRIES, K], SWIZZLED)
    key = gl.arange(0, ENTRIES, KEY_ROWS)
    key_at = ring_k + in_ring(start + key, R)[:, None] * K + column[None, :]
    copy(keys, key_at, (key < past)[:, None])
    commit_group()
    gl.thread_barrier()

    # the first tiles
    buffers = (
        _plane_buffers(planes, BUFFERS, K),
        gl.allocate_shared_memory(BF16, [BUFFERS, 16, ROWS], SWIZZLED),
        gl.allocate_shared_memory(BF16, [BUFFERS, 16, ROWS], SWIZZLED),
    )
    low = gl.arange(0, 16, VALUE_ROWS)
    in_block = low - 8  # of entries 16 .. 31
    source = (
        planes, ring_v + in_ring(start + low, R)[:, None] * V, low < past,
        gl.where((in_block >= 0)[:, None], v + in_block[:, None] * v_token,
                 ring_v + in_ring(start + low + 16, R)[:, None] * V),
        gl.where(in_block >= 0, V, R * V),
        gl.where(in_block >= 0, in_block < length, low + 16 < past),
    )  # fmt: skip
    for i in gl.static_range(BUFFERS):
        ask(begin + i, end, i, buffers, source, V, R)
    gl.thread_barrier()

    # append keys and gates; values follow tile by tile
    is_token = (token < length)[:, None]
    k_new = unit_keys(k_raw, is_token, eps, NORM)
    gl.store(ring_k + in_ring(start + past + token, R)[:, None] * K + column[None, :], k_new,
             is_token & (part == 0))  # fmt: skip
    queries, factors = _shared_queries(q_raw, (query < length)[:, None], q_scale, eps, NORM)
    g_raw, w_raw, rate, bias = raw_gates
    g_new, w_new = gate(gl.where(is_new, g_raw, 0.0), gl.where(is_new, w_raw, 0.0), rate, bias,
                        0.0, 0.0, GATES)  # fmt: skip
    gl.store(ring_g + at_gate, g_new, is_new & (part == 0))
    gl.store(ring_w + at_gate, w_new, is_new & (part == 0))
    gates = gl.where(is_new, g_new, g_old)
    strength = gl.where(is_new, w_new, w_old)

    # coefficients
    wait_group(BUFFERS)
    gl.thread_barrier()
    keys.slice(BLOCK, 8, 0).store(k_new)
    products, with_queries = key_products(keys, queries, factors, TOKENS)
    FOLD_PARTS: gl.constexpr = (3 if WIDE else 2) if FOLDS else 0
    read, fold = coefficients(products, with_queries, strength, gates, past, length, due, ancestors,
                              row, T, TOKENS, TREE, FOLD_PARTS, lanes)  # fmt: skip
    factors = factors.load(TILE_COLUMNS)
    fence_async_shared()
    gl.thread_barrier()

    _take_tiles(
        begin, end, buffers, source, keys, queries, (read, fold, factors), planes, out, out_token,
        ring_v, in_ring(start + past, R), length, due, full,
        T, V, R, DEPTH, FOLDS, BUFFERS,
    )  # fmt: skip


@gluon.jit
def one_pass_kernel(
    plan, list_due, ancestors, q, k, v, g, w, rates, biases, out, high, low,
    ring_k, ring_v, ring_g, ring_w, rows, q_row, q_token, k_row, k_token, v_row, v_token,
    g_row, g_token, w_row, w_token, out_row, out_token,
    high_slot, low_slot, k_slot, v_slot, g_slot, w_slot, q_scale, eps,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, WINDOW: gl.constexpr, KEEP: gl.constexpr, TREE: gl.constexpr,
    GATES: gl.constexpr, NORM: gl.constexpr, DEPTH: gl.constexpr, BOTH: gl.constexpr,
    WHICH: gl.constexpr, BUFFERS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Fold, append and read one of ``PARTS`` of a row's value heads of a key head.

    ``WHICH``: rows that are served: ``all``, or those that fold (``due``: by the plan's list) or do
    not (``rest``). ``BOTH``: tiles are of both planes. A block of no tokens (T = 0) folds what is
    due and reads nothing; q, k, v, g, w and ``out`` are not touched. The first part appends what
    all value heads share; outputs of rows without a slot are 0.
    """
    PER: gl.constexpr = HV // H
    TOKENS: gl.constexpr = 4 if T <= 4 else 8
    EACH: gl.constexpr = 8 // TOKENS
    TILES: gl.constexpr = PER * (V // ROWS) // PARTS
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, TOKENS], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    heads: gl.constexpr = gl.SliceLayout(2, lanes)
    part, pair = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS
    row, h = (pair // H).to(gl.int64), pair % H
    if WHICH == "due":
        if row >= gl.load(list_due):
            return
        row = gl.load(list_due + 1 + row).to(gl.int64)
    q, k = q + row * q_row + h * K, k + row * k_row + h * K
    v, out = v + row * v_row + h * (PER * V), out + row * out_row + h * (PER * V)

    # the block's own inputs
    column, token = gl.arange(0, K, KEY_COLUMNS), gl.arange(0, 8, KEY_ROWS)
    query = token // EACH
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, heads))
    head = (h * PER + gl.arange(0, PER, gl.SliceLayout(1, heads)))[:, None]
    given = ((entry >= BLOCK) & (entry < BLOCK + T))[None, :]
    k_raw = gl.load(k + token[:, None] * k_token + column[None, :], (token < T)[:, None], 0.0)
    q_raw = gl.load(q + query[:, None] * q_token + column[None, :],
                    ((query < T) & (token % EACH == 0))[:, None], 0.0)  # fmt: skip
    raw_gates = _raw_gates(g + row * g_row, w + row * w_row, rates, biases, head, entry - BLOCK,
                           given, g_token, w_token, GATES)  # fmt: skip
    gl.thread_barrier()

    # the plan: where the row stands, and how many entries are due
    slot, boundary, past, due, length = place_of_row(plan, rows, row, T, WINDOW, KEEP)
    # all of it at once: the rest would be asked for once it is known that there is a slot
    gl.thread_barrier()
    is_served = slot >= 0
    if WHICH == "rest":
        is_served = is_served & (due == 0)
    if is_served:
        full = gl.load(plan + FULL * rows + row) != 0
        state = h * (PER * V * K)
        planes = (high + (slot * high_slot + state),)
        if BOTH:
            planes = (planes[0], low + (slot * low_slot + state))
        stored = (planes, ring_k + slot * k_slot + h * (R * K),
                  ring_v + slot * v_slot + h * (PER * R * V),
                  ring_g + slot * g_slot, ring_w + slot * w_slot)  # fmt: skip
        # a number of tiles that the compiler knew would have it make all addresses of the loop
        # before anything is asked for
        end = gl.where(past >= 0, part * TILES + TILES, 0)
        _serve(
            (k_raw, q_raw, raw_gates), ((boundary % R).to(gl.int32), part * TILES, end),
            (v, out, ancestors), stored, (v_token, out_token), row, h, part, past, due, length,
            full, q_scale, eps, T, H, HV, K, V, R, TREE, GATES, NORM, DEPTH, WHICH != "rest",
            BUFFERS, PARTS,
        )  # fmt: skip
    elif slot < 0:
        value = gl.arange(0, ROWS, VALUE_COLUMNS)
        for t in gl.static_range(T):
            for i in gl.static_range(TILES):
                at = out + t * out_token + (part * TILES + i) * ROWS + value
                gl.store(at, gl.full_like(value, 0.0, dtype=BF16))
