"""Decision 4, speculation: what drafts bring for a cohort, and what they cost in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.evaluate.checks import Check, Status
from replayssm.evaluate.decisions.finding import Decision, Finding
from replayssm.evaluate.decisions.ratio import ratio_finding
from replayssm.evaluate.stats import Estimate, ratio_of_sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replayssm.evaluate.decisions.experiment import Experiment
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.tables import Cohort, Variant

QUESTION = "Do drafts pay for this traffic?"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of one variant for one cohort.

    Attributes:
        cohort: Name.
        variant: Name.
        rate: Accepted over drafted tokens, rounds resampled; None where nothing was drafted.
        length: Entries kept per verify.
        histogram: ``histogram[n]``: verifies that kept n entries.
        snapshot_bytes: Snapshots of the state that were not taken, bytes, over all timed rounds.
        preemptions: Sequences that lost their slot for memory, over all timed rounds.
        baseline_preemptions: The same on the baseline, within the same memory.
    """

    cohort: str
    variant: str
    rate: Estimate | None
    length: float | None
    histogram: tuple[int, ...]
    snapshot_bytes: int
    preemptions: int
    baseline_preemptions: int


def summarise(
    plan: RolloutPlan,
    experiment: Experiment,
    variant: Variant,
    histogram: Sequence[int],
    state_bytes: int,
) -> Acceptance:
    """Return what drafting did in an experiment.

    Args:
        plan: For the seed.
        experiment: The paired runs.
        variant: One that drafts.
        histogram: ``histogram[n]``: verifies that kept n entries, over all timed rounds.
        state_bytes: fp32 state of one sequence over all layers.
    """
    mine = [s for s in experiment.samples if s.variant == variant.name]
    theirs = [s for s in experiment.samples if s.variant == experiment.baseline]
    drafted = [s.counters.get("drafted", 0.0) for s in mine]
    accepted = [s.counters.get("accepted", 0.0) for s in mine]
    verifies = sum(histogram)
    kept = sum(n * count for n, count in enumerate(histogram))
    return Acceptance(
        cohort=experiment.cohort,
        variant=variant.name,
        rate=ratio_of_sums(accepted, drafted, seed=plan.seed),
        length=kept / verifies if verifies else None,
        histogram=tuple(histogram),
        # an engine with snapshots keeps one per entry of a block
        snapshot_bytes=int((sum(drafted) + verifies) * state_bytes),
        preemptions=int(sum(s.counters.get("preemptions", 0.0) for s in mine)),
        baseline_preemptions=int(sum(s.counters.get("preemptions", 0.0) for s in theirs)),
    )


def undrafted(plan: RolloutPlan, variant: Variant) -> Variant | None:
    """Return the variant that differs from a drafting one by the drafts only, if planned."""
    same = (v for v in plan.candidates if v.drafter is None)
    key = (variant.pool, variant.read)
    return next((v for v in same if (v.pool, v.read) == key), None)


def decide(
    plan: RolloutPlan, experiments: Mapping[str, Experiment], acceptances: Sequence[Acceptance]
) -> Decision:
    """Hold every drafting variant against the same one without drafts, or the baseline."""
    findings = []
    for cohort in plan.cohorts:
        for variant in plan.candidates:
            if variant.drafter is None:
                findings.append(_none(plan, cohort, variant))
                continue
            plain = undrafted(plan, variant)
            found = next(
                a for a in acceptances if (a.cohort, a.variant) == (cohort.name, variant.name)
            )
            findings.append(
                ratio_finding(
                    plan,
                    cohort,
                    experiments[cohort.name],
                    variant.name,
                    "speculation",
                    required=True,
                    against=None if plain is None else plain.name,
                    checks=(_evictions(found),),
                )
            )
    return Decision("speculation", QUESTION, "pairs", tuple(findings))


def _evictions(found: Acceptance) -> Check:
    more = found.preemptions > found.baseline_preemptions
    note = f"{found.preemptions}, the baseline {found.baseline_preemptions}, within equal memory"
    value = float(found.preemptions)
    return Check(
        "evictions",
        Status.FAIL if more else Status.PASS,
        float(found.baseline_preemptions),
        Estimate(value, value, value, 1, "counted"),
        note,
    )


def _none(plan: RolloutPlan, cohort: Cohort, variant: Variant) -> Finding:
    drafting = next((v.name for v in plan.candidates if v.drafter is not None), None)
    told = "it drafts nothing"
    told += "; no variant of the plan does" if drafting is None else f"; see {drafting}"
    return Finding(
        cohort=cohort.name,
        variant=variant.name,
        status=Status.PASS,
        required=False,
        metric=plan.decisions.speculation.metric,
        margin=plan.margin("speculation", cohort),
        estimate=None,
        bootstrap=None,
        more=0,
        reason=told,
    )
