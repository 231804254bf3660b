"""One evaluation from plan to result, with progress."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from replayssm.evaluate import bottleneck, compatibility, precision, speculation, window
from replayssm.evaluate.manifest import collect
from replayssm.evaluate.result import SCHEMA_VERSION, Result
from replayssm.evaluate.subject import one_geometry
from replayssm.evaluate.verdict import judge
from replayssm.models.registry import find_mixers
from replayssm.ops.dispatch import choose
from replayssm.types import Impl

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.plan import Plan
    from replayssm.evaluate.subject import Subject

BUSY_SWITCHES_PER_SAMPLE = 20
# names of the sections, and the share of a default run's time that each usually takes
SECTIONS = {
    "compatibility": 0.22,
    "bottleneck": 0.13,
    "window and batch": 0.17,
    "precision": 0.34,
    "speculation": 0.14,
}


class Progress(Protocol):
    """Where a run reports to."""

    def start(self, section: str, steps: int) -> None:
        """A section begins; ``tick`` will be called ``steps`` times."""
        ...

    def tick(self, what: str) -> None:
        """One step of the section is done."""
        ...

    def finish(self, section: str, seconds: float) -> None:
        """The section is done."""
        ...


class Silent:
    """Progress that goes nowhere."""

    def start(self, section: str, steps: int) -> None:
        """Ignore."""

    def tick(self, what: str) -> None:
        """Ignore."""

    def finish(self, section: str, seconds: float) -> None:
        """Ignore."""


def evaluate(
    subject: Subject,
    plan: Plan,
    progress: Progress | None = None,
    ready: Callable[[Arm], None] = lambda _: None,
) -> Result:
    """Run all five sections and judge them.

    The plan is hashed before anything runs: the margins in the result are those it was judged by.

    Args:
        subject: Model and text.
        plan: Arms, margins and sizes.
        progress: Where to report.
        ready: Called before an arm first runs; may wait for its kernels.
    """
    show, digest, begun = progress or Silent(), plan.digest, time.perf_counter()
    mixers = find_mixers(subject.model)[0]
    spec = one_geometry(tuple(mixer.spec for mixer in mixers))
    device = subject.model.device
    choices = {"impl": choose(Impl.AUTO, device).value, "device": str(device)}
    manifest = collect(seed=plan.seed, choices=choices)
    scope = plan.scope

    start = _begin(show, "compatibility", compatibility.count_steps(plan))
    first = compatibility.run(subject, plan, show.tick, ready)
    for arm in plan.arms:
        ready(arm)
    first = replace(first, seconds=_end(show, "compatibility", start))

    largest = bottleneck.largest_batch(subject, plan)[0]
    start = _begin(show, "bottleneck", len({b for b in scope.decode_batches if b < largest}) + 1)
    second = bottleneck.run(subject, plan, show.tick)
    second = replace(second, seconds=_end(show, "bottleneck", start))
    start = _begin(show, "window and batch", len(window.grid(plan)) + 1)
    third = window.run(spec, len(mixers), plan, show.tick)
    third = replace(third, seconds=_end(show, "window and batch", start))
    start = _begin(show, "precision", precision.count_steps(subject, plan))
    fourth = precision.run(subject, plan, show.tick)
    fourth = replace(fourth, seconds=_end(show, "precision", start))
    start = _begin(show, "speculation", speculation.count_steps(subject, plan))
    fifth = speculation.run(subject, plan, show.tick)
    fifth = replace(fifth, seconds=_end(show, "speculation", start))

    return Result(
        schema_version=SCHEMA_VERSION,
        plan_digest=digest,
        plan=plan,
        manifest=manifest,
        parameters=subject.parameters,
        compatibility=first,
        bottleneck=second,
        window=third,
        precision=fourth,
        speculation=fifth,
        judgement=judge(plan, first, second, third, fourth),
        seconds=time.perf_counter() - begun,
        warnings=_warnings(subject, plan, third),
    )


def _begin(show: Progress, section: str, steps: int) -> float:
    show.start(section, steps)
    return time.perf_counter()


def _end(show: Progress, section: str, start: float) -> float:
    seconds = time.perf_counter() - start
    show.finish(section, seconds)
    return seconds


def _warnings(subject: Subject, plan: Plan, third: window.WindowResult) -> tuple[str, ...]:
    found = []
    specs = {mixer.spec for mixer in find_mixers(subject.model)[0]}
    if len(specs) > 1:
        found.append(
            f"The recurrent layers have {len(specs)} geometries; section 3 times the commonest."
        )
    if subject.is_small:
        found.append(
            f"The model has {subject.parameters / 1e6:.1f} M parameters: in its whole decode step "
            "the interpreter's own time dominates, so the shares of section 2 do not transfer to "
            "a large model. The layer-level numbers of section 3 do."
        )
    samples = plan.scope.rounds * len(plan.arms)
    busy = [
        c
        for c in third.cells
        if sum(t.switches for t in c.timings) > BUSY_SWITCHES_PER_SAMPLE * samples
    ]
    if busy:
        found.append(
            f"The machine was busy: {len(busy)} of {len(third.cells)} timed cells saw more than "
            f"{BUSY_SWITCHES_PER_SAMPLE} involuntary context switches a sample. Nothing was "
            "dropped; the paired intervals are wider for it."
        )
    return tuple(found)
