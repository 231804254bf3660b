"""Error budgets: how far from fp64 an implementation, and a format, may be.

An implementation is judged *given the checkpoint it read*: its error against the fp64 reference on
that decoded checkpoint may be at most twice that of plain torch (the reference in fp32, its sums in
any order) in the same dtypes, plus one rounding. What a format loses is the format's own and has
its own budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.ops import reference
from replayssm.ring import tile_rows
from replayssm.storage import LayerStore
from replayssm.types import Decay, Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.ring import BlockPlan
    from replayssm.types import Block

# rounding of one stored number, relative to the largest of its value row
FORMAT_ROUNDING: dict[Format, float] = {
    Format.F32: 2.0**-23,
    Format.S32: 2.0**-23,
    Format.Q24: 2.0**-22,
    Format.Q16: 2.0**-14,
    Format.BF16: 2.0**-8,
}

# A dot product of keys is as exact as its order happens to be: where it cancels, plain torch itself
# is 0.5 to 4 roundings off over orders of the same channels. So plain torch's error is the worst of
# these turns of the key axis, which change nothing but the order of its sums.
KEY_TURNS = (0, 3, 7, 13)

# relative error of an output, whole sequence against fp64: the simulated error of slowly decaying
# delta layers (the worst of the families) with half as much again for other shapes and seeds
OUTPUT_BUDGET: dict[tuple[Format, ReadDepth], float] = {
    (Format.F32, ReadDepth.HIGH): 1e-6,
    (Format.F32, ReadDepth.FULL): 1e-6,
    (Format.S32, ReadDepth.HIGH): 2.5e-3,
    (Format.S32, ReadDepth.FULL): 1e-6,
    (Format.Q24, ReadDepth.HIGH): 8.4e-3,
    (Format.Q24, ReadDepth.FULL): 1e-6,
    (Format.Q16, ReadDepth.HIGH): 8.4e-3,
    (Format.Q16, ReadDepth.FULL): 8e-5,
    (Format.BF16, ReadDepth.HIGH): 6e-3,
    (Format.BF16, ReadDepth.FULL): 6e-3,
}

# relative error of a state under the same conditions
STATE_BUDGET: dict[Format, float] = {
    Format.F32: 1e-6,
    Format.S32: 1e-6,
    Format.Q24: 1e-6,
    Format.Q16: 8.4e-5,
    Format.BF16: 6e-3,
}


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return ``|got - exact| / |exact|`` over whole tensors, in fp64."""
    norm = float(exact.double().norm())
    error = float((got.double() - exact.double()).norm())
    return error / norm if norm else error


@dataclass(frozen=True, slots=True)
class Budget:
    """An exact result and how far from it each row may be, relative to the row's largest element.

    Attributes:
        exact: ``[B, ...]`` fp64.
        allowed: ``[B]`` fp64 largest absolute error of an element.
        plain: Error of plain torch, in roundings of the largest element of a row. It is a handful;
            far more means that the reference itself is wrong.
    """

    exact: Tensor
    allowed: Tensor
    plain: float = 0.0

    def excess(self, got: Tensor) -> float:
        """Return the largest error as a multiple of what is allowed; over 1 is a failure.

        A non-finite element that is not exactly the expected one is an infinite excess.
        """
        same = (got.double() == self.exact) | (got.isnan() & self.exact.isnan())
        error = torch.where(same, 0.0, (got.double() - self.exact).abs())
        worst = error.nan_to_num(nan=torch.inf, posinf=torch.inf).flatten(1).amax(1)
        ratio = torch.where(worst > 0, worst / self.allowed, 0.0)
        return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if len(ratio) else 0.0


def clone_store(store: LayerStore) -> LayerStore:
    """Return a store with its own dense tensors."""
    return LayerStore(store.spec, **{name: x.clone() for name, x in store.present().items()})


def output_budget(
    after: LayerStore,
    plan: BlockPlan,
    block: Block,
    depth: Sequence[ReadDepth],
    out_dtype: torch.dtype,
) -> Budget:
    """Return the budget of a step's outputs, given the checkpoint that the step left behind.

    Args:
        after: The layer after the step: folded, and holding the block's entries.
        plan: The step's plan.
        block: Its inputs.
        depth: Read depth of each row.
        out_dtype: dtype of the outputs that are judged.
    """
    settled = replace(plan, folded=np.maximum(plan.folded, plan.committed))
    store = clone_store(after)
    exact = torch.zeros(block.v.shape, dtype=torch.float64)
    reference.step_(store, settled, block, depth, exact, compute=torch.float64)
    plain = [plain_outputs(store, settled, block, depth, out_dtype, n) for n in KEY_TURNS]
    return _budget(exact, torch.stack(plain), torch.finfo(out_dtype).eps)


def fold_budget(before: LayerStore, plan: BlockPlan) -> Budget:
    """Return the budget of the full states after a fold, from the store before it.

    Compare with :func:`folded_states` of the store after it.
    """
    store = clone_store(before)
    reference.fold_(store, plan)
    plain = folded_states(store, plan)
    exact = torch.stack([_exact_fold(before, plan, row) for row in range(plan.rows)])
    return _budget(exact, plain, FORMAT_ROUNDING[before.spec.format])


def folded_states(after: LayerStore, plan: BlockPlan) -> Tensor:
    """Return ``[B, HV, V, K]``: every row's full checkpoint, decoded; pad rows are 0."""
    ring = after.spec.ring
    states = []
    for row in range(plan.rows):
        slot = int(plan.slots[row])
        tiles = [
            reference.decode_tile(after, max(slot, 0), tile, ReadDepth.FULL)
            for tile in range(ring.tiles)
        ]
        state = torch.cat(tiles, dim=1)
        states.append(state if slot >= 0 else torch.zeros_like(state))
    return torch.stack(states)


def _exact_fold(before: LayerStore, plan: BlockPlan, row: int) -> Tensor:
    spec, ring = before.spec, before.spec.ring
    slot, base, old = (int(x[row]) for x in (plan.slots, plan.base, plan.folded))
    layer = spec.layer
    if slot < 0:
        shape = (layer.value_heads, layer.value_dim, layer.key_dim)
        return torch.zeros(shape, dtype=torch.float64)
    new, tiles = max(old, int(plan.committed[row])), []
    for tile in range(ring.tiles):
        start, stop = (ring.folded_to(tile, base, at) for at in (old, new))
        state = reference.decode_tile(before, slot, tile, ReadDepth.FULL).double()
        entries = reference.gather(before, slot, start, stop, torch.float64)
        rows = tile_rows(tile, ring.tiles, layer.value_dim)
        tiles.append(reference.fold_serial(state, entries.rows(rows), layer.write))
    return torch.cat(tiles, dim=1)


def plain_outputs(
    store: LayerStore,
    plan: BlockPlan,
    block: Block,
    depth: Sequence[ReadDepth],
    out_dtype: torch.dtype,
    turn: int,
) -> Tensor:
    """Return plain torch's outputs, its key channels turned by ``turn``; else as output_budget."""
    by_key = ["high", "low", "columns", "k"]
    q, k, g = block.q.roll(turn, -1), block.k.roll(turn, -1), block.g
    if store.spec.layer.decay is Decay.CHANNEL:
        by_key.append("g")
        g = g.roll(turn, -1)
    tensors = {n: x.roll(turn, -1) if n in by_key else x for n, x in store.present().items()}
    turned = clone_store(LayerStore(store.spec, **tensors))
    out = torch.zeros(block.v.shape, dtype=out_dtype)
    reference.step_(turned, plan, replace(block, q=q, k=k, g=g), depth, out)
    return out


def _budget(exact: Tensor, plain: Tensor, rounding: float) -> Budget:
    """Return the budget given one or more ``plain [..., B, ...]`` results in another order."""
    error = torch.where(plain.double() == exact, 0.0, (plain.double() - exact).abs())
    error = error.reshape(-1, *exact.shape).amax(0)
    worst, size = (x.flatten(1).nan_to_num(0.0, 0.0, 0.0).amax(1) for x in (error, exact.abs()))
    # one row's plain error may be small by luck: the worst row's, relative to its size, counts
    relative = float(torch.where(size > 0, worst / size, 0.0).amax()) if len(size) else 0.0
    return Budget(exact, (2 * relative + rounding) * size, relative / rounding)
