"""The large part of one pass: 64 value rows of a state at a time, asked for, read and folded.

S k and S q come from the tensor cores, at once, as 16 bits of each number under 16-bit outputs. A
fold takes all of an fp32 number, as three bf16 parts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
    async_copy_global_to_shared as copy,
)
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from replayssm.ops.triton.kernels.common import cut_bf16
from replayssm.ops.triton.kernels.hopper import WARPS, as_operands, halves, parts_of
from replayssm.ops.triton.kernels.one_pass_system import BF16, ENTRIES, F32, FOLDED
from replayssm.ops.triton.kernels.operand_tiles import (
    KEY_COLUMNS,
    KEY_ROWS,
    KEYS,
    ROWS,
    VALUE_COLUMNS,
)

HALF = gl.constexpr(64)  # key columns that a fold holds in registers at a time
CUT = gl.constexpr(32)  # key columns whose products a tensor core adds up by itself

# registers: 16-byte pieces of rows of fp32, products, operands of products
KEYS_F32 = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]))
TILE_ROWS, TILE_COLUMNS = (gl.constexpr(gl.SliceLayout(i, TILE)) for i in (1, 0))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(i, TILE, 2)) for i in (0, 1))
BY_KEYS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16]))
BY_QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16]))


@gluon.jit
def _ask_plane(buffer, source, tile):
    K: gl.constexpr = buffer.shape[1]
    pieces: gl.constexpr = KEYS_F32 if source.dtype.element_ty == F32 else KEYS
    row = gl.arange(0, ROWS, gl.SliceLayout(1, pieces))[:, None]
    column = gl.arange(0, K, gl.SliceLayout(0, pieces))[None, :]
    copy(buffer, source + tile * (ROWS * K) + (row * K + column))


@gluon.jit
def ask(tile, end, at, buffers, source, V: gl.constexpr, R: gl.constexpr):
    """Ask for a tile of the state and its values, if it is before ``end``; close the group.

    ``source``: the planes; where the values of entries 0 .. 15 start and which are live; the same
    of entries 16 .. 31, with how far the next head's values are. ``buffers``: of each plane, then
    of values.
    """
    planes, old, old_live, new, new_step, new_live = source
    if tile < end:
        for i in gl.static_range(len(planes)):
            _ask_plane(buffers[0][i].index(at), planes[i], tile)
        value = gl.arange(0, ROWS, VALUE_COLUMNS)[None, :]
        head, first = tile // (V // ROWS), tile % (V // ROWS) * ROWS
        copy(buffers[1].index(at), old + (head * (R * V) + first) + value, old_live[:, None])
        new_at = new + (head * new_step + first)[:, None] + value
        copy(buffers[2].index(at), new_at, new_live[:, None])
    commit_group()


@gluon.jit
def joined_s32(top, rest):
    """Return the fp32 numbers of both planes."""
    bits = (top.to(gl.int16, bitcast=True).to(gl.int32) << 16) + (rest.to(gl.int32) - 32768)
    return bits.to(F32, bitcast=True)


@gluon.jit
def numbers_of(planes, at, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Load columns of a tile in shared memory: numbers, of two planes the whole ones."""
    numbers = planes[0].index(at).slice(FIRST, COUNT, 1).load(LAYOUT)
    if len(planes) == 2:
        numbers = joined_s32(numbers, planes[1].index(at).slice(FIRST, COUNT, 1).load(LAYOUT))
    return numbers


@gluon.jit
def tile_as_read(planes, at, full, DEPTH: gl.constexpr):
    """Load a tile as a read of the row's depth sees it, as the left operand of its products."""
    layout: gl.constexpr = gl.DotOperandLayout(0, BY_KEYS, 2)
    numbers = planes[0].index(at).load(layout)
    if len(planes) == 2 and DEPTH != "high":
        whole = joined_s32(numbers, planes[1].index(at).load(layout))
        numbers = gl.where(full, whole, numbers.to(F32)) if DEPTH == "mixed" else whole
    return numbers


@gluon.jit
def _of_head(part, head, FIRST: gl.constexpr, N: gl.constexpr):
    """Load a head's coefficients of 16 entries as the right operand of a product."""
    shape: gl.constexpr = [part.shape[0] // N, N, part.shape[1]]
    matrix = part._reinterpret(BF16, shape, part.layout).index(head)
    return matrix.slice(FIRST, 16, 1).permute((1, 0)).load(RIGHT)


@gluon.jit
def add_two(acc, of_v, of_p, head, values, product, FIRST: gl.constexpr, N: gl.constexpr):
    """Add values and products ``S k`` times their coefficients, 16 bits of each."""
    if len(of_v) == 2:
        acc = mma_v2(values, _of_head(of_v[1], head, FIRST, N), acc)
        acc = mma_v2(product[0], _of_head(of_p[1], head, FIRST, N), acc)
        top = _of_head(of_p[0], head, FIRST, N)
        acc = mma_v2(product[1], top, acc)
        acc = mma_v2(values, _of_head(of_v[0], head, FIRST, N), acc)
    else:
        acc = mma_v2(values, _of_head(of_v[0], head, FIRST, N), acc)
        top = _of_head(of_p[0], head, FIRST, N)
        acc = mma_v2(product[1], top, acc)
    return mma_v2(product[0], top, acc)


@gluon.jit
def _due_values(values, due):
    """Return values of entries that fold: what the others hold must not reach a checkpoint."""
    is_due = gl.arange(0, FOLDED, gl.SliceLayout(0, LEFT)) < due
    return gl.where(is_due[None, :], values, 0.0).to(BF16)


@gluon.jit
def _due_keys(keys, FIRST: gl.constexpr, COUNT: gl.constexpr, due):
    """Load columns of the keys of entries that fold, as the right operand of an update."""
    k = keys.slice(FIRST, COUNT, 1).slice(0, FOLDED, 0).load(RIGHT)
    is_due = gl.arange(0, FOLDED, gl.SliceLayout(1, RIGHT)) < due
    return gl.where(is_due[:, None], k, 0.0).to(BF16)


@gluon.jit
def _due_products(product, due):
    is_due = gl.arange(0, FOLDED, gl.SliceLayout(0, product.type.layout)) < due
    return gl.where(is_due[None, :], product, 0.0)


@gluon.jit
def _exact_writes(fold_v, fold_p, head, values, product):
    """Return values and products ``S k`` times a head's coefficients of a fold, all fp32.

    A tensor core cuts its sum off at every step. So the large terms are added outside, and the
    small ones, of which six count, on their own.
    """
    v_top, v_middle = _of_head(fold_v[0], head, 0, FOLDED), _of_head(fold_v[1], head, 0, FOLDED)
    top, middle = _of_head(fold_p[0], head, 0, FOLDED), _of_head(fold_p[1], head, 0, FOLDED)
    none = gl.zeros([ROWS, FOLDED], F32, TILE)
    small = mma_v2(product[0], _of_head(fold_p[2], head, 0, FOLDED), none)
    small = mma_v2(product[2], top, small)
    small = mma_v2(product[1], middle, small)
    small = mma_v2(values, _of_head(fold_v[2], head, 0, FOLDED), small)
    small = mma_v2(product[0], middle, small)
    small = mma_v2(product[1], top, small)
    small = mma_v2(values, v_middle, small)
    return mma_v2(values, v_top, none) + (mma_v2(product[0], top, none) + small)


@gluon.jit
def _exact_products(planes, at, keys):
    """Return ``S K`` of a tile in shared memory and the entries that fold, all fp32."""
    product = gl.zeros([ROWS, FOLDED], F32, TILE)
    for c in gl.static_range(planes[0].shape[2] // CUT):
        top, middle, last = parts_of(numbers_of(planes, at, c * CUT, CUT, LEFT), 3)
        k = keys.slice(c // 2 * HALF, HALF, 1).slice(0, FOLDED, 0).permute((1, 0))
        k = k.slice(c % 2 * CUT, CUT, 0).load(RIGHT)
        part = mma_v2(last, k, gl.zeros([ROWS, FOLDED], F32, TILE))
        product += mma_v2(top, k, mma_v2(middle, k, part))
    return product


@gluon.jit
def times_keys_and_queries(tile, keys, queries):
    """Return ``S K`` of entries 0 .. 15 and 16 .. 31, ``S Q``, and the tile's leading bf16 part."""
    WIDE: gl.constexpr = tile.dtype == gl.float32
    top = tile
    if WIDE:
        top, rest = cut_bf16(tile)
        middle, _ = cut_bf16(rest)
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
    first, second = halves(p)
    return first, second, gl.convert_layout(y, TILE), top


@gluon.jit
def _write_plane(target, buffer):
    """Write a plane's tile from shared memory in 16-byte pieces."""
    K: gl.constexpr = buffer.shape[1]
    row, column = gl.arange(0, ROWS, KEY_ROWS), gl.arange(0, K, KEY_COLUMNS)
    gl.store(target + row[:, None] * K + column[None, :], buffer.load(KEYS))


@gluon.jit
def fold_bf16(tile, buffer, keys, values, product, fold, head, due, target):
    """Fold a tile from registers and write it back through its buffer."""
    fold_v, fold_p, whole = fold
    whole = gl.max(whole.index(head).load(TILE_COLUMNS), 0)
    values = _due_values(values, due)
    product = as_operands(parts_of(_due_products(product, due), 2), LEFT)
    z = gl.zeros([ROWS, FOLDED], F32, TILE)
    z = add_two(z, fold_v, fold_p, head, values, product, 0, FOLDED)
    top, last = as_operands(parts_of(z, 2), LEFT)
    sides = halves(gl.convert_layout(tile, TILE))
    for c in gl.static_range(2):
        acc = gl.convert_layout(sides[c], TILE).to(F32) * whole
        k = _due_keys(keys, c * HALF, HALF, due)
        acc = mma_v2(top, k, mma_v2(last, k, acc))
        buffer.slice(c * HALF, HALF, 1).store(acc.to(BF16))
    _write_plane(target, buffer)


@gluon.jit
def fold_exactly(planes, at, keys, values, fold, head, due, targets):
    """Fold a tile in shared memory, of f32 or of both planes of s32, with fp32 products."""
    fold_v, fold_p, whole = fold
    whole = gl.max(whole.index(head).load(TILE_COLUMNS), 0)
    product = _due_products(_exact_products(planes, at, keys), due)
    product = as_operands(parts_of(product, 3), LEFT)
    z = _exact_writes(fold_v, fold_p, head, _due_values(values, due), product)
    top, middle, last = as_operands(parts_of(z, 3), LEFT)
    K: gl.constexpr = planes[0].shape[2]
    row, column = gl.arange(0, ROWS, TILE_ROWS), gl.arange(0, HALF, TILE_COLUMNS)
    for c in gl.static_range(2):
        k = _due_keys(keys, c * HALF, HALF, due)
        written = mma_v2(last, k, gl.zeros([ROWS, HALF], F32, TILE))
        written = mma_v2(top, k, mma_v2(middle, k, written))
        folded = gl.fma(numbers_of(planes, at, c * HALF, HALF, TILE), whole, written)
        if len(planes) == 2:
            # every NaN has one pattern: others would read as -0 from the high plane
            bits = gl.where(folded == folded, folded.to(gl.int32, bitcast=True), 0x7FC00000) + 32768
            high, low = (bits >> 16).to(gl.int16).to(BF16, bitcast=True), bits.to(gl.uint16)
            planes[0].index(at).slice(c * HALF, HALF, 1).store(high)
            planes[1].index(at).slice(c * HALF, HALF, 1).store(low)
        else:
            gl.store(targets[0] + c * HALF + row[:, None] * K + column[None, :], folded)
    if len(planes) == 2:
        _write_plane(targets[0], planes[0].index(at))
        _write_plane(targets[1], planes[1].index(at))
