"""The Triton implementation: one function per verb over a host plan.

What a graph captures is below this level: :mod:`replayssm.ops.triton.host` over a plan that stays
on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.ops.triton.host import check_served
from replayssm.ops.triton.host import fold_ as _fold
from replayssm.ops.triton.host import step_ as _step
from replayssm.ops.triton.others import (
    compact_call,
    conv_call,
    dense_weight,
    empty_like_dense,
    inner_dense,
    standard_call,
)
from replayssm.ops.triton.plan import device_plan, paths_on_device
from replayssm.ring import RingSpec
from replayssm.types import Block, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan
    from replayssm.storage import LayerStore

__all__ = ["compact_", "conv_", "fold_", "standard_", "step_"]


def step_(
    store: LayerStore, plan: BlockPlan, block: Block, depth: Sequence[ReadDepth], out: Tensor
) -> None:
    """Fold what is due, append the block's entries and write its outputs; as the reference."""
    check_served(store)
    ring = store.spec.ring
    on_device = device_plan(plan, ring, depth, block.tokens, store.high.device)
    target = inner_dense(out)
    _step(store, on_device, _dense(block), target)
    if target is not out:
        out.copy_(target)


def fold_(store: LayerStore, plan: BlockPlan) -> None:
    """Bring every row's planes to its newest boundary; mutates planes and scales only."""
    check_served(store)
    full = [ReadDepth.FULL] * plan.rows
    _fold(store, device_plan(plan, store.spec.ring, full, 1, store.high.device))


def standard_(
    state: Tensor,
    layer: LayerSpec,
    plan: BlockPlan,
    block: Block,
    out: Tensor,
    targets: NDArray[np.int64] | None = None,
) -> None:
    """Run the standard step; as the reference."""
    full = [ReadDepth.FULL] * plan.rows
    on_device = device_plan(plan, RingSpec(), full, block.tokens, state.device)
    where = None if targets is None else torch.from_numpy(targets).to(state.device)
    target = inner_dense(out)
    if plan.rows:
        standard_call(state, layer, on_device, _dense(block), target, where).run()
    if target is not out:
        out.copy_(target)


def conv_(
    store: LayerStore, plan: BlockPlan, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Convolve a block and append its inputs; as :func:`replayssm.ops.conv.conv_`."""
    if store.conv is None:
        raise TypeError("conv: this layer keeps no inputs of a convolution")
    full = [ReadDepth.FULL] * plan.rows
    on_device = device_plan(plan, store.spec.ring, full, x.shape[1], x.device)
    out = empty_like_dense(x)
    if plan.rows:
        conv_call(store.conv, on_device, inner_dense(x), dense_weight(weight), bias, out).run()
    return out


def compact_(store: LayerStore, plan: BlockPlan, paths: Sequence[tuple[int, ...] | None]) -> None:
    """Move each row's kept entries to the front of its block, one launch a layer."""
    if not any(path and path != tuple(range(len(path))) for path in paths):
        return
    device = store.high.device
    full = [ReadDepth.FULL] * plan.rows
    on_device = device_plan(plan, store.spec.ring, full, int(plan.lengths.max()), device)
    compact_call(store, on_device, paths_on_device(plan, paths, device)).run()


def _dense(block: Block) -> Block:
    q, k, v, g, w = (inner_dense(x) for x in (block.q, block.k, block.v, block.g, block.w))
    return Block(q, k, v, g, w)
