"""Launches of Gated DeltaNet's one pass over the state, on Hopper.

Its fold rounds otherwise than the one of :mod:`.host`, and a checkpoint is a function of the tokens
alone. So what a store is decides whether it is folded here, and then it always is: a block that the
kernel cannot read (more than eight tokens, 32-bit inputs) is folded here first and read there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from replayssm.ops.triton.call import PLAIN, Call, Fused, has_asm, power_of_two, present, strides
from replayssm.types import Decay, Format, Write

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore, StorageSpec
    from replayssm.types import Block

HOPPER = 9
KEY_DIM, VALUE_ROWS = 128, 64
MOST_WINDOW, MOST_PAST, MOST_TOKENS = 16, 24, 8
PARTS = {Format.BF16: ((32, 8), (64, 4), (512, 2)), Format.F32: ((32, 8), (64, 4), (2048, 2))}
"""Rows times key heads up to which programs share a key head, and how many: to fill the chip."""
ALIGNED = 16
"""Elements that rows of a block start at multiples of, so that they are copied 16 bytes a lane."""


@dataclass(frozen=True, slots=True)
class OnePass:
    """How the kernel is launched.

    Attributes:
        buffers: Tiles of a state that a program has in flight.
        parts: Programs that share the value heads of a row's key head.
        registers: Most registers of a thread; 0 leaves it to the compiler.
    """

    buffers: int
    parts: int = 1
    registers: int = 0


def choose(spec: StorageSpec, rows: int) -> OnePass:
    """Return how a layer is launched for a block of ``rows`` rows, as measured on an H200."""
    pairs = rows * spec.layer.key_heads
    parts = next((parts for most, parts in PARTS[spec.format] if pairs <= most), 1)
    # as many programs of a multiprocessor as its registers and shared memory hold
    if spec.format is Format.F32:
        return OnePass(1, parts, 168)
    return OnePass(2, parts)


@cache
def folds(spec: StorageSpec, device: torch.device) -> bool:
    """Whether a layer stored as ``spec`` is folded here on ``device``, whatever its blocks are."""
    if not has_asm(device) or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    return serves(spec)


def serves(spec: StorageSpec) -> bool:
    """Whether the kernel is written for a layer stored as ``spec``."""
    at, ring = spec.layer, spec.ring
    return (
        (at.write, at.decay) == (Write.DELTA, Decay.SCALAR)
        and spec.format in PARTS
        and spec.ring_dtype is torch.bfloat16
        and at.key_dim == KEY_DIM
        and at.value_dim % VALUE_ROWS == 0
        and at.heads_per_key == power_of_two(at.heads_per_key)
        and ring.tiles == 1
        and ring.window <= MOST_WINDOW
        # a step crosses one boundary at most, and a program holds all that it has not folded
        and ring.max_block <= ring.window
        and ring.most_unfolded <= MOST_PAST
    )


def reads(block: Block, out: Tensor, fused: Fused) -> bool:
    """Whether the kernel can read a block, not only fold before it."""
    vectors = (block.q, block.k, block.v, out)
    return (
        block.tokens <= MOST_TOKENS
        and fused.gates in ("none", "beta")
        and fused.skip is None
        and fused.z is None
        and all(x.dtype is torch.bfloat16 for x in vectors)
        and all(n % ALIGNED == 0 for x in vectors for n in (*x.stride()[:2], x.data_ptr()))
    )


def step_call(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused,
    how: OnePass,
) -> Call:
    """Return the launch of a step; arguments are those of :func:`.host.step_`."""
    return _call(store, plan, (block.q, block.k, block.v, block.g, block.w), out, fused, how,
                 block.tokens)  # fmt: skip


def fold_call(store: LayerStore, plan: DevicePlan, how: OnePass) -> Call:
    """Return the launch of a fold of what is due: a step of no tokens."""
    none = store.k
    return _call(store, plan, (none,) * 5, none, PLAIN, how, 0)


def _call(
    store: LayerStore,
    plan: DevicePlan,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    fused: Fused,
    how: OnePass,
    tokens: int,
) -> Call:
    at, ring = store.spec.layer, store.spec.ring
    stored = (store.high, store.k, store.v, store.g, store.w)
    none = store.g
    args = (
        plan.counts, plan.ancestors, *inputs, present(fused.rate, none), present(fused.bias, none),
        out, *stored, plan.rows, *strides(*inputs, out), *(x.stride(0) for x in stored),
        fused.q_scale, fused.norm_eps,
    )  # fmt: skip
    tiles = at.heads_per_key * at.value_dim // VALUE_ROWS
    parts = min(how.parts, tiles)
    constants = {
        "T": tokens, "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim,
        "R": ring.ring_len, "WINDOW": ring.window, "KEEP": ring.keep,
        "TREE": tokens > 0 and plan.parents is not None, "GATES": fused.gates, "NORM": fused.norm,
        "BUFFERS": how.buffers, "PARTS": parts,
    }  # fmt: skip
    # Gluon cannot be imported where kernels are interpreted
    from replayssm.ops.triton.kernels.hopper import WARPS
    from replayssm.ops.triton.kernels.one_pass import one_pass_kernel

    grid = (plan.rows * at.key_heads * parts,)
    return Call(one_pass_kernel, grid, args, constants, WARPS, how.registers)
