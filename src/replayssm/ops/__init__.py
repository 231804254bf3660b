"""One public function per verb, ending in ``_`` where it mutates: validation, then dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.errors import ContractError
from replayssm.ops import conv, reference
from replayssm.ops.dispatch import choose
from replayssm.ops.validation import (
    check_block,
    check_conv,
    check_exact,
    check_output,
    check_slots,
    check_targets,
    check_tensor,
    check_tree,
)
from replayssm.ring import BlockPlan
from replayssm.types import Block, Impl, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from replayssm.storage import LayerStore

__all__ = ["compact_", "conv_", "fold_", "materialise", "standard_", "step_"]


@torch.no_grad()
def step_(
    store: LayerStore,
    plan: BlockPlan,
    block: Block,
    *,
    depth: ReadDepth | Sequence[ReadDepth] = ReadDepth.FULL,
    impl: Impl = Impl.AUTO,
    out: Tensor | None = None,
    debug: bool = False,
) -> Tensor:
    """Fold what is due, append a block's entries to the rings, and return its outputs.

    Mutates the planes of rows that reach a boundary, the rings at the block's positions, and
    ``out``. Counts do not move: commit the forward's ticket for that.

    Args:
        store: Tensors of one layer.
        plan: Rows of this forward, shared by all layers.
        block: ``[B, T, ...]`` inputs, a chain or a tree; T = 1 is an ordinary step.
        depth: Planes to read, for all rows or per row.
        impl: Implementation.
        out: ``[B, T, HV, V]`` to write into, in memory of its own; allocated in v's dtype when
            None.
        debug: Refuse NaN, infinite and growing (g > 0) inputs.

    Returns:
        ``[B, T, HV, V]``; pad rows and tokens past a row's length are 0.

    Raises:
        ContractError: An argument does not fit; nothing was changed.
        UnsupportedError: ``impl`` cannot serve this device, or an exact store a high read.
    """
    device = store.high.device
    check_slots(plan, store.slots)
    check_tree(plan)
    check_block(store.spec.layer, plan, block, device, finite=debug)
    depths = _per_row(depth, plan.rows)
    check_exact(store.spec, depths, block)
    out = _output(out, block, device)
    ring = store.spec.ring
    if int(plan.lengths.max(initial=0)) > ring.max_block:
        raise ContractError("block", f"at most max_block ({ring.max_block}) tokens", block.tokens)
    chosen = choose(impl, device, tiles=ring.tiles, exact=store.spec.exact)
    if chosen is Impl.CPU:
        from replayssm.ops import cpu

        cpu.step_(store, plan, block, depths, out)
    elif chosen is Impl.TRITON:
        from replayssm.ops import triton

        triton.step_(store, plan, block, depths, out)
    else:
        reference.step_(store, plan, block, depths, out)
    return out


@torch.no_grad()
def conv_(
    store: LayerStore,
    plan: BlockPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    impl: Impl = Impl.AUTO,
    debug: bool = False,
) -> Tensor:
    """Run the causal depthwise convolution of a block and keep its raw inputs.

    Mutates the convolution's ring at the block's positions. Counts do not move.

    Args:
        store: Tensors of one layer that has a convolution.
        plan: Rows of this forward, shared by all layers; chains or trees.
        x: ``[B, T, C]`` raw inputs.
        weight: ``[C, width]``, the tap of the token itself last.
        bias: ``[C]`` or None.
        impl: Implementation; all but Triton share plain torch.
        debug: Refuse NaN and infinite inputs.

    Returns:
        ``[B, T, C]`` in x's dtype, summed in fp32, no activation; pad rows and tokens past a row's
        length are 0.

    Raises:
        ContractError: An argument does not fit, or the layer has no convolution; nothing was
            changed.
    """
    check_slots(plan, store.slots)
    check_tree(plan)
    check_conv(store.spec, plan, x, weight, bias, store.high.device, finite=debug)
    if choose(impl, x.device, tiles=store.spec.ring.tiles) is Impl.TRITON:
        from replayssm.ops import triton

        return triton.conv_(store, plan, x, weight, bias)
    return conv.conv_(store, plan, x, weight, bias)


def fold_(store: LayerStore, plan: BlockPlan, *, impl: Impl = Impl.AUTO) -> None:
    """Bring every row's planes to its newest boundary at or before ``committed - keep``.

    Mutates planes and scales only.
    """
    check_slots(plan, store.slots)
    spec = store.spec
    chosen = choose(impl, store.high.device, tiles=spec.ring.tiles, exact=spec.exact)
    if chosen is Impl.CPU:
        from replayssm.ops import cpu

        cpu.fold_(store, plan)
    elif chosen is Impl.TRITON:
        from replayssm.ops import triton

        triton.fold_(store, plan)
    else:
        reference.fold_(store, plan)


def compact_(
    store: LayerStore,
    plan: BlockPlan,
    paths: Sequence[tuple[int, ...] | None],
    *,
    impl: Impl = Impl.AUTO,
) -> None:
    """Move the entries of each row's accepted path to the front of its block.

    Mutates the rings at the block's positions only.

    Args:
        store: Tensors of one layer.
        plan: The forward's plan, a tree.
        paths: Per row the kept nodes, oldest first; None or empty moves nothing.
        impl: Implementation; all but Triton share plain torch.
    """
    if choose(impl, store.high.device, tiles=store.spec.ring.tiles) is Impl.TRITON:
        from replayssm.ops import triton

        triton.compact_(store, plan, paths)
        return
    reference.compact_(store, plan, paths)
    if store.conv is not None:
        conv.compact_(store, plan, paths)


@torch.no_grad()
def materialise(
    store: LayerStore, slot: int, base: int, folded: int, position: int, *, impl: Impl = Impl.AUTO
) -> Tensor:
    """Return the ``[HV, V, K]`` fp32 state at ``position``; the slot is untouched.

    Arguments are those of :func:`replayssm.ops.reference.materialise`. An exact store's state is
    the one that ``impl``'s standard step would have left.
    """
    start = store.spec.ring.folded_to(0, base, folded)
    if not store.spec.exact or start == position:
        return reference.materialise(store, slot, base, folded, position)
    state = reference.materialise(store, slot, base, folded, start).clone().unsqueeze(0)
    index = [p % store.spec.ring.ring_len for p in range(start, position)]
    k, v, g, w = (
        x[slot][:, index].transpose(0, 1).unsqueeze(0) for x in (store.k, store.v, store.g, store.w)
    )
    zero = np.zeros(1, np.int64)
    plan = BlockPlan(zero, zero, zero, zero, zero + len(index))
    # outputs are not asked for: any query does
    standard_(state, store.spec.layer, plan, Block(k, k, v, g, w), impl=impl)
    return state[0]


@torch.no_grad()
def standard_(
    state: Tensor,
    layer: LayerSpec,
    plan: BlockPlan,
    block: Block,
    *,
    impl: Impl = Impl.AUTO,
    out: Tensor | None = None,
    targets: NDArray[np.int64] | None = None,
) -> Tensor:
    """Run the standard step, which rewrites the whole state for every token.

    Mutates ``out``, and ``state`` at the plan's slots or, when given, at ``targets`` only.

    Args:
        state: ``[S, HV, V, K]`` fp32 or bf16 (then rounded after every token).
        layer: Geometry.
        plan: Rows; only ``slots`` and ``lengths`` are read.
        block: ``[B, T, ...]`` inputs, a chain.
        impl: Implementation.
        out: ``[B, T, HV, V]`` to write into, in memory of its own; allocated in v's dtype when
            None.
        targets: ``[B, T]`` slots that get the state after each token, which the next token then
            continues from; None rewrites in place. No slot may belong to two rows.

    Returns:
        ``[B, T, HV, V]``.

    Raises:
        ContractError: An argument does not fit; nothing was changed.
    """
    check_block(layer, plan, block, state.device)
    shape = (state.shape[0], layer.value_heads, layer.value_dim, layer.key_dim)
    check_tensor("state", state, shape, state.device)
    check_slots(plan, state.shape[0])
    if state.dtype not in (torch.float32, torch.bfloat16):
        raise ContractError("state", "float32 or bfloat16", state.dtype)
    if plan.parents is not None:
        raise ContractError("plan", "chains on the standard path", "a tree")
    if targets is not None:
        check_targets(plan, targets, block.tokens, state.shape[0])
    out = _output(out, block, state.device)
    chosen = choose(impl, state.device)
    if chosen is Impl.CPU:
        from replayssm.ops import cpu

        cpu.standard_(state, plan, block, layer.write, out, targets)
    elif chosen is Impl.TRITON:
        from replayssm.ops import triton

        triton.standard_(state, layer, plan, block, out, targets)
    else:
        reference.standard_(state, plan, block, layer.write, out, targets)
    return out


def _per_row(depth: ReadDepth | Sequence[ReadDepth], rows: int) -> list[ReadDepth]:
    if isinstance(depth, str):
        return [ReadDepth(depth)] * rows
    expected = f"one read depth or {rows} of them"
    if not isinstance(depth, Sequence):
        raise ContractError("depth", expected, depth)
    if len(depth) != rows:
        raise ContractError("depth", expected, f"{len(depth)} of them")
    return [ReadDepth(d) for d in depth]


def _output(out: Tensor | None, block: Block, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty_like(block.v, memory_format=torch.contiguous_format)
    check_tensor("out", out, tuple(block.v.shape), device)
    check_output(out, block)
    return out
