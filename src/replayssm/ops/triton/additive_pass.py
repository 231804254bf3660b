"""Launches of Mamba-2's one pass over the state, on Hopper; see :mod:`.one_pass` for when.

A checkpoint is a function of the tokens alone, so a store that is served here is always folded
here. A block that the kernels cannot read (more than eight tokens, both planes, 32-bit inputs) is
folded by them first and read by the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from replayssm.ops.triton.call import PLAIN, Call, Fused, present, strides
from replayssm.types import Decay, Format, ReadDepth, Write

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore, StorageSpec
    from replayssm.types import Block

KEY_DIM, VALUE_DIM, LEAST_HEADS = 128, 64, 4
MOST_WINDOW, MOST_PAST, MOST_TOKENS = 16, 24, 8
ALIGNED = 16
"""Elements that tokens of a block start at multiples of."""
FEW_ROWS = 32
"""Rows of one token below which the kernel of a whole step reads those that fold nothing: programs
of one pass need more before their first tile than such a step takes (1 to 16 rows)."""
FILLED = 396
"""Programs that fill an H200, three a multiprocessor; with fewer, a program takes fewer heads."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How one of the kernels is launched.

    Attributes:
        heads: Value heads of a program.
        buffers: Tiles of a state that a program has in flight.
        registers: Most registers of a thread; 0 leaves it to the compiler.
    """

    heads: int
    buffers: int
    registers: int = 0


# 8 heads x 2 or 3 tiles were best of 4, 8 and 16 x 2, 3 and 4 on an H200; 168 registers are three
# programs a multiprocessor, and 128 are slower for what they spill
READ = {Format.BF16: Sizes(8, 2), Format.Q24: Sizes(8, 3), Format.Q16: Sizes(8, 3)}
DUE = {Format.BF16: Sizes(8, 2), Format.Q24: Sizes(8, 2, 168), Format.Q16: Sizes(8, 2, 168)}


def holds(spec: StorageSpec) -> bool:
    """Whether a program of one pass, of either family, holds all that a row has not folded."""
    ring = spec.ring
    return (
        spec.ring_dtype is torch.bfloat16
        and ring.tiles == 1
        and ring.window <= MOST_WINDOW
        # a step crosses one boundary at most
        and ring.max_block <= ring.window
        and ring.most_unfolded <= MOST_PAST
    )


def serves(spec: StorageSpec) -> bool:
    """Whether the kernels are written for a layer stored as ``spec``."""
    at = spec.layer
    return (
        (at.write, at.decay) == (Write.ADDITIVE, Decay.SCALAR)
        and spec.format in READ
        and (at.key_dim, at.value_dim) == (KEY_DIM, VALUE_DIM)
        and at.heads_per_key >= LEAST_HEADS
        and holds(spec)
    )


def reads(plan: DevicePlan, block: Block, out: Tensor, fused: Fused, spec: StorageSpec) -> bool:
    """Whether the kernels can read a block, not only fold before it."""
    vectors = (block.q, block.k, block.v, out)
    gates = (block.g, block.w) if fused.gates == "none" else (block.g,)
    return (
        block.tokens <= MOST_TOKENS
        and (spec.format is Format.BF16 or plan.depth == ReadDepth.HIGH.value)
        and fused.gates in ("none", "dt")
        and not fused.norm
        and all(x.dtype is torch.bfloat16 for x in vectors)
        and all(can_copy_gates(x, spec.layer.heads_per_key) for x in gates)
        and all(is_aligned(x) for x in vectors)
    )


def is_aligned(x: Tensor) -> bool:
    """Whether tokens of a block start where 16 bytes a lane can be copied from."""
    return all(n % ALIGNED == 0 for n in (*x.stride()[:2], x.data_ptr()))


def can_copy_gates(x: Tensor, heads: int) -> bool:
    """Whether gates of ``heads`` heads a key head can be copied: four bytes at a time at least.

    That is one gate of 32 bits anywhere, but two of 16 bits side by side.
    """
    return x.stride(2) == 1 and (x.itemsize >= 4 or (heads % 2 == 0 and is_aligned(x)))


def choose(spec: StorageSpec, rows: int) -> tuple[Sizes, Sizes]:
    """Return how rows that fold nothing are launched, of ``rows``, and how those that are due."""
    return _fitted(READ[spec.format], spec, rows), _fitted(DUE[spec.format], spec, rows)


def _fitted(sizes: Sizes, spec: StorageSpec, rows: int) -> Sizes:
    at, heads = spec.layer, sizes.heads
    if at.heads_per_key < heads or rows * at.value_heads // heads < FILLED:
        heads = LEAST_HEADS
    return Sizes(heads, sizes.buffers, sizes.registers)


def step_calls(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused = PLAIN,
) -> list[Call]:
    """Return the launches of a step, which need nothing of each other: due rows, the others.

    Arguments are those of :func:`.host.step_`.
    """
    read, due = choose(store.spec, plan.rows)
    inputs = (block.q, block.k, block.v, block.g, block.w if fused.gates == "none" else block.g)
    return [
        _call(store, plan, inputs, out, fused, sizes, block.tokens, is_due)
        for sizes, is_due in ((due, True), (read, False))
    ]


def fold_call(store: LayerStore, plan: DevicePlan) -> Call:
    """Return the launch of a fold of what is due: a step of no tokens."""
    none = store.k
    _, due = choose(store.spec, plan.rows)
    return _call(store, plan, (none,) * 5, none, PLAIN, due, 0, True)


def _call(
    store: LayerStore,
    plan: DevicePlan,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    fused: Fused,
    how: Sizes,
    tokens: int,
    is_due: bool,
) -> Call:
    at, ring, none = store.spec.layer, store.spec.ring, store.high
    z, gate = present(fused.z, out), store.g
    stored = (
        none, present(store.low, none), present(store.row_scale, none),
        present(store.columns, none), store.k, store.v, store.g, store.w,
    )  # fmt: skip
    args = (
        *((plan.due,) if is_due else ()), plan.counts, plan.ancestors, *inputs,
        present(fused.rate, gate), present(fused.bias, gate), present(fused.skip, gate), z, out,
        *stored, plan.rows, *strides(*inputs, z, out), *(x.stride(0) for x in stored),
        fused.q_scale, *fused.dt_limit,
    )  # fmt: skip
    constants = {
        "T": tokens, "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim,
        "R": ring.ring_len, "WINDOW": ring.window, "KEEP": ring.keep,
        "FORMAT": store.spec.format.value, "TREE": tokens > 1 and plan.parents is not None,
        "GATES": fused.gates, "SKIP": fused.skip is not None, "HAS_Z": fused.z is not None,
        "HEADS": how.heads, "BUFFERS": how.buffers,
    }  # fmt: skip
    # Gluon cannot be imported where kernels are interpreted
    from replayssm.ops.triton.kernels.additive_pass import (
        additive_due_kernel,
        additive_read_kernel,
    )
    from replayssm.ops.triton.kernels.hopper import WARPS

    kernel = additive_due_kernel if is_due else additive_read_kernel
    grid = (plan.rows * at.key_heads * -(-at.heads_per_key // how.heads),)
    return Call(kernel, grid, args, constants, WARPS, how.registers)
