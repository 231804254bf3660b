"""Estimates with intervals: every number of a report carries its n and how it was made.

The unit of repetition is the run or the block of consecutive tokens, never the single token:
neighbouring tokens share their context and are not independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import optimize, stats

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEVEL = 0.95
TAIL_MINIMUM = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, its interval and its support.

    Attributes:
        value: Point estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n: Independent units behind it (pairs, blocks, probes).
        method: How the interval was made.
        level: Confidence level.
    """

    value: float
    low: float
    high: float
    n: int
    method: str
    level: float = LEVEL


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> Estimate:
    """Return how many times faster the candidate is, from interleaved pairs of durations.

    Geometric mean of ``baseline / candidate`` with a t interval on the logarithms of the pairs.

    Args:
        baseline: Durations of A, in the order measured.
        candidate: Durations of B; entry i was measured next to ``baseline[i]``.

    Raises:
        ContractError: Fewer than 3 pairs, unequal counts, or a duration that is not positive.
    """
    a, b = np.asarray(baseline, float), np.asarray(candidate, float)
    if a.shape != b.shape or a.size < 3:
        raise ContractError("candidate", "at least 3 pairs", f"{a.size} and {b.size} samples")
    if not (a > 0).all() or not (b > 0).all():
        raise ContractError("baseline", "positive durations", min(a.min(), b.min()))
    logs = np.log(a / b)
    mean, error = float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(len(logs))
    reach = float(stats.t.ppf(0.5 + LEVEL / 2, len(logs) - 1)) * error
    low, value, high = (math.exp(x) for x in (mean - reach, mean, mean + reach))
    return Estimate(value, low, high, len(logs), "t interval on log ratios of interleaved pairs")


def mean_t(samples: Sequence[float]) -> Estimate:
    """Return a mean with a t interval; needs 2 samples."""
    x = np.asarray(samples, float)
    if x.size < 2:
        raise ContractError("samples", "at least 2", x.size)
    reach = float(stats.t.ppf(0.5 + LEVEL / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size))
    mean = float(x.mean())
    return Estimate(mean, mean - reach, mean + reach, int(x.size), "t interval")


def block_mean(
    values: NDArray[np.float64], block: int, *, seed: int, draws: int = 2000
) -> Estimate:
    """Return the mean over tokens with a bootstrap interval over blocks of consecutive tokens.

    Args:
        values: ``[rows, tokens]``; every row is one sequence.
        block: Consecutive tokens that are resampled together; a remainder at the end of a row
            counts for the mean and not for the interval.
        seed: Seed of the resampling.
        draws: Bootstrap resamples.

    Raises:
        ContractError: Fewer than 2 blocks.
    """
    means = _blocks(values, block).mean(axis=1)
    if means.size < 2:
        raise ContractError("values", "at least 2 blocks", means.size)
    rng = np.random.default_rng(seed)
    sampled = means[rng.integers(means.size, size=(draws, means.size))].mean(axis=1)
    low, high = _ends(sampled)
    method = f"bootstrap over blocks of {block} tokens, {draws} draws"
    return Estimate(float(values.mean()), low, high, int(means.size), method)


def block_quantile(
    values: NDArray[np.float64], q: float, block: int, *, seed: int, draws: int = 500
) -> Estimate | None:
    """Return a tail quantile over tokens, resampled by block; None under 1,000 tokens."""
    if values.size < TAIL_MINIMUM:
        return None
    blocks = _blocks(values, block)
    rng = np.random.default_rng(seed)
    sampled = np.array(
        [np.quantile(blocks[rng.integers(len(blocks), size=len(blocks))], q) for _ in range(draws)]
    )
    low, high = _ends(sampled)
    method = f"bootstrap over blocks of {block} tokens, {draws} draws"
    return Estimate(float(np.quantile(values, q)), low, high, len(blocks), method)


def ratio_of_sums(
    top: Sequence[float], bottom: Sequence[float], *, seed: int, draws: int = 2000
) -> Estimate | None:
    """Return sum(top) / sum(bottom) over independent units, which the bootstrap resamples.

    None when there are fewer than 2 units or nothing to divide by.
    """
    a, b = np.asarray(top, float), np.asarray(bottom, float)
    if a.size < 2 or b.sum() <= 0:
        return None
    picks = np.random.default_rng(seed).integers(a.size, size=(draws, a.size))
    sums = b[picks].sum(axis=1)
    low, high = _ends(a[picks].sum(axis=1)[sums > 0] / sums[sums > 0])
    value = float(a.sum() / b.sum())
    return Estimate(value, low, high, int(a.size), f"bootstrap over units, {draws} draws")


def wilson(hits: int, n: int) -> Estimate:
    """Return a proportion with its Wilson score interval."""
    if n < 1 or not 0 <= hits <= n:
        raise ContractError("hits", f"0 to n and n >= 1 (n = {n})", hits)
    z = float(stats.norm.ppf(0.5 + LEVEL / 2))
    p, z2 = hits / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    reach = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Estimate(p, max(0.0, centre - reach), min(1.0, centre + reach), n, "Wilson score")


def paired_drop(lost: int, won: int, n: int) -> Estimate:
    """Return the drop of a success rate between paired trials with Tango's score interval.

    It stays honest when no pair differs: the interval then has the width that n allows, not 0.
    Source: Tango, Statistics in Medicine 17 (1998) 891-908.

    Args:
        lost: Trials that only the baseline got right.
        won: Trials that only the candidate got right.
        n: All paired trials.
    """
    if n < 1 or min(lost, won) < 0 or lost + won > n:
        raise ContractError("lost", f"lost + won within n ({n})", (lost, won))
    z = float(stats.norm.ppf(0.5 + LEVEL / 2))

    def score(delta: float) -> float:
        b = -lost - won + (2 * n - lost + won) * delta
        c = -won * delta * (1 - delta)
        q21 = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        spread = n * (2 * q21 + delta * (1 - delta))
        gap = lost - won - n * delta
        if gap == 0:
            return 0.0
        return gap / math.sqrt(spread) if spread > 0 else math.copysign(math.inf, gap)

    value, edge = (lost - won) / n, 1 - 1e-9
    low = -1.0 if score(-edge) < z else _root(lambda d: score(d) - z, -edge, value)
    high = 1.0 if score(edge) > -z else _root(lambda d: score(d) + z, value, edge)
    return Estimate(value, low, high, n, "Tango score interval for paired proportions")


def _root(f: object, low: float, high: float) -> float:
    return float(optimize.brentq(f, low, high, xtol=1e-10))


def _blocks(values: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    rows, tokens = values.shape
    whole = tokens // block * block
    if whole == 0:
        raise ContractError("values", f"at least {block} tokens a row", tokens)
    return values[:, :whole].reshape(rows * (whole // block), block)


def _ends(sampled: NDArray[np.float64]) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(sampled, [tail, 1 - tail])
    return float(low), float(high)
