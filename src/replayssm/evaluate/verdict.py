"""From numbers to advice: enable, do not enable, or inconclusive; and a first routing table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from replayssm.evaluate.checks import Check, Status, combine, quality_checks
from replayssm.evaluate.plan import FULL_SCOPE
from replayssm.evaluate.stats import Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.bottleneck import BottleneckResult
    from replayssm.evaluate.compatibility import CompatibilityResult
    from replayssm.evaluate.plan import Plan
    from replayssm.evaluate.precision import PrecisionResult
    from replayssm.evaluate.window import Timing, WindowResult

TODAY = "standard bf16"


class Verdict(StrEnum):
    """What to do with an arm."""

    ENABLE = "enable"
    REFUSE = "do not enable"
    OPEN = "inconclusive"


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
        arm: What serves it; where no candidate earned it, the standard arm to beat there.
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
    routes = route(settings, plan.margins.speedup)
    verdict, headline = _overall(plan, arms, settings, routes)
    return Judgement(verdict, headline, tuple(arms), tuple(settings), routes)


def faster(speedup: Estimate | None, margin: float) -> Status:
    """Tell whether a speed-up reaches its margin with its whole interval above 1."""
    if speedup is None:
        return Status.FAIL
    if speedup.low > 1 and speedup.value >= margin:
        return Status.PASS
    return Status.FAIL if speedup.high < margin else Status.OPEN


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
        what = "but its speed" if quality is Status.PASS else "and"
        verdict, speed = Verdict.OPEN, f"{what} is undecided at batch {_list(unclear)}"
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


def route(settings: list[Setting], margin: float) -> tuple[Route, ...]:
    """Return the best enabled arm per batch range; a range ends before the next batch measured.

    Args:
        settings: Every candidate at every batch.
        margin: Least speed-up of a state update.
    """
    lines: list[Route] = []
    batches = sorted({s.batch for s in settings})
    for i, batch in enumerate(batches):
        first = 1 if i == 0 else batch
        last = batches[i + 1] - 1 if i + 1 < len(batches) else None
        arm, reason = _serve([s for s in settings if s.batch == batch], margin)
        if lines and lines[-1].arm == arm:
            lines[-1] = Route(lines[-1].first, last, arm, lines[-1].reason)
        else:
            lines.append(Route(first, last, arm, reason))
    return tuple(lines)


def _serve(settings: list[Setting], margin: float) -> tuple[str, str]:
    """Return the arm for one batch and why."""
    best = fastest([s for s in settings if s.verdict is Verdict.ENABLE])
    if best is not None:
        return best.arm, best.reason
    to_beat = (fastest(settings) or settings[0]).against
    why = f"no candidate was shown to be at least {margin:g}x faster within the precision margins"
    return to_beat, why


def fastest(settings: Sequence[Setting]) -> Setting | None:
    """Return the setting whose speed-up has the best lower end, so that noise does not win."""
    timed = [s for s in settings if s.speedup is not None]
    return max(timed, key=lambda s: s.speedup.low if s.speedup else 0.0, default=None)


def _overall(
    plan: Plan, arms: list[ArmVerdict], settings: list[Setting], routes: tuple[Route, ...]
) -> tuple[Verdict, str]:
    verdicts = {a.arm: a.verdict for a in arms if a.verdict is not None}
    if Verdict.ENABLE in verdicts.values():
        paying = [r for r in routes if r.arm in verdicts]
        where = "; ".join(f"{r.arm} for {batch_words(r)}" for r in paying)
        return Verdict.ENABLE, f"Enable {where}. Keep the standard path elsewhere."
    if Verdict.OPEN in verdicts.values():
        more = "on a machine at rest" if plan.scope == FULL_SCOPE else "with --full"
        head = f"This run cannot decide: keep the standard path, and run again {more}."
        undecided = [s for s in settings if s.verdict is Verdict.OPEN]
        return Verdict.OPEN, head + _nearest(undecided, settings)
    sound = {a.arm for a in arms if a.quality is not Status.FAIL}
    keeping = [s for s in settings if s.arm in sound]
    head = "Do not enable state replay on this machine."
    return Verdict.REFUSE, head + _nearest(keeping or settings, settings)


def _nearest(eligible: list[Setting], settings: list[Setting]) -> str:
    """Name the eligible setting that comes nearest, and say so where none at all was faster."""
    best = fastest(eligible)
    if best is None or best.speedup is None:
        return ""
    told = f"{best.arm} at batch {best.batch}: state update {times(best.speedup)} against "
    told += f"{best.against}."
    if all(s.speedup is None or s.speedup.value < 1 for s in settings):
        return f" No candidate was faster; the closest is {told}"
    word = "best" if best.speedup.value >= 1 else "closest"
    return f" The {word} candidate is {told}"


def batch_words(line: Route) -> str:
    """Return a route's batch range in words."""
    if line.last is None:
        return f"batch {line.first} and above"
    if line.first == line.last:
        return f"batch {line.first}"
    return f"batch {line.first} to {line.last}"
