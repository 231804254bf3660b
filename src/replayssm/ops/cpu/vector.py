"""Sixteen fp32 lanes as a compiled value, so that the order of every sum is written down.

An auto-vectorised reduction may be summed in another order in another kernel, on another machine or
for another batch. Here each kernel says its order: one accumulator per (value row, query), key
chunks of 16 in ascending order, then the tree of :func:`total`. That makes outputs independent of T
and of the batch, and equal for formats that decode to equal numbers. Where registers are narrower
the compiler splits the lanes; results are the same.

Addresses are plain int64, so any stride is served by one compiled specialisation.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LANES = 16
# bytes of sixteen fp32 lanes
VECTOR = 4 * LANES
F32 = ir.VectorType(ir.FloatType(), LANES)
I32 = ir.VectorType(ir.IntType(32), LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)
ABS_MASK = 0x7FFFFFFF
MANTISSA_BITS = 23
LOG2_E = 1.44269502162933349609375
# Kernels are cached by processor, so this is no constant of another machine's
IS_ZEN = get_host_cpu_name().startswith("znver")
# how near a fetch brings a line, 3 being the nearest cache: Zen has few of those on their way at a
# time, and many to its second cache
NEAR = 2 if IS_ZEN else 3
# 1.5 * 2^23: fp32 numbers around it are whole, positive and negative offsets alike
INTEGERS = 12582912.0
# exp is a normal fp32 number between these
EXP_MIN, EXP_MAX = -87.3365447505531, 88.7228394

# never called from Python, so no wrappers: those took a third of the compile time
INNER: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}

F = TypeVar("F", bound="Callable[..., Any]")


class Vec:
    """Static stand-in for sixteen fp32 lanes; exists in compiled code only."""


class VecType(types.Type):
    """Numba type of :class:`Vec`."""

    def __init__(self) -> None:
        super().__init__(name="Vec16")


vec = VecType()


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: Any) -> None:  # noqa: ANN401
        super().__init__(manager, frontend, F32)  # type: ignore[no-untyped-call]


def device(function: F) -> F:
    """Compile a function that runs inside other kernels; IEEE arithmetic, no reassociation."""
    return cast("F", numba.njit(**INNER)(function))


def inlined(function: F) -> F:
    """Compile a function into its callers: a call would spill every lane to memory.

    It would also pass every field of every named tuple, which a head pays for at each call.
    """
    return cast("F", numba.njit(forceinline=True, **INNER)(function))


def merged(function: F) -> F:
    """Make a function part of its only caller before that is compiled.

    A function that is compiled by itself is compiled again in its caller, and in the caller of
    that: what holds most of a kernel would be so several times.
    """
    return cast("F", numba.njit(inline="always", **INNER)(function))


def single(value: float) -> float:
    """Return an fp32 constant: a bare literal would turn the kernel's arithmetic into fp64."""
    return cast("float", np.float32(value))


def define(result: types.Type, params: Sequence[types.Type], emit: Callable[..., Any]) -> Any:  # noqa: ANN401
    """Make a compiled function of ``params`` from ``emit(builder, *values)``."""

    def made(*_: object) -> tuple[object, Callable[..., Any]]:
        def generate(context: Any, builder: Any, _sig: object, values: Sequence[Any]) -> Any:  # noqa: ANN401
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        return result(*params), generate

    # numba binds arguments by name, so the number of parameters has to be spelled out
    by_count = (
        lambda c: made(c),
        lambda c, a: made(c, a),
        lambda c, a, b: made(c, a, b),
        lambda c, a, b, d: made(c, a, b, d),
        lambda c, a, b, d, e: made(c, a, b, d, e),
        lambda c, a, b, d, e, f: made(c, a, b, d, e, f),
        lambda c, a, b, d, e, f, g: made(c, a, b, d, e, f, g),
        lambda c, a, b, d, e, f, g, h: made(c, a, b, d, e, f, g, h),
        lambda c, a, b, d, e, f, g, h, i: made(c, a, b, d, e, f, g, h, i),
        lambda c, a, b, d, e, f, g, h, i, j: made(c, a, b, d, e, f, g, h, i, j),
    )
    return intrinsic(by_count[len(params)])


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """Return a constant with every lane equal."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:  # noqa: ANN401
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def splat_value(builder: Any, value: Any, kind: ir.VectorType) -> Any:  # noqa: ANN401
    """Copy a scalar to every lane."""
    one = builder.insert_element(
        ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def lane_mask(builder: Any, count: Any) -> Any:  # noqa: ANN401
    """Return the mask of lanes below ``count``."""
    lanes = ir.Constant(I32, list(range(LANES)))
    limit = splat_value(builder, builder.trunc(count, ir.IntType(32)), I32)
    return builder.icmp_signed("<", lanes, limit)


def read_lanes(builder: Any, address: Any, kind: ir.VectorType, count: Any = None) -> Any:  # noqa: ANN401
    """Load lanes; with ``count``, lanes from ``count`` on are not touched and read as 0."""
    pointer = builder.inttoptr(address, ir.PointerType(kind))
    if count is None:
        return builder.load(pointer, align=1)
    bits = kind.element.width if isinstance(kind.element, ir.IntType) else 32
    name = f"llvm.masked.load.v16{'f32' if kind == F32 else f'i{bits}'}.p0"
    one = ir.Constant(ir.IntType(32), 1)
    return call(
        builder, name, kind, pointer, one, lane_mask(builder, count), ir.Constant(kind, None)
    )


def write_lanes(builder: Any, address: Any, value: Any, count: Any = None) -> None:  # noqa: ANN401
    """Store lanes; with ``count``, only the first ``count``."""
    kind = value.type
    pointer = builder.inttoptr(address, ir.PointerType(kind))
    if count is None:
        builder.store(value, pointer, align=1)
        return
    bits = kind.element.width if isinstance(kind.element, ir.IntType) else 32
    name = f"llvm.masked.store.v16{'f32' if kind == F32 else f'i{bits}'}.p0"
    one = ir.Constant(ir.IntType(32), 1)
    call(builder, name, ir.VoidType(), value, pointer, one, lane_mask(builder, count))


def pick(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:  # noqa: ANN401
    """Return the lanes of two vectors that ``lanes`` numbers, those of b after those of a."""
    index = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(a, b, index)


def _halve(builder: Any, a: Any, b: Any, group: int, join: Callable[..., Any]) -> Any:  # noqa: ANN401
    # lanes of a and b come in groups; join each group's upper half to its lower half
    count = a.type.count if b is None else 2 * a.type.count
    low = [s + i for s in range(0, count, group) for i in range(group // 2)]
    high = [i + group // 2 for i in low]
    b = ir.Constant(a.type, ir.Undefined) if b is None else b
    return join(builder, pick(builder, a, b, low), pick(builder, a, b, high))


def _total(builder: Any, a: Any) -> Any:  # noqa: ANN401
    for half in (8, 4, 2, 1):
        none = ir.Constant(a.type, ir.Undefined)
        low = pick(builder, a, none, range(half))
        a = builder.fadd(low, pick(builder, a, none, range(half, 2 * half)))
    return builder.extract_element(a, ir.Constant(ir.IntType(32), 0))


def _tree(builder: Any, rows: Sequence[Any], join: Callable[..., Any]) -> Any:  # noqa: ANN401
    # the tree of _total, on all rows at once: level by level, two vectors become one
    level, group = list(rows), LANES
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [_halve(builder, a, b, group, join) for a, b in pairs]
        group //= 2
    (a,) = level
    while group > 1:
        a = _halve(builder, a, None, group, join)
        group //= 2
    return a


def _totals(builder: Any, address: Any, *rows: Any) -> None:  # noqa: ANN401
    write_lanes(builder, address, _tree(builder, rows, lambda b, x, y: b.fadd(x, y)))


def _tops(builder: Any, *rows: Any) -> Any:  # noqa: ANN401
    a = _tree(builder, rows, _max_bits)
    return pick(builder, a, a, [*range(len(rows))] * (LANES // len(rows)))


def _join_halves(builder: Any, a: Any, b: Any) -> Any:  # noqa: ANN401
    half = LANES // 2
    return pick(builder, a, b, [*range(half), *range(LANES, LANES + half)])


def _largest_bits(builder: Any, a: Any) -> Any:  # noqa: ANN401
    return call(builder, "llvm.vector.reduce.umax.v16i32", ir.IntType(32), builder.bitcast(a, I32))


def _abs(builder: Any, a: Any) -> Any:  # noqa: ANN401
    bits = builder.and_(builder.bitcast(a, I32), constant(I32, ABS_MASK))
    return builder.bitcast(bits, F32)


def _max_bits(builder: Any, a: Any, b: Any) -> Any:  # noqa: ANN401
    kind = ir.VectorType(ir.IntType(32), a.type.count)
    x, y = builder.bitcast(a, kind), builder.bitcast(b, kind)
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", x, y), x, y), a.type)


def _finite_or_zero(builder: Any, a: Any) -> Any:  # noqa: ANN401
    bits = builder.and_(builder.bitcast(a, I32), constant(I32, ABS_MASK))
    is_finite = builder.icmp_unsigned("<", bits, constant(I32, 0x7F800000))
    return builder.select(is_finite, a, constant(F32, 0.0))


def _exp(builder: Any, x: Any) -> Any:  # noqa: ANN401
    # exp(x) = 2^n exp(r), |r| <= ln(2)/2; polynomial of the Cephes library, about 1 ulp
    def muladd(a: Any, b: Any, c: float) -> Any:  # noqa: ANN401
        return call(builder, "llvm.fma.v16f32", F32, a, b, constant(F32, ir_float(c)))

    # a float this large has no bits for a fraction: the sum rounds, and its last bits are n
    shifted = muladd(x, constant(F32, ir_float(LOG2_E)), INTEGERS)
    n = builder.fsub(shifted, constant(F32, INTEGERS))
    r = call(builder, "llvm.fma.v16f32", F32, n, constant(F32, -0.693359375), x)
    r = call(builder, "llvm.fma.v16f32", F32, n, constant(F32, 2.1219444170128554e-4), r)
    p = constant(F32, 1.98756912141107022762298583984375e-4)
    for c in (1.3981999e-3, 8.333452e-3, 4.1665796e-2, 1.6666666e-1, 0.5):
        p = muladd(p, r, c)
    p = call(builder, "llvm.fma.v16f32", F32, p, builder.fmul(r, r), r)
    p = builder.bitcast(builder.fadd(p, constant(F32, 1.0)), I32)
    exponent = builder.shl(builder.bitcast(shifted, I32), constant(I32, MANTISSA_BITS))
    p = builder.bitcast(builder.add(p, exponent), F32)
    # no denormal results; what is too large is infinite, and NaN stays NaN
    is_small = builder.fcmp_ordered("<", x, constant(F32, ir_float(EXP_MIN)))
    p = builder.select(is_small, constant(F32, 0.0), p)
    is_large = builder.fcmp_unordered(">", x, constant(F32, ir_float(EXP_MAX)))
    return builder.select(is_large, builder.fmul(x, constant(F32, ir_float(3e38))), p)


def _at_most(builder: Any, a: Any, limit: Any) -> Any:  # noqa: ANN401
    top = splat_value(builder, limit, F32)
    return builder.select(builder.fcmp_ordered(">", a, top), top, a)


def _at_least(builder: Any, a: Any, limit: Any) -> Any:  # noqa: ANN401
    bottom = splat_value(builder, limit, F32)
    return builder.select(builder.fcmp_ordered("<", a, bottom), bottom, a)


def _prefetch(builder: Any, address: Any) -> None:  # noqa: ANN401
    pointer = builder.inttoptr(address, ir.PointerType(ir.IntType(8)))
    word = ir.IntType(32)
    hints = [ir.Constant(word, n) for n in (0, NEAR, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *hints)


def _keep_order(builder: Any) -> None:  # noqa: ANN401
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def ir_float(value: float) -> float:
    """Round to fp32, the only literals LLVM accepts for a float constant."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


i64, f32, none = types.int64, types.float32, types.void

zero: Callable[[], Vec] = define(vec, (), lambda b: constant(F32, 0.0))
splat: Callable[[float], Vec] = define(vec, (f32,), lambda b, x: splat_value(b, x, F32))
fma: Callable[[Vec, Vec, Vec], Vec] = define(
    vec, (vec, vec, vec), lambda b, x, y, z: call(b, "llvm.fma.v16f32", F32, x, y, z)
)
mul: Callable[[Vec, Vec], Vec] = define(vec, (vec, vec), lambda b, x, y: b.fmul(x, y))
add: Callable[[Vec, Vec], Vec] = define(vec, (vec, vec), lambda b, x, y: b.fadd(x, y))
sub: Callable[[Vec, Vec], Vec] = define(vec, (vec, vec), lambda b, x, y: b.fsub(x, y))
div: Callable[[Vec, Vec], Vec] = define(vec, (vec, vec), lambda b, x, y: b.fdiv(x, y))
exp: Callable[[Vec], Vec] = define(vec, (vec,), _exp)
absolute: Callable[[Vec], Vec] = define(vec, (vec,), _abs)
# of magnitudes; NaN counts as larger than infinity, so it is never lost
largest: Callable[[Vec, Vec], Vec] = define(vec, (vec, vec), _max_bits)
finite_or_zero: Callable[[Vec], Vec] = define(vec, (vec,), _finite_or_zero)
at_most: Callable[[Vec, float], Vec] = define(vec, (vec, f32), _at_most)
at_least: Callable[[Vec, float], Vec] = define(vec, (vec, f32), _at_least)
largest_bits: Callable[[Vec], int] = define(types.uint32, (vec,), _largest_bits)
total: Callable[[Vec], float] = define(f32, (vec,), _total)
# store the totals of 4, 8 or 16 vectors as that many consecutive floats
totals4: Callable[..., None] = define(none, (i64, *[vec] * 4), _totals)
totals8: Callable[..., None] = define(none, (i64, *[vec] * 8), _totals)
# the largest (of magnitudes) of each of eight vectors, as lanes that are repeated
tops8: Callable[..., Vec] = define(vec, [vec] * 8, _tops)
# the first eight lanes of two vectors
join_halves: Callable[[Vec, Vec], Vec] = define(vec, (vec, vec), _join_halves)
load: Callable[[int], Vec] = define(vec, (i64,), lambda b, p: read_lanes(b, p, F32))
load_some: Callable[[int, int], Vec] = define(
    vec, (i64, i64), lambda b, p, n: read_lanes(b, p, F32, n)
)
store: Callable[[int, Vec], None] = define(none, (i64, vec), write_lanes)
store_some: Callable[[int, Vec, int], None] = define(
    none, (i64, vec, i64), lambda b, p, x, n: write_lanes(b, p, x, n)
)
get: Callable[[int], float] = define(
    f32, (i64,), lambda b, p: b.load(b.inttoptr(p, ir.PointerType(ir.FloatType())), align=1)
)
put: Callable[[int, float], None] = define(
    none,
    (i64, f32),
    lambda b, p, x: (b.store(x, b.inttoptr(p, ir.PointerType(ir.FloatType())), align=1), None)[1],
)
prefetch: Callable[[int], None] = define(none, (i64,), _prefetch)
# no instruction: loads written before it are made before those behind it
keep_order: Callable[[], None] = define(none, (), _keep_order)


@inlined
def load_four(at: int) -> tuple[Vec, Vec, Vec, Vec]:
    """Load four consecutive vectors."""
    return load(at), load(at + VECTOR), load(at + 2 * VECTOR), load(at + 3 * VECTOR)
