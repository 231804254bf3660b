"""Driving an engine through a list of jobs.

The loop is synchronous and runs on the engine's own clock, so the same code measures a real machine
and a virtual one.
"""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from replayssm.evaluate.decisions.serving import Job, Run, Served, Step, make_served
from replayssm.traffic.energy import EnergyMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replayssm.engine.speculative import AcceptanceStats

# a clock that was asked to wait until an instant may stop a rounding error short of it
INSTANT = 1e-9
COUNTERS = ("flushes", "rollbacks", "drafted", "accepted", "preemptions", "restarts")


@dataclass(slots=True)
class _Open:
    """A request on its way."""

    job: Job
    scheduled: float
    sent: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def finish(self) -> Served:
        """Return the request as it was served."""
        return make_served(self.job, self.scheduled, self.sent, self.times, self.tokens)


class Driver:
    """Drives an engine through a list of jobs.

    Args:
        engine: The engine, or anything that behaves like it.
        request: Makes the engine's request out of a job.
        wait: Lets time pass until an instant of the engine's clock.
    """

    def __init__(
        self,
        engine: EngineLike,
        request: Callable[[Job], Any],
        wait: Callable[[float], None],
    ) -> None:
        self.engine, self._request, self._wait = engine, request, wait

    def run(self, jobs: Sequence[Job], in_flight: int | None = None) -> Run:
        """Serve every job; see :class:`~replayssm.evaluate.decisions.serving.Server`."""
        enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            meter = EnergyMeter()
            run = self._run(jobs, in_flight)
            return replace(run, energy=meter.stop())
        finally:
            if enabled:
                gc.enable()

    def _run(self, jobs: Sequence[Job], in_flight: int | None) -> Run:
        engine, zero = self.engine, self.engine.clock.now()
        waiting = deque(sorted(jobs, key=lambda job: job.at))
        running: dict[str, _Open] = {}
        served: list[Served] = []
        steps: list[Step] = []
        first = last = engine.stats()
        freed = 0.0
        while waiting or running:
            now = engine.clock.now() - zero
            room = len(waiting) if in_flight is None else in_flight - len(running)
            while (
                waiting and room > 0 and (in_flight is not None or waiting[0].at <= now + INSTANT)
            ):
                job = waiting.popleft()
                due = job.at if in_flight is None else freed
                running[job.id] = _Open(job, due, max(due, engine.clock.now() - zero))
                engine.submit(self._request(job))
                room -= 1
            if engine.is_idle:
                if running:
                    break  # the engine has lost them: the caller counts
                self._wait(zero + waiting[0].at)
                continue
            step, last = self._step(zero, running, served, last)
            steps.append(step)
            freed = engine.clock.now() - zero
        return Run(
            served=tuple(served),
            lost=len(running) + len(waiting),
            span_s=engine.clock.now() - zero,
            steps=tuple(steps),
            counters={name: float(getattr(last, name) - getattr(first, name)) for name in COUNTERS},
            histogram=_kept(first, last),
        )

    def _step(
        self, zero: float, running: dict[str, _Open], served: list[Served], before: StatsLike
    ) -> tuple[Step, StatsLike]:
        engine, start = self.engine, self.engine.clock.now()
        tokens = prefills = 0
        for event in engine.step():
            request = running.get(event.request_id)
            if request is None:
                continue
            if event.kind == "token" and event.token is not None:
                tokens += 1
                prefills += not request.times
                request.times.append(event.at - zero)
                request.tokens.append(int(event.token))
            elif event.kind == "finished":
                del running[event.request_id]
                served.append(request.finish())
        seconds, after = engine.clock.now() - start, engine.stats()
        step = Step(
            at=start - zero,
            seconds=seconds,
            tokens=tokens,
            prefills=prefills,
            flushes=after.flushes - before.flushes,
            live=after.running,
            live_bytes=after.used_bytes,
        )
        return step, after


def _kept(before: StatsLike, after: StatsLike) -> tuple[int, ...]:
    """Return how many verifies between two readings kept n entries, by n."""
    reached = np.zeros(1, np.int64)
    verifies = 0
    for cohort, now in after.acceptance.items():
        then = before.acceptance.get(cohort)
        verifies += now.verifies - (0 if then is None else then.verifies)
        # accepted_at[i]: verifies that kept the pending token and at least i + 1 drafts
        reached = (
            now.accepted_at
            - (0 if then is None else then.accepted_at)
            + np.pad(reached, (0, len(now.accepted_at) - len(reached)))
        )
    if not verifies:
        return ()
    at_least = np.concatenate([[verifies], reached, [0]])
    exactly = at_least[:-1] - at_least[1:]
    return (0, *np.trim_zeros(exactly, "b").tolist())


class ClockLike(Protocol):
    """Seconds."""

    def now(self) -> float:
        """Return the time."""
        ...


class EventLike(Protocol):
    """What the engine tells of one request."""

    @property
    def request_id(self) -> str:
        """Which request."""
        ...

    @property
    def kind(self) -> str:
        """What happened."""
        ...

    @property
    def token(self) -> int | None:
        """The token, of a ``token`` event."""
        ...

    @property
    def at(self) -> float:
        """When, on the engine's clock."""
        ...


class StatsLike(Protocol):
    """What the driver reads of an engine's counts."""

    @property
    def flushes(self) -> int:
        """Folds."""
        ...

    @property
    def running(self) -> int:
        """Requests that hold a seat."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the seats that are taken."""
        ...

    @property
    def acceptance(self) -> Mapping[str, AcceptanceStats]:
        """Acceptance by cohort."""
        ...


class EngineLike(Protocol):
    """What the driver needs of an engine."""

    @property
    def clock(self) -> ClockLike:
        """Where the engine reads the time."""
        ...

    def submit(self, request: Any) -> None:  # noqa: ANN401 - the engine's own request
        """Take a request."""
        ...

    def step(self) -> Sequence[EventLike]:
        """Run one iteration."""
        ...

    def stats(self) -> StatsLike:
        """Return a copy of the counts."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is waiting or running."""
        ...
