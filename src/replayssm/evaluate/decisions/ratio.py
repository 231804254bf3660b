"""Findings whose primary metric is a paired ratio to another variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.evaluate.checks import Check, Status, combine
from replayssm.evaluate.decisions.finding import Finding
from replayssm.evaluate.decisions.paired import at_least, more_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.evaluate.decisions.experiment import Experiment
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.tables import Cohort

WORDS = {
    "throughput": "tokens per second",
    "goodput": "goodput",
    "goodput_per_dollar": "goodput per dollar",
    "goodput_per_watt": "goodput per watt",
    "ttft": "time to first token",
    "tpot": "time per token",
    "e2el": "end-to-end latency",
    "memory_per_sequence": "memory per sequence",
}


def ratio_finding(
    plan: RolloutPlan,
    cohort: Cohort,
    experiment: Experiment,
    variant: str,
    decision: str,
    *,
    required: bool,
    against: str | None = None,
    checks: Sequence[Check] = (),
) -> Finding:
    """Return a finding of how a variant's metric stands to another variant's.

    Args:
        plan: Metrics and margins.
        cohort: Whose.
        experiment: The paired runs.
        variant: Name.
        decision: Which decision, by name; it has a metric and a margin in the plan.
        required: Whether the variant stands or falls by it.
        against: The other variant; the baseline unless told.
        checks: Other numbers that have to hold.
    """
    metric: str = getattr(plan.decisions, decision).metric
    margin, design = plan.margin(decision, cohort), plan.design
    found = experiment.compare(variant, metric, against=against, seed=plan.seed)
    ratio = found.ratio
    primary = at_least(ratio, margin)
    more = more_pairs(found, margin, confidence=design.confidence, power=design.power)
    status = combine([primary, *(c.status for c in checks)])
    told = (
        f"{WORDS[metric]} {ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f}) as good as "
        f"{against or experiment.baseline}, margin {margin:g}x"
    )
    broken = [f"{c.name}: {c.note}" for c in checks if c.status is not Status.PASS]
    return Finding(
        cohort=cohort.name,
        variant=variant,
        status=status,
        required=required,
        metric=metric,
        margin=margin,
        estimate=ratio,
        bootstrap=(found.bootstrap_low, found.bootstrap_high),
        more=more if status is Status.OPEN else 0,
        reason="; ".join([told, *broken]),
        checks=tuple(checks),
    )
