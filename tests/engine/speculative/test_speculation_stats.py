import math

import numpy as np
import pytest

from replayssm.engine.speculative import AcceptanceStats, Accepted, Draft, OverlapCheck
from replayssm.errors import ContractError


def test_counts_rates_and_positions():
    stats = AcceptanceStats()
    assert math.isnan(stats.rate)
    assert math.isnan(stats.length)
    assert len(stats.position_rates()) == 0
    stats.record_(Draft.empty(), Accepted((), 3))
    assert math.isnan(stats.length)
    stats.record_(Draft.chain([1, 2, 3]), Accepted((0, 1), 3))
    stats.record_(Draft.chain([1]), Accepted((), 3))
    assert (stats.plain, stats.verifies, stats.drafted, stats.accepted) == (1, 2, 4, 2)
    assert stats.rate == 0.5
    assert stats.length == 2.0
    assert stats.position_rates().tolist() == [0.5, 1.0, 0.0]


def test_a_tree_counts_nodes_as_drafted_and_depth_as_position():
    tree = Draft(np.array([1, 2, 3, 4], np.int64), np.array([-1, 0, -1, 2], np.int64))
    stats = AcceptanceStats()
    stats.record_(tree, Accepted((2, 3), 0))
    assert (stats.drafted, stats.accepted, stats.length) == (4, 2, 3.0)
    assert stats.position_rates().tolist() == [1.0, 1.0]
    for path in ((0, 3), (3,), (4,), (0, 1, 2)):
        with pytest.raises(ContractError, match="path"):
            stats.record_(tree, Accepted(path, 0))
    assert stats.verifies == 1


def test_merged_counts_equal_counting_together():
    rng = np.random.default_rng(0)
    parts = [AcceptanceStats() for _ in range(3)]
    together = AcceptanceStats()
    for _ in range(60):
        count = int(rng.integers(0, 5))
        draft = Draft.chain(rng.integers(0, 9, count).tolist())
        accepted = Accepted(tuple(range(int(rng.integers(0, count + 1)))), 0)
        parts[int(rng.integers(3))].record_(draft, accepted)
        together.record_(draft, accepted)
    total = AcceptanceStats()
    for part in parts:
        total.merge_(part)
    assert (total.plain, total.verifies) == (together.plain, together.verifies)
    assert (total.rate, total.length) == (together.rate, together.length)
    assert total.position_rates().tolist() == together.position_rates().tolist()
    assert together.drafted_at.sum() == together.drafted
    assert together.accepted_at.sum() == together.accepted


def test_certain_trials_deviate_by_nothing_or_by_everything():
    rows = np.eye(3)[[1, 2]]
    draft = Draft.chain([1])
    check = OverlapCheck()
    check.record_(rows, draft, Accepted((0,), 2))
    assert check.deviation == 0
    check.record_(rows, Draft.chain([0]), Accepted((0,), 2))
    assert check.deviation == math.inf
    check = OverlapCheck()
    check.record_(rows, Draft.empty(), Accepted((), 1))
    assert (check.trials, check.deviation) == (0, 0)


def test_rows_a_little_off_in_sum_are_scaled():
    check = OverlapCheck()
    check.record_(np.full((2, 4), 0.2505), Draft.chain([1]), Accepted((), 2))
    assert check.expected == pytest.approx(0.25, abs=1e-12)
