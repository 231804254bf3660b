"""What the records of a run amount to. Latencies are milliseconds, times seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError
from replayssm.traffic.record import Status
from replayssm.traffic.slo import Attainment, Slo, attain
from replayssm.traffic.steady import Steady, most_running, steady_window
from replayssm.traffic.use import Use, used

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from replayssm.traffic.record import Record
    from replayssm.traffic.run import Sample

TAIL_MINIMUM = 1000
LATE_MS = 50.0
LATE_SHARE = 0.01
LATENCIES = ("ttft", "ttft_scheduled", "tpot", "e2el", "e2el_scheduled")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds over requests, or over the tokens of requests.

    Percentiles interpolate linearly. There is no p99 from fewer than 1,000 requests.

    Attributes:
        n: Values.
        requests: Requests that they come from.
        mean: Mean; this and the rest are None without values.
        std: Standard deviation.
        p50: Median.
        p95: 95th percentile.
        p99: 99th percentile.
        maximum: Largest.
    """

    n: int
    requests: int
    mean: float | None
    std: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    maximum: float | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Whether requests left when the trace asked for them.

    Attributes:
        lag: Send minus schedule, the wait for a free place or an earlier turn included.
        client_lag: The part of it that is the client's own fault.
        late_share: Share of requests that the client sent more than 50 ms late.
        degraded: Whether that is more than 1 %: then latencies measure the client too.
        offered_rate: Requests a second that the trace asked for; None when all are due at once.
        sent_rate: Requests a second that were sent.
        completed_rate: Requests a second that succeeded.
    """

    lag: Distribution
    client_lag: Distribution
    late_share: float
    degraded: bool
    offered_rate: float | None
    sent_rate: float | None
    completed_rate: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """What was asked for against what came.

    Attributes:
        input: Prompt tokens of requests that succeeded: as the target counted them, or as meant.
        output: Output tokens of requests that succeeded.
        input_mismatches: Requests whose prompt the target counted otherwise than meant.
        output_mismatches: Requests that succeeded with another length than asked for.
        coalesced: Tokens that came together with another one, their times shared out.
        uncounted: Tokens that the target counted and the stream did not show one by one.
        cached: Prompt tokens that were not computed again; None where the target does not say.
        drafted: Tokens drafted; None where the target does not say.
        accepted: Drafted tokens that were accepted.
    """

    input: int
    output: int
    input_mismatches: int
    output_mismatches: int
    coalesced: int
    uncounted: int
    cached: int | None
    drafted: int | None
    accepted: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one cohort, or all of them.

    Attributes:
        requests: Requests by status: ``ok``, ``failed``, ``cancelled``, ``cut``.
        failures: Failed requests by kind.
        moved: Requests that were told to move.
        tokens: What was asked for against what came.
        latencies: ``ttft``, ``ttft_scheduled``, ``tpot``, ``e2el``, ``e2el_scheduled`` of requests
            that succeeded, and ``itl`` over their tokens.
        request_throughput: Requests that succeeded, a second of the span.
        output_throughput: Their output tokens a second.
        total_throughput: Their input and output tokens a second.
        slo: How many kept their limits.
    """

    requests: dict[str, int]
    failures: dict[str, int]
    moved: int
    tokens: Tokens
    latencies: dict[str, Distribution]
    request_throughput: float
    output_throughput: float
    total_throughput: float
    slo: Attainment


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run amounts to, warm-ups left out.

    Attributes:
        schema_version: Version of this shape.
        span_s: From the first send to the last token.
        warmups: Records left out.
        limits: Limits that requests were judged by.
        total: All requests.
        cohorts: The same by cohort, over the same span.
        schedule: Whether requests left when they should.
        most_running: Most requests in flight at once.
        steady: The part of the run at full load; None when there is none.
        use: What the target used, by its own counts; None where it tells nothing.
        warnings: What a reader should know before trusting a number.
    """

    schema_version: int
    span_s: float
    warmups: int
    limits: tuple[Slo, ...]
    total: Group
    cohorts: dict[str, Group]
    schedule: Schedule
    most_running: int
    steady: Steady | None
    use: Use | None
    warnings: tuple[str, ...]


SCHEMA_VERSION = 1


def summarise(
    records: Iterable[Record], slos: Sequence[Slo] = (), samples: Sequence[Sample] = ()
) -> Summary:
    """Summarise the records of a run.

    Args:
        records: One a request; warm-ups are counted and left out.
        slos: Limits to judge by; with none, every request that succeeded is good.
        samples: The run over time, with the target's own counts.

    Raises:
        ContractError: There is no record beside warm-ups.
    """
    everything = list(records)
    kept = [r for r in everything if not r.warmup]
    if not kept:
        raise ContractError("records", "at least one that is no warm-up", "none")
    first = min(r.send_s for r in kept)
    span = max(r.last_token_s or r.end_s for r in kept) - first
    cohorts = {name: [r for r in kept if r.cohort == name] for name in _names(kept)}
    total, schedule = _group(kept, slos, span), _schedule(kept, span)
    return Summary(
        schema_version=SCHEMA_VERSION,
        span_s=span,
        warmups=len(everything) - len(kept),
        limits=tuple(slos),
        total=total,
        cohorts={name: _group(part, slos, span) for name, part in cohorts.items()},
        schedule=schedule,
        most_running=most_running(kept),
        steady=steady_window(kept),
        use=used(samples),
        warnings=tuple(_warnings(total, schedule, len(kept))),
    )


def distribution(values: Sequence[float], requests: int | None = None) -> Distribution:
    """Return the distribution of seconds, in milliseconds.

    Args:
        values: Seconds.
        requests: Requests that they come from; one each by default.
    """
    n = len(values)
    behind = n if requests is None else requests
    if not n:
        return Distribution(0, behind, None, None, None, None, None, None)
    x = np.asarray(values, float) * 1e3
    p50, p95, p99 = (float(p) for p in np.quantile(x, (0.5, 0.95, 0.99)))
    tail = p99 if behind >= TAIL_MINIMUM else None
    return Distribution(n, behind, float(x.mean()), float(x.std()), p50, p95, tail, float(x.max()))


def kinds(failures: Mapping[str, int]) -> str:
    """Return failures by kind in words."""
    return ", ".join(f"{n:,} x {kind}" for kind, n in failures.items())


def _names(records: Sequence[Record]) -> list[str]:
    return sorted({r.cohort for r in records})


def _group(records: Sequence[Record], slos: Sequence[Slo], span: float) -> Group:
    good = [r for r in records if r.status is Status.OK]
    tokens, counted = _tokens(good), Counter(r.status.value for r in records)
    errors = (r.error.partition(":")[0] for r in records if r.error is not None)
    latencies = {
        name: distribution([v for r in good if (v := getattr(r, name)) is not None])
        for name in LATENCIES
    }
    gaps = [r.itl for r in good if len(r.token_times_s) > 1]
    latencies["itl"] = distribution([gap for itl in gaps for gap in itl], len(gaps))
    seconds = span or np.inf
    return Group(
        requests={status.value: counted[status.value] for status in Status},
        failures=dict(Counter(errors).most_common()),
        moved=sum(r.moved for r in records),
        tokens=tokens,
        latencies=latencies,
        request_throughput=len(good) / seconds,
        output_throughput=tokens.output / seconds,
        total_throughput=(tokens.input + tokens.output) / seconds,
        slo=attain(records, slos, span),
    )


def _tokens(good: Sequence[Record]) -> Tokens:
    def told(name: str) -> int | None:
        values = [v for r in good if (v := getattr(r, name)) is not None]
        return sum(values) if values else None

    inputs = [(r.input_tokens, r.requested_input_tokens) for r in good]
    return Tokens(
        input=sum(meant if counted is None else counted for counted, meant in inputs),
        output=sum(r.output_tokens for r in good),
        input_mismatches=sum(counted not in (None, meant) for counted, meant in inputs),
        output_mismatches=sum(r.output_tokens != r.requested_output_tokens for r in good),
        coalesced=sum(r.coalesced_tokens for r in good),
        uncounted=sum(r.uncounted_tokens for r in good),
        cached=told("cached_tokens"),
        drafted=told("draft_tokens"),
        accepted=told("accepted_tokens"),
    )


def _schedule(records: Sequence[Record], span: float) -> Schedule:
    due = sorted(r.scheduled_s for r in records)
    sent = sorted(r.send_s for r in records)
    late = sum(r.client_lag * 1e3 > LATE_MS for r in records) / len(records)
    good = sum(r.status is Status.OK for r in records)
    return Schedule(
        lag=distribution([r.lag for r in records]),
        client_lag=distribution([r.client_lag for r in records]),
        late_share=late,
        degraded=late > LATE_SHARE,
        offered_rate=_rate(due),
        sent_rate=_rate(sent),
        completed_rate=good / (span or np.inf),
    )


def _rate(instants: Sequence[float]) -> float | None:
    span = instants[-1] - instants[0]
    return (len(instants) - 1) / span if span > 0 else None


def _warnings(total: Group, schedule: Schedule, n: int) -> list[str]:
    found, tokens = [], total.tokens
    if schedule.degraded:
        late = f"{100 * schedule.late_share:.1f} %"
        found.append(
            f"degraded: the client sent {late} of the requests more than {LATE_MS:g} ms late; "
            "latencies measure the client too"
        )
    if total.failures:
        found.append(f"{total.requests['failed']} of {n} requests failed: {kinds(total.failures)}")
    if tokens.output_mismatches:
        found.append(f"{tokens.output_mismatches} replies have another length than asked for")
    if tokens.input_mismatches:
        found.append(f"{tokens.input_mismatches} prompts were counted otherwise than meant")
    if tokens.uncounted:
        found.append(
            f"{tokens.uncounted} tokens came in chunks that do not say how many they hold: ITL is "
            "per chunk there, TPOT is right"
        )
    if tokens.cached:
        share = tokens.cached / max(1, tokens.input)
        found.append(
            f"{100 * share:.0f} % of the prompt tokens came from a cache; a new seed avoids that"
        )
    return found
