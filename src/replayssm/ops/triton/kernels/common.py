"""Device functions shared by the Triton kernels: positions, gates, exact dots, integer dots.

A plan on the device is ``[6, B]`` int64, one row of the table per field below. A tile that no fold
has reached stands at the slot's base, so every position is >= 0.
"""

import triton
import triton.language as tl

SLOT = tl.constexpr(0)
BASE = tl.constexpr(1)
FOLDED = tl.constexpr(2)
COMMITTED = tl.constexpr(3)
LENGTH = tl.constexpr(4)
FULL = tl.constexpr(5)


@triton.jit
def folded_to(tile, base, folded, WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr):
    """Return the position up to which ``tile`` is folded once the planes reached ``folded``."""
    phase = tile * WINDOW // TILES
    past = folded - KEEP - phase
    boundary = tl.where(past >= 0, past // WINDOW * WINDOW + phase, 0)
    return tl.maximum(base, boundary)


@triton.jit
def oldest_needed(base, folded, WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr):
    """Return the oldest position whose entry some tile has not folded."""
    oldest = folded_to(0, base, folded, WINDOW, KEEP, TILES)
    for tile in tl.static_range(1, TILES):
        oldest = tl.minimum(oldest, folded_to(tile, base, folded, WINDOW, KEEP, TILES))
    return oldest


@triton.jit
def below(x, end, ALWAYS: tl.constexpr):
    """Whether ``x < end``; where it always is, nothing is compared and no register zeroed."""
    return tl.full(x.shape, 1, tl.int1) if ALWAYS else x < end


@triton.jit
def decay_of(gates):
    """Return exp(gates) within a few units in the last place, exactly 0 for -inf.

    The chip's exponential is one of base 2: a gate times log2(e) loses as many of its last bits as
    the gate is large, so what that product lost is put back.
    """
    x = tl.where(gates < -200.0, -200.0, gates)
    scaled = x * 1.4426950408889634
    lost = tl.fma(x, 1.4426950408889634, -scaled) + x * 1.9259629911266175e-8
    return tl.exp2(scaled) * (1.0 + lost * 0.6931471805599453)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def product(x, AXIS: tl.constexpr):
    """Return the product along an axis."""
    return tl.reduce(x, AXIS, _times)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) with full relative precision at both ends."""
    grown = tl.exp(tl.minimum(x, 20.0))
    # log(1 + e) loses e once it is small; its series does not
    near = tl.where(grown < 1e-3, grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0))), 0.0)
    return tl.where(x > 20.0, x, tl.where(grown < 1e-3, near, tl.log(1.0 + grown)))


@triton.jit
def gate(raw_g, raw_w, rate, bias, low, high, GATES: tl.constexpr):
    """Return the log-decay and the write strength of raw inputs; every kernel's one formula.

    ``none``: they are given. ``dt`` (Mamba-2): w = softplus(raw_g + bias) within low .. high,
    g = -rate w. ``beta`` (Gated DeltaNet, KDA): g = -rate softplus(raw_g + bias),
    w = sigmoid(raw_w).
    """
    g, w = raw_g, raw_w
    if GATES == "dt":
        w = tl.minimum(tl.maximum(softplus(raw_g + bias), low), high)
        g = -rate * w
    if GATES == "beta":
        g = -rate * softplus(raw_g + bias)
        w = 1.0 / (1.0 + tl.exp(-raw_w))
    return g, w


@triton.jit
def unit(x, eps, NORM: tl.constexpr):
    """Divide the last axis of fp32 ``x`` by its L2 norm, as sqrt(sum of squares + eps)."""
    if NORM:
        axis: tl.constexpr = len(x.shape) - 1
        x = x * tl.rsqrt(tl.sum(x * x, axis, keep_dims=True) + eps)
    return x


@triton.jit
def unit_key(x, eps, NORM: tl.constexpr):
    """Divide a key that is appended by its norm, with the same bits whatever a block's length.

    The length decides the layout, and the layout the order of a sum. In fp64 the order is lost when
    the sum is rounded, so the ring, and the checkpoint that it is folded into, do not know it.
    """
    if NORM:
        axis: tl.constexpr = len(x.shape) - 1
        wide = x.to(tl.float64)
        squares = tl.sum(wide * wide, axis, keep_dims=True).to(tl.float32)
        x = x * tl.rsqrt(squares + eps)
    return x


@triton.jit
def cut_bf16(a):
    """Return the leading 8 bits of fp32 ``a`` as bf16, and the exact rest; three cuts are all."""
    bits = a.to(tl.int32, bitcast=True)
    top = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return top, a - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def dot_exact(a, b, acc, SPLIT: tl.constexpr):
    """Add ``a @ b`` to ``acc`` with fp32 products; operands are fp32 or of 16 bits.

    ``SPLIT``: on the tensor cores, where bf16 is exact and fp32 is three bf16 parts, of whose
    products fp32 can tell six.
    """
    if SPLIT:
        A16: tl.constexpr = a.dtype == tl.bfloat16
        B16: tl.constexpr = b.dtype == tl.bfloat16
        a_top, b_top = a, b
        if not A16:
            a_top, rest = cut_bf16(a.to(tl.float32))
            a_middle, rest = cut_bf16(rest)
            a_last, _ = cut_bf16(rest)
        if not B16:
            b_top, rest = cut_bf16(b.to(tl.float32))
            b_middle, rest = cut_bf16(rest)
            b_last, _ = cut_bf16(rest)
            acc = tl.dot(a_top, b_last, acc)
        if not A16:
            acc = tl.dot(a_last, b_top, acc)
        if not B16:
            if not A16:
                acc = tl.dot(a_middle, b_middle, acc)
            acc = tl.dot(a_top, b_middle, acc)
        if not A16:
            acc = tl.dot(a_middle, b_top, acc)
        acc = tl.dot(a_top, b_top, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def dot_near(a, b, acc, SPLIT: tl.constexpr):
    """Add ``a @ b`` to ``acc`` with 16 bits or more of each fp32 operand, all of a bf16 one.

    Enough under 16-bit outputs, on the tensor cores; without ``SPLIT`` products are fp32.
    """
    if SPLIT:
        A16: tl.constexpr = a.dtype == tl.bfloat16
        B16: tl.constexpr = b.dtype == tl.bfloat16
        a_top, b_top = a, b
        if not A16:
            a_top, rest = cut_bf16(a)
            a_rest, _ = cut_bf16(rest)
        if not B16:
            b_top, rest = cut_bf16(b)
            b_rest, _ = cut_bf16(rest)
            acc = tl.dot(a_top, b_rest, acc)
        if not A16:
            acc = tl.dot(a_rest, b_top, acc)
        acc = tl.dot(a_top, b_top, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def dot4(a, b, acc, ASM: tl.constexpr):
    """Add the products of four signed bytes in each int32 word of ``a`` and ``b`` to ``acc``."""
    if ASM:
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], tl.int32, True, 1
        )
    else:
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def round_int(x):
    """Round fp32 to int32, half up; NaN becomes 0."""
    return tl.floor(tl.where(x == x, x, 0.0) + 0.5).to(tl.int32)


@triton.jit
def larger(a, b):
    """Return the larger number, or NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_amax(x):
    """Return the largest magnitude of each row; NaN where a row holds one."""
    return tl.reduce(tl.abs(x), 1, larger)


@triton.jit
def _fetch(target):
    """Ask for the cache lines at ``target`` to be brought into the L2 cache (NVIDIA)."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [target], tl.int32, False, 1
    )


@triton.jit
def fetch_entries(ring, start, count, R: tl.constexpr, WIDTH: tl.constexpr):
    """Bring ``count`` entries of a ring, ``WIDTH`` elements each, into the L2 cache."""
    per_line: tl.constexpr = 128 // (ring.dtype.element_ty.primitive_bitwidth // 8)
    lines: tl.constexpr = (WIDTH + per_line - 1) // per_line
    width: tl.constexpr = 1 << (R * lines - 1).bit_length()
    line = tl.arange(0, width)
    at = start + line // lines
    at = tl.where(at >= R, at - R, at)
    # lines beyond the last ask for the first again
    _fetch(ring + tl.where(line < count * lines, at * WIDTH + line % lines * per_line,
                           start * WIDTH))  # fmt: skip
