"""The gate: six decisions in, one route per cohort out.

A cohort gets the variant that passed every decision it stands by and has the best lower end of its
speed-up. One engine has one pool, so all cohorts share a state format and a window: the pair that
gains most over all cohorts. Whatever did not earn a change stays on the standard path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.evaluate.checks import Status, combine
from replayssm.evaluate.decisions.routing import (
    STANDARD,
    CohortRoute,
    Guard,
    Match,
    Pool,
    RoutingFile,
    fallbacks,
    route_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replayssm.evaluate.decisions.finding import Decision, Finding
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.tables import Cohort, Variant

RANKED_BY = "concurrency"


@dataclass(frozen=True, slots=True)
class CohortVerdict:
    """What the gate says of one cohort.

    Attributes:
        cohort: Name.
        status: Pass when a change was earned, fail when none was, inconclusive when some variant
            failed nothing and is undecided.
        variant: What serves it; the baseline unless the status is pass.
        considered: The variant that the decisions are shown for: the one chosen, else the one that
            came nearest.
        decisions: Status of each decision for ``considered``.
        reason: One or two sentences.
        more: Pairs that would decide, where the status is inconclusive and a number would.
    """

    cohort: str
    status: Status
    variant: str
    considered: str
    decisions: dict[str, Status]
    reason: str
    more: int | None


def provisional(plan: RolloutPlan, decisions: Sequence[Decision]) -> dict[str, Variant]:
    """Return the variant of each cohort after the first five decisions, baseline included."""
    best: dict[tuple[str, tuple[object, int]], tuple[float, Variant]] = {}
    for cohort in plan.cohorts:
        for variant in plan.candidates:
            if standing(decisions, cohort.name, variant.name) is not Status.PASS:
                continue
            gain = _gain(decisions, cohort.name, variant.name)
            at = (cohort.name, variant.pool)
            if at not in best or gain > best[at][0]:
                best[at] = (gain, variant)
    pools = {pool for _, pool in best}
    if not pools:
        return dict.fromkeys((c.name for c in plan.cohorts), plan.baseline)

    def total(pool: tuple[object, int]) -> float:
        return sum(gain for (_, other), (gain, _) in best.items() if other == pool)

    chosen = max(sorted(pools, key=str), key=total)
    return {
        c.name: best[c.name, chosen][1] if (c.name, chosen) in best else plan.baseline
        for c in plan.cohorts
    }


def standing(decisions: Sequence[Decision], cohort: str, variant: str) -> Status:
    """Return how a variant stands over the decisions that it has to pass."""
    found = [d.about(cohort, variant) for d in decisions]
    return combine([f.status for f in found if f is not None and f.required])


def judge(
    plan: RolloutPlan, decisions: Sequence[Decision], routed: Mapping[str, Variant]
) -> tuple[CohortVerdict, ...]:
    """Return the verdict of every cohort, the sixth decision included.

    Args:
        plan: Cohorts and variants.
        decisions: All six.
        routed: What the whole traffic was replayed with, by cohort.
    """
    return tuple(_judge(plan, decisions, cohort, routed[cohort.name]) for cohort in plan.cohorts)


def _judge(
    plan: RolloutPlan, decisions: Sequence[Decision], cohort: Cohort, routed: Variant
) -> CohortVerdict:
    if routed.is_replay:
        status = standing(decisions, cohort.name, routed.name)
        considered = routed
    else:
        status, considered = _nearest(plan, decisions, cohort)
    findings = {d.name: d.about(cohort.name, considered.name) for d in decisions}
    serving = routed if status is Status.PASS and routed.is_replay else plan.baseline
    if status is Status.PASS and not routed.is_replay:
        status = Status.FAIL
        reason = (
            f"{considered.name} passed, but the pool that serves the other cohorts best differs"
        )
    else:
        reason = _reason(status, considered, findings)
    undecided = [f.more for f in findings.values() if f is not None and f.status is Status.OPEN]
    known = [n for n in undecided if n is not None]
    return CohortVerdict(
        cohort=cohort.name,
        status=status,
        variant=serving.name,
        considered=considered.name,
        decisions={name: f.status for name, f in findings.items() if f is not None},
        reason=reason,
        more=max(known) if known and len(known) == len(undecided) else None,
    )


def _nearest(
    plan: RolloutPlan, decisions: Sequence[Decision], cohort: Cohort
) -> tuple[Status, Variant]:
    """Return the candidate that failed least, and among those the fastest, with its standing."""

    def rank(variant: Variant) -> tuple[int, bool, float]:
        found = [d.about(cohort.name, variant.name) for d in decisions]
        failed = sum(f is not None and f.required and f.status is Status.FAIL for f in found)
        is_passed = standing(decisions, cohort.name, variant.name) is Status.PASS
        return -failed, is_passed, _gain(decisions, cohort.name, variant.name)

    best = max(plan.candidates, key=rank)
    return standing(decisions, cohort.name, best.name), best


def _gain(decisions: Sequence[Decision], cohort: str, variant: str) -> float:
    for decision in decisions:
        finding = decision.about(cohort, variant)
        if decision.name == RANKED_BY and finding is not None and finding.estimate is not None:
            return math.log(max(finding.estimate.low, 1e-9))
    return -math.inf


def _reason(status: Status, variant: Variant, findings: Mapping[str, Finding | None]) -> str:
    if status is Status.PASS:
        gain = findings[RANKED_BY]
        told = "" if gain is None else f": {gain.reason}"
        return f"{variant.name} passed every decision it stands by{told}"
    blocking = [f for f in findings.values() if f is not None and f.required and f.status is status]
    told = "; ".join(f.reason for f in blocking)
    word = "failed" if status is Status.FAIL else "is undecided"
    return f"{variant.name} {word}: {told}" if told else f"{variant.name} {word}"


def routing(
    plan: RolloutPlan, verdicts: Sequence[CohortVerdict], digest: str, created: str
) -> RoutingFile:
    """Return the routing that the verdicts amount to."""
    rows, pool = [], None
    for verdict in verdicts:
        cohort, variant = plan.cohort(verdict.cohort), plan.variant(verdict.variant)
        route = route_of(variant)
        if variant.is_replay:
            pool = Pool(state=variant.state, window=variant.window)
        tolerance = plan.decisions.precision.guard_tolerance
        rows.append(
            CohortRoute(
                cohort=cohort.name,
                match=Match(prompt_tokens=cohort.prompt_tokens, output_tokens=cohort.output_tokens),
                route=route,
                guard=Guard(tolerance=tolerance) if variant.is_replay else None,
                fallback=fallbacks(route),
                verdict=verdict.status,
                reason=verdict.reason,
            )
        )
    return RoutingFile(
        plan=digest,
        model=plan.model,
        created=created,
        pool=pool,
        default=STANDARD,
        cohorts=tuple(rows),
    )


def overall(verdicts: Sequence[CohortVerdict]) -> Status:
    """Return pass when some cohort earned a change, else inconclusive when some may have."""
    statuses = {v.status for v in verdicts}
    if Status.PASS in statuses:
        return Status.PASS
    return Status.OPEN if Status.OPEN in statuses else Status.FAIL
