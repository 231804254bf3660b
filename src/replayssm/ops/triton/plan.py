"""A block plan on the device: the integers that every kernel of a forward reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.types import ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.ring import BlockPlan


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Rows of a forward where kernels can read them.

    Attributes:
        counts: ``[6, B]`` int64: slot (-1 for a pad row), base, folded, committed, length, and
            whether the row's read is full.
        ancestors: ``[B, T]`` int64 bit masks: the block's tokens on the path to each token, its own
            included; None when every row is a chain of one token.
        depth: ``"high"``, ``"full"`` or ``"mixed"``: what the rows' reads have in common.
    """

    counts: Tensor
    ancestors: Tensor | None
    depth: str
    due: Tensor | None = None

    @property
    def rows(self) -> int:
        """B."""
        return int(self.counts.shape[1])


def device_plan(
    plan: BlockPlan, depth: Sequence[ReadDepth], tokens: int, device: torch.device
) -> DevicePlan:
    """Copy a plan to ``device``: one transfer, whatever the number of rows.

    Args:
        plan: The forward's plan.
        depth: Read depth of each row.
        tokens: T of the block.
        device: Where the layer's tensors are.
    """
    full = np.array([d is ReadDepth.FULL for d in depth], np.int64)
    table = np.stack([plan.slots, plan.base, plan.folded, plan.committed, plan.lengths, full])
    kinds = set(depth)
    shared = "mixed" if len(kinds) > 1 else str(next(iter(kinds), ReadDepth.FULL).value)
    paths = None if tokens == 1 else _ancestor_masks(plan, tokens)
    if paths is None:
        return DevicePlan(_to(table, device), None, shared)
    both = _to(np.concatenate([table.ravel(), paths.ravel()]), device)
    return DevicePlan(both[: table.size].view(6, -1), both[table.size :].view(paths.shape), shared)


def _ancestor_masks(plan: BlockPlan, tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    own = np.left_shift(np.int64(1), np.arange(tokens, dtype=np.int64))
    masks = np.broadcast_to(np.cumsum(own), (plan.rows, tokens)).copy()
    if plan.parents is not None:
        for t in range(min(tokens, plan.parents.shape[1])):
            parent = plan.parents[:, t]
            behind = np.take_along_axis(masks, parent.clip(min=0)[:, None], 1)[:, 0]
            masks[:, t] = np.where(parent >= 0, behind, 0) | own[t]
    return masks


def _to(table: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(table))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
