"""The conformance suite: an engine hands in its step and learns whether it keeps the rules.

    from replayssm.testing.conformance import check_step
    check_step(my_engine.step_)

Every case runs a few windows of partial commits over a guarded, poisoned store and checks after
each forward: outputs within the budget given the checkpoint that was read, the fold within its own
budget, pad rows and lanes past a row's length exactly 0, no byte changed outside the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.ops import reference
from replayssm.ring import RingSpec
from replayssm.storage import LayerStore, StorageSpec
from replayssm.testing.budgets import clone_store, fold_budget, folded_states, output_budget
from replayssm.testing.factories import (
    DIMS,
    FAMILIES,
    HEADS,
    Regime,
    make_block,
    make_layer,
    make_plan,
    make_state,
    make_tree,
    pad_tokens,
)
from replayssm.testing.guard import bystander_digests, guarded_store, poison_dead_
from replayssm.types import Format, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replayssm.ring import BlockPlan
    from replayssm.types import Block

# (store, plan, block, depth of each row, out): as reference.step_
Step = Callable[[LayerStore, "BlockPlan", "Block", Sequence[ReadDepth], Tensor], None]

SLOTS = 7
ROWS = (5, -1, 0, 6)  # a pad row, and the first and the last slot of the pool
FORWARDS = 7
# beyond this the reference itself is wrong
PLAIN_ROUNDINGS = 1000.0
RING = RingSpec(window=4, max_block=3)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of the suite."""

    layer: LayerSpec
    format: Format
    ring: RingSpec = RING
    regime: Regime = Regime.TYPICAL
    dtype: torch.dtype = torch.float32
    outliers: float = 0.0
    is_tree: bool = False

    def __str__(self) -> str:
        at, ring = self.layer, self.ring
        parts = [
            f"{at.write}-{at.decay}",
            f"{at.key_heads}:{at.value_heads}",
            f"{at.key_dim}x{at.value_dim}",
            self.format.value,
            str(self.dtype).removeprefix("torch."),
            self.regime.value,
            f"window {ring.window} keep {ring.keep} tiles {ring.tiles}",
        ]
        if self.outliers:
            parts.append(f"outliers {self.outliers}")
        return ", ".join([*parts, "tree"] if self.is_tree else parts)


def cases(*, tiles: bool = True, trees: bool = True) -> Iterator[Case]:
    """Yield the suite's configurations.

    Args:
        tiles: Include rings that fold value tiles at their own time.
        trees: Include trees of drafts.
    """
    shapes = cycle([(heads, dims) for dims in DIMS for heads in HEADS])
    dtypes = cycle([torch.float32, torch.bfloat16, torch.float16])
    rings = cycle([RING, RingSpec(window=4, keep=5, max_block=3)])
    for family in FAMILIES:
        for fmt in Format:
            layer = make_layer(*family, *next(shapes))
            yield Case(layer, fmt, ring=next(rings), dtype=next(dtypes))
        small = make_layer(*family)
        for regime in Regime:
            yield Case(small, Format.S32, regime=regime)
            yield Case(small, Format.Q24, regime=regime)
        yield Case(small, Format.Q24, outliers=2.0)
        yield Case(small, Format.Q16, ring=RingSpec(window=2, max_block=5))
        if tiles:
            yield Case(small, Format.Q24, ring=RingSpec(window=8, keep=5, max_block=3, tiles=4))
            yield Case(small, Format.S32, ring=RingSpec(window=8, max_block=3, tiles=8))
        if trees:
            yield Case(small, Format.S32, is_tree=True)
        if tiles and trees:
            ring = RingSpec(window=8, max_block=3, tiles=4)
            yield Case(small, Format.F32, ring=ring, is_tree=True)


def check_step(step: Step, *, tiles: bool = True, trees: bool = True) -> int:
    """Run the whole suite.

    Args:
        step: Folds what is due, appends a block's entries and writes its outputs, exactly as
            :func:`replayssm.ops.reference.step_`.
        tiles: Whether ``step`` folds value tiles at their own time.
        trees: Whether ``step`` reads trees.

    Returns:
        The number of cases.

    Raises:
        AssertionError: A rule is broken; the message names the case, the forward and the rule.
    """
    count = 0
    for case in cases(tiles=tiles, trees=trees):
        check_case(step, case)
        count += 1
    return count


def check_case(step: Step, case: Case) -> None:
    """Run one configuration; see :func:`check_step`."""
    spec = StorageSpec(case.layer, case.format, case.ring, case.dtype)
    guarded = guarded_store(spec, SLOTS)
    guard = guarded.guard_digest()
    # rows stand at different phases of the window, one of them far along
    committed = np.array([3, 0, 17, 2**40 + 1])
    base, folded = committed.copy(), committed.copy()
    for row, slot in enumerate(ROWS):
        if slot >= 0:
            state = make_state(case.layer, seed=row, outliers=case.outliers)
            reference.admit_(guarded.store, slot, state)
    rng = np.random.default_rng(0)
    for forward in range(FORWARDS):
        lengths = np.where(np.array(ROWS) < 0, 0, rng.integers(1, case.ring.max_block + 1, 4))
        plan = _plan(case, lengths, base, folded, committed, forward)
        _poison_ring(guarded.store, plan)
        _check_forward(step, case, guarded.store, plan, forward)
        if guarded.guard_digest() != guard:
            raise AssertionError(f"{case}, forward {forward}: bytes between slots changed")
        folded = np.maximum(folded, committed)
        committed = committed + rng.integers(0, lengths + 1)


def _plan(
    case: Case,
    lengths: np.ndarray,
    base: np.ndarray,
    folded: np.ndarray,
    committed: np.ndarray,
    seed: int,
) -> BlockPlan:
    counts = {"base": base.tolist(), "folded": folded.tolist()}
    tree = None
    if case.is_tree:
        width = int(lengths.max())
        tree = [make_tree(width, seed=seed * len(ROWS) + row) for row in range(len(ROWS))]
    return make_plan(ROWS, lengths.tolist(), committed.tolist(), parents=tree, **counts)


def _poison_ring(store: LayerStore, plan: BlockPlan) -> None:
    ring = store.spec.ring
    for slot, base, folded, committed in zip(
        plan.slots, plan.base, plan.folded, plan.committed, strict=True
    ):
        if slot >= 0:
            oldest = ring.oldest_needed(int(base), int(folded))
            poison_dead_(store, int(slot), range(oldest, int(committed)))


def _check_forward(
    step: Step, case: Case, store: LayerStore, plan: BlockPlan, forward: int
) -> None:
    tokens = case.ring.max_block
    block = make_block(
        case.layer,
        len(ROWS),
        tokens,
        seed=100 + forward,
        regime=case.regime,
        dtype=case.dtype,
        outliers=case.outliers,
    )
    for row, length in enumerate(plan.lengths.tolist()):
        for x in (block.q, block.k, block.v, block.g, block.w):
            x[row, length:] = torch.nan
    block = pad_tokens(block, tokens + 1)
    depth = [(ReadDepth.HIGH, ReadDepth.FULL)[(row + forward) % 2] for row in range(len(ROWS))]
    out = torch.full(block.v.shape, torch.nan, dtype=case.dtype)
    before = clone_store(store)
    bystanders = bystander_digests(store, plan.slots.tolist())

    step(store, plan, block, depth, out)

    where = f"{case}, forward {forward}"
    for what, budget, got in (
        ("the fold", fold_budget(before, plan), folded_states(store, plan)),
        ("an output", output_budget(store, plan, block, depth, case.dtype), out),
    ):
        if budget.plain > PLAIN_ROUNDINGS:
            raise AssertionError(
                f"{where}: {what} of the reference is {budget.plain:.3g} roundings off"
            )
        excess = budget.excess(got)
        if excess > 1:
            raise AssertionError(f"{where}: {what}'s error is {excess:.3g} times its budget")
    if bystander_digests(store, plan.slots.tolist()) != bystanders:
        raise AssertionError(f"{where}: a slot outside the batch changed")
    for row, length in enumerate(plan.lengths.tolist()):
        if bool((out[row, length:] != 0).any()):
            raise AssertionError(f"{where}: row {row} is not 0 past its length {length}")
