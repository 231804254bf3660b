"""One run: a list of jobs served under one routing, and the numbers that a run is judged by.

The loop that drives the engine is synchronous and runs on the engine's own clock, so the same code
measures a real machine and a virtual one. Latencies count from the schedule: a request that waits
for a place waits for its answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replayssm.engine.speculative import AcceptanceStats
    from replayssm.evaluate.decisions.tables import Slo

# a clock that was asked to wait until an instant may stop a rounding error short of it
INSTANT = 1e-9
COUNTERS = ("flushes", "rollbacks", "drafted", "accepted", "preemptions", "restarts")


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be served.

    Attributes:
        id: Unique in the run.
        at: When it is due, seconds from the start.
        prompt: Token ids.
        output_tokens: Tokens to emit.
        cohort: Its cohort.
        text: The prompt as text, for graders.
    """

    id: str
    at: float
    prompt: tuple[int, ...]
    output_tokens: int
    cohort: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """One request as it was served; times in seconds from the start of the run.

    Attributes:
        id: Of the job.
        cohort: Of the job.
        scheduled_s: When it was due; in a closed loop, when its place became free.
        token_times_s: When each token came.
        tokens: The tokens.
    """

    id: str
    cohort: str
    scheduled_s: float
    token_times_s: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def ttft(self) -> float:
        """Seconds from the schedule to the first token."""
        return self.token_times_s[0] - self.scheduled_s

    @property
    def e2el(self) -> float:
        """Seconds from the schedule to the last token."""
        return self.token_times_s[-1] - self.scheduled_s

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        n = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (n - 1) if n > 1 else None

    def meets(self, slo: Slo) -> bool:
        """Tell whether every limit was met; a TPOT limit cannot be met by one token."""
        if not self.token_times_s:
            return False
        tpot = self.tpot
        pairs = ((slo.ttft_ms, self.ttft), (slo.e2el_ms, self.e2el), (slo.tpot_ms, tpot))
        return all(
            limit is None or (value is not None and value * 1e3 <= limit) for limit, value in pairs
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the engine.

    Attributes:
        at: When it began, seconds from the start.
        seconds: How long it took.
        tokens: Tokens it emitted.
        prefills: Requests that got their first token in it.
        flushes: Folds of whole slots in it.
        live: Sequences that held a slot after it.
        live_bytes: Bytes of state, rings and attention cache in use after it.
    """

    at: float
    seconds: float
    tokens: int
    prefills: int
    flushes: int
    live: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one run left behind.

    Attributes:
        served: Every request that was finished.
        lost: Requests that were submitted and never finished.
        span_s: From the start to the last token.
        steps: Every iteration of the engine.
        counters: The engine's counters over the run.
        histogram: ``histogram[n]``: verifies that kept n entries; empty without drafts.
    """

    served: tuple[Served, ...]
    lost: int
    span_s: float
    steps: tuple[Step, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()

    def cohort(self, name: str) -> list[Served]:
        """Return the requests of one cohort."""
        return [s for s in self.served if s.cohort == name]


class Server(Protocol):
    """Serves jobs under one routing, within the plan's memory limit."""

    def run(self, jobs: Sequence[Job], in_flight: int | None = None) -> Run:
        """Serve every job and return what was seen.

        Args:
            jobs: In order of arrival.
            in_flight: Most requests in flight; None sends each when it is due.
        """
        ...


def measure(run: Run, cohort: str, slo: Slo, per_hour: float) -> dict[str, float]:
    """Return every metric of one cohort in one run.

    Args:
        run: What was seen.
        cohort: Which requests count.
        slo: Limits for goodput.
        per_hour: Price of an hour, the fixed cost of a change included where there is one.

    Raises:
        ContractError: The run finished no request of the cohort.
    """
    mine = run.cohort(cohort)
    if not mine:
        raise ContractError("run", f"a finished request of cohort {cohort}", "none")
    first = min(s.scheduled_s for s in mine)
    span = max(s.token_times_s[-1] for s in mine) - first
    good = sum(s.meets(slo) for s in mine)
    tpots = [s.tpot for s in mine if s.tpot is not None]
    # half a request stands in for none, so that a ratio exists and is as bad as it can be seen
    goodput = max(good, 0.5) / span
    busy = [s.live_bytes / s.live for s in run.steps if s.live]
    return {
        "throughput": sum(len(s.tokens) for s in mine) / span,
        "goodput": goodput,
        "goodput_per_dollar": goodput * 3600 / per_hour,
        "attainment": good / len(mine),
        "ttft": float(np.mean([s.ttft for s in mine])),
        "tpot": float(np.mean(tpots)) if tpots else float("nan"),
        "e2el": float(np.mean([s.e2el for s in mine])),
        "memory_per_sequence": float(np.mean(busy)) if busy else float("nan"),
    }


BETTER = {
    "throughput": "higher",
    "goodput": "higher",
    "goodput_per_dollar": "higher",
    "ttft": "lower",
    "tpot": "lower",
    "e2el": "lower",
    "memory_per_sequence": "lower",
}


@dataclass(slots=True)
class _Open:
    """A request on its way."""

    job: Job
    scheduled: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


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
        """Serve every job; see :class:`Server`."""
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
                running[job.id] = _Open(job, job.at if in_flight is None else freed)
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
                job = running.pop(event.request_id).job
                times = tuple(request.times)
                served.append(
                    Served(job.id, job.cohort, request.scheduled, times, tuple(request.tokens))
                )
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
