"""Two evaluations side by side: what changed, and whether the machine or the plan did too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from replayssm.evaluate.checks import Status
from replayssm.evaluate.decisions.serving import BETTER
from replayssm.evaluate.stats import Estimate

if TYPE_CHECKING:
    from replayssm.evaluate.decisions.experiment import Experiment
    from replayssm.evaluate.decisions.result import Rollout


@dataclass(frozen=True, slots=True)
class CohortChange:
    """One cohort in both.

    Attributes:
        cohort: Name.
        before: The gate's word in A.
        after: The gate's word in B.
        route_before: Variant that serves in A.
        route_after: Variant that serves in B.
    """

    cohort: str
    before: Status
    after: Status
    route_before: str
    route_after: str

    @property
    def is_worse(self) -> bool:
        """Whether a change that A had earned is no longer earned."""
        return self.before is Status.PASS and self.after is not Status.PASS


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric of one variant in both.

    Attributes:
        cohort: Name.
        variant: Name.
        metric: The primary metric of the third decision.
        ratio: B over A, above 1 where B is better, with Welch's t interval on logarithms: the runs
            of two evaluations are no pairs, so drift of the machine is in it.
    """

    cohort: str
    variant: str
    metric: str
    ratio: Estimate


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between two evaluations.

    Attributes:
        conditions: Differences of plan, machine, versions and commit, in words.
        cohorts: Cohorts that both have.
        metrics: Variants that both have.
        missing: Cohorts and variants that only one has.
    """

    conditions: tuple[str, ...]
    cohorts: tuple[CohortChange, ...]
    metrics: tuple[MetricChange, ...]
    missing: tuple[str, ...]

    @property
    def status(self) -> Status:
        """Fail where a cohort lost its change or a variant got slower, else open or pass."""
        if any(c.is_worse and c.after is Status.FAIL for c in self.cohorts):
            return Status.FAIL
        if any(m.ratio.high < 1 for m in self.metrics):
            return Status.FAIL
        return Status.OPEN if any(c.is_worse for c in self.cohorts) else Status.PASS


def compare_results(a: Rollout, b: Rollout) -> Changes:
    """Return what changed from A to B."""
    theirs = {v.cohort: v for v in b.verdicts}
    cohorts = tuple(
        CohortChange(v.cohort, v.status, other.status, v.variant, other.variant)
        for v in a.verdicts
        if (other := theirs.get(v.cohort)) is not None
    )
    experiments = {e.cohort: e for e in b.experiments}
    metric = a.plan.decisions.concurrency.metric
    metrics = [
        MetricChange(e.cohort, variant, metric, found)
        for e in a.experiments
        if (other_runs := experiments.get(e.cohort)) is not None
        for variant in dict.fromkeys(s.variant for s in e.samples)
        if (found := _welch(e, other_runs, variant, metric)) is not None
    ]
    return Changes(_conditions(a, b), cohorts, tuple(metrics), _missing(a, b))


def _welch(a: Experiment, b: Experiment, variant: str, metric: str) -> Estimate | None:
    before, after = (np.log(x.values(variant, metric)) for x in (a, b))
    if min(len(before), len(after)) < 2:
        return None
    sign = 1 if BETTER[metric] == "higher" else -1
    mean = sign * float(after.mean() - before.mean())
    parts = [float(x.var(ddof=1)) / len(x) for x in (before, after)]
    error = math.sqrt(sum(parts))
    if error == 0:
        return Estimate(math.exp(mean), math.exp(mean), math.exp(mean), len(after), "no spread")
    free = sum(parts) ** 2 / sum(
        p * p / (len(x) - 1) for p, x in zip(parts, (before, after), strict=True)
    )
    reach = float(stats.t.ppf(0.5 + a.confidence / 2, free)) * error
    low, value, high = (math.exp(x) for x in (mean - reach, mean, mean + reach))
    n = min(len(before), len(after))
    return Estimate(value, low, high, n, "Welch's t interval on logarithms", a.confidence)


def _conditions(a: Rollout, b: Rollout) -> tuple[str, ...]:
    first, second = a.stamp.manifest, b.stamp.manifest
    pairs = [
        ("plan", a.stamp.plan_digest[:12], b.stamp.plan_digest[:12]),
        ("model", a.plan.model, b.plan.model),
        ("cpu", first.machine.cpu, second.machine.cpu),
        ("cores", first.machine.cores, second.machine.cores),
        ("threads", first.threads, second.threads),
        ("commit", first.commit, second.commit),
    ]
    names = sorted({*first.versions, *second.versions})
    pairs += [(n, first.versions.get(n), second.versions.get(n)) for n in names]
    return tuple(f"{name}: {x} in A, {y} in B" for name, x, y in pairs if x != y)


def _missing(a: Rollout, b: Rollout) -> tuple[str, ...]:
    found = []
    for label, one, other in (("A", a, b), ("B", b, a)):
        names = {c.name for c in one.plan.cohorts} - {c.name for c in other.plan.cohorts}
        found += [f"cohort {name} only in {label}" for name in sorted(names)]
        names = {v.name for v in one.plan.variants} - {v.name for v in other.plan.variants}
        found += [f"variant {name} only in {label}" for name in sorted(names)]
    return tuple(found)
