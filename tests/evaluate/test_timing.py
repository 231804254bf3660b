from __future__ import annotations

import pytest
import torch

from replayssm.evaluate.arms import DEFAULT, STANDARD
from replayssm.evaluate.plan import Plan, Scope
from replayssm.evaluate.timing import interleave
from replayssm.evaluate.window import grid, tolerance
from replayssm.evaluate.workload import Runner, Shape, make_blocks, output_error
from replayssm.types import Decay, LayerSpec, Write

SPECS = [
    LayerSpec(Write.ADDITIVE, Decay.SCALAR, 1, 4, 8, 8),
    LayerSpec(Write.DELTA, Decay.SCALAR, 2, 4, 8, 8),
    LayerSpec(Write.DELTA, Decay.CHANNEL, 4, 4, 8, 8),
]


def test_arms_alternate_and_nothing_is_dropped():
    seen: list[str] = []
    arms = {name: (lambda n=name: seen.append(n)) for name in "abc"}
    found = interleave(arms, rounds=4)
    timed = [seen[3 * r : 3 * r + 3] for r in range(4)]
    assert all(sorted(r) == list("abc") for r in timed)
    assert len({tuple(r) for r in timed}) == 3
    assert all(len(s.seconds) == 4 for s in found.values())


def test_a_time_limit_leaves_at_least_three_rounds():
    found = interleave({"a": lambda: None}, rounds=10, limit_s=0.0)
    assert len(found["a"].seconds) == 3


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("arm", DEFAULT, ids=lambda a: a.name)
def test_every_arm_computes_the_standard_step(spec, arm):
    shape = Shape(spec, 1, 3, 4)
    blocks = make_blocks(spec, 3, 0, 11)
    assert output_error(arm, shape, blocks, STANDARD, 11) <= tolerance(arm)


def test_folds_are_spread_over_the_window():
    spec = SPECS[1]
    runner = Runner(DEFAULT[2], Shape(spec, 2, 8, 8), make_blocks(spec, 8, 0))
    runner.cycle()
    each = []
    for _ in range(8):
        before = runner.folds
        runner.step()
        each.append(runner.folds - before)
    assert each == [1] * 8


def test_state_changes_while_it_is_timed():
    spec = SPECS[0]
    runner = Runner(STANDARD, Shape(spec, 1, 2, 4), make_blocks(spec, 2, 0))
    first = runner.step().clone()
    runner.cycle()
    runner.steps = 0
    assert not torch.equal(first, runner.step())


def test_grid_measures_other_windows_where_they_matter():
    plan = Plan("x")
    cells = grid(plan)
    assert {(b, 16) for b in plan.scope.batches} <= set(cells)
    assert {w for b, w in cells if b == 64} == {8, 16, 32}
    full = Plan("x", scope=Scope(batches=(1, 2, 3, 4, 5), windows=(4, 16)))
    assert len(grid(full)) == 10
