"""Device functions for kernels in Gluon, which says which lane holds what: shuffles, exact cuts.

Gluon takes plain Triton functions too where they work element by element, so that a gate has one
formula: :mod:`.common`.
"""

# Triton reads tuple sums, not starred tuples
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.triton.kernels.common import (
    BASE,
    COMMITTED,
    FOLDED,
    LENGTH,
    SLOT,
    cut_bf16,
    folded_to,
)

WARPS = 4
"""Warps of a program."""


@gluon.jit
def of_lane(x, lane):
    """Return what another lane of the warp holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, lane], gl.float32, True, 1
    )


@gluon.jit
def of_lane_above(x, distance):
    """Return what the lane ``distance`` further up holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.down.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, distance], gl.float32, True, 1
    )


@gluon.jit
def product_from(x, lane):
    """Return the product over this lane and all above it."""
    for step in gl.static_range(5):
        above = of_lane_above(x, gl.full_like(x, 1 << step, dtype=gl.int32))
        x = gl.where(lane + (1 << step) < 32, x * above, x)
    return x


@gluon.jit
def sum_from(x, lane):
    """Return the sum over this lane and all above it."""
    for step in gl.static_range(5):
        above = of_lane_above(x, gl.full_like(x, 1 << step, dtype=gl.int32))
        x = gl.where(lane + (1 << step) < 32, x + above, x)
    return x


@gluon.jit
def next_lane(x):
    """Return what the next lane holds."""
    return of_lane_above(x, gl.full_like(x, 1, dtype=gl.int32))


@gluon.jit
def parts_of(x, COUNT: gl.constexpr):
    """Cut fp32 into two bf16, 16 bits of it, or into three, all of it."""
    top, rest = cut_bf16(x)
    parts = (top,)
    if COUNT == 3:
        middle, rest = cut_bf16(rest)
        parts = (top, middle)
    return parts + (rest.to(gl.bfloat16),)


@gluon.jit
def as_operands(parts, LAYOUT: gl.constexpr):
    """Give parts the layout of an operand."""
    moved = (gl.convert_layout(parts[0], LAYOUT),)
    for i in gl.static_range(1, len(parts)):
        moved = moved + (gl.convert_layout(parts[i], LAYOUT),)
    return moved


@gluon.jit
def halves(x):
    """Split a matrix down the middle."""
    wide: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, wide)), (0, 2, 1)))


@gluon.jit
def in_ring(position, R: gl.constexpr):
    """Return the index of a position less than two rings from the first."""
    return gl.where(position >= R, position - R, position)


@gluon.jit
def place_of_row(plan, rows, row, T: gl.constexpr, WINDOW: gl.constexpr, KEEP: gl.constexpr):
    """Return a row's slot, boundary, entries that no fold has reached, how many are due, tokens.

    A pad row has no entries and no tokens.
    """
    slot, base = gl.load(plan + SLOT * rows + row), gl.load(plan + BASE * rows + row)
    folded, committed = gl.load(plan + FOLDED * rows + row), gl.load(plan + COMMITTED * rows + row)
    length = gl.minimum(gl.load(plan + LENGTH * rows + row).to(gl.int32), T)
    boundary = folded_to(0, base, folded, WINDOW, KEEP, 1)
    due = folded_to(0, base, gl.maximum(folded, committed), WINDOW, KEEP, 1) - boundary
    past = gl.where(slot < 0, 0, committed - boundary).to(gl.int32)
    due, length = gl.where(slot < 0, 0, due).to(gl.int32), gl.where(slot < 0, 0, length)
    return slot, boundary, past, due, length
