"""Device functions that decode and encode a tile of value rows, one format at a time.

``at`` are element offsets ``[rows, K]`` into the planes of a slot's head, ``live`` their mask. The
arithmetic is that of :mod:`replayssm.formats`.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.common import round_int, row_amax

ROW_SCALE_MIN = tl.constexpr(2.0**-100)
COLUMN_SCALE_MIN = tl.constexpr(2.0**-60)
COLUMN_SCALE_MAX = tl.constexpr(2.0**60)
HIGH_MAX = tl.constexpr(127.0)


@triton.jit
def read_high(high, at, live):
    """Return the high plane as fp32, without scales."""
    return tl.load(high + at, mask=live, other=0).to(tl.float32)


@triton.jit
def read_full(high, low, at, live, low_live, FORMAT: tl.constexpr):
    """Return both planes joined as fp32: a number (``f32``, ``s32``, ``bf16``) or an integer.

    Where ``low_live`` is not set the low plane counts as its bias: the high plane's number.
    """
    top = tl.load(high + at, mask=live, other=0)
    if FORMAT == "s32":
        bits = top.to(tl.int16, bitcast=True).to(tl.int32) << 16
        bits = bits + tl.load(low + at, mask=low_live, other=32768).to(tl.int32) - 32768
        value = bits.to(tl.float32, bitcast=True)
    elif FORMAT == "q24":
        rest = tl.load(low + at, mask=low_live, other=32768).to(tl.int32)
        value = ((top.to(tl.int32) << 16) + (rest - 32768)).to(tl.float32)
    elif FORMAT == "q16":
        rest = tl.load(low + at, mask=low_live, other=128).to(tl.int32)
        value = ((top.to(tl.int32) << 8) + (rest - 128)).to(tl.float32)
    else:
        value = top.to(tl.float32)
    return value


@triton.jit
def step_size(FORMAT: tl.constexpr):
    """Return what one unit of a joined integer is worth, in row scales."""
    size = 1.0
    if FORMAT == "q24":
        size = 1.0 / 65536.0
    if FORMAT == "q16":
        size = 1.0 / 256.0
    return size


@triton.jit
def read_rows(high, low, scales, at, live, rows, rows_live, FORMAT: tl.constexpr):
    """Return a block of the full state without its column scales."""
    state = read_full(high, low, at, live, live, FORMAT)
    if FORMAT == "q24" or FORMAT == "q16":
        state *= (tl.load(scales + rows, rows_live, 0.0) * step_size(FORMAT))[:, None]
    return state


@triton.jit
def write_tile(state, high, low, scales, at, live, rows_at, rows_live,
               FORMAT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Encode an fp32 tile and store its planes and row scales.

    A scaled format's tile is already divided by its column scales.
    """
    if FORMAT == "s32":
        state = tl.where(state == state, state, float("nan"))
        bits = state.to(tl.int32, bitcast=True)
        bits = tl.where(state == state, bits, 0x7FC00000) + 32768
        top = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(high + at, top, mask=live)
        tl.store(low + at, (bits & 0xFFFF).to(tl.uint16), mask=live)
    elif FORMAT == "q24" or FORMAT == "q16":
        scale = row_amax(state) / HIGH_MAX
        is_finite = scale < float("inf")
        usable = is_finite & (scale >= ROW_SCALE_MIN)
        units: tl.constexpr = 65536 if FORMAT == "q24" else 256
        per_unit = tl.where(usable, units / tl.where(usable, scale, 1.0), 0.0)
        wide = state * per_unit[:, None]
        biased = round_int(wide, ASM) + units // 2
        kept = tl.where(is_finite, tl.where(usable, scale, 0.0), float("nan"))
        tl.store(scales + rows_at, kept, mask=rows_live)
        if FORMAT == "q24":
            tl.store(high + at, (biased >> 16).to(tl.int8), mask=live)
            tl.store(low + at, (biased & 0xFFFF).to(tl.uint16), mask=live)
        else:
            tl.store(high + at, (biased >> 8).to(tl.int8), mask=live)
            tl.store(low + at, (biased & 0xFF).to(tl.uint8), mask=live)
    else:
        tl.store(high + at, state.to(high.dtype.element_ty), mask=live)
