"""The launch of Gated DeltaNet's pull-back and read in one program, on Hopper.

Of rows that fold nothing in a step, beside the pull-back, fold and read of those that do. It writes
no checkpoint, so blocks that it cannot read, and few rows, take the other launches at any time.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from replayssm.ops.triton import one_pass
from replayssm.ops.triton.additive_pass import can_copy_gates, holds
from replayssm.ops.triton.call import Call, Fused, power_of_two, present, strides
from replayssm.types import Decay, Format, ReadDepth, Write

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore, StorageSpec
    from replayssm.types import Block

MOST_HEADS, BUFFERS = 4, 3
"""Value heads of a program, and tiles of a state that it has in flight."""
LEAST_ROWS = 256
"""Rows from which on it was measured to be faster than the pull-back of all rows."""


@cache
def serves(spec: StorageSpec, device: torch.device) -> bool:
    """Whether the kernel is written for a layer stored as ``spec``, and for ``device``."""
    at = spec.layer
    return (
        one_pass.is_hopper(device)
        and (at.write, at.decay) == (Write.DELTA, Decay.SCALAR)
        and spec.format in (Format.Q24, Format.Q16)
        and at.key_dim == one_pass.KEY_DIM
        and at.value_dim in (64, 128, 256)
        and at.heads_per_key > 1
        and at.heads_per_key == power_of_two(at.heads_per_key)
        and holds(spec)
    )


def reads(store: LayerStore, plan: DevicePlan, block: Block, out: Tensor, fused: Fused) -> bool:
    """Whether the kernel can read a block, of as many rows as it is worth."""
    heads = store.spec.layer.heads_per_key
    return (
        plan.rows >= LEAST_ROWS
        and plan.depth == ReadDepth.HIGH.value
        and one_pass.reads(block, out, fused)
        and all(can_copy_gates(x, heads) for x in (block.g, block.w))
        and one_pass.is_aligned(store)
    )


def read_call(store: LayerStore, plan: DevicePlan, block: Block, out: Tensor, fused: Fused) -> Call:
    """Return the launch for the rows that fold nothing; arguments are those of host.step_."""
    # Gluon cannot be imported where kernels are interpreted
    from replayssm.ops.triton.kernels.hopper import WARPS
    from replayssm.ops.triton.kernels.pull_and_read import pull_and_read_kernel

    at, ring, none = store.spec.layer, store.spec.ring, store.g
    inputs = (block.q, block.k, block.v, block.g, block.w)
    stored = (
        store.high, present(store.row_scale, none), present(store.columns, none),
        store.k, store.v, store.g, store.w,
    )  # fmt: skip
    args = (
        plan.counts, plan.ancestors, *inputs, present(fused.rate, none), present(fused.bias, none),
        out, *stored, plan.rows, *strides(*inputs, out), *(x.stride(0) for x in stored),
        fused.q_scale, fused.norm_eps,
    )  # fmt: skip
    heads = min(at.heads_per_key, MOST_HEADS)
    constants = {
        "T": block.tokens, "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim,
        "V": at.value_dim, "R": ring.ring_len, "WINDOW": ring.window, "KEEP": ring.keep,
        "TREE": block.tokens > 1 and plan.parents is not None, "GATES": fused.gates,
        "NORM": fused.norm, "HEADS": heads,
        "BUFFERS": min(BUFFERS, heads * at.value_dim // one_pass.VALUE_ROWS),
    }  # fmt: skip
    grid = (plan.rows * at.value_heads // heads,)
    return Call(pull_and_read_kernel, grid, args, constants, WARPS)
