"""The read, S_0 X for one chunk of value rows: the only part that streams the state.

A high read of a fixed-point format never converts its bytes: ``x`` times the column scales is cut
into two signed base-256 digits (15 bits and sign), and four products a lane go into one int32 sum.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.common import dot4, larger
from replayssm.ops.triton.planes import read_full, read_high, step_size

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
        return read_high(high, at, live)
    # a low plane that is not read counts as its bias, which leaves the high plane's number
    return read_full(high, low, at, live, live & full, FORMAT) * step_size(FORMAT)


@triton.jit
def read_chunk(
    out, x, scale, coef, gate_z, high, low, scales, columns, ring_v,
    out_token, z_token, x_token, start, begin, total, length, full, row0, row_end,
    T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, NE: tl.constexpr,
    TILES: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, SHARED_X: tl.constexpr,
    DIGITS: tl.constexpr, HAS_Z: tl.constexpr, ASM: tl.constexpr, CHUNK: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write a chunk's outputs: the state's part and that of entries ``begin .. total - 1``.

    Entries count from the row's oldest, at ring index ``start``. Pointers are those of the row and
    head.
    """
    e, kk, w = tl.arange(0, NE), tl.arange(0, BK), tl.arange(0, BK // 4)
    k_live, e_live = kk < K, (e >= begin) & (e < total)
    SCALED: tl.constexpr = FORMAT == "q24" or FORMAT == "q16"
    PACKED: tl.constexpr = DIGITS and DEPTH == "high"
    at_e = start + e
    at_e = tl.where(at_e >= R, at_e - R, at_e)
    for block in tl.static_range(0, CHUNK, BR):
        r = row0 + block + tl.arange(0, BR)
        r_live = r < row_end
        if PACKED:
            at = high.to(tl.pointer_type(tl.int32), bitcast=True) + r[:, None] * (K // 4)
            state = tl.load(at + w[None, :], r_live[:, None] & (w < K // 4)[None, :], 0)
        else:
            at_s, live = r[:, None] * K + kk[None, :], r_live[:, None] & k_live[None, :]
            state = read_numbers(high, low, at_s, live, full, FORMAT, DEPTH)
        values = tl.load(ring_v + at_e[:, None] * V + r[None, :],
                         e_live[:, None] & r_live[None, :], 0.0).to(tl.float32)  # fmt: skip
        if SCALED:
            row_scale = tl.load(scales + r, r_live, 0.0)
        for t in tl.static_range(T):
            here = t < length
            if PACKED:
                top, bottom, unit = pack_digits(x + t * x_token, columns, K, BK // 4)
                y = read_words(state, top, bottom, ASM).to(tl.float32) * unit
            else:
                vector = tl.load(x + t * x_token + kk, k_live & here, 0.0).to(tl.float32)
                if SCALED:
                    vector *= tl.load(columns + kk, k_live, 0.0).to(tl.float32)
                y = tl.sum(state * vector[None, :], 1)
            if SCALED:
                y *= row_scale
            if SHARED_X:
                y *= tl.load(scale + t * TILES, here, 0.0)
            c = tl.load(coef + t * NE + e, e_live & here, 0.0)
            y += tl.sum(c[:, None] * values, 0)
            if HAS_Z:
                z = tl.load(gate_z + t * z_token + r, r_live & here, 0.0).to(tl.float32)
                y *= z / (1.0 + tl.exp(-z))
            # tokens past the row's length are 0, whatever was read for them
            tl.store(
                out + t * out_token + r, tl.where(here, y, 0.0).to(out.dtype.element_ty), r_live
            )
