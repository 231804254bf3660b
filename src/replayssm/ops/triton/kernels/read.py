"""The read, S_0 X for one chunk of value rows: the only part that streams the state.

A high read of a fixed-point format never converts its bytes: ``x`` times the column scales is cut
into two signed base-256 digits (15 bits and sign), and four products a lane go into one int32 sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replayssm.ops.triton.kernels.common import dot4, dot_near, larger
from replayssm.ops.triton.kernels.planes import read_full, step_size

DIGITS_MAX = tl.constexpr(32512.0)


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
def _one(
    state, values, x, coef, columns, e_live, here, K: tl.constexpr, NE: tl.constexpr,
    PACKED: tl.constexpr, SCALED: tl.constexpr, SHARED_X: tl.constexpr, scale, row_scale,
    ASM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return one token's outputs ``[rows]`` of a block; pointers are those of the token."""
    kk, e = tl.arange(0, BK), tl.arange(0, NE)
    if PACKED:
        top, bottom, unit = pack_digits(x, columns, K, BK // 4)
        y = read_words(state, top, bottom, ASM).to(tl.float32) * unit
    else:
        vector = tl.load(x + kk, (kk < K) & here, 0.0).to(tl.float32)
        if SCALED:
            vector *= tl.load(columns + kk, kk < K, 0.0).to(tl.float32)
        y = tl.sum(state.to(tl.float32) * vector[None, :], 1)
    if SCALED:
        y *= row_scale
    if SHARED_X:
        y *= tl.load(scale, here, 0.0)
    c = tl.load(coef + e, e_live & here, 0.0)
    return y + tl.sum(c[:, None] * values.to(tl.float32), 0)


@triton.jit
def _digits(part):
    """Cut fp32 ``part [K, tokens]`` into two signed digits and what one unit is worth."""
    amax = tl.max(tl.abs(part), 0)
    per_unit = tl.where(amax > 0, DIGITS_MAX / amax, 0.0)
    number = tl.floor(part * per_unit[None, :] + 0.5).to(tl.int32)
    top = (number + 128) >> 8
    return top.to(tl.int8), (number - (top << 8)).to(tl.int8), amax / DIGITS_MAX


@triton.jit
def _many(
    state, values, x, coef, columns, x_token, e_live, length, scale, row_scale,
    T: tl.constexpr, K: tl.constexpr, NE: tl.constexpr, TILES: tl.constexpr, NT: tl.constexpr,
    PACKED: tl.constexpr, SCALED: tl.constexpr, SHARED_X: tl.constexpr, SPLIT: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the outputs ``[rows, NT]`` of a block for all tokens, by matrix products."""
    kk, e, t = tl.arange(0, BK), tl.arange(0, NE), tl.arange(0, NT)
    here = t < length
    at, live = x + t[None, :] * x_token + kk[:, None], (kk < K)[:, None] & here[None, :]
    vectors = tl.load(at, live, 0.0)
    if SCALED:
        vectors = vectors.to(tl.float32)
        vectors *= tl.load(columns + kk, kk < K, 0.0).to(tl.float32)[:, None]
    y = tl.zeros((BR, NT), tl.float32)
    if PACKED:
        top, bottom, unit = _digits(vectors)
        coarse = tl.dot(state, top, out_dtype=tl.int32)
        y = ((coarse << 8) + tl.dot(state, bottom, out_dtype=tl.int32)).to(tl.float32)
        y *= unit[None, :]
    else:
        if state.dtype == tl.int8:
            state = state.to(tl.bfloat16 if SPLIT else tl.float32)
        y = dot_near(state, vectors, y, SPLIT)
    if SCALED:
        y *= row_scale[:, None]
    if SHARED_X:
        y *= tl.load(scale + t * TILES, here, 0.0)[None, :]
    c = tl.load(coef + t[None, :] * NE + e[:, None], e_live[:, None] & here[None, :], 0.0)
    return dot_near(tl.trans(values), c, y, SPLIT)


@triton.jit
def read_chunk(
    out, x, scale, coef, gate_z, high, low, scales, columns, ring_v,
    out_token, z_token, x_token, start, begin, total, length, full, row0, row_end,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, NE: tl.constexpr,
    TILES: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, SHARED_X: tl.constexpr,
    DIGITS: tl.constexpr, HAS_Z: tl.constexpr, ASM: tl.constexpr, WAITS: tl.constexpr,
    CHUNK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write a chunk's outputs: the state's part and that of entries ``begin .. total - 1``.

    Entries count from the row's oldest, at ring index ``start``. Pointers are those of the row and
    head. ``WAITS``: the pull-back may still run while the first rows of the state are on their way.
    """
    e, kk, w = tl.arange(0, NE), tl.arange(0, BK), tl.arange(0, BK // 4)
    k_live, e_live = kk < K, (e >= begin) & (e < total)
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    PACKED: tl.constexpr = DIGITS and DEPTH == "high" and (T == 1 or BK >= 32)
    # a matrix unit takes 8 tokens or more
    NT: tl.constexpr = 8 if T <= 8 else 1 << (T - 1).bit_length()
    SPLIT: tl.constexpr = ASM and out.dtype.element_ty.primitive_bitwidth == 16
    at_e = start + e
    at_e = tl.where(at_e >= R, at_e - R, at_e)
    for block in tl.static_range(0, CHUNK, BR):
        r = row0 + block + tl.arange(0, BR)
        r_live = r < row_end
        if PACKED and T == 1:
            at = high.to(tl.pointer_type(tl.int32), bitcast=True) + r[:, None] * (K // 4)
            state = tl.load(at + w[None, :], r_live[:, None] & (w < K // 4)[None, :], 0)
        else:
            at_s, live = r[:, None] * K + kk[None, :], r_live[:, None] & k_live[None, :]
            state = read_numbers(high, low, at_s, live, full, FORMAT, DEPTH)
        row_scale = 1.0
        if SCALED:
            row_scale = tl.load(scales + r, r_live, 0.0)
        if WAITS and block == 0:
            gdc_wait()
        values = tl.load(ring_v + at_e[:, None] * V + r[None, :],
                         e_live[:, None] & r_live[None, :], 0.0)  # fmt: skip
        # tokens past the row's length are 0, whatever was read for them
        if T == 1:
            here = length > 0
            y = _one(state, values, x, coef, columns, e_live, here, K, NE, PACKED, SCALED, SHARED_X,
                     scale, row_scale, ASM, BK)  # fmt: skip
            at_z, at_out, y_live, here = gate_z + r, out + r, r_live, r_live & here
        else:
            t = tl.arange(0, NT)
            y = _many(state, values, x, coef, columns, x_token, e_live, length, scale, row_scale,
                      T, K, NE, TILES, NT, PACKED, SCALED, SHARED_X, SPLIT, BR, BK)  # fmt: skip
            at_z = gate_z + t[None, :] * z_token + r[:, None]
            at_out = out + t[None, :] * out_token + r[:, None]
            y_live = r_live[:, None] & (t < T)[None, :]
            here = r_live[:, None] & (t < length)[None, :]
        if HAS_Z:
            z = tl.load(at_z, here, 0.0).to(tl.float32)
            y *= z / (1.0 + tl.exp(-z))
        tl.store(at_out, tl.where(here, y, 0.0).to(out.dtype.element_ty), y_live)
