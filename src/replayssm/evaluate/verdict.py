"""From numbers to advice: enable, do not enable, or inconclusive; and a first routing table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from replayssm.evaluate.compatibility import is_exact
from replayssm.evaluate.stats import Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.bottleneck import BottleneckResult
    from replayssm.evaluate.compatibility import CompatibilityResult
    from replayssm.evaluate.plan import Margins, Plan
    from replayssm.evaluate.precision import ArmPrecision, PrecisionResult
    from replayssm.evaluate.window import Timing, WindowResult

LEAST_RECALL = 0.2
TODAY = "standard bf16"


class Verdict(StrEnum):
    """What to do with an arm."""

    ENABLE = "enable"
    REFUSE = "do not enable"
    OPEN = "inconclusive"


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


@dataclass(frozen=True, slots=True)
class Setting:
    """One candidate at one batch.

    Attributes:
        arm: Candidate.
        batch: B.
        window: Window.
        verdict: What to do there.
        speedup: Of the state update, against the fastest standard arm that keeps the margins.
        against: That standard arm.
        whole_model: Speed-up of the whole decode step against standard f32, nearest measured batch.
        reason: One sentence with the numbers.
    """

    arm: str
    batch: int
    window: int
    verdict: Verdict
    speedup: Estimate | None
    against: str
    whole_model: Estimate | None
    reason: str


@dataclass(frozen=True, slots=True)
class ArmVerdict:
    """One arm over all settings.

    Attributes:
        arm: Name.
        quality: How it stands against the precision margins.
        verdict: Enable where some batch earns it; None for a standard arm, which is no candidate.
        reason: One sentence.
        checks: The numbers behind ``quality``.
    """

    arm: str
    quality: Status
    verdict: Verdict | None
    reason: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the routing table.

    Attributes:
        first: Least batch.
        last: Largest batch; None is open-ended.
        arm: What serves it; the standard path where nothing earned more.
        reason: One sentence.
    """

    first: int
    last: int | None
    arm: str
    reason: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a run.

    Attributes:
        verdict: Overall.
        headline: One or two sentences in plain words.
        arms: Every arm.
        settings: Every candidate at every batch.
        routes: Routing table by batch, standard path as fallback.
    """

    verdict: Verdict
    headline: str
    arms: tuple[ArmVerdict, ...]
    settings: tuple[Setting, ...]
    routes: tuple[Route, ...]

    def arm(self, name: str) -> ArmVerdict:
        """Return one arm's verdict."""
        return next(a for a in self.arms if a.arm == name)


def judge(
    plan: Plan,
    compatibility: CompatibilityResult,
    bottleneck: BottleneckResult,
    window: WindowResult,
    precision: PrecisionResult,
) -> Judgement:
    """Judge every arm and setting against the margins of the plan."""
    checks = {arm.name: quality_checks(arm, plan, compatibility, precision) for arm in plan.arms}
    quality = {name: combine([c.status for c in found]) for name, found in checks.items()}
    settings: list[Setting] = []
    for arm in plan.candidates:
        for cell in window.row(plan.scope.window):
            found = _setting(arm, cell.batch or 1, plan, quality, window, bottleneck)
            settings.append(found)
    arms = []
    for arm in plan.arms:
        mine = [s for s in settings if s.arm == arm.name]
        arms.append(_arm(arm, quality[arm.name], checks[arm.name], mine))
    routes = route(settings)
    verdict, headline = _overall(arms, settings, routes)
    return Judgement(verdict, headline, tuple(arms), tuple(settings), routes)


def under(value: Estimate | None, margin: float) -> Status:
    """Tell whether a number stays at or under its margin, by the ends of its interval."""
    if value is None:
        return Status.OPEN
    if value.high <= margin:
        return Status.PASS
    return Status.FAIL if value.low > margin else Status.OPEN


def faster(speedup: Estimate | None, margin: float) -> Status:
    """Tell whether a speed-up reaches its margin with its whole interval above 1."""
    if speedup is None:
        return Status.FAIL
    if speedup.low > 1 and speedup.value >= margin:
        return Status.PASS
    return Status.FAIL if speedup.high < margin else Status.OPEN


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


def _setting(
    arm: Arm,
    batch: int,
    plan: Plan,
    quality: dict[str, Status],
    window: WindowResult,
    bottleneck: BottleneckResult,
) -> Setting:
    cell = next(c for c in window.row(plan.scope.window) if c.batch == batch)
    timing = cell.timing(arm.name)
    speedup, against = _strictest(timing, plan, quality)
    profile = bottleneck.nearest(batch)
    whole = next((a.speedup for a in profile.arms if a.arm == arm.name), None)
    speed = faster(speedup, plan.margins.speedup)
    status = combine([quality[arm.name], speed])
    told = _speed_words(speedup, against, whole, profile.batch)
    if not timing.valid:
        verdict, reason = Verdict.REFUSE, f"outputs are wrong (relative error {timing.error:.1e})"
    elif quality[arm.name] is Status.FAIL:
        verdict, reason = Verdict.REFUSE, f"a precision margin is broken; {told}"
    elif speed is Status.FAIL:
        need = f"the margin is {plan.margins.speedup:.2f}x"
        verdict, reason = Verdict.REFUSE, f"too slow: {told}; {need}"
    elif whole is not None and whole.high < 1:
        verdict, reason = Verdict.REFUSE, f"the whole decode step gets slower: {told}"
    elif status is Status.PASS:
        verdict, reason = Verdict.ENABLE, f"every margin is kept: {told}"
    else:
        what = "speed" if speed is Status.OPEN else "precision"
        verdict, reason = Verdict.OPEN, f"the {what} interval straddles its margin; {told}"
    return Setting(arm.name, batch, plan.scope.window, verdict, speedup, against, whole, reason)


def _strictest(
    timing: Timing, plan: Plan, quality: dict[str, Status]
) -> tuple[Estimate | None, str]:
    """Compare with the fastest standard arm that keeps the precision margins itself."""
    reference = plan.arms[0].name
    rivals = [(timing.speedup, reference)]
    if quality.get(TODAY) is Status.PASS and timing.versus_today is not None:
        rivals.append((timing.versus_today, TODAY))
    known = [(s, name) for s, name in rivals if s is not None]
    return min(known, key=lambda pair: pair[0].value) if known else (None, reference)


def _speed_words(speedup: Estimate | None, against: str, whole: Estimate | None, batch: int) -> str:
    if speedup is None:
        return "no timing"
    told = f"state update {times(speedup)} against {against}"
    if whole is not None:
        told += f", whole decode step {times(whole)} at batch {batch}"
    return told


def times(value: Estimate) -> str:
    """Return a ratio with its interval in words."""
    return f"{value.value:.2f}x ({value.low:.2f} to {value.high:.2f})"


def _arm(
    arm: Arm, quality: Status, checks: tuple[Check, ...], settings: list[Setting]
) -> ArmVerdict:
    broken = [c for c in checks if c.status is Status.FAIL]
    unsure = [c for c in checks if c.status is Status.OPEN]
    words = {
        Status.PASS: "keeps every precision margin",
        Status.FAIL: "breaks " + ", ".join(_check_words(c) for c in broken),
        Status.OPEN: "cannot be told apart from the margin of " + ", ".join(c.name for c in unsure),
    }[quality]
    if not arm.is_replay:
        return ArmVerdict(arm.name, quality, None, words, checks)
    enabled = [s.batch for s in settings if s.verdict is Verdict.ENABLE]
    unclear = [s.batch for s in settings if s.verdict is Verdict.OPEN]
    if enabled:
        verdict, speed = Verdict.ENABLE, f"and pays at batch {_list(enabled)}"
    elif unclear:
        verdict, speed = Verdict.OPEN, f"and is undecided at batch {_list(unclear)}"
    elif quality is Status.FAIL:
        verdict, speed = Verdict.REFUSE, "so its speed does not matter"
    else:
        verdict, speed = Verdict.REFUSE, "but pays at no batch measured"
    return ArmVerdict(arm.name, quality, verdict, f"{words}, {speed}", checks)


def _check_words(check: Check) -> str:
    value = "none" if check.value is None else f"{check.value.value:.2g}"
    return f"{check.name} ({value}, margin {check.margin:g})"


def _list(batches: list[int]) -> str:
    return ", ".join(str(b) for b in batches)


def route(settings: list[Setting]) -> tuple[Route, ...]:
    """Return the best enabled arm per batch range; a range ends before the next batch measured."""
    lines: list[Route] = []
    batches = sorted({s.batch for s in settings})
    for i, batch in enumerate(batches):
        first = 1 if i == 0 else batch
        last = batches[i + 1] - 1 if i + 1 < len(batches) else None
        able = [s for s in settings if s.batch == batch and s.verdict is Verdict.ENABLE]
        best = fastest(able)
        arm = "standard" if best is None else best.arm
        reason = "no candidate kept every margin" if best is None else best.reason
        if lines and lines[-1].arm == arm:
            lines[-1] = Route(lines[-1].first, last, arm, lines[-1].reason)
        else:
            lines.append(Route(first, last, arm, reason))
    return tuple(lines)


def fastest(settings: Sequence[Setting]) -> Setting | None:
    """Return the setting whose speed-up has the best lower end, so that noise does not win."""
    timed = [s for s in settings if s.speedup is not None]
    return max(timed, key=lambda s: s.speedup.low if s.speedup else 0.0, default=None)


def _overall(
    arms: list[ArmVerdict], settings: list[Setting], routes: tuple[Route, ...]
) -> tuple[Verdict, str]:
    verdicts = [a.verdict for a in arms if a.verdict is not None]
    if Verdict.ENABLE in verdicts:
        paying = [r for r in routes if r.arm != "standard"]
        where = "; ".join(f"{r.arm} for {batch_words(r)}" for r in paying)
        return Verdict.ENABLE, f"Enable {where}. Keep the standard path elsewhere."
    sound = {a.arm for a in arms if a.quality is not Status.FAIL}
    best = fastest([s for s in settings if s.arm in sound]) or fastest(settings)
    told = ""
    if best is not None and best.speedup is not None:
        told = (
            f" The best candidate is {best.arm} at batch {best.batch}: "
            f"state update {times(best.speedup)} against {best.against}."
        )
    if Verdict.OPEN in verdicts:
        head = "This run cannot decide: keep the standard path, and run again with --full."
        return Verdict.OPEN, head + told
    return Verdict.REFUSE, "Do not enable state replay on this machine." + told


def batch_words(line: Route) -> str:
    """Return a route's batch range in words."""
    if line.last is None:
        return f"batch {line.first} and above"
    if line.first == line.last:
        return f"batch {line.first}"
    return f"batch {line.first} to {line.last}"
