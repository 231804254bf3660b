"""The fold of one chunk of value rows, in fp32, from raw entries and both planes.

Value rows never mix, so a chunk is folded in blocks of ``BF`` rows that stay in registers. With
scalar decays a window is one or two matrix products on the tensor cores; entries with a decay per
channel are folded one at a time. Every decay is a product of those of single entries. What is
folded may be read at once, from the same registers.

Scaled formats need a column scale before a block can be encoded, and no block sees the others: it
is the bound ``c' = c D + sum_j D_j w_j max|v_j| |k_j|`` on the new state's columns, from the old
scale and the entries alone (docs/decisions/0004).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replayssm.ops.triton.kernels.blocks import across, block_of, offsets, sliced, stored
from replayssm.ops.triton.kernels.common import below, decay_of, dot_exact, product
from replayssm.ops.triton.kernels.entries import fold_by_entries
from replayssm.ops.triton.kernels.planes import (
    as_read,
    column_scale_of,
    join_rows,
    load_rows,
    write_rows,
    write_scales,
)
from replayssm.ops.triton.kernels.read import (
    load_values,
    load_vectors,
    load_weights,
    read_block,
    tokens_of,
    write_outputs,
)


@triton.jit
def _inverse_of_unit_upper(a, FE: tl.constexpr, SPLIT: tl.constexpr):
    """Return ``(I + a)^-1`` for a strictly upper ``a [FE, FE]``.

    The inverses of two neighbouring diagonal blocks give that of the block they are in.
    """
    i, j = tl.arange(0, FE)[:, None], tl.arange(0, FE)[None, :]
    x = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -a, 0.0))
    zero = tl.zeros((FE, FE), tl.float32)
    for level in tl.static_range(1, FE.bit_length() - 1):
        is_beside = (i >> level != j >> level) & (i >> level + 1 == j >> level + 1)
        beside = tl.where(is_beside, -a, 0.0)
        x = dot_exact(dot_exact(x, beside, zero, SPLIT), x, x, SPLIT)
    return x


@triton.jit
def _products_of_keys(keys, decay, FE: tl.constexpr, SPLIT: tl.constexpr):
    """Return ``D_{t+1..s} k_s . k_t`` at ``[t, s]``, 0 unless s > t; ``keys [K, FE]``."""
    e = tl.arange(0, FE)
    is_newer = e[None, :] > e[:, None]
    between = tl.cumprod(tl.where(is_newer, decay[None, :], 1.0), 1)
    products = dot_exact(tl.trans(keys), keys, tl.zeros((FE, FE), tl.float32), SPLIT)
    return tl.where(is_newer, between * products, 0.0)


@triton.jit
def _prepare(
    columns, ring_k, ring_v, ring_g, ring_w, at, e_live, start, count, row0, row_end,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, SCALED: tl.constexpr,
    DELTA: tl.constexpr, SPLIT: tl.constexpr, BC: tl.constexpr, FK: tl.constexpr,
    FE: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Return what all blocks of a chunk take of ``count <= FE`` entries with scalar decays.

    That is keys for the state as it was, keys for what is added, the state's own factor, the
    matrix and the two weights of a delta fold, the old column scale and the new one.
    """
    kk, e = tl.arange(0, FK), tl.arange(0, FE)
    next_at = start + e + 1
    next_at = tl.where(next_at >= R, next_at - R, next_at)
    keys = tl.load(ring_k + at[None, :] * K + kk[:, None],
                   e_live[None, :] & (kk < K)[:, None], 0.0)  # fmt: skip
    # the decay behind an entry is the product of the newer decays, never a quotient of products
    later = tl.load(ring_g + next_at, e + 1 < count, 0.0)
    after = tl.cumprod(decay_of(later), 0, reverse=True)
    decay = decay_of(tl.load(ring_g + at, e_live, 0.0))
    strength = tl.load(ring_w + at, e_live, 0.0)
    weight, carry = strength * after, tl.broadcast_to(product(decay, 0), (FK,))
    solve, upto = 0.0, 0.0
    if DELTA:
        transposed = _products_of_keys(keys, decay, FE, SPLIT) * strength[None, :]
        solve = _inverse_of_unit_upper(transposed, FE, SPLIT) * after[None, :]
        solve = solve[None, :, :]
        upto = strength * tl.cumprod(decay, 0)
    fresh, inverse = 1.0, 1.0
    if SCALED:
        every = row0 + tl.arange(0, BC)
        sizes = tl.load(ring_v + at[:, None] * V + every[None, :],
                        e_live[:, None] & (every < row_end)[None, :], 0.0)  # fmt: skip
        size = tl.max(tl.abs(sizes.to(tl.float32)), 1) * tl.abs(weight)
        old = tl.load(columns + kk, kk < K, 1.0).to(tl.float32)
        part = tl.sum(size[None, :] * tl.abs(keys.to(tl.float32)), 1)
        fresh = column_scale_of(old * carry + part, old)
        inverse = 1.0 / fresh.to(tl.float32)
        if not DELTA:
            carry = old * carry * inverse
    if DELTA:
        near = sliced(keys, FE, SLICES, VEC)
        far = near
    else:
        # a bf16 value is exact on the tensor cores, what it is multiplied by is fp32
        near = 0.0
        far = keys.to(tl.float32) * weight[None, :]
        if SCALED:
            far *= inverse[:, None]
        far = sliced(far, FE, SLICES, VEC)
    far = tl.permute(far, (0, 2, 1))
    if SCALED and DELTA:
        inverse = across(inverse, SLICES, VEC)
    return near, far, across(carry, SLICES, VEC), solve, strength, upto, fresh, inverse


@triton.jit
def _fold_products(
    state, values, near, far, carry, solve, strength, upto,
    DELTA: tl.constexpr, SPLIT: tl.constexpr, BF: tl.constexpr, FE: tl.constexpr,
    SLICES: tl.constexpr,
):  # fmt: skip
    """Fold all entries into a block ``[slices, rows, channels]``: ``S D + U K``.

    An entry's row of U takes the decay behind it. It is ``w v`` of an additive write. For delta
    writes it is that of the UT transform, ``(I + A)^-1 R``, with A strictly lower, ``A_st = w_s
    D_{t+1..s} k_s . k_t`` and ``R_s = w_s (v_s - D_{1..s} S k_s)``.
    """
    if DELTA:
        none = tl.zeros((SLICES, BF, FE), tl.float32)
        known = tl.sum(dot_exact(state, near, none, SPLIT), 0)
        values = values.to(tl.float32) * strength - upto * known
        none = tl.zeros((1, BF, FE), tl.float32)
        values = tl.reshape(dot_exact(values[None, :, :], solve, none, SPLIT), (BF, FE))
    values = tl.broadcast_to(values[None, :, :], (SLICES, BF, FE))
    return dot_exact(values, far, state * carry, SPLIT)


@triton.jit
def _joined(
    top, rest, unit, columns, channel,
    K: tl.constexpr, FORMAT: tl.constexpr, DELTA: tl.constexpr, ASM: tl.constexpr,
    FR: tl.constexpr, SLICES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Return a block ``[slices, rows, channels]`` of both planes' numbers, as its fold takes it."""
    state = join_rows(top, rest, unit, FORMAT, ASM)
    if DELTA and (FORMAT == "q24" or FORMAT == "q16"):
        # a delta fold needs the state itself before it decays; kept, the scales would not fit
        state *= tl.load(columns + channel, channel < K, 0.0).to(tl.float32)
    return block_of(state, FR, SLICES, VEC)


@triton.jit
def _vectors_and_weights(
    reading, fresh, K: tl.constexpr, T: tl.constexpr, NE: tl.constexpr, TILES: tl.constexpr,
    SCALED: tl.constexpr, SHARED_X: tl.constexpr, FK: tl.constexpr, SLICES: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Return what all blocks are read with: vectors, entry weights, a shared vector's factor.

    Vectors take the new column scales.
    """
    _, x, scale, coef, _, _, _, x_token, _, unread, length, _ = reading
    NT: tl.constexpr = tokens_of(T)
    vectors = load_vectors(x, x, x_token, length, K, NT, False, FK)
    if SCALED:
        vectors = vectors.to(tl.float32) * fresh.to(tl.float32)[:, None]
    c, factor = load_weights(coef, scale, unread, length, NE, NT, TILES, SHARED_X, True)
    return sliced(vectors, NT, SLICES, VEC), c, factor


@triton.jit
def _newer_values(reading, ring_v, rows, rows_live, V: tl.constexpr):
    """Return the values ``[NE, rows]`` of the entries that stay in the ring."""
    _, _, _, _, _, _, _, _, at_e, unread, _, _ = reading
    return load_values(ring_v, at_e, unread, rows, rows_live, V)


@triton.jit
def _read_folded(
    reading, taken, top, rest, newer, row_scale, rows, rows_live,
    FORMAT: tl.constexpr, DEPTH: tl.constexpr, T: tl.constexpr, SCALED: tl.constexpr,
    HAS_Z: tl.constexpr, ASM: tl.constexpr, FR: tl.constexpr, SLICES: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a block from the numbers that its fold has stored."""
    out, _, _, _, gate_z, out_token, z_token, _, _, _, length, full = reading
    vectors, c, factor = taken
    NT: tl.constexpr = tokens_of(T)
    NEAR: tl.constexpr = ASM and out.dtype.element_ty.primitive_bitwidth == 16
    numbers = as_read(top, rest, full, FORMAT, DEPTH)
    y = read_block(numbers, vectors, NT, NEAR, FR, SLICES, VEC)
    write_outputs(y, newer, c, factor, row_scale, rows, rows_live, length, out, gate_z,
                  out_token, z_token, T, NT, SCALED, HAS_Z, NEAR, True)  # fmt: skip


@triton.jit
def _fold_by_products(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    reading, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr,
    FORMAT: tl.constexpr, DELTA: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    T: tl.constexpr, NE: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr,
    SHARED_X: tl.constexpr, HAS_Z: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Fold entries with scalar decays into a chunk, as matrix products."""
    # a matrix unit takes 16 entries, value rows and channels or more
    FE: tl.constexpr = 16 if WINDOW <= 16 else 1 << (WINDOW - 1).bit_length()
    FR: tl.constexpr = BF if BF > 16 else 16
    FK: tl.constexpr = BK if BK > 16 else 16
    # numbers that a thread finds side by side: 16 bytes of the plane with the wider ones
    VEC: tl.constexpr = 4 if FORMAT == "f32" or FK == 16 else 8
    SLICES: tl.constexpr = FK // (4 * VEC)
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    SPLIT: tl.constexpr = ASM and ring_k.dtype.element_ty == tl.bfloat16
    kk, e = tl.arange(0, FK), tl.arange(0, FE)
    e_live, at = e < count, start + e
    at = tl.where(at >= R, at - R, at)
    near, far, carry, solve, strength, upto, fresh, inverse = _prepare(
        columns, ring_k, ring_v, ring_g, ring_w, at, e_live, start, count, row0, row_end,
        K, V, R, SCALED, DELTA, SPLIT, BC, FK, FE, SLICES, VEC,
    )  # fmt: skip
    if reading is not None:
        if WAITS:
            gdc_wait()
        taken = _vectors_and_weights(reading, fresh, K, T, NE, TILES, SCALED, SHARED_X, FK, SLICES,
                                     VEC)  # fmt: skip
    in_block, channel = offsets(FR, SLICES, VEC)
    # the bound is known at run time only, so that blocks are not unrolled into each other
    for block in range(0, row_end - row0, FR):
        r, rows = row0 + block + in_block, row0 + block + tl.arange(0, FR)
        r_live, rows_live = below(r, row_end, EVEN), below(rows, row_end, EVEN)
        at_s = tl.max_contiguous(r * K + channel, (1, 1, 1, VEC))
        live = r_live & (channel < K)
        top, rest, unit = load_rows(high, low, scales, at_s, live, r, r_live, FORMAT)
        values = tl.load(ring_v + at[None, :] * V + rows[:, None],
                         e_live[None, :] & rows_live[:, None], 0.0)  # fmt: skip
        state = _joined(top, rest, unit, columns, channel, K, FORMAT, DELTA, ASM, FR, SLICES, VEC)
        state = _fold_products(state, values, near, far, carry, solve, strength, upto,
                               DELTA, SPLIT, FR, FE, SLICES)  # fmt: skip
        if reading is not None:
            newer = _newer_values(reading, ring_v, rows, rows_live, V)
        row_scale = 1.0
        if SCALED:
            if DELTA:
                state *= inverse
            row_scale, per_unit = write_scales(state, scales, rows, rows_live, FORMAT)
            state *= per_unit[None, :, None]
        state = stored(state, FR, SLICES, VEC)
        top, rest = write_rows(state, high, low, at_s, live, FORMAT, ASM)
        if reading is not None:
            _read_folded(reading, taken, top, rest, newer, row_scale, rows, rows_live, FORMAT,
                         DEPTH, T, SCALED, HAS_Z, ASM, FR, SLICES, VEC)  # fmt: skip
    if SCALED:
        # not before every block has taken the old ones
        tl.debug_barrier()
        tl.store(columns + kk, fresh, kk < K)


@triton.jit
def fold_chunk(
    high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
    reading, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr,
    FORMAT: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    T: tl.constexpr, NE: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr,
    SHARED_X: tl.constexpr, HAS_Z: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Bring value rows ``row0 .. row_end - 1`` of a head over ``count`` entries, to a boundary.

    Pointers are those of the slot's head, ``columns`` of its tile. ``start`` is the ring index of
    the oldest entry. ``reading``: what outputs take, as :func:`.read.read_chunk` has it, to write
    those of the chunk too; or None. ``EVEN``: the chunk is a whole number of blocks.
    """
    if CHANNEL:
        fold_by_entries(
            high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
            reading, K, V, R, FORMAT, DELTA, ASM, BF, BC, BK, EVEN,
            T, NE, TILES, DEPTH, SHARED_X, HAS_Z, WAITS,
        )  # fmt: skip
    else:
        _fold_by_products(
            high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, start, count, row0, row_end,
            reading, K, V, R, WINDOW, FORMAT, DELTA, ASM, BF, BC, BK, EVEN,
            T, NE, TILES, DEPTH, SHARED_X, HAS_Z, WAITS,
        )  # fmt: skip
