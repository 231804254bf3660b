"""One run: a list of jobs served under one routing, and the numbers that a run is judged by.

Latencies count from the schedule: a request that waits for a place waits for its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from replayssm.errors import ContractError
from replayssm.traffic.record import Record, Status
from replayssm.traffic.slo import Slo as Limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.evaluate.decisions.tables import Slo
    from replayssm.traffic.energy import Energy


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
        index: Its place in the trace.
    """

    id: str
    at: float
    prompt: tuple[int, ...]
    output_tokens: int
    cohort: str
    text: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """One request as it was served.

    Attributes:
        record: Its times, in seconds from the start of the run.
        tokens: The tokens.
    """

    record: Record
    tokens: tuple[int, ...]

    @property
    def id(self) -> str:
        """Id of the job."""
        return self.record.request_id

    def meets(self, slo: Slo) -> bool:
        """Tell whether every limit was met; latencies count from the schedule."""
        limits = (
            ("ttft_scheduled", slo.ttft_ms),
            ("tpot", slo.tpot_ms),
            ("e2el_scheduled", slo.e2el_ms),
        )
        return all(Limit(name, ms).is_met(self.record) for name, ms in limits if ms is not None)


def make_served(
    job: Job, scheduled: float, sent: float, times: Sequence[float], tokens: Sequence[int]
) -> Served:
    """Return a request that was served to its end.

    Args:
        job: What was asked for.
        scheduled: When it was due; in a closed loop, when its place became free.
        sent: When the engine took it.
        times: When each token came, at least one.
        tokens: The tokens.
    """
    record = Record(
        request_id=job.id,
        index=job.index,
        cohort=job.cohort,
        session_id=None,
        turn=0,
        warmup=False,
        status=Status.OK,
        finish_reason="length",
        error=None,
        scheduled_s=scheduled,
        released_s=scheduled,
        send_s=sent,
        first_token_s=times[0],
        last_token_s=times[-1],
        end_s=times[-1],
        token_times_s=tuple(times),
        coalesced_tokens=0,
        uncounted_tokens=0,
        requested_input_tokens=len(job.prompt),
        input_tokens=len(job.prompt),
        cached_tokens=0,
        requested_output_tokens=job.output_tokens,
        output_tokens=len(tokens),
        draft_tokens=None,
        accepted_tokens=None,
        moved=False,
    )
    return Served(record, tuple(tokens))


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
        energy: What the machine used meanwhile; None where nobody looked.
    """

    served: tuple[Served, ...]
    lost: int
    span_s: float
    steps: tuple[Step, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()
    energy: Energy | None = None

    def cohort(self, name: str) -> list[Served]:
        """Return the requests of one cohort."""
        return [s for s in self.served if s.record.cohort == name]


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
    """Return every metric of one cohort in one run; ``goodput_per_watt`` where energy was read.

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
    records = [s.record for s in mine]
    span = max(r.end_s for r in records) - min(r.scheduled_s for r in records)
    good = sum(s.meets(slo) for s in mine)
    # half a request stands in for none, so that a ratio exists and is as bad as it can be seen
    goodput = max(good, 0.5) / span
    busy = [s.live_bytes / s.live for s in run.steps if s.live]
    joules = None if run.energy is None else run.energy.joules
    # the whole run's energy: cohorts share the machine; requests a second over watts
    per_watt = {"goodput_per_watt": max(good, 0.5) / joules} if joules else {}
    return {
        "throughput": sum(r.output_tokens for r in records) / span,
        "goodput": goodput,
        "goodput_per_dollar": goodput * 3600 / per_hour,
        **per_watt,
        "attainment": good / len(mine),
        "ttft": _mean([r.ttft_scheduled for r in records]),
        "tpot": _mean([r.tpot for r in records]),
        "e2el": _mean([r.e2el_scheduled for r in records]),
        "memory_per_sequence": _mean(busy),
    }


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else float("nan")


BETTER = {
    "throughput": "higher",
    "goodput": "higher",
    "goodput_per_dollar": "higher",
    "goodput_per_watt": "higher",
    "ttft": "lower",
    "tpot": "lower",
    "e2el": "lower",
    "memory_per_sequence": "lower",
}
