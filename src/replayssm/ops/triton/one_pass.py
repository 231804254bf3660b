"""Launches of Gated DeltaNet's one pass over the state, on Hopper.

Its fold rounds otherwise than the one of :mod:`.pulled_back`, and a checkpoint is a function of the
tokens alone. So what a store is decides whether it is folded here, and then it always is: a block
that the kernel cannot read (more than eight tokens, 32-bit inputs) is folded here first and read
there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton

from replayssm.errors import UnsupportedError
from replayssm.ops.triton import additive_pass
from replayssm.ops.triton.call import PLAIN, Call, Fused, has_asm, power_of_two, present, strides
from replayssm.types import Decay, Format, ReadDepth, Write

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore, StorageSpec
    from replayssm.types import Block

HOPPER = 9
KEY_DIM, VALUE_ROWS = 128, 64
MOST_TOKENS = 8
MOST_HEADS = 16
"""Value heads of a key head: a program keeps the coefficients of all in shared memory."""
PARTS = {
    Format.BF16: ((32, 8), (64, 4), (512, 2)),
    Format.F32: ((32, 8), (64, 4), (2048, 2)),
    Format.S32: ((32, 8), (64, 4), (2048, 2)),
}
"""Rows times key heads up to which programs share a key head, and how many: to fill the chip."""
ALIGNED = 16
"""Bytes that the first slot, and elements that others, start at multiples of."""


@dataclass(frozen=True, slots=True)
class OnePass:
    """How the kernel is launched.

    Attributes:
        buffers: Tiles of a state that a program has in flight.
        registers: Most registers of a thread; 0 leaves it to the compiler.
    """

    buffers: int
    registers: int = 0


# as many programs of a multiprocessor as its registers and shared memory hold
FOLDING = {Format.BF16: OnePass(2), Format.F32: OnePass(1, 168), Format.S32: OnePass(1, 168)}
LONE = OnePass(1)
"""Of programs that fold both planes of a single value head: at 168 registers they would spill."""
READING = OnePass(2, 128)
"""Of programs that read the high plane of rows that fold nothing, beside those that fold."""


def programs_per_key_head(spec: StorageSpec, rows: int) -> int:
    """Return how many programs share a key head, as measured on an H200."""
    pairs = rows * spec.layer.key_heads
    parts = next((parts for most, parts in PARTS[spec.format] if pairs <= most), 1)
    # every one takes as many tiles
    return math.gcd(parts, _tiles(spec))


def _tiles(spec: StorageSpec) -> int:
    return spec.layer.heads_per_key * spec.layer.value_dim // VALUE_ROWS


@cache
def folds(spec: StorageSpec, device: torch.device) -> bool:
    """Whether a layer stored as ``spec`` is folded in one pass, of this module or of the other.

    It then is on ``device`` whatever its blocks are.
    """
    return is_hopper(device) and (serves(spec) or additive_pass.serves(spec))


def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` is one that kernels in Gluon are written for."""
    if not is_known_gluon() or not has_asm(device):
        return False
    return torch.cuda.get_device_capability(device)[0] == HOPPER


def is_known_gluon() -> bool:
    """Whether this Triton's Gluon is the one that the kernel was written for and measured with.

    It is experimental, and later versions name things otherwise; with them layers are pulled back.
    """
    is_interpreted = triton.knobs.runtime.interpret
    return bool(triton.__version__.startswith("3.6.") and not is_interpreted)


def serves(spec: StorageSpec) -> bool:
    """Whether the kernel is written for a layer stored as ``spec``."""
    at = spec.layer
    return (
        (at.write, at.decay) == (Write.DELTA, Decay.SCALAR)
        and spec.format in PARTS
        and at.key_dim == KEY_DIM
        and at.value_dim % VALUE_ROWS == 0
        and at.heads_per_key == power_of_two(at.heads_per_key)
        and at.heads_per_key <= MOST_HEADS
        and additive_pass.holds(spec)
    )


def check_strides(store: LayerStore) -> None:
    """Refuse slots that do not start where 16 bytes a lane can be copied from."""
    for name, x in _copied(store):
        if not _has_aligned_slots(x):
            raise UnsupportedError(
                f"{name}: the first slot must start at a multiple of {ALIGNED} bytes and others at "
                f"multiples of {ALIGNED} elements, not at {x.data_ptr()} and {x.stride(0)} apart; "
                "align the tensor"
            )


def is_aligned(store: LayerStore) -> bool:
    """Whether slots start where 16 bytes a lane can be copied from."""
    return all(_has_aligned_slots(x) for _, x in _copied(store))


def _has_aligned_slots(x: Tensor) -> bool:
    return x.stride(0) % ALIGNED == 0 and x.data_ptr() % ALIGNED == 0


def _copied(store: LayerStore) -> list[tuple[str, Tensor]]:
    names = ("high", "low", "row_scale", "columns", "k", "v")
    return [(name, x) for name in names if (x := getattr(store, name)) is not None]


def reads(block: Block, out: Tensor, fused: Fused) -> bool:
    """Whether the kernel can read a block, not only fold before it."""
    vectors = (block.q, block.k, block.v, out)
    return (
        block.tokens <= MOST_TOKENS
        and fused.gates in ("none", "beta")
        and fused.skip is None
        and fused.z is None
        # columns of no token are 0, and divided by their norm they have to stay 0
        and (fused.norm_eps > 0 or not fused.norm)
        and all(x.dtype is torch.bfloat16 for x in vectors)
        and all(additive_pass.is_aligned(x) for x in vectors)
    )


def step_calls(
    store: LayerStore, plan: DevicePlan, block: Block, out: Tensor, fused: Fused = PLAIN
) -> list[Call]:
    """Return the launches of a step, which need nothing of each other.

    Arguments are those of :func:`.host.step_`.
    """
    inputs, folding = (block.q, block.k, block.v, block.g, block.w), _folding(store.spec)
    given = (store, plan, inputs, out, fused, block.tokens)
    if store.low is None or plan.depth != ReadDepth.HIGH:
        return [_call(*given, folding, "all")]
    return [_call(*given, folding, "due"), _call(*given, READING, "rest")]


def fold_call(store: LayerStore, plan: DevicePlan) -> Call:
    """Return the launch of a fold of what is due: a step of no tokens."""
    none = store.k
    return _call(store, plan, (none,) * 5, none, PLAIN, 0, _folding(store.spec), "due")


def _folding(spec: StorageSpec) -> OnePass:
    is_lone = spec.format is Format.S32 and spec.layer.heads_per_key == 1
    return LONE if is_lone else FOLDING[spec.format]


def _call(
    store: LayerStore,
    plan: DevicePlan,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    fused: Fused,
    tokens: int,
    how: OnePass,
    which: str,
) -> Call:
    # Gluon cannot be imported where kernels are interpreted
    from replayssm.ops.triton.kernels.hopper import WARPS
    from replayssm.ops.triton.kernels.one_pass import one_pass_kernel

    at, ring, none = store.spec.layer, store.spec.ring, store.g
    has_both = store.low is not None and which != "rest"
    stored = (store.high, present(store.low, store.high), store.k, store.v, store.g, store.w)
    args = (
        plan.counts, plan.due, plan.ancestors, *inputs, present(fused.rate, none),
        present(fused.bias, none), out, *stored, plan.rows, *strides(*inputs, out),
        *(x.stride(0) for x in stored), fused.q_scale, fused.norm_eps,
    )  # fmt: skip
    parts = programs_per_key_head(store.spec, plan.rows)
    constants = {
        "T": tokens, "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim,
        "R": ring.ring_len, "WINDOW": ring.window, "KEEP": ring.keep,
        "TREE": tokens > 0 and plan.parents is not None, "GATES": fused.gates, "NORM": fused.norm,
        "DEPTH": plan.depth if has_both and which == "all" else "high", "BOTH": has_both,
        "WHICH": which, "BUFFERS": min(how.buffers, _tiles(store.spec) // parts), "PARTS": parts,
    }  # fmt: skip
    grid = (plan.rows * at.key_heads * parts,)
    return Call(one_pass_kernel, grid, args, constants, WARPS, how.registers)
