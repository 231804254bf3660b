"""One pass over the state for a block of Gated DeltaNet: a Gluon kernel for Hopper, not shipped.

The shipped step pulls every query back through the ring before it reads the state. Here a program
streams the states of one row and key head once and needs the ring only for small matrices that it
makes while the states are on their way. ``one_pass_gdn.py`` checks and times it.

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
state becomes D S + sum_j z_j k_j^T. So S meets one matrix, [K | Q], and all else is small.

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

# Triton reads tuple sums, not starred tuples
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared as copy,
)
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WARPS = 4
WINDOW = gl.constexpr(16)
ENTRIES = gl.constexpr(32)
BLOCK = gl.constexpr(24)  # the entry that the block's first token is
ROWS = gl.constexpr(64)  # value rows of a tile
HALF = gl.constexpr(64)  # key columns that a fold holds in registers at a time
BF16, F32 = gl.constexpr(gl.bfloat16), gl.constexpr(gl.float32)

# registers: 16-byte pieces of rows of K and of tiles of values, products, operands of products
KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0]))
KEY_ROWS, KEY_COLUMNS = (gl.constexpr(gl.SliceLayout(i, KEYS)) for i in (1, 0))
VALUES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))
VALUE_ROWS, VALUE_COLUMNS = (gl.constexpr(gl.SliceLayout(i, VALUES)) for i in (1, 0))
TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]))
TILE_ROWS, TILE_COLUMNS = (gl.constexpr(gl.SliceLayout(i, TILE)) for i in (1, 0))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(i, TILE, 2)) for i in (0, 1))
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, WARPS // 2], [16, 8]))
BY_KEYS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16]))
BY_QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16]))
FOUR_TOKENS = gl.constexpr(gl.DistributedLinearLayout(
    [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
))  # fmt: skip
# shared memory
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_F32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
READ = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
FOLD = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def of_lane(x, lane):
    """Return what another lane of the warp holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, lane], gl.float32, True, 1
    )


@gluon.jit
def of_lane_above(x, distance):
    """Return what the lane ``distance`` further up holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.down.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, distance], gl.float32, True, 1
    )


@gluon.jit
def product_from(x, lane):
    """Return the product over this lane and all above it."""
    for step in gl.static_range(5):
        above = of_lane_above(x, gl.full_like(x, 1 << step, dtype=gl.int32))
        x = gl.where(lane + (1 << step) < 32, x * above, x)
    return x


@gluon.jit
def decay_of(gates):
    """Return exp(gates) as the shipped kernels do, bit for bit."""
    x = gl.where(gates < -200.0, -200.0, gates)
    scaled = x * 1.4426950408889634
    lost = gl.fma(x, gl.full_like(x, 1.4426950408889634), -scaled) + x * 1.9259629911266175e-8
    return gl.exp2(scaled) * (1.0 + lost * 0.6931471805599453)


@gluon.jit
def softplus(x):
    """Return log(1 + exp(x)) as the shipped kernels do, bit for bit."""
    grown = gl.exp(gl.minimum(x, 20.0))
    near = gl.where(grown < 1e-3, grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0))), 0.0)
    return gl.where(x > 20.0, x, gl.where(grown < 1e-3, near, gl.log(1.0 + grown)))


@gluon.jit
def folded_to(base, folded):
    """Return the position up to which a head is folded."""
    return gl.maximum(base, gl.where(folded >= 0, folded // WINDOW * WINDOW, 0))


@gluon.jit
def place(plan, rows, row):
    """Return a row's slot, boundary, entries that no fold has reached, how many are due, tokens."""
    slot, base = gl.load(plan + row), gl.load(plan + rows + row)
    folded, committed = gl.load(plan + 2 * rows + row), gl.load(plan + 3 * rows + row)
    length = gl.load(plan + 4 * rows + row).to(gl.int32)
    boundary = folded_to(base, folded)
    due = (folded_to(base, gl.maximum(folded, committed)) - boundary).to(gl.int32)
    return slot, boundary, (committed - boundary).to(gl.int32), due, length


@gluon.jit
def in_ring(position, R: gl.constexpr):
    """Return the index of a position less than two rings from the first."""
    return gl.where(position >= R, position - R, position)


@gluon.jit
def leading(x):
    """Cut fp32 into its leading bf16 and the exact rest."""
    bits = x.to(gl.int32, bitcast=True)
    top = (bits >> 16).to(gl.int16).to(BF16, bitcast=True)
    return top, x - (bits & -65536).to(F32, bitcast=True)


@gluon.jit
def parts_of(x, COUNT: gl.constexpr):
    """Cut fp32 into two bf16, 16 bits of it, or into three, all of it."""
    top, rest = leading(x)
    parts = (top,)
    if COUNT == 3:
        middle, rest = leading(rest)
        parts = (top, middle)
    return parts + (rest.to(BF16),)


@gluon.jit
def left(parts):
    """Make parts the left operands of products."""
    moved = (gl.convert_layout(parts[0], LEFT),)
    for i in gl.static_range(1, len(parts)):
        moved = moved + (gl.convert_layout(parts[i], LEFT),)
    return moved


@gluon.jit
def halves(x, N: gl.constexpr):
    """Split ``[64, 2 N]`` down the middle."""
    return gl.split(gl.permute(gl.reshape(x, (ROWS, 2, N)), (0, 2, 1)))


@gluon.jit
def allocate_parts(COUNT: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Allocate shared memory for coefficients ``[heads * N, entries]``, part by part."""
    parts = (gl.allocate_shared_memory(BF16, SHAPE, LAYOUT),)
    for _ in gl.static_range(COUNT - 1):
        parts = parts + (gl.allocate_shared_memory(BF16, SHAPE, LAYOUT),)
    return parts


@gluon.jit
def put(target, x):
    """Store ``[heads, entries, N]`` as rows of ``[heads * N, entries]``."""
    target.store(gl.reshape(gl.permute(x, (0, 2, 1)), (x.shape[0] * x.shape[2], x.shape[1])))


@gluon.jit
def put_parts(targets, x):
    """Store coefficients; in a single target both parts of four tokens are side by side."""
    parts = parts_of(x, 3 if len(targets) == 3 else 2)
    if len(targets) == 1:
        put(targets[0], gl.reshape(gl.join(parts[0], parts[1]), (x.shape[0], x.shape[1], 8)))
    else:
        for i in gl.static_range(len(targets)):
            put(targets[i], parts[i])


@gluon.jit
def of_head(part, head, FIRST: gl.constexpr, N: gl.constexpr):
    """Load a head's coefficients of 16 entries as the right operand of a product."""
    shape: gl.constexpr = [part.shape[0] // N, N, part.shape[1]]
    matrix = part._reinterpret(BF16, shape, part.layout).index(head)
    return matrix.slice(FIRST, 16, 1).permute((1, 0)).load(RIGHT)


@gluon.jit
def add_two(acc, of_v, of_p, head, values, product, FIRST: gl.constexpr, N: gl.constexpr):
    """Add values and products ``S k`` times their coefficients, 16 bits of each."""
    if len(of_v) == 2:
        acc = mma_v2(values, of_head(of_v[1], head, FIRST, N), acc)
        acc = mma_v2(product[0], of_head(of_p[1], head, FIRST, N), acc)
        top = of_head(of_p[0], head, FIRST, N)
        acc = mma_v2(product[1], top, acc)
        acc = mma_v2(values, of_head(of_v[0], head, FIRST, N), acc)
    else:
        acc = mma_v2(values, of_head(of_v[0], head, FIRST, N), acc)
        top = of_head(of_p[0], head, FIRST, N)
        acc = mma_v2(product[1], top, acc)
    return mma_v2(product[0], top, acc)


@gluon.jit
def add_three(acc, of_v, of_p, head, values, product):
    """Add values and products times their coefficients with fp32 products, smallest first."""
    top, middle = of_head(of_p[0], head, 0, WINDOW), of_head(of_p[1], head, 0, WINDOW)
    acc = mma_v2(product[0], of_head(of_p[2], head, 0, WINDOW), acc)
    acc = mma_v2(product[2], top, acc)
    acc = mma_v2(product[1], middle, acc)
    acc = mma_v2(values, of_head(of_v[2], head, 0, WINDOW), acc)
    acc = mma_v2(product[0], middle, acc)
    acc = mma_v2(product[1], top, acc)
    acc = mma_v2(values, of_head(of_v[1], head, 0, WINDOW), acc)
    acc = mma_v2(values, of_head(of_v[0], head, 0, WINDOW), acc)
    return mma_v2(product[0], top, acc)


@gluon.jit
def ask(tile, TILES: gl.constexpr, at, buffers, source, V: gl.constexpr, R: gl.constexpr):
    """Ask for a tile of the state and its values, where there is one; close the group of copies.

    ``source``: the state; where the values of entries 0 .. 15 start and which are live; the same of
    entries 16 .. 31, with how far the next head's values are.
    """
    state, old, old_live, new, new_step, new_live = source
    K: gl.constexpr = buffers[0].shape[2]
    WIDE: gl.constexpr = state.dtype.element_ty == gl.float32
    pieces: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]) if WIDE else KEYS
    if tile < TILES:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, pieces))[:, None]
        column = gl.arange(0, K, gl.SliceLayout(0, pieces))[None, :]
        value = gl.arange(0, ROWS, VALUE_COLUMNS)[None, :]
        head, first = tile // (V // ROWS), tile % (V // ROWS) * ROWS
        copy(buffers[0].index(at), state + tile * (ROWS * K) + (row * K + column))
        copy(buffers[1].index(at), old + (head * (R * V) + first) + value, old_live[:, None])
        new_at = new + (head * new_step + first)[:, None] + value
        copy(buffers[2].index(at), new_at, new_live[:, None])
    commit_group()


@gluon.jit
def key_products(keys, queries, q_norm, TOKENS: gl.constexpr):
    """Store products of keys with older keys, and with the tokens' normalised queries."""
    rows = keys.load(gl.DotOperandLayout(0, PAIRS, 2))
    gram = mma_v2(rows, keys.permute((1, 0)).load(gl.DotOperandLayout(1, PAIRS, 2)),
                  gl.zeros([ENTRIES, ENTRIES], F32, PAIRS))  # fmt: skip
    by_query = mma_v2(rows, queries.permute((1, 0)).load(gl.DotOperandLayout(1, PAIRS, 2)),
                      gl.zeros([ENTRIES, 8], F32, PAIRS))  # fmt: skip
    by_query = by_query * q_norm.load(gl.SliceLayout(0, PAIRS))[None, :]
    newer = gl.arange(0, ENTRIES, gl.SliceLayout(1, PAIRS))[:, None]
    older = gl.arange(0, ENTRIES, gl.SliceLayout(0, PAIRS))[None, :]
    products = gl.allocate_shared_memory(F32, [ENTRIES, ENTRIES], TABLE)
    products.store(gl.where(older < newer, gram, 0.0))
    with_queries = gl.allocate_shared_memory(F32, [ENTRIES, TOKENS], TABLE)
    if TOKENS == 8:
        with_queries.store(by_query)
    else:
        with_queries.store(gl.sum(gl.reshape(by_query, (ENTRIES, TOKENS, 2)), 2))
    return products, with_queries


@gluon.jit
def substitute(products, with_queries, strength, past, length,
               TOKENS: gl.constexpr, LANES: gl.constexpr):  # fmt: skip
    """Return b ``[heads, entries, tokens]``, from the newest entry to the oldest."""
    row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LANES))
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(1, gl.SliceLayout(0, LANES)))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(0, LANES)))
    sees = entry[:, None] - BLOCK <= token[None, :]
    start = gl.where(sees, with_queries.load(gl.SliceLayout(0, LANES)), 0.0)
    b = strength[:, :, None] * start[None, :, :]
    rows = products._reinterpret(F32, [ENTRIES, ENTRIES], LINE)
    at = BLOCK + length - 1
    keys = rows.index(at).load(row)
    for _ in range(1, past + length):
        weight = strength * keys[None, :]
        older = gl.where(at == BLOCK, past, at) - 1
        keys = rows.index(gl.maximum(older, 0)).load(row)
        b = b - of_lane(b, at) * weight[:, :, None]
        at = older
    return b


@gluon.jit
def decays_behind(decay_after, TOKENS: gl.constexpr, LANES: gl.constexpr):
    """Return D(j + 1, t) ``[heads, entries, tokens]`` of the decays behind each entry."""
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(0, LANES)))[None, :]
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(1, gl.SliceLayout(0, LANES)))[:, None]
    seen = (entry + 1 - BLOCK <= token) & (entry < ENTRIES - 1)
    lane = gl.arange(0, ENTRIES, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 2)
    return product_from(gl.where(seen[None, :, :], decay_after[:, :, None], 1.0), lane)


@gluon.jit
def prepare_fold(products, strength, decay, decay_after, due, fold_v, fold_p, whole):
    """Store the coefficients of a due row's fold and the decay of its states.

    One lane holds an entry and half of the unit vectors: 16 entries of a head are a warp.
    """
    PER: gl.constexpr = strength.shape[0]
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0])
    heads: gl.constexpr = gl.SliceLayout(2, lanes)
    row: gl.constexpr = gl.SliceLayout(0, heads)
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, strength.type.layout))
    after = gl.where((entry + 1 < due)[None, :], decay_after, 1.0)
    after = product_from(after, gl.expand_dims(entry, 0))
    all_decays = of_lane(after * decay, 0)
    whole.store(gl.max(all_decays, 1))
    tables = (gl.allocate_shared_memory(F32, [ENTRIES, PER], TABLE),
              gl.allocate_shared_memory(F32, [ENTRIES, PER], TABLE),
              gl.allocate_shared_memory(F32, [ENTRIES, PER], TABLE))  # fmt: skip
    tables[0].store(gl.permute(strength, (1, 0)))
    tables[1].store(gl.permute(after, (1, 0)))
    tables[2].store(gl.permute(all_decays, (1, 0)))
    folded = gl.arange(0, WINDOW, row)
    unit = gl.arange(0, WINDOW, gl.SliceLayout(0, gl.SliceLayout(0, lanes)))
    weights = tables[0].slice(0, WINDOW, 0).permute((1, 0)).load(heads)
    weights = gl.where((folded < due)[None, :], weights, 0.0)
    diagonal = (gl.arange(0, WINDOW, gl.SliceLayout(1, gl.SliceLayout(0, lanes)))[:, None]
                == unit[None, :])  # fmt: skip
    b = gl.where(diagonal[None, :, :], weights[:, :, None], 0.0)
    half = (unit // 8)[None, :][None, :, :]
    rows = products._reinterpret(F32, [ENTRIES * 2, WINDOW], LINE)
    for i in range(1, due):
        at = due - i
        weight = weights * rows.index(at * 2).load(row)[None, :]
        b = b - of_lane(b, at * 2 + half) * weight[:, :, None]
    decays = tables[1].slice(0, WINDOW, 0).permute((1, 0)).load(heads)
    put_parts(fold_v, b * decays[:, :, None])
    decays = tables[2].slice(0, WINDOW, 0).permute((1, 0)).load(heads)
    put_parts(fold_p, -b * decays[:, :, None])


@gluon.jit
def times_keys_and_queries(tile, keys, queries):
    """Return ``S K`` of entries 0 .. 15 and 16 .. 31, ``S Q``, and the tile's leading bf16 part."""
    WIDE: gl.constexpr = tile.dtype == gl.float32
    top = tile
    if WIDE:
        top, rest = leading(tile)
        middle, _ = leading(rest)
    keys, queries = keys.permute((1, 0)), queries.permute((1, 0))
    p = gl.zeros([ROWS, ENTRIES], F32, BY_KEYS)
    y = gl.zeros([ROWS, 8], F32, BY_QUERIES)
    query_side: gl.constexpr = gl.DotOperandLayout(0, BY_QUERIES, 2)
    p = warpgroup_mma(top, keys, p, use_acc=False, is_async=True)
    y = warpgroup_mma(gl.convert_layout(top, query_side), queries, y, use_acc=False, is_async=True)
    if WIDE:
        p = warpgroup_mma(middle, keys, p, is_async=True)
        y = warpgroup_mma(gl.convert_layout(middle, query_side), queries, y, is_async=True)
    p, y = warpgroup_mma_wait(0, [p, y])
    first, second = halves(p, 16)
    return first, second, gl.convert_layout(y, TILE), top


@gluon.jit
def fold_bf16(tile, buffer, keys, values, product, fold_v, fold_p, head, whole, target):
    """Fold a tile from registers and write it back, through its buffer, in 16-byte pieces."""
    z = gl.zeros([ROWS, WINDOW], F32, TILE)
    z = add_two(z, fold_v, fold_p, head, values, product, 0, WINDOW)
    top, last = left(parts_of(z, 2))
    sides = halves(gl.convert_layout(tile, TILE), HALF)
    for c in gl.static_range(2):
        acc = gl.convert_layout(sides[c], TILE).to(F32) * whole
        k = keys.slice(c * HALF, HALF, 1).slice(0, WINDOW, 0).load(RIGHT)
        acc = mma_v2(top, k, mma_v2(last, k, acc))
        buffer.slice(c * HALF, HALF, 1).store(acc.to(BF16))
    K: gl.constexpr = buffer.shape[1]
    row, column = gl.arange(0, ROWS, KEY_ROWS), gl.arange(0, K, KEY_COLUMNS)
    gl.store(target + row[:, None] * K + column[None, :], buffer.load(KEYS))


@gluon.jit
def fold_f32(product, buffer, keys, values, fold_v, fold_p, head, whole, target):
    """Fold a tile with fp32 products; ``product`` has all of S k but the tile's last parts."""
    product = gl.convert_layout(product, TILE)
    for c in gl.static_range(2):
        last = parts_of(buffer.slice(c * HALF, HALF, 1).load(LEFT), 3)[2]
        k = keys.slice(c * HALF, HALF, 1).slice(0, WINDOW, 0).permute((1, 0)).load(RIGHT)
        product = mma_v2(last, k, product)
    product = left(parts_of(product, 3))
    z = add_three(gl.zeros([ROWS, WINDOW], F32, TILE), fold_v, fold_p, head, values, product)
    top, middle, last = left(parts_of(z, 3))
    K: gl.constexpr = buffer.shape[1]
    row, column = gl.arange(0, ROWS, TILE_ROWS), gl.arange(0, HALF, TILE_COLUMNS)
    for c in gl.static_range(2):
        k = keys.slice(c * HALF, HALF, 1).slice(0, WINDOW, 0).load(RIGHT)
        acc = buffer.slice(c * HALF, HALF, 1).load(TILE) * whole
        acc = mma_v2(top, k, mma_v2(middle, k, mma_v2(last, k, acc)))
        gl.store(target + c * HALF + row[:, None] * K + column[None, :], acc)


@gluon.jit
def one_pass_kernel(
    plan, q, k, v, g, w, rates, biases, out, state, ring_k, ring_v, ring_g, ring_w, rows,
    q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, w_row, w_token,
    out_row, out_token, s_slot, k_slot, v_slot, g_slot, w_slot, q_scale, eps,
    T: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Fold, append and read one row's heads of one key head; no pad rows, no kept entries."""
    PER: gl.constexpr = HV // H
    TOKENS: gl.constexpr = 4 if T <= 4 else 8
    EACH: gl.constexpr = 8 // TOKENS  # columns of a token
    TILES: gl.constexpr = PER * (V // ROWS)
    WIDE: gl.constexpr = state.dtype.element_ty == gl.float32
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, TOKENS], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    heads: gl.constexpr = gl.SliceLayout(2, lanes)

    row, h = (gl.program_id(0) // H).to(gl.int64), gl.program_id(0) % H
    q, k = q + row * q_row + h * K, k + row * k_row + h * K
    v, out = v + row * v_row + h * (PER * V), out + row * out_row + h * (PER * V)
    g, w = g + row * g_row, w + row * w_row

    # the block's own inputs
    column, token = gl.arange(0, K, KEY_COLUMNS), gl.arange(0, 8, KEY_ROWS)
    query = token // EACH
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, heads))
    head = (h * PER + gl.arange(0, PER, gl.SliceLayout(1, heads)))[:, None]
    given = ((entry >= BLOCK) & (entry < BLOCK + T))[None, :]
    k_raw = gl.load(k + token[:, None] * k_token + column[None, :], (token < T)[:, None], 0.0)
    q_raw = gl.load(q + query[:, None] * q_token + column[None, :],
                    ((query < T) & (token % EACH == 0))[:, None], 0.0)  # fmt: skip
    g_raw = gl.load(g + (entry - BLOCK)[None, :] * g_token + head, given, 0.0)
    w_raw = gl.load(w + (entry - BLOCK)[None, :] * w_token + head, given, 0.0)
    rate, bias = gl.load(rates + head).to(F32), gl.load(biases + head).to(F32)
    gl.thread_barrier()

    # the plan: where the row stands, and how many entries are due
    slot, boundary, past, due, length = place(plan, rows, row)
    start = (boundary % R).to(gl.int32)
    ring_k += slot * k_slot + h * (R * K)
    ring_v += slot * v_slot + h * (PER * R * V)
    ring_g, ring_w = ring_g + slot * g_slot, ring_w + slot * w_slot
    state += slot * s_slot + h * (PER * V * K)

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
    tile_layout: gl.constexpr = SWIZZLED_F32 if WIDE else SWIZZLED
    buffers = (
        gl.allocate_shared_memory(state.dtype.element_ty, [BUFFERS, ROWS, K], tile_layout),
        gl.allocate_shared_memory(BF16, [BUFFERS, 16, ROWS], SWIZZLED),
        gl.allocate_shared_memory(BF16, [BUFFERS, 16, ROWS], SWIZZLED),
    )
    low = gl.arange(0, 16, VALUE_ROWS)
    in_block = low - 8  # of entries 16 .. 31
    source = (
        state, ring_v + in_ring(start + low, R)[:, None] * V, low < past,
        gl.where((in_block >= 0)[:, None], v + in_block[:, None] * v_token,
                 ring_v + in_ring(start + low + 16, R)[:, None] * V),
        gl.where(in_block >= 0, V, R * V),
        gl.where(in_block >= 0, in_block < length, low + 16 < past),
    )  # fmt: skip
    for i in gl.static_range(BUFFERS):
        ask(i, TILES, i, buffers, source, V, R)
    gl.thread_barrier()

    # append keys and gates; values follow tile by tile
    is_token = (token < length)[:, None]
    k_new = gl.where(is_token, k_raw.to(F32), 0.0)
    k_new = (k_new * gl.rsqrt(gl.sum(k_new * k_new, 1) + eps)[:, None]).to(BF16)
    gl.store(
        ring_k + in_ring(start + past + token, R)[:, None] * K + column[None, :], k_new, is_token
    )
    queries = gl.allocate_shared_memory(BF16, [8, K], SWIZZLED)
    q_new = gl.where((query < length)[:, None], q_raw.to(F32), 0.0)
    queries.store(q_new.to(BF16))
    q_norm = gl.allocate_shared_memory(F32, [8], LINE)
    q_norm.store(gl.rsqrt(gl.sum(q_new * q_new, 1) + eps) * q_scale)
    g_new = -rate * softplus(gl.where(is_new, g_raw.to(F32), 0.0) + bias)
    w_new = 1.0 / (1.0 + gl.exp(-gl.where(is_new, w_raw.to(F32), 0.0)))
    gl.store(ring_g + at_gate, g_new, is_new)
    gl.store(ring_w + at_gate, w_new, is_new)
    decay = decay_of(gl.where(is_new, g_new, g_old))
    strength = gl.where(is_new, w_new, w_old)

    # products of keys with keys and queries
    wait_group(BUFFERS)
    gl.thread_barrier()
    keys.slice(BLOCK, 8, 0).store(k_new)
    products, with_queries = key_products(keys, queries, q_norm, TOKENS)

    # coefficients: decays behind an entry, as far as a token sees them
    b = substitute(products, with_queries, strength, past, length, TOKENS, lanes)
    decay_after = of_lane_above(decay, gl.full_like(decay, 1, dtype=gl.int32))
    behind = decays_behind(decay_after, TOKENS, lanes)
    whole = of_lane(behind * decay[:, :, None], 0)
    fold_whole = gl.allocate_shared_memory(F32, [PER], LINE)
    fold_v = allocate_parts(3 if WIDE else 2, [PER * WINDOW, WINDOW], FOLD)
    fold_p = allocate_parts(3 if WIDE else 2, [PER * WINDOW, WINDOW], FOLD)
    if due > 0:
        prepare_fold(products, strength, decay, decay_after, due, fold_v, fold_p, fold_whole)
    read_v = allocate_parts(TOKENS // 4, [PER * 8, ENTRIES], READ)
    read_p = allocate_parts(TOKENS // 4, [PER * 8, ENTRIES], READ)
    put_parts(read_v, b * behind)
    put_parts(read_p, -b * whole)
    read_whole = gl.allocate_shared_memory(F32, [PER, 8], TABLE)
    whole = gl.max(whole, 1)
    read_whole.store(whole if TOKENS == 8 else gl.reshape(gl.join(whole, whole), (PER, 8)))
    read_whole = read_whole._reinterpret(F32, [PER, 8], LINE)
    fold_whole = fold_whole._reinterpret(F32, [PER, 1], LINE)
    q_norm_read = q_norm.load(TILE_COLUMNS)
    fence_async_shared()
    gl.thread_barrier()

    out_layout: gl.constexpr = TILE if TOKENS == 8 else FOUR_TOKENS
    out_rows = gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))[:, None]
    out_tokens = gl.arange(0, TOKENS, gl.SliceLayout(0, out_layout))[None, :]
    out_at = out + out_tokens * out_token + out_rows
    value, append = gl.arange(0, ROWS, VALUE_COLUMNS)[None, :], gl.arange(0, 8, VALUE_ROWS)
    append_at = in_ring(start + past + append, R)[:, None] * V + value
    for i in range(TILES):
        each, first = i // (V // ROWS), i % (V // ROWS) * ROWS
        wait_group(BUFFERS - 1)
        gl.thread_barrier()
        at = i % BUFFERS
        tile = buffers[0].index(at).load(gl.DotOperandLayout(0, BY_KEYS, 2))
        v_old = buffers[1].index(at).permute((1, 0)).load(LEFT)
        v_new = buffers[2].index(at).permute((1, 0)).load(LEFT)
        v_block = buffers[2].index(at).slice(8, 8, 0).load(VALUES)
        if due == 0:
            ask(i + BUFFERS, TILES, at, buffers, source, V, R)
        p, p_new, y, tile = times_keys_and_queries(tile, keys, queries)
        p_parts, p_new_parts = left(parts_of(p, 2)), left(parts_of(p_new, 2))
        y = y * (read_whole.index(each).load(TILE_COLUMNS) * q_norm_read)[None, :]
        y = add_two(y, read_v, read_p, each, v_old, p_parts, 0, 8)
        y = add_two(y, read_v, read_p, each, v_new, p_new_parts, 16, 8)
        if TOKENS == 4:
            y = gl.convert_layout(gl.sum(gl.reshape(y, (ROWS, 4, 2)), 2), FOUR_TOKENS)
        gl.store(ring_v + (each * (R * V) + first) + append_at, v_block, (append < length)[:, None])
        y = gl.where(out_tokens < length, y, 0.0).to(BF16)
        gl.store(out_at + (each * V + first), y, out_tokens < T)
        if due > 0:
            decays = gl.max(fold_whole.index(each).load(TILE_COLUMNS), 0)
            target = state + i * (ROWS * K)
            buffer = buffers[0].index(at)
            if WIDE:
                fold_f32(p, buffer, keys, v_old, fold_v, fold_p, each, decays, target)
            else:
                fold_bf16(tile, buffer, keys, v_old, p_parts, fold_v, fold_p, each, decays, target)
            ask(i + BUFFERS, TILES, at, buffers, source, V, R)
