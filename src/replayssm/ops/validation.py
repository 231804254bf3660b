"""Checks of shapes, dtypes, devices and values, shared by every implementation."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.errors import ContractError, UnsupportedError
from replayssm.types import Block, Decay, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan
    from replayssm.storage import StorageSpec

# counts are int64; this leaves half of them to count on from any position
MOST_TOKENS = 2**62
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


def check_conv(
    spec: StorageSpec,
    plan: BlockPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    device: torch.device,
    *,
    finite: bool = False,
) -> None:
    """Refuse inputs ``[B, T, C]`` or taps that do not fit a layer's convolution or the plan."""
    conv, longest = spec.layer.conv, int(plan.lengths.max(initial=0))
    if conv is None:
        raise ContractError("layer", "a layer with a convolution (LayerSpec.conv)", "one without")
    if longest > spec.ring.max_block:
        raise ContractError("x", f"at most max_block ({spec.ring.max_block}) tokens", longest)
    if x.ndim != 3:
        raise ContractError("x", "3 dimensions [B, T, C]", tuple(x.shape))
    if x.shape[1] < longest:
        raise ContractError("x", f"at least {longest} tokens, as planned", f"{x.shape[1]} tokens")
    check_tensor("x", x, (plan.rows, x.shape[1], conv.channels), device)
    check_tensor("weight", weight, (conv.channels, conv.width), device)
    if bias is not None:
        check_tensor("bias", bias, (conv.channels,), device)
    if finite and not bool(torch.isfinite(x[_real(plan, x)]).all()):
        raise ContractError("x", "finite values", "NaN or infinity")


def check_position(position: int) -> int:
    """Return a token count that leaves room to count on, or refuse it."""
    try:
        at = index(position)
    except TypeError:
        at = -1
    if not 0 <= at <= MOST_TOKENS:
        raise ContractError("position", f"an integer from 0 to {MOST_TOKENS}", position)
    return at


def check_admission(
    specs: Sequence[StorageSpec],
    states: Sequence[Tensor] | None,
    windows: Sequence[Tensor | None] | None,
    device: torch.device,
    *,
    finite: bool = False,
) -> None:
    """Refuse states or convolution windows that do not fit their layers; None is all zeros."""
    for name, given in (("states", states), ("windows", windows)):
        if given is not None and len(given) != len(specs):
            raise ContractError(name, f"{len(specs)} tensors, one a layer", len(given))
    for i, (at, conv) in enumerate((spec.layer, spec.layer.conv) for spec in specs):
        if states is not None:
            state_shape = (at.value_heads, at.value_dim, at.key_dim)
            _check_admitted(f"states[{i}]", states[i], state_shape, device, finite=finite)
        window = None if windows is None else windows[i]
        if window is None:
            continue
        if conv is None:
            raise ContractError(f"windows[{i}]", "None, the layer has no convolution", "a tensor")
        shape = (conv.channels, conv.width - 1)
        _check_admitted(f"windows[{i}]", window, shape, device, finite=finite)


def _check_admitted(
    name: str, x: Tensor, shape: tuple[int, ...], device: torch.device, *, finite: bool
) -> None:
    if tuple(x.shape) != shape:
        raise ContractError(name, f"shape {shape}", tuple(x.shape))
    if x.device != device or not x.is_floating_point() or x.layout is not torch.strided:
        got = f"{x.dtype}, {x.layout}, on {x.device}"
        raise ContractError(name, f"a dense float tensor on {device}", got)
    if finite and not bool(torch.isfinite(x.float()).all()):
        raise ContractError(name, "finite values", "NaN or infinity")


def check_values(plan: BlockPlan, block: Block) -> None:
    """Refuse NaN, infinity and g > 0 in the tokens that count; g = -inf is a gate of exactly 0."""
    real = _real(plan, block.q)
    for name in ("q", "k", "v", "w"):
        if not bool(torch.isfinite(getattr(block, name)[real].float()).all()):
            raise ContractError(name, "finite values", "NaN or infinity")
    if not bool((block.g[real] <= 0).all()):
        raise ContractError("g", "log-decays <= 0", "a positive number or NaN")


def _real(plan: BlockPlan, x: Tensor) -> Tensor:
    lengths = torch.from_numpy(plan.lengths).to(x.device)
    return torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(-1)


def check_tree(plan: BlockPlan) -> None:
    """Refuse parents that do not come before their nodes; a walk along them would not end."""
    if plan.parents is None:
        return
    longest = int(plan.lengths.max(initial=0))
    if plan.parents.shape[0] != plan.rows or plan.parents.shape[1] < longest:
        expected = f"parents of shape [{plan.rows}, {longest}] or wider"
        raise ContractError("plan", expected, plan.parents.shape)
    nodes = np.arange(plan.parents.shape[1])
    is_wrong = (plan.parents < -1) | (plan.parents >= nodes)
    if bool((is_wrong & (nodes < plan.lengths[:, None])).any()):
        raise ContractError("plan", "-1 <= parents[b, t] < t", plan.parents.tolist())


def check_exact(spec: StorageSpec, depths: Sequence[ReadDepth], block: Block) -> None:
    """Refuse what an exact store cannot read exactly: half a state, or entries that get rounded."""
    if not spec.exact:
        return
    if ReadDepth.HIGH in depths:
        raise UnsupportedError("exact=True: needs full reads, not depth=high")
    for name, x in (("k", block.k), ("v", block.v)):
        if spec.ring_dtype not in (torch.float32, x.dtype):
            expected = f"{spec.ring_dtype}, which the ring of an exact pool stores whole"
            raise ContractError(name, expected, x.dtype, "use ring_dtype=torch.float32")


def check_slots(plan: BlockPlan, slots: int) -> None:
    """Refuse a plan whose slots are not in a pool of ``slots``; compiled code would not notice."""
    if plan.rows and not -1 <= plan.slots.min() <= plan.slots.max() < slots:
        raise ContractError("plan", f"slots -1 to {slots - 1}", plan.slots.tolist())


def check_targets(plan: BlockPlan, targets: NDArray[np.int64], tokens: int, slots: int) -> None:
    """Refuse targets ``[B, T]`` that name slots outside a state of ``slots``."""
    if targets.shape != (plan.rows, tokens):
        raise ContractError("targets", f"shape {(plan.rows, tokens)}", targets.shape)
    used = targets[np.arange(tokens) < plan.lengths[:, None]]
    if used.size and not 0 <= used.min() <= used.max() < slots:
        raise ContractError("targets", f"slots 0 to {slots - 1}", targets.tolist())


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
