"""What an arm has to keep besides speed: every number against its margin."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from replayssm.evaluate.compatibility import is_exact
from replayssm.evaluate.stats import Estimate

if TYPE_CHECKING:
    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.compatibility import CompatibilityResult
    from replayssm.evaluate.plan import Margins, Plan
    from replayssm.evaluate.precision import ArmPrecision, PrecisionResult

LEAST_RECALL = 0.2


class Status(StrEnum):
    """How one number stands against its margin."""

    PASS = "pass"
    FAIL = "fail"
    OPEN = "inconclusive"


@dataclass(frozen=True, slots=True)
class Check:
    """One number against one margin.

    Attributes:
        name: What is checked.
        status: How it stands.
        margin: The limit.
        value: The number; None when it could not be measured.
        note: Where the number comes from, or why there is none.
    """

    name: str
    status: Status
    margin: float
    value: Estimate | None
    note: str


def under(value: Estimate | None, margin: float) -> Status:
    """Tell whether a number stays at or under its margin, by the ends of its interval."""
    if value is None:
        return Status.OPEN
    if value.high <= margin:
        return Status.PASS
    return Status.FAIL if value.low > margin else Status.OPEN


def combine(statuses: list[Status]) -> Status:
    """Return fail if any fails, else inconclusive if any is, else pass."""
    for status in (Status.FAIL, Status.OPEN):
        if status in statuses:
            return status
    return Status.PASS


def quality_checks(
    arm: Arm, plan: Plan, compatibility: CompatibilityResult, precision: PrecisionResult
) -> tuple[Check, ...]:
    """Return the checks that do not concern speed."""
    margins, found = plan.margins, precision.arm(arm.name)
    reference = precision.arms[0]
    checks = []
    if is_exact(arm):
        checks += _agreement_checks(arm, margins, compatibility)
    if arm.name == reference.arm:
        return tuple(checks)
    worst = [("mean_kl", "mean KL"), ("p99_kl", "p99 KL"), ("increase", "bits per byte")]
    limits = (margins.mean_kl, margins.p99_kl, margins.bits_per_byte)
    for (field, name), limit in zip(worst, limits, strict=True):
        checks.append(_worst_bucket(name, field, limit, found))
    drop, status = found.recall_drop, under(found.recall_drop, margins.recall_drop)
    note = f"{reference.recall_all.n} probes"
    if reference.recall_all.value < LEAST_RECALL:
        status = Status.OPEN
        note = (
            f"the reference itself answers {reference.recall_all.value:.0%} of "
            f"{reference.recall_all.n} probes, too few to see a drop"
        )
    checks.append(Check("recall drop", status, margins.recall_drop, drop, note))
    return tuple(checks)


def _agreement_checks(
    arm: Arm, margins: Margins, compatibility: CompatibilityResult
) -> list[Check]:
    mine = [a for a in compatibility.agreements if a.arm == arm.name]
    pairs = (
        ("logit error", [a.logit_error for a in mine], margins.logit_error),
        ("state error", [a.state_error for a in mine], margins.state_error),
    )
    checks = []
    for name, values, margin in pairs:
        worst = max(values, default=float("inf"))
        status = Status.PASS if worst <= margin else Status.FAIL
        value = Estimate(worst, worst, worst, len(values), "largest over all runs")
        checks.append(Check(name, status, margin, value, "step by step against transformers"))
    return checks


def _worst_bucket(name: str, field: str, margin: float, found: ArmPrecision) -> Check:
    values: list[tuple[Estimate, int]] = [
        (getattr(b, field), b.stop) for b in found.buckets if getattr(b, field) is not None
    ]
    if not values:
        return Check(name, Status.OPEN, margin, None, "too few tokens for this number")
    value, stop = max(values, key=lambda pair: pair[0].high)
    status = combine([under(v, margin) for v, _ in values])
    return Check(name, status, margin, value, f"worst length bucket (to {stop} tokens)")
