"""The read, S_0 X for one chunk of value rows: the only part that streams the state.

A high read of a fixed-point format never converts its bytes: ``x`` times the column scales is cut
into two signed base-256 digits (15 bits and sign), and four products a lane go into one int32 sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replayssm.ops.triton.kernels.blocks import block_of, offsets, sliced
from replayssm.ops.triton.kernels.common import dot4, dot_near, larger
from replayssm.ops.triton.kernels.planes import read_full, step_size

DIGITS_MAX = tl.constexpr(32512.0)


@triton.constexpr_function
def tokens_of(T):
    """Return how many tokens a matrix unit takes for a block's: 8 or more."""
    return 8 if T <= 8 else 1 << (T - 1).bit_length()


@triton.jit
def pack_digits(x, columns, K: tl.constexpr, BW: tl.constexpr):
    """Cut ``x`` times the column scales into packed digits: two ``[K / 4]`` words and a scale.

    ``x`` and ``columns`` point at K numbers each.
    """
    words = tl.arange(0, BW)
    amax = 0.0
    for i in tl.static_range(4):
        at, live = words * 4 + i, words * 4 + i < K
        part = tl.load(x + at, live, 0.0).to(tl.float32)
        part *= tl.load(columns + at, live, 0.0).to(tl.float32)
        amax = larger(amax, tl.reduce(tl.abs(part), 0, larger))
    per_unit = tl.where(amax > 0, DIGITS_MAX / amax, 0.0)
    top, bottom = tl.zeros((BW,), tl.int32), tl.zeros((BW,), tl.int32)
    for i in tl.static_range(4):
        at, live = words * 4 + i, words * 4 + i < K
        part = tl.load(x + at, live, 0.0).to(tl.float32)
        part *= tl.load(columns + at, live, 0.0).to(tl.float32)
        number = tl.floor(part * per_unit + 0.5).to(tl.int32)
        digit = (number + 128) >> 8
        top |= (digit & 255) << (8 * i)
        bottom |= ((number - (digit << 8)) & 255) << (8 * i)
    return top, bottom, amax / DIGITS_MAX


@triton.jit
def read_words(words, top, bottom, ASM: tl.constexpr):
    """Return the integer products ``[rows]`` of packed bytes ``[rows, K / 4]`` and digits."""
    zero = tl.zeros_like(words)
    coarse = dot4(words, tl.broadcast_to(top[None, :], words.shape), zero, ASM)
    both = dot4(words, tl.broadcast_to(bottom[None, :], words.shape), coarse << 8, ASM)
    return tl.sum(both, 1)


@triton.jit
def read_numbers(high, low, at, live, full, FORMAT: tl.constexpr, DEPTH: tl.constexpr):
    """Return a block of the state as a read of the row's depth sees it, without scales."""
    if FORMAT == "f32" or FORMAT == "bf16" or DEPTH == "high":
        numbers = tl.load(high + at, mask=live, other=0)
    else:
        # a low plane that is not read counts as its bias, which leaves the high plane's number
        numbers = read_full(high, low, at, live, live & full, FORMAT) * step_size(FORMAT)
    return numbers


@triton.jit
def read_one(
    state, x, columns, here, K: tl.constexpr, PACKED: tl.constexpr, SCALED: tl.constexpr,
    ASM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the products ``[rows]`` of a block with one token's vector."""
    kk = tl.arange(0, BK)
    if PACKED:
        top, bottom, unit = pack_digits(x, columns, K, BK // 4)
        y = read_words(state, top, bottom, ASM).to(tl.float32) * unit
    else:
        vector = tl.load(x + kk, (kk < K) & here, 0.0).to(tl.float32)
        if SCALED:
            vector *= tl.load(columns + kk, kk < K, 0.0).to(tl.float32)
        y = tl.sum(state.to(tl.float32) * vector[None, :], 1)
    return y


@triton.jit
def _digits(part):
    """Cut fp32 ``part [K, tokens]`` into two signed digits and what one unit is worth."""
    amax = tl.max(tl.abs(part), 0)
    per_unit = tl.where(amax > 0, DIGITS_MAX / amax, 0.0)
    number = tl.floor(part * per_unit[None, :] + 0.5).to(tl.int32)
    top = (number + 128) >> 8
    return top.to(tl.int8), (number - (top << 8)).to(tl.int8), amax / DIGITS_MAX


@triton.jit
def load_vectors(
    x, columns, x_token, length, K: tl.constexpr, NT: tl.constexpr, SCALED: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Return all tokens' vectors, times the column scales, ``[K, NT]``."""
    kk, t = tl.arange(0, BK), tl.arange(0, NT)
    at, live = x + t[None, :] * x_token + kk[:, None], (kk < K)[:, None] & (t < length)[None, :]
    vectors = tl.load(at, live, 0.0)
    if SCALED:
        vectors = vectors.to(tl.float32)
        vectors *= tl.load(columns + kk, kk < K, 0.0).to(tl.float32)[:, None]
    return vectors


@triton.jit
def read_block(
    numbers, vectors, NT: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Return the products ``[rows, NT]`` of a stored block with all tokens' sliced vectors."""
    if numbers.dtype == tl.int8:
        numbers = numbers.to(tl.bfloat16 if SPLIT else tl.float32)
    none = tl.zeros((SLICES, ROWS, NT), tl.float32)
    block = block_of(numbers, ROWS, SLICES, VEC)
    return tl.sum(dot_near(block, vectors, none, SPLIT), 0)


@triton.jit
def read_digits(state, vectors):
    """Return the products ``[rows, NT]`` of a fixed-point block with all tokens' vectors."""
    top, bottom, unit = _digits(vectors)
    coarse = tl.dot(state, top, out_dtype=tl.int32)
    y = (coarse << 8) + tl.dot(state, bottom, out_dtype=tl.int32)
    return y.to(tl.float32) * unit[None, :]


@triton.jit
def load_values(ring_v, at_e, e_live, r, r_live, V: tl.constexpr):
    """Return the values ``[NE, rows]`` of the entries that a chunk has not folded."""
    return tl.load(ring_v + at_e[:, None] * V + r[None, :], e_live[:, None] & r_live[None, :], 0.0)


@triton.jit
def load_weights(
    coef, scale, e_live, length, NE: tl.constexpr, NT: tl.constexpr, TILES: tl.constexpr,
    SHARED_X: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the entries' weights ``[NE]`` and a shared vector's factor, ``WIDE`` those of tokens.

    Tokens past the row's length are 0, whatever was read for them.
    """
    e, t = tl.arange(0, NE), tl.arange(0, NT)
    factor = 1.0
    if WIDE:
        here = t < length
        c = tl.load(coef + t[None, :] * NE + e[:, None], e_live[:, None] & here[None, :], 0.0)
        if SHARED_X:
            factor = tl.load(scale + t * TILES, here, 0.0)[None, :]
    else:
        here = length > 0
        c = tl.load(coef + e, e_live & here, 0.0)
        if SHARED_X:
            factor = tl.load(scale, here, 0.0)
    return c, factor


@triton.jit
def write_outputs(
    y, values, c, factor, row_scale, r, r_live, length, out, gate_z, out_token, z_token,
    T: tl.constexpr, NT: tl.constexpr, SCALED: tl.constexpr, HAS_Z: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the entries' part to a block's products, gate and store.

    ``y`` is ``[rows]`` of one token, ``WIDE`` ``[rows, NT]``; ``values`` are those of all entries,
    ``[NE, rows]``.
    """
    t = tl.arange(0, NT)
    y *= factor
    if WIDE:
        if SCALED:
            y *= row_scale[:, None]
        y = dot_near(tl.trans(values), c, y, SPLIT)
        at_z = gate_z + t[None, :] * z_token + r[:, None]
        at_out = out + t[None, :] * out_token + r[:, None]
        y_live = r_live[:, None] & (t < T)[None, :]
        here = r_live[:, None] & (t < length)[None, :]
    else:
        y = y * row_scale + tl.sum(c[:, None] * values.to(tl.float32), 0)
        at_z, at_out, y_live, here = gate_z + r, out + r, r_live, r_live & (length > 0)
    if HAS_Z:
        z = tl.load(at_z, here, 0.0).to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    tl.store(at_out, tl.where(here, y, 0.0).to(out.dtype.element_ty), y_live)


@triton.jit
def read_chunk(
    high, low, scales, columns, ring_v, row0, row_end, reading,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NE: tl.constexpr,
    TILES: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, SHARED_X: tl.constexpr,
    DIGITS: tl.constexpr, HAS_Z: tl.constexpr, ASM: tl.constexpr, WAITS: tl.constexpr,
    CHUNK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write a chunk's outputs: the state's part and that of the entries that no fold has taken.

    Pointers are those of the row and head. ``reading``: ``out``, ``x``, ``scale``, ``coef`` and
    ``gate_z``, the strides of a token of ``out``, ``gate_z`` and ``x``, the ring indices ``[NE]``
    of the entries from the row's oldest on, which of them the chunk reads, the row's length, and
    whether it is read in full. ``WAITS``: the pull-back may still run while the first rows of the
    state are on their way.
    """
    out, x, scale, coef, gate_z, out_token, z_token, x_token, at_e, e_live, length, full = reading
    kk, w = tl.arange(0, BK), tl.arange(0, BK // 4)
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    PACKED: tl.constexpr = DIGITS and DEPTH == "high" and (T == 1 or BK >= 32)
    NT: tl.constexpr = tokens_of(T)
    SPLIT: tl.constexpr = ASM and out.dtype.element_ty.primitive_bitwidth == 16
    FK: tl.constexpr = BK if BK > 16 else 16
    FR: tl.constexpr = BR if T == 1 or BR > 16 else 16
    VEC: tl.constexpr = 4 if FORMAT == "f32" or FK == 16 else 8
    SLICES: tl.constexpr = FK // (4 * VEC)
    for block in tl.static_range(0, CHUNK, FR):
        r = row0 + block + tl.arange(0, FR)
        r_live = r < row_end
        if PACKED and T == 1:
            at = high.to(tl.pointer_type(tl.int32), bitcast=True) + r[:, None] * (K // 4)
            state = tl.load(at + w[None, :], r_live[:, None] & (w < K // 4)[None, :], 0)
        elif PACKED or T == 1:
            at_s, live = r[:, None] * K + kk[None, :], r_live[:, None] & (kk < K)[None, :]
            state = read_numbers(high, low, at_s, live, full, FORMAT, DEPTH)
        else:
            in_block, channel = offsets(FR, SLICES, VEC)
            row = row0 + block + in_block
            at_s = tl.max_contiguous(row * K + channel, (1, 1, 1, VEC))
            live = (row < row_end) & (channel < K)
            state = read_numbers(high, low, at_s, live, full, FORMAT, DEPTH)
        row_scale = 1.0
        if SCALED:
            row_scale = tl.load(scales + r, r_live, 0.0)
        if WAITS and block == 0:
            gdc_wait()
        values = load_values(ring_v, at_e, e_live, r, r_live, V)
        if T > 1 and block == 0:
            c, factor = load_weights(coef, scale, e_live, length, NE, NT, TILES, SHARED_X, True)
            vectors = load_vectors(x, columns, x_token, length, K, NT, SCALED, FK)
            if not PACKED:
                vectors = sliced(vectors, NT, SLICES, VEC)
        if T == 1:
            y = read_one(state, x, columns, length > 0, K, PACKED, SCALED, ASM, BK)
            c, factor = load_weights(coef, scale, e_live, length, NE, NT, TILES, SHARED_X, False)
        elif PACKED:
            y = read_digits(state, vectors)
        else:
            y = read_block(state, vectors, NT, SPLIT, FR, SLICES, VEC)
        write_outputs(y, values, c, factor, row_scale, r, r_live, length, out, gate_z, out_token,
                      z_token, T, NT, SCALED, HAS_Z, SPLIT, T > 1)  # fmt: skip
