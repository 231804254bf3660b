"""Decision 5, precision: is what a variant serves still what the model says?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.evaluate.checks import Check, Status, combine
from replayssm.evaluate.decisions.finding import Decision, Finding, more_units
from replayssm.evaluate.decisions.paired import at_most

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.quality import Quality
    from replayssm.evaluate.decisions.tables import Cohort
    from replayssm.evaluate.stats import Estimate

QUESTION = "Is what it serves still what the model says?"
WORDS = {
    "mean_kl": "mean KL",
    "p99_logprob": "p99 |delta logprob|",
    "score_drop": "drop of graded replies",
}


def decide(plan: RolloutPlan, measured: Sequence[Quality]) -> Decision:
    """Hold every variant's precision against the margins of its cohort."""
    findings = tuple(_find(plan, plan.cohort(q.cohort), q) for q in measured)
    return Decision("precision", QUESTION, "requests", findings)


def _find(plan: RolloutPlan, cohort: Cohort, quality: Quality) -> Finding:
    target = plan.decisions.precision
    margin = plan.margin("precision", cohort)
    primary = _check(target.metric, margin, quality)
    checks = [_check(name, limit, quality) for name, limit in target.also.items()]
    status = combine([primary.status, *(c.status for c in checks)])
    deciding = next((c for c in (primary, *checks) if c.status is status), primary)
    return Finding(
        cohort=cohort.name,
        variant=quality.variant,
        status=status,
        required=True,
        metric=target.metric,
        margin=margin,
        estimate=primary.value,
        bootstrap=None,
        more=_more(deciding),
        reason=_words(deciding),
        checks=tuple(checks),
    )


def _check(metric: str, margin: float, quality: Quality) -> Check:
    """Return a metric's worst case against its margin."""
    values: list[tuple[Estimate, str]]
    if metric == "mean_kl":
        values = [(b.mean_kl, f"{b.source} to {b.stop} tokens") for b in quality.buckets]
    elif metric == "p99_logprob":
        tail = quality.p99_logprob
        values = [] if tail is None else [(tail, "all tokens")]
    else:
        values = [(s.drop, f"grader {s.grader}") for s in quality.scores if s.drop is not None]
    if not values:
        return Check(WORDS[metric], Status.OPEN, margin, None, "too little was measured")
    worst, where = max(values, key=lambda pair: pair[0].high)
    status = combine([at_most(value, margin) for value, _ in values])
    return Check(WORDS[metric], status, margin, worst, where)


def _more(check: Check) -> int | None:
    if check.status is not Status.OPEN:
        return 0
    return None if check.value is None else more_units(check.value, check.margin)


def _words(check: Check) -> str:
    if check.value is None:
        return f"{check.name}: {check.note}"
    verb = {Status.PASS: "stays within", Status.FAIL: "exceeds", Status.OPEN: "straddles"}
    value = check.value
    told = f"{check.name} {value.value:.2g} ({value.low:.2g} to {value.high:.2g}, {check.note})"
    return f"{told} {verb[check.status]} {check.margin:g}"
