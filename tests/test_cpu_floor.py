"""The CPU floor's own arithmetic, and that its bytes are those of a step."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

pytest.importorskip("numba")

from cpu_floor import DISTANCES, Bytes, record
from cpu_kernels import inputs, replay
from replayssm.types import Decay, Format, LayerSpec, ReadDepth, Write

WINDOW, ROWS = 4, 4


def fill(store, value):
    for x in store.present().values():
        x.fill_(value)


def changed(store, name, value):
    return {tuple(at) for at in (getattr(store, name) != value).nonzero()[:, :1].tolist()}


def test_what_has_to_be_hidden_is_what_bytes_and_arithmetic_have_too_much():
    label = "q24 high"
    bytes_ms = {f"{label} bytes, {ahead} ahead": 6.0 + ahead for ahead in DISTANCES}
    ms = {"in place": 9.0, "standard": 12.0, label: 9.0, **bytes_ms}
    found = record("kda", 32, label, ms, {label: 20}, alone=4.0)
    assert (found["ratio"], found["bytes_ratio"]) == (1.33, 2.0)
    assert found["goal_ms"] == 8.0
    # 6 + 4 - 9 of the smaller one's 4 was hidden, 6 + 4 - 8 would have to be
    assert (found["hidden"], found["hidden_wanted"]) == (0.25, 0.5)


def test_every_step_of_a_benchmark_costs_the_average_of_a_fold_cycle():
    layer = LayerSpec(Write.DELTA, Decay.SCALAR, 2, 4, 16, 16)
    run = replay(layer, (Format.F32, ReadDepth.FULL), WINDOW, WINDOW, [], torch.bfloat16)
    ring = run.store.spec.ring
    for _ in range(WINDOW + 1):
        plan = run.plan()
        positions = zip(plan.base, plan.folded, plan.committed, strict=True)
        unfolded = [c - ring.folded_to(0, int(b), int(c)) for b, _, c in positions]
        assert sorted(unfolded) == list(range(WINDOW))
        run.folded, run.committed = run.committed, run.committed + 1


@pytest.mark.slow
@pytest.mark.parametrize("decay", [Decay.SCALAR, Decay.CHANNEL])
@pytest.mark.parametrize("fmt", [Format.F32, Format.Q24])
def test_the_bytes_of_a_step_are_stored_where_a_step_stores(fmt, decay):
    layer = LayerSpec(Write.DELTA, decay, 2, 4, 64, 64)
    blocks = [inputs(layer, ROWS, 0)]
    depth = ReadDepth.FULL if fmt is Format.F32 else ReadDepth.HIGH
    run = replay(layer, (fmt, depth), WINDOW, ROWS, blocks, torch.bfloat16)
    arm = Bytes(run, ahead=1024)
    for _ in range(2 * WINDOW):
        fill(run.store, 1)
        before, new = run.folded // WINDOW, run.committed % run.store.spec.ring.ring_len
        folds = run.committed // WINDOW > before
        arm.step()
        for name in ("k", "v", "g", "w"):
            ring = getattr(run.store, name)
            expected = torch.ones_like(ring)
            expected[range(ROWS), :, new] = 0
            assert torch.equal(ring, expected), name
        for row, due in enumerate(folds):
            assert bool((run.store.high[row] == (0 if due else 1)).all())
        assert not run.out.any()
