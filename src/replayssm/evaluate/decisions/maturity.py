"""Decision 2, compatibility and maturity: what runs at which versions, and is it still the same?

The matrix has a row per mode: engine, version, model, variant. A variant that promises fp32 results
is compared with transformers' own step functions, step by step, and in the timed traffic its tokens
with the baseline's: a difference counts as a fault unless, teacher-forced at the first one, the
logits agree within the margin and the two best tokens are nearer to each other than that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import replayssm
from replayssm.evaluate import compatibility as section
from replayssm.evaluate.arms import STANDARD
from replayssm.evaluate.checks import Check, Status, combine
from replayssm.evaluate.compatibility import Agreement, LayerLine
from replayssm.evaluate.decisions import quality
from replayssm.evaluate.decisions.finding import Decision, Finding
from replayssm.evaluate.decisions.quality import arm_of
from replayssm.evaluate.manifest import versions
from replayssm.evaluate.plan import Plan, Scope
from replayssm.evaluate.stats import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.serving import Job
    from replayssm.evaluate.decisions.tables import Variant
    from replayssm.evaluate.subject import Subject

QUESTION = "Does it run here, and does it compute the same?"
PREFILLS = (16, 128)


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests whose tokens were compared with the baseline's.

    Attributes:
        compared: All of them.
        same: Of them, equal.
        ties: Of them, different where two tokens were as good as equal.
        faults: Of them, different without that excuse; counted only where equality is promised.
    """

    compared: int = 0
    same: int = 0
    ties: int = 0
    faults: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.compared + other.compared,
            self.same + other.same,
            self.ties + other.ties,
            self.faults + other.faults,
        )


@dataclass(frozen=True, slots=True)
class Mode:
    """One row of the matrix.

    Attributes:
        engine: What serves, with its version.
        model: Name.
        variant: Name.
        promises: Whether it promises the standard path's fp32 results.
        logit_error: Largest, step by step against transformers; None without that promise.
        tokens: Requests of timed traffic, held against the baseline's tokens.
    """

    engine: str
    model: str
    variant: str
    promises: bool
    logit_error: float | None
    tokens: Tally


@dataclass(frozen=True, slots=True)
class Maturity:
    """Evidence of the decision.

    Attributes:
        layers: Every recurrent layer of the model.
        agreements: Step-by-step comparisons.
        modes: The matrix.
        pins: Per pinned package, the version wanted and the one found.
    """

    layers: tuple[LayerLine, ...]
    agreements: tuple[Agreement, ...]
    modes: tuple[Mode, ...]
    pins: dict[str, tuple[str, str]]


def numerics(
    subject: Subject, plan: RolloutPlan, tick: Callable[[str], None]
) -> tuple[tuple[LayerLine, ...], tuple[Agreement, ...]]:
    """Compare every variant that promises fp32 results with transformers, step by step."""
    agreements: list[Agreement] = []
    for window in sorted({v.window for v in plan.candidates}):
        # drafts change no state: a variant and the same one with drafts are compared once
        arms = {(v.state, v.read): arm_of(v) for v in plan.candidates if v.window == window}
        scope = Scope(
            window=window,
            steps=plan.decisions.compatibility.steps,
            prefills=PREFILLS,
            block=quality.block_of(window),
        )
        asked = Plan(plan.model, (STANDARD, *arms.values()), scope=scope, seed=plan.seed)
        agreements += section.run(subject, asked, tick).agreements
    return section.layer_lines(subject), tuple(agreements)


def tally(
    subject: Subject,
    variant: Variant,
    jobs: Sequence[Job],
    tokens: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    margin: float,
) -> Tally:
    """Hold a variant's tokens against the baseline's, request by request.

    Args:
        subject: The model, not enabled.
        variant: What served ``tokens``.
        jobs: The requests.
        tokens: By job.
        expected: The baseline's.
        margin: Budget of a logit difference, over the logits' standard deviation.
    """
    different = [job for job in jobs if list(tokens[job.id]) != list(expected[job.id])]
    ties = faults = 0
    for job in different if promises(variant) else ():
        is_tie = _is_tie(subject, variant, job, tokens[job.id], expected[job.id], margin)
        ties, faults = ties + is_tie, faults + (not is_tie)
    return Tally(len(jobs), len(jobs) - len(different), ties, faults)


def promises(variant: Variant) -> bool:
    """Tell whether a variant promises the standard fp32 path's results."""
    return section.is_exact(arm_of(variant))


def mode(
    plan: RolloutPlan,
    variant: Variant,
    agreements: Sequence[Agreement],
    tokens: Tally,
) -> Mode:
    """Return a variant's row of the matrix."""
    arm = arm_of(variant)
    mine = [
        a.logit_error
        for a in agreements
        if a.arm
        in {v.name for v in plan.candidates if (v.pool, v.read) == (variant.pool, variant.read)}
    ]
    return Mode(
        engine=f"{plan.engine} {replayssm.__version__}",
        model=plan.model,
        variant=variant.name,
        promises=section.is_exact(arm),
        logit_error=max(mine) if mine else None,
        tokens=tokens,
    )


def pinned(plan: RolloutPlan) -> dict[str, tuple[str, str]]:
    """Return the wanted and the installed version of every pinned package."""
    installed = versions()
    return {
        name: (wanted, installed.get(name, "not installed"))
        for name, wanted in plan.decisions.compatibility.pins.items()
    }


def decide(plan: RolloutPlan, found: Maturity) -> Decision:
    """Hold every mode against the margin, the pins and the faults."""
    findings = []
    general = (_layers(found), _pins(found))
    for mode in found.modes:
        for cohort in plan.cohorts:
            margin = plan.margin("compatibility", cohort)
            findings.append(_find(cohort.name, mode, margin, general))
    return Decision("compatibility", QUESTION, "steps", tuple(findings))


def _find(cohort: str, mode: Mode, margin: float, general: tuple[Check, ...]) -> Finding:
    checks, estimate, primary = list(general), None, Status.PASS
    told = f"{mode.variant} runs; it promises no fp32 results, so decision 5 speaks of its numbers"
    if mode.promises:
        checks.append(_faults(mode))
        error = mode.logit_error
        if error is None:
            primary, told = Status.OPEN, "no step was compared"
        else:
            estimate = Estimate(error, error, error, mode.tokens.compared, "largest over all steps")
            primary = Status.PASS if error <= margin else Status.FAIL
            told = f"logits differ by {error:.1e} of their deviation at most, margin {margin:g}"
    status = combine([primary, *(c.status for c in checks)])
    broken = [f"{c.name}: {c.note}" for c in checks if c.status is not Status.PASS]
    return Finding(
        cohort=cohort,
        variant=mode.variant,
        status=status,
        required=True,
        metric="logit_error",
        margin=margin,
        estimate=estimate,
        bootstrap=None,
        more=None if status is Status.OPEN else 0,
        reason="; ".join([told, *broken]),
        checks=tuple(checks),
    )


def _layers(found: Maturity) -> Check:
    refused = sum(len(line.layers) for line in found.layers if not line.qualifies)
    served = sum(len(line.layers) for line in found.layers if line.qualifies)
    status = Status.FAIL if refused or not served else Status.PASS
    return Check("layers", status, 0.0, None, f"{served} served, {refused} refused")


def _pins(found: Maturity) -> Check:
    wrong = [f"{n} {got}, pinned {want}" for n, (want, got) in found.pins.items() if want != got]
    status = Status.FAIL if wrong else Status.PASS
    return Check("pins", status, 0.0, None, "; ".join(wrong) or f"{len(found.pins)} hold")


def _faults(mode: Mode) -> Check:
    tokens, value = mode.tokens, float(mode.tokens.faults)
    note = f"{tokens.faults} of {tokens.compared} requests, {tokens.ties} ties apart"
    status = Status.FAIL if tokens.faults else Status.PASS
    estimate = Estimate(value, value, value, tokens.compared, "counted")
    return Check("token faults", status, 0.0, estimate, note)


def _is_tie(
    subject: Subject,
    variant: Variant,
    job: Job,
    tokens: Sequence[int],
    expected: Sequence[int],
    margin: float,
) -> bool:
    """Teacher-force up to the first difference: were two tokens as good as equal there?"""
    at = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
    reference, found = (
        quality.last_log_probs(subject.model, job.prompt, expected[: at + 1], v)
        for v in (_standard(variant), variant)
    )
    budget = margin * float(reference.std())
    best = np.sort(reference)[-2:]
    return bool(np.abs(found - reference).max() <= budget and best[1] - best[0] <= budget)


def _standard(variant: Variant) -> Variant:
    return variant.model_copy(
        update={
            "name": "standard",
            "path": "standard",
            "state": STANDARD.state,
            "read": STANDARD.read,
            "drafter": None,
            "draft_tokens": 0,
        }
    )
