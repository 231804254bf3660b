"""Element types of inputs, rings, outputs and planes: how sixteen of them become fp32 and go back.

Every function takes ``n``, the number of lanes that exist; 16 or more is the plain case, and with a
literal the compiler removes the other branch. Lanes from ``n`` on are masked at the load: they read
as 0 and are not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from replayssm.formats import HIGH_MAX, ROW_SCALE_MIN
from replayssm.ops.cpu.vector import (
    F32,
    I32,
    LANES,
    Vec,
    call,
    constant,
    define,
    i64,
    inlined,
    lane_mask,
    load,
    load_some,
    none,
    pick,
    read_lanes,
    store,
    store_some,
    total,
    vec,
    write_lanes,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Four = tuple[Vec, Vec, Vec, Vec]

# codes of element types and formats inside kernels
IS_F32, IS_BF16, IS_F16 = 0, 1, 2
FMT_F32, FMT_S32, FMT_Q24, FMT_Q16, FMT_BF16 = 0, 1, 2, 3, 4

I8 = ir.VectorType(ir.IntType(8), LANES)
I16 = ir.VectorType(ir.IntType(16), LANES)
F16 = ir.VectorType(ir.HalfType(), LANES)


def _widen_bf16(b: Any, raw: Any) -> Any:  # noqa: ANN401
    return b.bitcast(b.shl(b.zext(raw, I32), constant(I32, 16)), F32)


def _widen_f16(b: Any, raw: Any) -> Any:  # noqa: ANN401
    return b.fpext(b.bitcast(raw, F16), F32)


def _narrow_bf16(b: Any, x: Any) -> Any:  # noqa: ANN401
    # round to nearest even; NaN becomes the canonical quiet NaN
    bits = b.bitcast(x, I32)
    odd = b.and_(b.lshr(bits, constant(I32, 16)), constant(I32, 1))
    rounded = b.lshr(b.add(bits, b.add(odd, constant(I32, 0x7FFF))), constant(I32, 16))
    is_nan = b.fcmp_unordered("uno", x, x)
    return b.trunc(b.select(is_nan, constant(I32, 0x7FC0), rounded), I16)


def _narrow_f16(b: Any, x: Any) -> Any:  # noqa: ANN401
    return b.bitcast(b.fptrunc(x, F16), I16)


def _join(b: Any, high: Any, low: Any, bits: int) -> Any:  # noqa: ANN401
    q = b.add(b.shl(b.sext(high, I32), constant(I32, bits)), b.zext(low, I32))
    return b.sub(q, constant(I32, 1 << (bits - 1)))


def _cut(b: Any, q: Any, bits: int) -> tuple[Any, Any]:  # noqa: ANN401
    # the biased low plane is what truncation to its width leaves
    biased = b.add(q, constant(I32, 1 << (bits - 1)))
    return b.ashr(biased, constant(I32, bits)), biased


def _store_s32(b: Any, high: Any, low: Any, x: Any, n: Any = None) -> None:  # noqa: ANN401
    is_nan = b.fcmp_unordered("uno", x, x)
    q = b.select(is_nan, constant(I32, 0x7FC00000), b.bitcast(x, I32))
    top, rest = _cut(b, q, 16)
    write_lanes(b, high, b.trunc(top, I16), n)
    write_lanes(b, low, b.trunc(rest, I16), n)


def _fixed(b: Any, x: Any, bits: int) -> Any:  # noqa: ANN401
    # a row is divided by its own maximum: numbers exceed the limit by their rounding at most
    q = call(b, "llvm.lrint.v16i32.v16f32", I32, x)
    limit = constant(I32, HIGH_MAX << bits)
    q = b.select(b.icmp_signed(">", q, limit), limit, q)
    limit = constant(I32, -HIGH_MAX << bits)
    return b.select(b.icmp_signed("<", q, limit), limit, q)


def _store_fixed(b: Any, high: Any, low: Any, x: Any, bits: int, n: Any = None) -> None:  # noqa: ANN401
    top, rest = _cut(b, _fixed(b, x, bits), bits)
    write_lanes(b, high, b.trunc(top, I8), n)
    write_lanes(b, low, b.trunc(rest, I16 if bits == 16 else I8), n)


def _row_scales(b: Any, top: Any) -> Any:  # noqa: ANN401
    # of row amaxes: NaN where one is not finite, 0 under the smallest that has a reciprocal
    scale = b.fdiv(top, constant(F32, HIGH_MAX))
    is_small = b.fcmp_ordered("<", scale, constant(F32, ROW_SCALE_MIN))
    scale = b.select(is_small, constant(F32, 0.0), scale)
    is_finite = b.icmp_unsigned("<", b.bitcast(top, I32), constant(I32, 0x7F800000))
    return b.select(is_finite, scale, constant(F32, float("nan")))


def _narrow(b: Any, parts: Sequence[Any], size: int, at: int) -> list[Any]:  # noqa: ANN401
    # of every lane the ``size`` bytes from byte ``at`` on, two vectors at a time
    kind = ir.VectorType(ir.IntType(8 * size), 4 // size * LANES)
    lanes = [i * (4 // size) + at // size for i in range(2 * LANES)]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [pick(b, b.bitcast(x, kind), b.bitcast(y, kind), lanes) for x, y in pairs]


def _store_wide(b: Any, high: Any, low: Any, bits: int, *parts: Any) -> None:  # noqa: ANN401
    # bytes are picked from whole vectors: a truncation of each vector by itself costs twice as much
    biased = [b.add(_fixed(b, x, bits), constant(I32, 1 << (bits - 1))) for x in parts]
    size = bits // 8
    for address, width, at in ((high, 1, size), (low, size, 0)):
        x, y = _narrow(b, biased, width, at)
        write_lanes(b, address, pick(b, x, y, range(4 * LANES)))


def _load_pair(
    convert: Callable[..., Any], *kinds: ir.VectorType
) -> tuple[Callable[..., Vec], Callable[..., Vec]]:
    # (all lanes, some lanes) of a number whose parts live at one address per kind
    addresses = [i64] * len(kinds)

    def parts(b: Any, values: Any, n: Any) -> list[Any]:  # noqa: ANN401
        return [read_lanes(b, p, kind, n) for p, kind in zip(values, kinds, strict=True)]

    def some(b: Any, *values: Any) -> Any:  # noqa: ANN401
        # parts of 0 do not make a number of 0 where the low part is biased: mask the number as well
        *places, n = values
        made = convert(b, *parts(b, places, n))
        return b.select(lane_mask(b, n), made, constant(F32, 0.0))

    return (
        define(vec, addresses, lambda b, *p: convert(b, *parts(b, p, None))),
        define(vec, [*addresses, i64], some),
    )


def _store_pair(convert: Callable[..., Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    return (
        define(none, (i64, vec), lambda b, p, x: write_lanes(b, p, convert(b, x))),
        define(none, (i64, vec, i64), lambda b, p, x, n: write_lanes(b, p, convert(b, x), n)),
    )


_load_bf16, _load_bf16_some = _load_pair(_widen_bf16, I16)
_load_f16, _load_f16_some = _load_pair(_widen_f16, I16)
_store_bf16, _store_bf16_some = _store_pair(_narrow_bf16)
_store_f16, _store_f16_some = _store_pair(_narrow_f16)
_load_i8, _load_i8_some = _load_pair(lambda b, h: b.sitofp(b.sext(h, I32), F32), I8)
_load_s32, _load_s32_some = _load_pair(lambda b, h, w: b.bitcast(_join(b, h, w, 16), F32), I16, I16)
_load_q24, _load_q24_some = _load_pair(lambda b, h, w: b.sitofp(_join(b, h, w, 16), F32), I8, I16)
_load_q16, _load_q16_some = _load_pair(lambda b, h, w: b.sitofp(_join(b, h, w, 8), F32), I8, I8)
_put_s32 = define(none, (i64, i64, vec), _store_s32)
_put_s32_some = define(none, (i64, i64, vec, i64), _store_s32)
_put_q24 = define(none, (i64, i64, vec), lambda b, h, w, x: _store_fixed(b, h, w, x, 16))
_put_q24_some = define(
    none, (i64, i64, vec, i64), lambda b, h, w, x, n: _store_fixed(b, h, w, x, 16, n)
)
_put_q16 = define(none, (i64, i64, vec), lambda b, h, w, x: _store_fixed(b, h, w, x, 8))
_put_q16_some = define(
    none, (i64, i64, vec, i64), lambda b, h, w, x, n: _store_fixed(b, h, w, x, 8, n)
)


row_scales: Callable[[Vec], Vec] = define(vec, (vec,), _row_scales)
_put_wide_q24 = define(
    none, (i64, i64, *[vec] * 4), lambda b, h, w, *x: _store_wide(b, h, w, 16, *x)
)
_put_wide_q16 = define(
    none, (i64, i64, *[vec] * 4), lambda b, h, w, *x: _store_wide(b, h, w, 8, *x)
)


@inlined
def load_as(at: int, kind: int, n: int) -> Vec:
    """Load n elements of an element type as fp32."""
    if n >= LANES:
        if kind == IS_F32:
            return load(at)
        if kind == IS_BF16:
            return _load_bf16(at)
        return _load_f16(at)
    if kind == IS_F32:
        return load_some(at, n)
    if kind == IS_BF16:
        return _load_bf16_some(at, n)
    return _load_f16_some(at, n)


@inlined
def store_as(at: int, kind: int, x: Vec, n: int) -> None:
    """Round fp32 to an element type (to nearest even) and store n elements."""
    if n >= LANES:
        if kind == IS_F32:
            store(at, x)
        elif kind == IS_BF16:
            _store_bf16(at, x)
        else:
            _store_f16(at, x)
    elif kind == IS_F32:
        store_some(at, x, n)
    elif kind == IS_BF16:
        _store_bf16_some(at, x, n)
    else:
        _store_f16_some(at, x, n)


@inlined
def scalar_as(at: int, kind: int) -> float:
    """Load one element of an element type as fp32."""
    return total(load_as(at, kind, 1))


@inlined
def width(kind: int) -> int:
    """Return the bytes of one element."""
    return 4 if kind == IS_F32 else 2


@inlined
def copy_in(to: int, at: int, kind: int, n: int) -> None:
    """Copy n elements to padded fp32: whole lanes are written, those behind n are 0."""
    size, whole = width(kind), n // LANES * LANES
    for i in range(0, whole, LANES):
        store(to + 4 * i, load_as(at + size * i, kind, LANES))
    if whole < n:
        store(to + 4 * whole, load_as(at + size * whole, kind, n - whole))


@inlined
def copy_out(to: int, kind: int, at: int, n: int) -> None:
    """Copy n padded fp32 numbers to an element type."""
    size, whole = width(kind), n // LANES * LANES
    for i in range(0, whole, LANES):
        store_as(to + size * i, kind, load(at + 4 * i), LANES)
    if whole < n:
        store_as(to + size * whole, kind, load(at + 4 * whole), n - whole)


@inlined
def clear(at: int, n: int) -> None:
    """Zero n padded fp32 numbers."""
    for i in range(0, n, LANES):
        store(at + 4 * i, zero())


@inlined
def put_f32(high: int, low: int, i: int, x: Vec, n: int) -> None:
    """Write ``f32``."""
    store_as(high + 4 * i, IS_F32, x, n)


@inlined
def put_bf16(high: int, low: int, i: int, x: Vec, n: int) -> None:
    """Round and write ``bf16``."""
    store_as(high + 2 * i, IS_BF16, x, n)


@inlined
def plane_f32(high: int, low: int, i: int, n: int) -> Vec:
    """Read ``f32``."""
    return load(high + 4 * i) if n >= LANES else load_some(high + 4 * i, n)


@inlined
def plane_bf16(high: int, low: int, i: int, n: int) -> Vec:
    """Read ``bf16``, or the high plane of ``s32``."""
    return _load_bf16(high + 2 * i) if n >= LANES else _load_bf16_some(high + 2 * i, n)


@inlined
def plane_i8(high: int, low: int, i: int, n: int) -> Vec:
    """Read the high plane of ``q24`` or ``q16``, in units of row scale times column scale."""
    return _load_i8(high + i) if n >= LANES else _load_i8_some(high + i, n)


@inlined
def plane_s32(high: int, low: int, i: int, n: int) -> Vec:
    """Read both planes of ``s32``."""
    if n >= LANES:
        return _load_s32(high + 2 * i, low + 2 * i)
    return _load_s32_some(high + 2 * i, low + 2 * i, n)


@inlined
def plane_q24(high: int, low: int, i: int, n: int) -> Vec:
    """Read both planes of ``q24``, in units of 2^-16 row scale times column scale."""
    if n >= LANES:
        return _load_q24(high + i, low + 2 * i)
    return _load_q24_some(high + i, low + 2 * i, n)


@inlined
def plane_q16(high: int, low: int, i: int, n: int) -> Vec:
    """Read both planes of ``q16``, in units of 2^-8 row scale times column scale."""
    if n >= LANES:
        return _load_q16(high + i, low + i)
    return _load_q16_some(high + i, low + i, n)


@inlined
def put_s32(high: int, low: int, i: int, x: Vec, n: int) -> None:
    """Write both planes of ``s32``."""
    if n >= LANES:
        _put_s32(high + 2 * i, low + 2 * i, x)
    else:
        _put_s32_some(high + 2 * i, low + 2 * i, x, n)


@inlined
def put_q24(high: int, low: int, i: int, x: Vec, n: int) -> None:
    """Round, clip, cut and write both planes of ``q24``."""
    if n >= LANES:
        _put_q24(high + i, low + 2 * i, x)
    else:
        _put_q24_some(high + i, low + 2 * i, x, n)


@inlined
def put_q16(high: int, low: int, i: int, x: Vec, n: int) -> None:
    """Round, clip, cut and write both planes of ``q16``."""
    if n >= LANES:
        _put_q16(high + i, low + i, x)
    else:
        _put_q16_some(high + i, low + i, x, n)


@inlined
def put_wide_q24(high: int, low: int, i: int, x: Four) -> None:
    """Write 64 numbers of both planes of ``q24``."""
    _put_wide_q24(high + i, low + 2 * i, x[0], x[1], x[2], x[3])


@inlined
def put_wide_q16(high: int, low: int, i: int, x: Four) -> None:
    """Write 64 numbers of both planes of ``q16``."""
    _put_wide_q16(high + i, low + i, x[0], x[1], x[2], x[3])
