from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from replayssm.errors import ContractError
from replayssm.evaluate.stats import (
    block_mean,
    block_quantile,
    mean_t,
    paired_drop,
    paired_ratio,
    wilson,
)


def test_wilson_equals_the_published_example():
    # Newcombe 1998, table I: 81 of 263
    found = wilson(81, 263)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)


def _score_by_brute_force(lost: int, won: int, n: int, delta: float) -> float:
    """The score statistic with its nuisance parameter found by maximising the likelihood."""

    def loss(q21: float) -> float:
        q12, rest = q21 + delta, 1 - 2 * q21 - delta
        if min(q12, q21, rest) <= 0:
            return 1e9
        return -(lost * np.log(q12) + won * np.log(q21) + (n - lost - won) * np.log(rest))

    bounds = (max(0.0, -delta), (1 - delta) / 2)
    q21 = optimize.minimize_scalar(
        loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}
    ).x
    return float((lost - won - n * delta) / np.sqrt(n * (2 * q21 + delta - delta * delta)))


@pytest.mark.parametrize(("lost", "won", "n"), [(12, 2, 44), (5, 4, 200), (3, 9, 60), (8, 1, 10)])
def test_paired_drop_ends_where_the_score_test_rejects(lost, won, n):
    found = paired_drop(lost, won, n)
    assert found.value == pytest.approx((lost - won) / n)
    assert _score_by_brute_force(lost, won, n, found.low) == pytest.approx(1.959964, abs=2e-3)
    assert _score_by_brute_force(lost, won, n, found.high) == pytest.approx(-1.959964, abs=2e-3)


def test_paired_drop_without_discordant_pairs_has_its_closed_form():
    z2 = 1.959964**2
    for n in (10, 128, 1000):
        assert paired_drop(0, 0, n).high == pytest.approx(z2 / (n + z2), rel=1e-5)


def test_paired_drop_is_antisymmetric():
    a, b = paired_drop(7, 3, 50), paired_drop(3, 7, 50)
    assert (a.low, a.high) == pytest.approx((-b.high, -b.low), abs=1e-8)


def test_no_discordant_pair_is_not_certainty():
    assert paired_drop(0, 0, 20).high > 0.1


def test_paired_ratio_ignores_what_both_arms_share():
    rng = np.random.default_rng(0)
    drift = np.exp(rng.normal(0, 0.5, 40))
    found = paired_ratio(2 * drift, drift * np.exp(rng.normal(0, 0.01, 40)))
    assert found.low < 2 < found.high
    assert found.high - found.low < 0.03


def test_t_interval_covers_at_its_level():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        found = mean_t(rng.normal(3.0, 1.0, 6))
        hits += found.low <= 3.0 <= found.high
    assert 0.92 < hits / 400 < 0.98


def test_block_bootstrap_is_wider_than_tokens_would_suggest():
    rng = np.random.default_rng(2)
    by_block = np.repeat(rng.normal(0, 1, (4, 16)), 64, axis=1)
    found = block_mean(by_block, 64, seed=0)
    naive = 2 * 1.96 * by_block.std() / np.sqrt(by_block.size)
    assert found.n == 64
    assert found.high - found.low > 3 * naive


def test_tail_quantiles_need_a_thousand_tokens():
    values = np.arange(999, dtype=float).reshape(1, -1)
    assert block_quantile(values, 0.99, 9, seed=0) is None
    more = np.arange(2000, dtype=float).reshape(2, -1)
    found = block_quantile(more, 0.99, 50, seed=0)
    assert found is not None
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize(
    "call",
    [
        lambda: paired_ratio([1.0, 1.0], [1.0, 1.0]),
        lambda: paired_ratio([1.0, 1.0, 0.0], [1.0, 1.0, 1.0]),
        lambda: wilson(3, 2),
        lambda: paired_drop(2, 2, 3),
        lambda: mean_t([1.0]),
    ],
)
def test_impossible_inputs_are_refused(call):
    with pytest.raises(ContractError):
        call()
