"""The fold of one pass for additive writes: through registers, out in wide stores.

A thread has eight neighbouring channels (16 bytes of the widest plane) of rows r and r + 8;
products want two. Channels are permuted within a slice instead of moved, which costs nothing: keys
are stored in that order once, see :func:`to_tile`. A quarter of the channels is folded at a time:
what is added to it then has few registers, and so have the scales of its columns.
"""

# Triton reads tuple sums, not starred tuples
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group

from replayssm.ops.triton.kernels.common import larger, row_amax
from replayssm.ops.triton.kernels.hopper import WARPS, halves, parts_of
from replayssm.ops.triton.kernels.one_pass_system import BF16, F32, FOLDED, SWIZZLED
from replayssm.ops.triton.kernels.operand_tiles import (
    KEYS,
    ROWS,
    VALUE_ROWS,
    VALUES,
    arrived,
    ask,
    ask_plane,
    source_of,
    tile_outputs,
)
from replayssm.ops.triton.kernels.planes import (
    column_scale_of,
    join_rows,
    step_size,
    store_scales,
    write_rows,
)

HALF = gl.constexpr(64)  # channels of a line of a swizzled tile of keys
CUT = gl.constexpr(32)  # channels that are folded at a time
VEC = gl.constexpr(8)  # neighbouring channels of a thread

TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8]))
TILE_ROWS, TILE_COLUMNS = (gl.constexpr(gl.SliceLayout(i, TILE)) for i in (1, 0))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(i, TILE, 2)) for i in (0, 1))
CHANNEL = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [1, WARPS], [1, 0]))  # one of a thread
CHANNEL_ENTRIES, CHANNELS = (gl.constexpr(gl.SliceLayout(i, CHANNEL)) for i in (1, 0))
PERMUTED = gl.constexpr(gl.DistributedLinearLayout(  # of :func:`to_tile`
    [], [[1], [8], [16], [2], [4]], [[32], [64]], [], [128]
))  # fmt: skip
WIDE = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
    [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128]
))  # fmt: skip
WIDE_CUT = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [8, 0]],
    [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
))  # fmt: skip
CUT_ROWS, CUT_COLUMNS = (gl.constexpr(gl.SliceLayout(i, WIDE_CUT)) for i in (1, 0))


@gluon.jit
def to_tile(x):
    """Make a block ``[rows, channels]`` one of products, with its channels in permuted order.

    Channel 32 m + 8 p + 2 j + i becomes column 32 m + 8 j + 2 p + i: no lane changes.
    """
    N: gl.constexpr = x.shape[1]
    x = gl.reshape(x, (x.shape[0], N // (4 * VEC), 4, VEC // 2, 2))
    return gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), (x.shape[0], N))


@gluon.jit
def _from_tile(x):
    """Undo :func:`to_tile`."""
    N: gl.constexpr = x.shape[1]
    x = gl.reshape(x, (x.shape[0], N // (4 * VEC), VEC // 2, 4, 2))
    return gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), (x.shape[0], N))


@gluon.jit
def _permuted(x):
    """Bring 128 channels into the order that :func:`to_tile` leaves, or back."""
    x = gl.permute(gl.reshape(x, (4, 4, 4, 2)), (0, 2, 1, 3))
    return gl.reshape(x, (128,))


@gluon.jit
def window_of(keys, due):
    """Return the keys of the due entries, 0 behind them, in permuted order in shared memory."""
    K: gl.constexpr = keys.shape[1]
    window = gl.allocate_shared_memory(BF16, [FOLDED, K], SWIZZLED)
    is_due = gl.arange(0, FOLDED, gl.SliceLayout(1, KEYS))[:, None] < due
    found = gl.where(is_due, keys.slice(0, FOLDED, 0).load(KEYS).to(F32), 0.0)
    window.store(to_tile(found.to(BF16)))
    return window


@gluon.jit
def _weighted(values, weights, due):
    """Return the due entries' ``u = w D v`` as three bf16 left operands ``[64, 16]``."""
    entry = gl.arange(0, FOLDED, gl.SliceLayout(0, LEFT))
    v = values.slice(0, FOLDED, 0).permute((1, 0)).load(LEFT)
    w = weights.slice(0, FOLDED, 0).load(gl.SliceLayout(0, LEFT))
    u = gl.where((entry < due)[None, :], v.to(F32) * w[None, :], 0.0)
    return parts_of(u, 3)


@gluon.jit
def _quarters(buffer):
    """Load a tile of a plane in wide pieces and split it, which moves nothing."""
    pieces, sides = (), halves(buffer.load(WIDE))
    for half in gl.static_range(2):
        side = sides[half]
        first, second = halves(side)
        pieces = pieces + (gl.convert_layout(first, WIDE_CUT),)
        pieces = pieces + (gl.convert_layout(second, WIDE_CUT),)
    return pieces


@gluon.jit
def _written(u, keys, c: gl.constexpr):
    """Return ``sum_j u_j k_j^T`` of a quarter of the channels with fp32 products, smallest first.

    A tensor core cuts its sum off at every step: the decayed state is added to this outside.
    """
    k = keys.slice(c // 2 * HALF, HALF, 1).slice(c % 2 * CUT, CUT, 1).load(RIGHT)
    written = mma_v2(u[2], k, gl.zeros([ROWS, CUT], F32, TILE))
    return mma_v2(u[0], k, mma_v2(u[1], k, written))


@gluon.jit
def _new_column_scales(columns, old_scales, values, weights, keys, due, whole, carries, inverses):
    """Set a head's column scales to the bound of decision 0004.

    Leaves the old ones times the head's decay and the inverse of the new ones, in permuted order.
    """
    channel = gl.arange(0, keys.shape[1], PERMUTED)
    old = gl.convert_layout(_permuted(old_scales.load(PERMUTED)), CHANNELS).to(F32)
    entry = gl.arange(0, FOLDED, VALUE_ROWS)
    size = gl.max(gl.abs(values.slice(0, FOLDED, 0).load(VALUES).to(F32)), 1)
    size = size * gl.abs(weights.slice(0, FOLDED, 0).load(VALUE_ROWS))
    size = gl.convert_layout(gl.where(entry < due, size, 0.0), CHANNEL_ENTRIES)
    added = gl.sum(size[:, None] * gl.abs(keys.load(CHANNEL).to(F32)), 0)
    fresh = column_scale_of(gl.fma(old, whole, added), old)
    carries.store(old * whole)
    inverses.store(1.0 / fresh.to(F32))
    gl.store(columns + channel, gl.convert_layout(_permuted(fresh), PERMUTED))


@gluon.jit
def _place_of_cut(K: gl.constexpr):
    """Return where a quarter's numbers are in a tile."""
    return gl.arange(0, ROWS, CUT_ROWS)[:, None] * K + gl.arange(0, CUT, CUT_COLUMNS)[None, :]


@gluon.jit
def _fold_plain(tops, u, keys, whole, high):
    """Fold a bf16 tile and write it back."""
    at = _place_of_cut(keys.shape[1])
    for c in gl.static_range(4):
        state = gl.convert_layout(to_tile(tops[c].to(F32)), TILE)
        state = gl.fma(state, whole, _written(u, keys, c))
        gl.store(high + c * CUT + at, gl.convert_layout(_from_tile(state), WIDE_CUT).to(BF16))


@gluon.jit
def _fold_scaled(tops, rests, u, keys, row_scale, carries, inverses, high, low, scales,
                 FORMAT: gl.constexpr):  # fmt: skip
    """Fold a tile of a fixed-point format from the numbers of both planes."""
    unit = gl.broadcast((row_scale * step_size(FORMAT))[:, None], tops[0])[0]
    cuts = ()
    for c in gl.static_range(4):
        state = gl.convert_layout(to_tile(join_rows(tops[c], rests[c], unit, FORMAT, True)), TILE)
        carry = carries.slice(c * CUT, CUT, 0).load(TILE_COLUMNS)[None, :]
        inverse = inverses.slice(c * CUT, CUT, 0).load(TILE_COLUMNS)[None, :]
        state = gl.fma(state, gl.broadcast(carry, state)[0], _written(u, keys, c)) * inverse
        cuts = cuts + (state,)
    amax = larger(larger(row_amax(cuts[0]), row_amax(cuts[1])),
                  larger(row_amax(cuts[2]), row_amax(cuts[3])))  # fmt: skip
    _, per_unit = store_scales(amax, scales, gl.arange(0, ROWS, TILE_ROWS), None, FORMAT)
    at = _place_of_cut(keys.shape[1])
    for c in gl.static_range(4):
        numbers = gl.convert_layout(_from_tile(cuts[c] * per_unit[:, None]), WIDE_CUT)
        write_rows(numbers, high, low, c * CUT + at, None, FORMAT, True)


@gluon.jit
def _again(x):
    """Return an integer that the compiler does not know.

    What is made of it is made where it is used, and not kept in registers from tile to tile.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _ask_next(tile, buffers, low_buffer, low, given, R: gl.constexpr, HEADS: gl.constexpr,
              BUFFERS: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """Ask for what a due row needs once a tile is done: the next low plane, a later tile.

    Where values are is found anew, so that nothing of it takes registers while a tile is folded.
    """
    if SCALED:  # noqa: SIM102 - without a low plane nothing of it must be compiled
        if tile + 1 < given[7]:
            ask_plane(low_buffer, low + (tile + 1) * (ROWS * low_buffer.shape[1]))
    if tile + BUFFERS < HEADS:
        at = tile % BUFFERS
        high, v, v_token, ring_v, start, past, length, own = given
        source = source_of(high, v, v_token, ring_v, _again(start), _again(past), _again(length),
                           own, buffers[1].shape[2], R)  # fmt: skip
        ask(tile + BUFFERS, buffers[0].index(at), buffers[1].index(at), source, ROWS)
    else:
        commit_group()


@gluon.jit
def _scales_of(of_slot, tile, K: gl.constexpr):
    """Return where a head's row and column scales are, found anew as other addresses are."""
    scales, columns, scales_slot, columns_slot, slot, head0 = of_slot
    slot = _again(slot).to(gl.int64)
    head = _again(head0) + tile
    return scales + slot * scales_slot + head * ROWS, columns + slot * columns_slot + head * K


@gluon.jit
def fold_row(buffers, given, reading, place_of, folding, T: gl.constexpr, R: gl.constexpr,
             FORMAT: gl.constexpr, HAS_Z: gl.constexpr, HEADS: gl.constexpr,
             BUFFERS: gl.constexpr):  # fmt: skip
    """Read, if there are tokens, and then fold the heads of a due row.

    ``folding``: how many entries are due; their keys, weights of values and decays of states; what
    is asked for and written beside the plane that is read.
    """
    SCALED: gl.constexpr = FORMAT != "bf16"
    due, keys, weights, wholes, low_buffer, low, tables = folding
    high = given[0]
    K: gl.constexpr = buffers[0].shape[2]
    for n in range(given[7]):
        i = _again(n)
        arrived(0)
        tile, values = buffers[0].index(i % BUFFERS), buffers[1].index(i % BUFFERS)
        if T > 0:
            out_at, z_at, tokens, length, ring_v, first = place_of
            here = (out_at, z_at, tokens, _again(length), ring_v, _again(first))
            tile_outputs(i, tile, values, reading, here, T, ROWS, R, FORMAT, HAS_Z)
        whole = gl.max(wholes.index(i).load(TILE_COLUMNS), 0)
        u = _weighted(values, weights.index(i), due)
        tops = _quarters(tile)
        if SCALED:
            carries, inverses, old_scales, row_scales, of_slot = tables
            scales, columns = _scales_of(of_slot, i, K)
            _new_column_scales(columns, old_scales.index(i), values, weights.index(i), keys,
                               due, whole, carries, inverses)  # fmt: skip
            rests = _quarters(low_buffer)
            row_scale = row_scales.index(i).load(CUT_ROWS)
        gl.thread_barrier()
        _ask_next(i, buffers, low_buffer, low, given, R, HEADS, BUFFERS, SCALED)
        if SCALED:
            _fold_scaled(tops, rests, u, keys, row_scale, carries, inverses, high + i * (ROWS * K),
                         low + i * (ROWS * K), scales, FORMAT)  # fmt: skip
        else:
            _fold_plain(tops, u, keys, whole, high + i * (ROWS * K))
