"""Paired comparisons of whole runs: estimate, verdict, and how many more pairs would decide.

The unit is the run. Run i of the candidate was measured beside run i of the baseline, so drift of
the machine hits both and cancels in their ratio. Every function takes the logarithms of those
ratios, signed so that above 0 the candidate is better.

The number of pairs is set in two stages (Stein, Annals of Mathematical Statistics 16 (1945)
243-258): a pilot of fixed size tells the spread, the spread tells how many pairs an effect of the
planned size needs, and only then is the mean looked at. Nobody stops at a lucky moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from replayssm.errors import ContractError
from replayssm.evaluate.checks import Status
from replayssm.evaluate.stats import Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_PAIRS = 8
MOST_PAIRS = 10_000
SPREAD_LEVEL = 0.8
DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate against its baseline over interleaved pairs of runs.

    Attributes:
        ratio: Geometric mean of candidate over baseline, above 1 where the candidate is better,
            with a t interval on the logarithms.
        bootstrap_low: Lower end of the percentile bootstrap over pairs, beside the t interval.
        bootstrap_high: Its upper end.
        spread: Standard deviation of the logarithms.
        logs: The logarithms, in the order measured.
    """

    ratio: Estimate
    bootstrap_low: float
    bootstrap_high: float
    spread: float
    logs: tuple[float, ...]

    @property
    def differs(self) -> bool:
        """Whether the t interval excludes 1."""
        return self.ratio.low > 1 or self.ratio.high < 1


def log_ratios(
    baseline: Sequence[float], candidate: Sequence[float], *, better: str
) -> list[float]:
    """Return the logarithms of candidate over baseline, above 0 where the candidate is better.

    Args:
        baseline: One number a run.
        candidate: One number a run; entry i was measured beside ``baseline[i]``.
        better: ``higher`` or ``lower``.

    Raises:
        ContractError: Unequal counts, a number that is not positive, or an unknown direction.
    """
    if better not in ("higher", "lower"):
        raise ContractError("better", "higher or lower", better)
    a, b = np.asarray(baseline, float), np.asarray(candidate, float)
    if a.shape != b.shape:
        raise ContractError("candidate", f"{a.size} runs, as many as the baseline", b.size)
    if a.size and not (min(a.min(), b.min()) > 0 and math.isfinite(max(a.max(), b.max()))):
        raise ContractError("candidate", "positive finite numbers", min(a.min(), b.min()))
    logs = np.log(b / a) if better == "higher" else np.log(a / b)
    return [float(x) for x in logs]


def compare(logs: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Return the paired comparison behind logarithms of ratios.

    Args:
        logs: From :func:`log_ratios`.
        confidence: Level of both intervals.
        seed: Seed of the bootstrap.

    Raises:
        ContractError: Fewer than 2 pairs.
    """
    x = np.asarray(logs, float)
    if x.size < 2:
        raise ContractError("pairs", "at least 2", x.size)
    mean, spread = float(x.mean()), float(x.std(ddof=1))
    reach = _t(confidence, x.size) * spread / math.sqrt(x.size)
    method = f"t interval on log ratios of {x.size} interleaved pairs"
    low, value, high = (math.exp(v) for v in (mean - reach, mean, mean + reach))
    picks = np.random.default_rng(seed).integers(x.size, size=(DRAWS, x.size))
    tail = (1 - confidence) / 2
    ends = np.exp(np.quantile(x[picks].mean(axis=1), [tail, 1 - tail]))
    return Comparison(
        ratio=Estimate(value, low, high, int(x.size), method, confidence),
        bootstrap_low=float(ends[0]),
        bootstrap_high=float(ends[1]),
        spread=spread,
        logs=tuple(float(v) for v in x),
    )


def at_least(ratio: Estimate, margin: float) -> Status:
    """Tell whether a ratio reaches its margin, by the ends of its interval.

    A margin below 1 asks for non-inferiority, one of 1 or more for superiority.
    """
    if ratio.low >= margin:
        return Status.PASS
    return Status.FAIL if ratio.high < margin else Status.OPEN


def at_most(value: Estimate, margin: float) -> Status:
    """Tell whether a number stays at or below its margin, by the ends of its interval."""
    if value.high <= margin:
        return Status.PASS
    return Status.FAIL if value.low > margin else Status.OPEN


def pairs_for_effect(spread: float, effect: float, *, confidence: float, power: float) -> int:
    """Return the pairs that detect a relative effect with the given power.

    Args:
        spread: Standard deviation of the log ratios.
        effect: Relative difference to detect, e.g. 0.05.
        confidence: Level of the two-sided interval.
        power: Chance that the interval excludes 1 when the effect is real.

    Returns:
        At least 2, at most ``MOST_PAIRS``.
    """
    if not 0 < effect < 1:
        raise ContractError("effect", "between 0 and 1", effect)
    return _pairs(abs(math.log1p(-effect)), spread, confidence, power)


def more_pairs(
    comparison: Comparison, margin: float, *, confidence: float, power: float
) -> int | None:
    """Return how many more pairs would decide against a margin, were the means as measured.

    None where the mean lies so near the margin that no sensible number of pairs would.
    """
    distance = abs(float(np.mean(comparison.logs)) - math.log(margin))
    if distance == 0:
        return None
    wanted = _pairs(distance, comparison.spread, confidence, power)
    return None if wanted >= MOST_PAIRS else max(0, wanted - len(comparison.logs))


def careful_spread(logs: Sequence[float]) -> float:
    """Return an upper bound of the standard deviation of few log ratios (one-sided 80 %).

    A pilot of eight often shows too small a spread; planning with it would promise too much.
    """
    x = np.asarray(logs, float)
    if x.size < 2:
        raise ContractError("pairs", "at least 2", x.size)
    free = x.size - 1
    return float(x.std(ddof=1) * math.sqrt(free / stats.chi2.ppf(1 - SPREAD_LEVEL, free)))


def _pairs(distance: float, spread: float, confidence: float, power: float) -> int:
    if spread == 0:
        return 2
    low, high = 2, 2
    while high < MOST_PAIRS and _power(high, distance / spread, confidence) < power:
        low, high = high, high * 2
    high = min(high, MOST_PAIRS)
    while low < high:
        middle = (low + high) // 2
        if _power(middle, distance / spread, confidence) < power:
            low = middle + 1
        else:
            high = middle
    return high


def _power(n: int, standardised: float, confidence: float) -> float:
    """Chance that a paired t interval of n pairs excludes 0 on the right side."""
    shift, edge = standardised * math.sqrt(n), _t(confidence, n)
    # beyond a few hundred pairs scipy's noncentral t is slow, and equal to a normal
    tail = stats.norm.sf(edge - shift) if n > 300 else stats.nct.sf(edge, n - 1, min(shift, 37.0))
    return float(tail)


def _t(confidence: float, n: int) -> float:
    return float(stats.t.ppf(0.5 + confidence / 2, n - 1))
