"""Checks of shapes, dtypes, devices and values, shared by every implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.errors import ContractError
from replayssm.types import Block, Decay, LayerSpec

if TYPE_CHECKING:
    from replayssm.ring import BlockPlan

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def block_shapes(layer: LayerSpec, rows: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the shape that every field of a :class:`Block` must have."""
    h, hv = layer.key_heads, layer.value_heads
    gate = (hv,) if layer.decay is Decay.SCALAR else (hv, layer.key_dim)
    return {
        "q": (rows, tokens, h, layer.key_dim),
        "k": (rows, tokens, h, layer.key_dim),
        "v": (rows, tokens, hv, layer.value_dim),
        "g": (rows, tokens, *gate),
        "w": (rows, tokens, hv),
    }


def check_block(
    layer: LayerSpec, plan: BlockPlan, block: Block, device: torch.device, *, finite: bool = False
) -> None:
    """Refuse a block that does not fit the layer or the plan; nothing is changed.

    Args:
        layer: Geometry the block must have.
        plan: The forward's plan; it decides B and the least T.
        block: Inputs.
        device: Where the layer's tensors are.
        finite: Also check the values (debug mode; costs a pass over the inputs).
    """
    if not isinstance(block, Block):
        raise ContractError("block", "a Block", type(block).__name__)
    if block.q.ndim != 4:
        raise ContractError("q", "4 dimensions [B, T, H, K]", tuple(block.q.shape))
    tokens = block.tokens
    longest = int(plan.lengths.max(initial=0))
    if tokens < longest:
        raise ContractError("q", f"at least {longest} tokens, as planned", f"{tokens} tokens")
    for name, shape in block_shapes(layer, plan.rows, tokens).items():
        check_tensor(name, getattr(block, name), shape, device)
    if finite:
        check_values(plan, block)


def check_values(plan: BlockPlan, block: Block) -> None:
    """Refuse NaN, infinity and g > 0 in the tokens that count; g = -inf is a gate of exactly 0."""
    lengths = torch.from_numpy(plan.lengths).to(block.q.device)
    real = torch.arange(block.tokens, device=block.q.device) < lengths.unsqueeze(-1)
    for name in ("q", "k", "v", "w"):
        if not bool(torch.isfinite(getattr(block, name)[real]).all()):
            raise ContractError(name, "finite values", "NaN or infinity")
    if not bool((block.g[real] <= 0).all()):
        raise ContractError("g", "log-decays <= 0", "a positive number or NaN")


def check_slots(plan: BlockPlan, slots: int) -> None:
    """Refuse a plan whose slots are not in a pool of ``slots``; compiled code would not notice."""
    if plan.rows and not -1 <= plan.slots.min() <= plan.slots.max() < slots:
        raise ContractError("plan", f"slots -1 to {slots - 1}", plan.slots.tolist())


def check_output(out: Tensor, block: Block) -> None:
    """Refuse an output that a step could not write element by element before it is done reading.

    That is one whose elements share memory, one made in inference mode and used outside of it, and
    one in the memory of an input.
    """
    if any(stride == 0 and n > 1 for stride, n in zip(out.stride(), out.shape, strict=True)):
        expected = "an element of memory for every output"
        raise ContractError("out", expected, f"strides {out.stride()}", "use torch.empty")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ContractError("out", "a tensor that may be written here", "an inference tensor")
    memory = out.untyped_storage().data_ptr()
    for name in ("q", "k", "v", "g", "w"):
        if memory and getattr(block, name).untyped_storage().data_ptr() == memory:
            raise ContractError("out", "memory of its own", f"the memory of {name}")


def check_tensor(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse what is no tensor, or one of another shape, dtype class or device."""
    if not isinstance(x, Tensor):
        raise ContractError(name, "a torch tensor", type(x).__name__)
    if tuple(x.shape) != shape:
        raise ContractError(name, f"shape {shape}", tuple(x.shape))
    if x.dtype not in INPUT_DTYPES:
        raise ContractError(name, f"one of {INPUT_DTYPES}", x.dtype)
    if x.device != device:
        raise ContractError(name, f"device {device}", x.device, "move it with .to()")
