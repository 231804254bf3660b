"""Decision 6, outcome and operations: the whole traffic, replayed with and without the change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from replayssm.evaluate.checks import Check, Status
from replayssm.evaluate.decisions.experiment import Experiment
from replayssm.evaluate.decisions.finding import Decision, Finding
from replayssm.evaluate.decisions.paired import at_least
from replayssm.evaluate.decisions.ratio import ratio_finding
from replayssm.evaluate.stats import TAIL_MINIMUM, Estimate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.serving import Run, Step
    from replayssm.evaluate.decisions.tables import Variant

QUESTION = "Does the whole service get better, and can it be operated?"
ROUTED = "routed"
POINTS = 200
TIMELINE = 400


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one cohort under one routing, all rounds together, in ms, ascending.

    Attributes:
        cohort: Name.
        routing: ``routed``, or the baseline's name.
        n: Requests.
        ttft: At up to 200 evenly spaced quantiles.
        tpot: Likewise.
        e2el: Likewise.
    """

    cohort: str
    routing: str
    n: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    e2el: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Iterations of the engine in the last round under one routing.

    Attributes:
        routing: ``routed``, or the baseline's name.
        at: When each began, s; neighbours are joined so that there are at most 400.
        ms: The longest of the joined iterations.
        flushes: Folds in them.
        live: Most sequences that held a slot.
        live_bytes: Most bytes in use.
    """

    routing: str
    at: tuple[float, ...]
    ms: tuple[float, ...]
    flushes: tuple[int, ...]
    live: tuple[int, ...]
    live_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlushCost:
    """Decode steps of the last round, those with a flush and those without.

    Attributes:
        routing: ``routed``, or the baseline's name.
        steps: Decode steps.
        flushing: Of them, with a flush.
        p50_ms: Median of all.
        p99_ms: 99th percentile of all; None under 1,000 steps.
        plain_ms: Mean of those without a flush.
        flushing_ms: Mean of those with one; None where there was none.
    """

    routing: str
    steps: int
    flushing: int
    p50_ms: float
    p99_ms: float | None
    plain_ms: float
    flushing_ms: float | None


@dataclass(frozen=True, slots=True)
class Operations:
    """What operations need to know before a rollout.

    Attributes:
        drilled: Whether every rehearsed fault tripped its fallback and lost nothing; None where no
            drill was asked for.
        drill: What was rehearsed, one line each.
        slots: Slots of the engine after all runs.
        free: Of them, free.
        canary_same: Whether a canary request, run alone before and after, gave the same tokens.
    """

    drilled: bool | None
    drill: tuple[str, ...]
    slots: int
    free: int
    canary_same: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """Evidence of the decision.

    Attributes:
        experiments: One per cohort: the baseline against the routing.
        latencies: By cohort and routing.
        timelines: By routing.
        flush_costs: By routing.
        operations: Drill and leaks.
        energy: Whose counters goodput per watt goes by, or why there is none.
    """

    experiments: tuple[Experiment, ...]
    latencies: tuple[Latencies, ...]
    timelines: tuple[Timeline, ...]
    flush_costs: tuple[FlushCost, ...]
    operations: Operations
    energy: str = "not measured"


def energy_source(runs: Sequence[Run]) -> str:
    """Return whose counters the energy of runs was read from, or why it was not."""
    found = runs[-1].energy if runs else None
    if found is None or found.joules is None:
        return f"not measured ({'nobody looked' if found is None else found.why_not})"
    return f"{found.source} counters of {found.devices} devices, idle power not subtracted"


def latencies(cohort: str, routing: str, runs: Sequence[Run]) -> Latencies:
    """Return the latencies of one cohort over all rounds."""
    mine = [s for run in runs for s in run.cohort(cohort)]
    return Latencies(
        cohort=cohort,
        routing=routing,
        n=len(mine),
        ttft=quantiles([s.record.ttft_scheduled for s in mine]),
        tpot=quantiles([s.record.tpot for s in mine]),
        e2el=quantiles([s.record.e2el_scheduled for s in mine]),
    )


def timeline(routing: str, steps: Sequence[Step]) -> Timeline:
    """Return a run's iterations, neighbours joined."""
    groups = np.array_split(np.arange(len(steps)), min(TIMELINE, max(1, len(steps))))
    joined = [[steps[i] for i in group] for group in groups if len(group)]
    return Timeline(
        routing=routing,
        at=tuple(g[0].at for g in joined),
        ms=tuple(max(s.seconds for s in g) * 1e3 for g in joined),
        flushes=tuple(sum(s.flushes for s in g) for g in joined),
        live=tuple(max(s.live for s in g) for g in joined),
        live_bytes=tuple(max(s.live_bytes for s in g) for g in joined),
    )


def flush_cost(routing: str, steps: Sequence[Step]) -> FlushCost | None:
    """Return what flushes cost among the decode steps; None where there were none."""
    decode = [s for s in steps if s.tokens and not s.prefills]
    if not decode:
        return None
    ms = np.array([s.seconds for s in decode]) * 1e3
    flushing = np.array([s.flushes > 0 for s in decode])
    return FlushCost(
        routing=routing,
        steps=len(decode),
        flushing=int(flushing.sum()),
        p50_ms=float(np.median(ms)),
        p99_ms=float(np.quantile(ms, 0.99)) if ms.size >= TAIL_MINIMUM else None,
        plain_ms=float(ms[~flushing].mean()) if (~flushing).any() else float(ms.mean()),
        flushing_ms=float(ms[flushing].mean()) if flushing.any() else None,
    )


def decide(plan: RolloutPlan, routed: Mapping[str, Variant], found: Outcome) -> Decision:
    """Hold every routed cohort's outcome against the margin, and operations against their duty."""
    by_name = {e.cohort: e for e in found.experiments}
    checks = (*_checks(plan, found), *_bystanders(plan, routed, by_name))
    findings: list[Finding] = []
    for cohort in plan.cohorts:
        variant = routed[cohort.name]
        if not variant.is_replay:
            continue
        made = ratio_finding(
            plan, cohort, by_name[cohort.name], ROUTED, "outcome", required=True, checks=checks
        )
        findings.append(replace(made, variant=variant.name))
    return Decision("outcome", QUESTION, "pairs", tuple(findings))


def _bystanders(
    plan: RolloutPlan, routed: Mapping[str, Variant], experiments: Mapping[str, Experiment]
) -> list[Check]:
    """Cohorts that stay on standard share the machine, and must not pay for the others."""
    metric, checks = plan.decisions.outcome.metric, []
    for cohort in plan.cohorts:
        if routed[cohort.name].is_replay:
            continue
        margin = plan.margin("outcome", cohort)
        ratio = experiments[cohort.name].compare(ROUTED, metric, seed=plan.seed).ratio
        # shown to be worse fails; that nobody is worse off can only be shown by many more pairs
        status = Status.FAIL if at_least(ratio, margin) is Status.FAIL else Status.PASS
        note = f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f}), margin {margin:g}x"
        checks.append(Check(f"{cohort.name} beside it", status, margin, ratio, note))
    return checks


def skipped(plan: RolloutPlan) -> Decision:
    """Return the decision of a run whose first five left no cohort a candidate."""
    target = plan.decisions.outcome
    findings = tuple(
        Finding(
            cohort=cohort.name,
            variant=variant.name,
            status=Status.OPEN,
            required=False,
            metric=target.metric,
            margin=plan.margin("outcome", cohort),
            estimate=None,
            bootstrap=None,
            more=None,
            reason="not replayed: no variant passed the five decisions before",
        )
        for cohort in plan.cohorts
        for variant in plan.candidates
    )
    return Decision("outcome", QUESTION, "pairs", findings)


def _checks(plan: RolloutPlan, found: Outcome) -> tuple[Check, ...]:
    target, operations = plan.decisions.outcome, found.operations
    leaked = operations.slots - operations.free
    checks = [
        Check(
            "leaks",
            Status.PASS if leaked == 0 else Status.FAIL,
            0.0,
            _counted(leaked),
            f"{operations.free} of {operations.slots} slots free after all runs",
        ),
        Check(
            "canary",
            Status.PASS if operations.canary_same else Status.FAIL,
            0.0,
            None,
            "same tokens before and after" if operations.canary_same else "its tokens changed",
        ),
    ]
    if target.drill:
        is_done = {True: Status.PASS, False: Status.FAIL, None: Status.OPEN}
        failed = [line for line in operations.drill if ": passed" not in line]
        count = (
            f"{len(operations.drill) - len(failed)} of {len(operations.drill)} rehearsals passed"
        )
        note = "; ".join([count, *failed]) if operations.drill else "not rehearsed"
        checks.append(Check("fallback drill", is_done[operations.drilled], 0.0, None, note))
    if target.step_p99_over_p50 is not None:
        checks.append(_spikes(target.step_p99_over_p50, found))
    return tuple(checks)


def _spikes(limit: float, found: Outcome) -> Check:
    cost = next((c for c in found.flush_costs if c.routing == ROUTED), None)
    name = "step time p99 / p50"
    if cost is None or cost.p99_ms is None:
        return Check(name, Status.OPEN, limit, None, f"under {TAIL_MINIMUM} decode steps")
    ratio = cost.p99_ms / cost.p50_ms
    status = Status.PASS if ratio <= limit else Status.FAIL
    value = Estimate(ratio, ratio, ratio, cost.steps, "last round")
    return Check(name, status, limit, value, f"{ratio:.2f} over {cost.steps} steps")


def _counted(n: int) -> Estimate:
    return Estimate(float(n), float(n), float(n), 1, "counted")


def quantiles(seconds: Sequence[float | None]) -> tuple[float, ...]:
    """Return milliseconds at up to 200 evenly spaced quantiles of the seconds that are known."""
    known = [s for s in seconds if s is not None]
    if not known:
        return ()
    at = np.linspace(0, 1, min(POINTS, len(known)))
    return tuple(float(x) * 1e3 for x in np.quantile(known, at))
