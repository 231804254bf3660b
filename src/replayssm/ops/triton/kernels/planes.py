"""Device functions that decode and encode a tile of value rows, one format at a time.

``at`` are element offsets ``[rows, K]`` into the planes of a slot's head, ``live`` their mask. The
arithmetic is that of :mod:`replayssm.formats`.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.kernels.common import larger, round_int

ROW_SCALE_MIN = tl.constexpr(2.0**-100)
COLUMN_SCALE_MIN = tl.constexpr(2.0**-60)
COLUMN_SCALE_MAX = tl.constexpr(2.0**60)
HIGH_MAX = tl.constexpr(127.0)


@triton.jit
def column_scale_of(bound, old):
    """Return a column bound as a scale that planes can take."""
    # an entry that is not finite must not take the scale with it: its rows show it
    bound = tl.where(bound < float("inf"), bound, old)
    return tl.minimum(tl.maximum(bound, COLUMN_SCALE_MIN), COLUMN_SCALE_MAX).to(tl.bfloat16)


@triton.jit
def load_planes(high, low, at, live, low_live, FORMAT: tl.constexpr):
    """Return the numbers of both planes, the high one's twice if it is the only one.

    Where ``low_live`` is not set the low plane's number is about its bias: see :func:`read_full`.
    """
    top = tl.load(high + at, mask=live, other=0)
    if FORMAT == "s32" or FORMAT == "q24":
        rest = tl.load(low + at, mask=low_live, other=32768)
    elif FORMAT == "q16":
        rest = tl.load(low + at, mask=low_live, other=128)
    else:
        rest = top
    return top, rest


@triton.jit
def join_planes(top, rest, FORMAT: tl.constexpr):
    """Return both planes joined as fp32: a number (``f32``, ``s32``, ``bf16``) or an integer."""
    if FORMAT == "s32":
        bits = (top.to(tl.int16, bitcast=True).to(tl.int32) << 16) + (rest.to(tl.int32) - 32768)
        value = bits.to(tl.float32, bitcast=True)
    elif FORMAT == "q24":
        value = ((top.to(tl.int32) << 16) + (rest.to(tl.int32) - 32768)).to(tl.float32)
    elif FORMAT == "q16":
        value = ((top.to(tl.int32) << 8) + (rest.to(tl.int32) - 128)).to(tl.float32)
    else:
        value = top.to(tl.float32)
    return value


@triton.jit
def read_full(high, low, at, live, low_live, FORMAT: tl.constexpr):
    """Return both planes joined; where ``low_live`` is not set, the high plane's number."""
    top, rest = load_planes(high, low, at, live, low_live, FORMAT)
    return join_where(top, rest, low_live, FORMAT)


@triton.jit
def join_where(top, rest, low_live, FORMAT: tl.constexpr):
    """Return both planes joined; where ``low_live`` is not set, the high plane's number."""
    if FORMAT == "s32" or FORMAT == "q24" or FORMAT == "q16":
        # what a masked load puts in is sign-extended when numbers are packed in a word, which
        # changes those with the top bit set
        bias: tl.constexpr = 128 if FORMAT == "q16" else 32768
        rest = tl.where(low_live, rest, tl.cast(bias, rest.dtype))
    return join_planes(top, rest, FORMAT)


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
def as_read(top, rest, full, FORMAT: tl.constexpr, DEPTH: tl.constexpr):
    """Return what a read of the row's depth sees of both planes' numbers, without scales."""
    numbers = top
    if FORMAT != "f32" and FORMAT != "bf16" and DEPTH != "high":
        numbers = join_where(top, rest, full, FORMAT) * step_size(FORMAT)
    return numbers


@triton.jit
def _join(top, rest, FORMAT: tl.constexpr):
    """Return ``(top << bits) + rest`` of a fixed-point format as fp32, on NVIDIA chips.

    A byte permute with sign extension and one conversion a number. Not marked as pure, so
    that it is not made again for every layout that its numbers are wanted in.
    """
    if FORMAT == "q24":
        joined = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, $5, 0x8054;
            prmt.b32 b, $4, $5, 0x9176;
            prmt.b32 c, $4, $6, 0xa254;
            prmt.b32 d, $4, $6, 0xb376;
            cvt.rn.f32.s32 $0, a;
            cvt.rn.f32.s32 $1, b;
            cvt.rn.f32.s32 $2, c;
            cvt.rn.f32.s32 $3, d;
            }""",
            "=f,=f,=f,=f,r,r,r", [top, rest], tl.float32, False, 4,
        )  # fmt: skip
    else:
        joined = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, $5, 0x8804;
            prmt.b32 b, $4, $5, 0x9915;
            prmt.b32 c, $4, $5, 0xaa26;
            prmt.b32 d, $4, $5, 0xbb37;
            cvt.rn.f32.s32 $0, a;
            cvt.rn.f32.s32 $1, b;
            cvt.rn.f32.s32 $2, c;
            cvt.rn.f32.s32 $3, d;
            }""",
            "=f,=f,=f,=f,r,r", [top, rest], tl.float32, False, 4,
        )  # fmt: skip
    return joined


@triton.jit
def _split(wide, FORMAT: tl.constexpr):
    """Round fp32 to the joined integers of a fixed-point format and cut them, on NVIDIA chips."""
    if FORMAT == "q24":
        top, rest = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            cvt.rni.s32.f32 a, $3;
            cvt.rni.s32.f32 b, $4;
            cvt.rni.s32.f32 c, $5;
            cvt.rni.s32.f32 d, $6;
            add.s32 a, a, 32768;
            add.s32 b, b, 32768;
            add.s32 c, c, 32768;
            add.s32 d, d, 32768;
            prmt.b32 $1, a, b, 0x5410;
            prmt.b32 $2, c, d, 0x5410;
            prmt.b32 a, a, b, 0x0062;
            prmt.b32 c, c, d, 0x0062;
            prmt.b32 $0, a, c, 0x5410;
            }""",
            "=&r,=&r,=&r,f,f,f,f", [wide], (tl.int8, tl.uint16), True, 4,
        )  # fmt: skip
    else:
        top, rest = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            cvt.rni.s32.f32 a, $2;
            cvt.rni.s32.f32 b, $3;
            cvt.rni.s32.f32 c, $4;
            cvt.rni.s32.f32 d, $5;
            add.s32 a, a, 128;
            add.s32 b, b, 128;
            add.s32 c, c, 128;
            add.s32 d, d, 128;
            prmt.b32 a, a, b, 0x5140;
            prmt.b32 c, c, d, 0x5140;
            prmt.b32 $1, a, c, 0x5410;
            prmt.b32 $0, a, c, 0x7632;
            }""",
            "=&r,=&r,f,f,f,f", [wide], (tl.int8, tl.uint8), True, 4,
        )  # fmt: skip
    return top, rest


@triton.jit
def load_rows(high, low, scales, at, live, rows, rows_live, FORMAT: tl.constexpr):
    """Return a block of the full state as it is stored: both planes' numbers and row scales."""
    top, rest = load_planes(high, low, at, live, live, FORMAT)
    unit = 1.0
    if FORMAT == "q24" or FORMAT == "q16":
        unit = tl.load(scales + rows, rows_live, 0.0) * step_size(FORMAT)
    return top, rest, unit


@triton.jit
def join_rows(top, rest, unit, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Return the block that :func:`load_rows` found, without its column scales."""
    if FORMAT == "q24" or FORMAT == "q16":
        if ASM:
            bias: tl.constexpr = 32768 if FORMAT == "q24" else 128
            # one rounding, of (joined - bias) unit: the product with the bias is exact
            state = tl.fma(_join(top, rest, FORMAT), unit, -bias * unit)
        else:
            state = join_planes(top, rest, FORMAT) * unit
    else:
        state = join_planes(top, rest, FORMAT)
    return state


@triton.jit
def write_scales(state, scales, rows, rows_live, FORMAT: tl.constexpr):
    """Store the row scales of ``state [slices, rows, channels]``, divided by its column scales.

    Return them and how many units of a joined integer one is, ``[rows]`` each.
    """
    amax = tl.reduce(tl.reduce(tl.abs(state), 2, larger), 0, larger)
    return store_scales(amax, scales, rows, rows_live, FORMAT)


@triton.jit
def store_scales(amax, scales, rows, rows_live, FORMAT: tl.constexpr):
    """Store the scales of rows by their largest magnitudes; return as :func:`write_scales`."""
    scale = amax / HIGH_MAX
    is_finite = scale < float("inf")
    usable = is_finite & (scale >= ROW_SCALE_MIN)
    units: tl.constexpr = 65536 if FORMAT == "q24" else 256
    kept = tl.where(is_finite, tl.where(usable, scale, 0.0), float("nan"))
    tl.store(scales + rows, kept, mask=rows_live)
    return kept, tl.where(usable, units / tl.where(usable, scale, 1.0), 0.0)


@triton.jit
def write_rows(state, high, low, at, live, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Encode fp32 numbers, of a scaled format in units of its joined integer, and store them.

    Return the numbers of both planes, as :func:`load_planes` would.
    """
    if FORMAT == "s32":
        state = tl.where(state == state, state, float("nan"))
        bits = state.to(tl.int32, bitcast=True)
        bits = tl.where(state == state, bits, 0x7FC00000) + 32768
        top = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        rest = (bits & 0xFFFF).to(tl.uint16)
    elif FORMAT == "q24" or FORMAT == "q16":
        if ASM:
            top, rest = _split(state, FORMAT)
        else:
            bits: tl.constexpr = 16 if FORMAT == "q24" else 8
            biased = round_int(state) + (1 << (bits - 1))
            top = (biased >> bits).to(tl.int8)
            rest = (biased & ((1 << bits) - 1)).to(low.dtype.element_ty)
    else:
        top = state.to(high.dtype.element_ty)
        rest = top
    tl.store(high + at, top, mask=live)
    if FORMAT == "s32" or FORMAT == "q24" or FORMAT == "q16":
        tl.store(low + at, rest, mask=live)
    return top, rest
