"""The rollback torture: it passes what is right, at every phase, and notices what is not."""

from __future__ import annotations

import pytest
import torch

from replayssm.baselines import RecomputePool, SnapshotPool
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import make_layer
from replayssm.testing.rollback import check_rollback
from replayssm.types import Decay, Format, Impl, Write

LAYERS = (
    make_layer(Write.ADDITIVE, Decay.SCALAR, (1, 2), (5, 3), (4, 4)),
    make_layer(Write.DELTA, Decay.SCALAR, (1, 2), (6, 3), (5, 2)),
    make_layer(Write.DELTA, Decay.CHANNEL, (1, 1), (18, 4)),
)
WINDOW = 8


def pool(max_block, keep, **kwargs):
    ring = RingSpec(window=WINDOW, keep=keep, max_block=max_block)
    return StatePool(LAYERS, 3, ring=ring, **kwargs)


# the reference takes minutes for as many rounds as the kernels
ROUNDS = [
    pytest.param(Impl.AUTO, 500),
    pytest.param(Impl.AUTO, 2000, marks=pytest.mark.slow),
    pytest.param(Impl.REFERENCE, 100),
    pytest.param(Impl.REFERENCE, 2000, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("which", "rounds"), ROUNDS)
def test_rollbacks_leave_no_trace(which, rounds):
    report = check_rollback(
        LAYERS, lambda block, keep: pool(block, keep, impl=which), rounds=rounds
    )
    assert report.rounds == rounds
    assert report.worst_state == 0
    assert report.phases == set(range(WINDOW))
    assert min(report.partial, report.trees, report.cropped) > rounds / 5
    assert report.departures > rounds / 40
    assert report.kept < report.drafted


@pytest.mark.parametrize(
    ("fmt", "tolerance"),
    [(Format.F32, 1e-5), (Format.Q24, 1e-4), (Format.Q16, 5e-3), (Format.BF16, 3e-2)],
)
def test_every_format_rolls_back_to_the_same_bits(impl, fmt, tolerance):
    """The checkpoint is exact in every format; an output reads it at one boundary or the next."""
    check_rollback(
        LAYERS,
        lambda block, keep: pool(block, keep, impl=impl, state=fmt, ring_dtype=torch.bfloat16),
        rounds=100,
        tolerance=tolerance,
    )


def test_value_tiles_roll_back(impl):
    if impl == "cpu":
        pytest.skip("the cpu implementation folds whole slots")
    ring = {"window": WINDOW, "tiles": 3}
    check_rollback(
        LAYERS,
        lambda block, keep: StatePool(
            LAYERS, 3, ring=RingSpec(keep=keep, max_block=block, **ring), impl=impl
        ),
        rounds=100,
    )


@pytest.mark.parametrize("kind", [SnapshotPool, RecomputePool])
def test_baselines_roll_back(impl, kind):
    report = check_rollback(
        LAYERS,
        lambda block, keep: kind(LAYERS, 3, max_block=block, impl=impl),
        rounds=100,
        keep=0,
        trees=False,
        settle=False,
    )
    assert report.worst_state == report.worst_output == 0


class OffByOne(StatePool):
    """Class 33: the always accepted pending token is forgotten now and then."""

    def commit_(self, ticket, num_accepted):
        if ticket.plan.lengths.max() > 1:
            num_accepted = [n - 1 if n == 4 else n for n in num_accepted]
        super().commit_(ticket, num_accepted)


class ForgetsTheWindow(StatePool):
    """Class 34: the convolution's window is not rolled back with the state."""

    def conv_(self, ticket, layer, x, weight, bias=None):
        y = super().conv_(ticket, layer, x, weight, bias)
        ring, plan = self.stores[layer].conv, ticket.plan
        for row, slot in enumerate(plan.slots):
            if plan.lengths[row] > 3:
                ring[slot, (plan.committed[row] - 1) % ring.shape[1]] = x[row, -1]
        return y


class KeepsTheFirstPath(StatePool):
    """The accepted path of a tree is not compacted."""

    def commit_paths_(self, ticket, paths):
        for path in paths:
            if path and list(path) != list(range(len(path))):
                ticket.plan.parents[:] = range(-1, ticket.plan.parents.shape[1] - 1)
        chain = [None if path is None else list(range(len(path))) for path in paths]
        super().commit_paths_(ticket, chain)


class CropsTooFar(StatePool):
    """Classes 97 and 98: a trim reports success and takes back something else."""

    def crop_(self, refs, tokens):
        super().crop_(refs, max(0, tokens - 1))


@pytest.mark.parametrize("kind", [OffByOne, ForgetsTheWindow, KeepsTheFirstPath, CropsTooFar])
def test_a_rollback_that_leaves_a_trace_is_noticed(kind):
    def make(max_block, keep):
        ring = RingSpec(window=WINDOW, keep=keep, max_block=max_block)
        return kind(LAYERS, 3, ring=ring, impl="reference")

    with pytest.raises(AssertionError, match=r"is off by|wrong convolution window"):
        check_rollback(LAYERS, make, rounds=100)


def test_too_few_rounds_to_see_every_phase_are_refused():
    with pytest.raises(AssertionError, match="2 rounds never compared phases"):
        check_rollback(LAYERS, lambda block, keep: pool(block, keep), rounds=2)
