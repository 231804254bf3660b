"""Decision 1, bottleneck: does recurrent-state traffic dominate a step, and at which batch?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayssm.evaluate import arms
from replayssm.evaluate import bottleneck as section
from replayssm.evaluate.checks import Status
from replayssm.evaluate.decisions.finding import Decision, Finding, more_units
from replayssm.evaluate.decisions.paired import at_least
from replayssm.evaluate.plan import Plan, Scope
from replayssm.models.registry import find_mixers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replayssm.evaluate.bottleneck import Profile
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.tables import Cohort
    from replayssm.evaluate.subject import Subject

QUESTION = "Does recurrent-state traffic dominate a step?"
CELL_SECONDS = 6.0


def batch_of(plan: RolloutPlan, cohort: Cohort) -> int:
    """Return how many sequences of a cohort decode together, at most."""
    wanted = {"closed": cohort.concurrency, "offline": cohort.requests, "scheduled": 1}
    return min(wanted[cohort.arrival], plan.hardware.max_batch)


def profile(
    subject: Subject, plan: RolloutPlan, tick: Callable[[str], None]
) -> tuple[Profile, ...]:
    """Measure the share of state updates in a decode step at every batch that matters."""
    batches = {batch_of(plan, c) for c in plan.cohorts} | set(plan.surface.batches)
    specs = [mixer.spec for mixer in find_mixers(subject.model)[0]]
    state_bytes = 4 * sum(spec.state_elements for spec in specs)
    scope = Scope(
        decode_batches=tuple(sorted(batches)),
        decode_samples=plan.design.pairs,
        cell_seconds=CELL_SECONDS,
        # the section adds the largest batch that fits: let that be one of ours
        budget_bytes=state_bytes * max(batches),
    )
    reference = Plan(plan.model, (arms.STANDARD,), scope=scope, seed=plan.seed)
    return section.run(subject, reference, tick).profiles


def decide(plan: RolloutPlan, profiles: Sequence[Profile]) -> Decision:
    """Hold the ceiling, 1 / (1 - share), at each cohort's batch against the margin."""
    findings = []
    for cohort in plan.cohorts:
        batch = batch_of(plan, cohort)
        at = min(profiles, key=lambda p: abs(np.log(p.batch / batch)))
        margin = plan.margin("bottleneck", cohort)
        status = at_least(at.ceiling, margin)
        share = 100 * min(max(at.update_share.value, 0.0), 1.0)
        told = f"state updates take {share:.0f} % of a step at batch {at.batch}, ceiling "
        told += f"{at.ceiling.value:.2f}x"
        findings += [
            Finding(
                cohort=cohort.name,
                variant=variant.name,
                status=status,
                # drafts save whole forwards, whatever the share of the state in one of them
                required=variant.drafter is None,
                metric="ceiling",
                margin=margin,
                estimate=at.ceiling,
                bootstrap=None,
                more=more_units(at.ceiling, margin) if status is Status.OPEN else 0,
                reason=f"{told} (margin {margin:g}x)",
            )
            for variant in plan.candidates
        ]
    return Decision("bottleneck", QUESTION, "samples", tuple(findings))
