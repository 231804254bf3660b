"""Memory by arithmetic: how many sequences fit, and what a verify and its commit move."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING

import torch

from replayssm.errors import ContractError
from replayssm.formats import FORMATS
from replayssm.ring import RingSpec
from replayssm.storage import RING_AXES, StorageSpec
from replayssm.types import Format, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one pool of a model costs.

    Attributes:
        budget_bytes: Memory given to the pool.
        slot_bytes: Bytes of one sequence over all recurrent layers, rings and scales included.
        ring_bytes: The part of ``slot_bytes`` that rings take.
        standard_bytes: Bytes of one sequence on the standard path with an fp32 state.
        slots: Sequences that fit.
        standard_slots: Sequences that fit on the standard path.
    """

    budget_bytes: int
    slot_bytes: int
    ring_bytes: int
    standard_bytes: int
    slots: int
    standard_slots: int


def plan_memory(
    layers: Sequence[LayerSpec],
    gib: float,
    *,
    state: Format | str = Format.S32,
    ring: RingSpec | None = None,
    ring_dtype: torch.dtype = torch.float32,
) -> MemoryPlan:
    """Answer how many sequences fit in ``gib`` GiB.

    The same shape table allocates a pool, so ``StatePool(layers, plan.slots, ...).nbytes()`` equals
    ``plan.slots * plan.slot_bytes``.

    Args:
        layers: Geometry of the model's recurrent layers.
        gib: Memory for the pool, in GiB.
        state: State format.
        ring: Ring sizes.
        ring_dtype: dtype of ring keys and values.

    Raises:
        ContractError: ``gib`` is not positive, or not finite in bytes, or there is no layer.
    """
    if not 0 < gib * GIB < inf:
        raise ContractError("gib", "a positive finite number", gib)
    if not layers:
        raise ContractError("layers", "at least one layer", "none")
    fmt, ring = Format(state), ring or RingSpec()
    specs = [StorageSpec(layer, fmt, ring, ring_dtype) for layer in layers]
    slot = sum(spec.nbytes(1) for spec in specs)
    standard = sum(layer.state_elements * 4 for layer in layers)
    budget = int(gib * GIB)
    return MemoryPlan(
        budget_bytes=budget,
        slot_bytes=slot,
        ring_bytes=sum(spec.ring_nbytes(1) for spec in specs),
        standard_bytes=standard,
        slots=budget // slot,
        standard_slots=budget // standard,
    )


def moved_bytes(
    spec: StorageSpec, tokens: int, accepted: float, depth: ReadDepth = ReadDepth.FULL
) -> float:
    """Return the bytes that one row's verify and commit move in one layer, over whole fold cycles.

    A verify reads the planes once and the live entries once, and appends ``tokens`` entries. Every
    accepted entry is folded once, and one in ``window`` of them rewrites both planes.

    Args:
        spec: Storage of the layer.
        tokens: T of the block.
        accepted: Mean number of entries that a commit keeps.
        depth: Planes that the verify reads.
    """
    fmt, ring, elements = FORMATS[spec.format], spec.ring, spec.layer.state_elements
    folds = accepted / ring.window
    planes = elements * (fmt.read_bytes[depth] + 2 * fmt.stored_bytes * folds)
    rings = {name: shape for name, shape in spec.shapes(1).items() if name in RING_AXES}
    inputs = rings.pop("conv", None)
    entry = sum(prod(shape) * dtype.itemsize for shape, dtype in rings.values()) / ring.ring_len
    live = ring.keep + (ring.window - 1) / 2 + tokens
    moved = planes + entry * (live + tokens + accepted)
    if inputs is not None and spec.layer.conv is not None:
        entry = spec.layer.conv.channels * inputs[1].itemsize
        moved += entry * (spec.layer.conv.width - 1 + tokens)
    return moved
