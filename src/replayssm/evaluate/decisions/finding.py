"""What a decision ends in: a status with its number, its margin and what more would decide."""

from __future__ import annotations

import math
from dataclasses import dataclass

from replayssm.evaluate.checks import Check, Status
from replayssm.evaluate.stats import Estimate

MANY = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One decision about one variant for one cohort.

    Attributes:
        cohort: Name.
        variant: Name.
        status: Pass, fail or inconclusive.
        required: Whether this variant stands or falls by the decision for this cohort.
        metric: The primary metric.
        margin: Its margin.
        estimate: The number; None where it could not be measured.
        bootstrap: Ends of the bootstrap interval beside it, None where there is none.
        more: Pairs (or probes, or requests) that would decide, were the number as measured: 0 when
            decided, None when no sensible number would.
        reason: One sentence.
        checks: Other numbers that had to hold as well.
    """

    cohort: str
    variant: str
    status: Status
    required: bool
    metric: str
    margin: float
    estimate: Estimate | None
    bootstrap: tuple[float, float] | None
    more: int | None
    reason: str
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """One of the six.

    Attributes:
        name: Short name.
        question: What it answers.
        unit: What one more of is meant by ``more``: pairs, requests, ..
        findings: By cohort, then variant.
    """

    name: str
    question: str
    unit: str
    findings: tuple[Finding, ...]

    def about(self, cohort: str, variant: str) -> Finding | None:
        """Return the finding about a variant for a cohort, None where there is none."""
        found = (f for f in self.findings if (f.cohort, f.variant) == (cohort, variant))
        return next(found, None)


def more_units(estimate: Estimate, margin: float) -> int | None:
    """Return how many more units shrink an interval to one side of a margin.

    The width goes with the root of the number of units; the value is taken as measured. 0 when the
    interval lies on one side already, None when no sensible number would do.
    """
    if not estimate.low < margin < estimate.high:
        return 0
    distance = abs(estimate.value - margin)
    reach = max(estimate.high - estimate.value, estimate.value - estimate.low)
    if distance == 0:
        return None
    units = math.ceil(estimate.n * (reach / distance) ** 2)
    return None if units > MANY else max(1, units - estimate.n)
