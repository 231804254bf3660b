from __future__ import annotations

import math

import numpy as np
import pytest

from replayssm.errors import ContractError
from replayssm.evaluate.checks import Status
from replayssm.evaluate.decisions.finding import more_units
from replayssm.evaluate.decisions.paired import (
    at_least,
    at_most,
    careful_spread,
    compare,
    log_ratios,
    more_pairs,
    pairs_for_effect,
)
from replayssm.evaluate.stats import Estimate


def share(outcomes) -> float:
    return float(np.mean(list(outcomes)))


def test_equal_runs_are_told_apart_in_at_most_7_percent():
    rng = np.random.default_rng(1)
    # runs whose common drift is ten times their own noise
    alarms = []
    for _ in range(1000):
        drift = np.cumsum(rng.normal(0, 0.05, 8))
        a, b = (np.exp(drift + rng.normal(0, 0.02, 8)) for _ in range(2))
        alarms.append(compare(log_ratios(a, b, better="lower")).differs)
    assert share(alarms) <= 0.07


@pytest.mark.parametrize("spread", [0.04, 0.08])
def test_the_planned_pairs_have_the_planned_power(spread):
    n = pairs_for_effect(spread, 0.05, confidence=0.95, power=0.8)
    rng = np.random.default_rng(2)
    runs = rng.normal(math.log(0.95), spread, (600, n))
    found = share(compare(logs).ratio.high < 1 for logs in runs)
    assert 0.76 <= found <= 0.9
    fewer = share(compare(logs[: n // 2]).ratio.high < 1 for logs in runs)
    assert fewer < 0.6


def test_a_pilot_of_eight_is_not_trusted_with_its_own_spread():
    rng = np.random.default_rng(3)
    spreads = [careful_spread(x) for x in rng.normal(0, 1, (1000, 8))]
    assert share(s > 1 for s in spreads) == pytest.approx(0.8, abs=0.04)


def test_better_is_above_one_in_both_directions():
    assert compare(log_ratios([1, 1, 1], [2, 2, 2.1], better="higher")).ratio.low > 1
    assert compare(log_ratios([1, 1, 1], [2, 2, 2.1], better="lower")).ratio.high < 1


def test_the_bootstrap_stands_beside_the_t_interval():
    found = compare(np.random.default_rng(4).normal(0.1, 0.05, 40))
    assert found.bootstrap_low == pytest.approx(found.ratio.low, rel=0.01)
    assert found.bootstrap_high == pytest.approx(found.ratio.high, rel=0.01)


def test_an_interval_passes_fails_or_leaves_it_open():
    def interval(low, high):
        return Estimate((low + high) / 2, low, high, 8, "made by hand")

    assert at_least(interval(1.05, 1.2), 1.05) is Status.PASS
    assert at_least(interval(0.9, 1.04), 1.05) is Status.FAIL
    assert at_least(interval(0.9, 1.2), 1.05) is Status.OPEN
    assert at_most(interval(0.1, 0.2), 0.2) is Status.PASS
    assert at_most(interval(0.3, 0.4), 0.2) is Status.FAIL
    assert at_most(interval(0.1, 0.4), 0.2) is Status.OPEN


def test_more_pairs_decide_what_fewer_left_open():
    rng = np.random.default_rng(5)
    logs = rng.normal(0.03, 0.08, 8)
    found = compare(logs)
    more = more_pairs(found, 1.0, confidence=0.95, power=0.8)
    assert at_least(found.ratio, 1.0) is Status.OPEN
    assert more > 0
    mean, spread = logs.mean(), logs.std(ddof=1)
    decided = share(
        at_least(compare(rng.normal(mean, spread, 8 + more)).ratio, 1.0) is Status.PASS
        for _ in range(400)
    )
    assert decided >= 0.75


def test_no_number_of_pairs_decides_on_the_margin_itself():
    found = compare([0.1, -0.1, 0.1, -0.1])
    assert more_pairs(found, 1.0, confidence=0.95, power=0.8) is None
    assert more_units(Estimate(1.0, 0.5, 1.5, 8, ""), 1.0) is None
    assert more_units(Estimate(1.0, 0.5, 1.5, 8, ""), 1.25) == 24
    assert more_units(Estimate(1.0, 0.5, 1.5, 8, ""), 2.0) == 0


@pytest.mark.parametrize(
    ("a", "b", "better"),
    [([1, 2], [1], "higher"), ([1, 0], [1, 1], "higher"), ([1], [math.inf], "lower"),
     ([1], [1], "up")],
)  # fmt: skip
def test_runs_that_make_no_ratio_are_refused(a, b, better):
    with pytest.raises(ContractError):
        log_ratios(a, b, better=better)
