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
def of_entry(x, entry):
    """Return what ``x [heads, entries, ...]`` holds of an entry, in the place of every entry.

    Lanes of a warp hold the entries and pass numbers on by ``gather``. A shuffle in assembly is not
    known to need all lanes: a compiler may clone it into branches that part them, where it waits
    forever.
    """
    return gl.gather(x, gl.full_like(x, entry, dtype=gl.int32), 1)


@gluon.jit
def _entries(x):
    """Return the number of each entry of ``x [heads, entries, ...]``, as it lies in ``x``."""
    if len(x.shape) == 2:
        entry = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    else:
        line: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout))
        entry = gl.arange(0, x.shape[1], line)[None, :][:, :, None]
    return entry + gl.full_like(x, 0, dtype=gl.int32)


@gluon.jit
def _of_entry_behind(x, entry, DISTANCE: gl.constexpr, none):
    """Return what the entry ``DISTANCE`` further on holds, and ``none`` where there is none."""
    behind = gl.gather(x, gl.minimum(entry + DISTANCE, x.shape[1] - 1), 1)
    return gl.where(entry + DISTANCE < x.shape[1], behind, none)


@gluon.jit
def product_from(x):
    """Return the product over each entry and all behind it."""
    entry = _entries(x)
    for step in gl.static_range(5):
        x = x * _of_entry_behind(x, entry, 1 << step, 1.0)
    return x


@gluon.jit
def sum_from(x):
    """Return the sum over each entry and all behind it."""
    entry = _entries(x)
    for step in gl.static_range(5):
        x = x + _of_entry_behind(x, entry, 1 << step, 0.0)
    return x


@gluon.jit
def next_entry(x):
    """Return what the next entry holds; the last one's stands for its own."""
    return gl.gather(x, gl.minimum(_entries(x) + 1, x.shape[1] - 1), 1)


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
