"""A block plan on the device: the integers that every kernel of a forward reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.types import ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan, RingSpec


# rows of ``counts``, as kernels/common.py has them
FOLDED, COMMITTED = 2, 3


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Rows of a forward where kernels can read them.

    Attributes:
        counts: ``[6, B]`` int64: slot (-1 for a pad row), base, folded, committed, length, and
            whether the row's read is full.
        depth: ``"high"``, ``"full"`` or ``"mixed"``: what the rows' reads have in common.
        due: ``[1 + B * tiles]`` int32: how many value tiles fold in this forward, then
            ``row * tiles + tile`` of each.
        ancestors: ``[B, T]`` int64 bit masks: the block's tokens on the path to each token, its own
            included.
        parents: ``[B, T]`` int64, as in the plan; None when every row is a chain.
    """

    counts: Tensor
    depth: str
    due: Tensor
    ancestors: Tensor
    parents: Tensor | None = None

    @property
    def rows(self) -> int:
        """B."""
        return int(self.counts.shape[1])

    def after_folds(self) -> DevicePlan:
        """Return the plan of the same rows once what is due has been folded: nothing is."""
        counts = self.counts.clone()
        torch.maximum(counts[FOLDED], counts[COMMITTED], out=counts[FOLDED])
        return replace(self, counts=counts, due=torch.zeros_like(self.due))


def device_plan(
    plan: BlockPlan,
    ring: RingSpec,
    depth: Sequence[ReadDepth],
    tokens: int,
    device: torch.device,
) -> DevicePlan:
    """Copy a plan to ``device`` in one transfer; the layers of a forward share the copy.

    Args:
        plan: The forward's plan.
        ring: Ring sizes.
        depth: Read depth of each row.
        tokens: T of the block.
        device: Where the layer's tensors are.
    """
    key = (ring, tuple(depth), tokens, device)
    found = plan.on_device.get(key)
    if not isinstance(found, DevicePlan):
        found = plan.on_device[key] = _copy(plan, ring, depth, tokens, device)
    return found


def paths_on_device(
    plan: BlockPlan, paths: Sequence[tuple[int, ...] | None], device: torch.device
) -> Tensor:
    """Return ``[B, T]`` int64 kept nodes, then -1; the layers of a forward share the copy."""
    key = ("paths", tuple(paths), device)
    found = plan.on_device.get(key)
    if not isinstance(found, Tensor):
        table = np.full((plan.rows, max(1, int(plan.lengths.max(initial=1)))), -1, np.int64)
        for row, path in enumerate(paths):
            table[row, : len(path or ())] = path or ()
        found = plan.on_device[key] = _to(table, device)
    return found


def counts_on_host(plan: DevicePlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ``folded`` and ``committed``, ``[B]`` each, once the device has come to rest."""
    counts = plan.counts.cpu().numpy()
    return counts[FOLDED], counts[COMMITTED]


def due_tiles(plan: BlockPlan, ring: RingSpec) -> NDArray[np.int32]:
    """Return ``[1 + B * tiles]``: the number of value tiles that fold, then which."""
    tile = np.arange(ring.tiles)
    phase = tile * ring.window // ring.tiles

    def folded_to(count: NDArray[np.int64]) -> NDArray[np.int64]:
        past = count[:, None] - ring.keep - phase
        boundary = past // ring.window * ring.window + phase
        reached: NDArray[np.int64] = np.maximum(plan.base[:, None], boundary)
        return reached

    after = folded_to(np.maximum(plan.folded, plan.committed))
    is_due = (folded_to(plan.folded) < after) & (plan.slots >= 0)[:, None]
    found = np.flatnonzero(is_due)
    listed = np.zeros(1 + is_due.size, np.int32)
    listed[0], listed[1 : 1 + len(found)] = len(found), found
    return listed


def _copy(
    plan: BlockPlan, ring: RingSpec, depth: Sequence[ReadDepth], tokens: int, device: torch.device
) -> DevicePlan:
    full = np.array([d is ReadDepth.FULL for d in depth], np.int64)
    counts = np.stack([plan.slots, plan.base, plan.folded, plan.committed, plan.lengths, full])
    kinds = set(depth)
    shared = "mixed" if len(kinds) > 1 else next(iter(kinds), ReadDepth.FULL).value
    parts = [counts, _ancestor_masks(plan, tokens)]
    if plan.parents is not None:
        wide = np.full((plan.rows, tokens), -1, np.int64)
        known = min(tokens, plan.parents.shape[1])
        wide[:, :known] = plan.parents[:, :known]
        parts.append(wide)
    due = due_tiles(plan, ring)
    parts.append(np.pad(due, (0, len(due) % 2)).view(np.int64))
    whole = _to(np.concatenate([part.ravel() for part in parts]), device)
    cuts = whole.split([part.size for part in parts])
    shaped = [cut.view(part.shape) for cut, part in zip(cuts, parts, strict=True)]
    parents = shaped[2] if plan.parents is not None else None
    return DevicePlan(shaped[0], shared, shaped[-1].view(torch.int32), shaped[1], parents)


def _ancestor_masks(plan: BlockPlan, tokens: int) -> NDArray[np.int64]:
    own = np.left_shift(np.int64(1), np.arange(tokens, dtype=np.int64))
    masks = np.broadcast_to(np.cumsum(own), (plan.rows, tokens)).copy()
    if plan.parents is not None:
        for t in range(min(tokens, plan.parents.shape[1])):
            parent = plan.parents[:, t]
            behind = np.take_along_axis(masks, parent.clip(min=0)[:, None], 1)[:, 0]
            masks[:, t] = np.where(parent >= 0, behind, 0) | own[t]
    return masks


def _to(table: NDArray[np.int64], device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(table))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
