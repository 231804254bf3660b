"""What a load run amounts to in words and tables: one definition for the report and a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from replayssm.evaluate.report import manifest as stamps
from replayssm.evaluate.report.tables import Table
from replayssm.evaluate.report.words import NONE, count, mib, number, percent
from replayssm.traffic.record import Status
from replayssm.traffic.summary import LATE_MS, TAIL_MINIMUM, kinds

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.evaluate.load_run import LoadResult
    from replayssm.traffic.slo import Slo
    from replayssm.traffic.summary import Distribution, Group, Summary

T = TypeVar("T")

NAMES = {
    "ttft": "TTFT",
    "ttft_scheduled": "TTFT from schedule",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "e2el_scheduled": "E2EL from schedule",
}
TARGETS = {
    "replayssm": "the embedded engine, in the client's process",
    "openai": "an OpenAI-compatible server, completions",
    "openai-chat": "an OpenAI-compatible server, chat",
}
LATENCY_COLUMNS = ("ms", "mean", "p50", "p95", "p99", "most", "n")
NO_TAIL = f"Over requests that succeeded. No p99 from fewer than {TAIL_MINIMUM:,} requests."


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the headline.

    Attributes:
        title: What it says first.
        text: The rest.
        tone: ``good``, ``bad``, ``open``, or nothing.
    """

    title: str
    text: str
    tone: str


def headlines(result: LoadResult) -> tuple[Line, ...]:
    """Return what a run amounts to; that its client was too slow is said before anything else."""
    summary = result.summary
    total, schedule = summary.total, summary.schedule
    is_bad = bool(total.requests["failed"]) or not total.requests["ok"]
    lines = [Line(_asked(result), f"{_kept(summary)} {_ended(total)}", "bad" if is_bad else "")]
    if schedule.degraded:
        late = (
            f"It sent {percent(schedule.late_share)} of the requests more than {LATE_MS:g} ms "
            "late: latencies measure the client too."
        )
        lines.insert(0, Line("Degraded: the client was too slow", late, "open"))
    return tuple(lines)


def _asked(result: LoadResult) -> str:
    schedule, at_once = result.summary.schedule, result.trace.concurrency
    n = sum(result.summary.total.requests.values())
    requests = f"{n:,} {'request' if n == 1 else 'requests'}"
    done = f"{number(schedule.completed_rate)} a second completed"
    if at_once is not None:
        return f"{requests}, {at_once:,} at a time, {done}"
    if schedule.offered_rate is None:
        return f"{requests}, due at once, {done}"
    return f"{requests} at {number(schedule.offered_rate)} a second"


def _kept(summary: Summary) -> str:
    slo = summary.total.slo
    if not summary.limits:
        return f"{slo.met:,} of {slo.judged:,} succeeded; no limit was set."
    *most, last = (_limit(limit) for limit in summary.limits)
    limits = f"{', '.join(most)} and {last}" if most else last
    kept = "" if slo.share is None else f" ({percent(slo.share)})"
    goodput = f"a goodput of {number(slo.goodput)} a second"
    return f"{slo.met:,} of {slo.judged:,}{kept} stayed within {limits}: {goodput}."


def _ended(total: Group) -> str:
    failed = total.requests["failed"]
    words = [f"{failed:,} failed ({kinds(total.failures)})" if failed else "None failed"]
    if total.requests["cancelled"]:
        words.append(f"{total.requests['cancelled']:,} were cancelled by the trace")
    if total.requests["cut"]:
        words.append(f"{total.requests['cut']:,} were cut by the end of the run")
    return f"{', '.join(words)}."


def _limit(limit: Slo) -> str:
    name, _, schedule = NAMES[limit.metric].partition(" ")
    return f"{name} {limit.limit_ms:,g} ms{' ' if schedule else ''}{schedule}"


def latencies(summary: Summary) -> Table:
    """Latencies of all requests, and the schedule lag."""
    rows = [_row(NAMES[name], found) for name, found in summary.total.latencies.items()]
    rows.append(_row("schedule lag", summary.schedule.lag))
    rows.append(_row("of it the client's", summary.schedule.client_lag))
    return Table(LATENCY_COLUMNS, tuple(rows), NO_TAIL)


def cohort_latencies(summary: Summary) -> Table:
    """Latencies of every cohort."""
    rows = tuple(
        (cohort, *_row(NAMES[name], found))
        for cohort, group in summary.cohorts.items()
        for name, found in group.latencies.items()
    )
    return Table(("cohort", *LATENCY_COLUMNS), rows, NO_TAIL)


def _row(name: str, found: Distribution) -> tuple[str, ...]:
    values = (found.mean, found.p50, found.p95, found.p99, found.maximum)
    return (name, *(tenths(value) for value in values), f"{found.n:,}")


def tenths(value: float | None) -> str:
    """Return a number with one digit after the point."""
    return NONE if value is None else f"{value:,.1f}"


def share(value: float | None) -> str:
    """Return a share that may be that of nothing."""
    return NONE if value is None else percent(value)


def cohorts(summary: Summary) -> Table:
    """Throughput, latency and goodput of all requests and, where there are several, by cohort."""
    columns = (
        "cohort",
        "ok",
        "requests/s",
        "tokens/s",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "goodput/s",
        "in SLO",
    )
    rows = tuple(
        (
            name,
            f"{group.requests['ok']:,}",
            f"{group.request_throughput:.2f}",
            f"{group.output_throughput:,.0f}",
            tenths(group.latencies["ttft"].p50),
            tenths(group.latencies["tpot"].p50),
            f"{group.slo.goodput:.2f}",
            share(group.slo.share),
        )
        for name, group in groups(summary).items()
    )
    return Table(columns, rows, "" if summary.limits else "Without limits all that succeed are in.")


def groups(summary: Summary) -> dict[str, Group]:
    """Return all requests and, where there are several, those of each cohort, by name."""
    return {"all": summary.total, **(summary.cohorts if len(summary.cohorts) > 1 else {})}


def ends(summary: Summary) -> Table:
    """How requests ended, and their tokens."""
    rows = tuple(
        (
            name,
            *(f"{group.requests[status.value]:,}" for status in Status),
            kinds(group.failures) or NONE,
            f"{group.moved:,}",
            f"{group.tokens.input:,}",
            f"{group.tokens.output:,}",
        )
        for name, group in groups(summary).items()
    )
    columns = ("cohort", *(s.value for s in Status), "failures", "moved", "input tokens",
               "output tokens")  # fmt: skip
    return Table(
        columns, rows, f"Tokens of requests that succeeded; {summary.warmups} warm-ups left out."
    )


def limits(summary: Summary) -> Table:
    """Each limit, and the share of requests that kept it."""
    slo = summary.total.slo
    judged = f"{slo.judged:,}"
    rows = [
        (NAMES[limit.metric], f"{limit.limit_ms:,g} ms", share(slo.by_metric[limit.metric]), judged)
        for limit in summary.limits
    ]
    if rows:
        rows.append(("all of them", NONE, share(slo.share), judged))
    notes = "Failed requests are misses; cancelled and cut ones are left out."
    return Table(("limit on", "at most", "kept by", "n"), tuple(rows), notes)


def rates(summary: Summary) -> Table:
    """Arrivals against completions, and the part of the run at full load."""
    schedule, steady = summary.schedule, summary.steady
    rows = [
        ("offered by the trace", f"{number(schedule.offered_rate)} requests a second"),
        ("sent", f"{number(schedule.sent_rate)} requests a second"),
        ("completed", f"{number(schedule.completed_rate)} requests a second"),
        ("output", f"{number(summary.total.output_throughput)} tokens a second"),
        ("in flight", f"{summary.most_running:,} at most"),
        (f"sent more than {LATE_MS:g} ms late by the client", percent(schedule.late_share)),
    ]
    if steady is not None:
        span = f"from {steady.start_s:,.1f} s to {steady.end_s:,.1f} s"
        rate = f"{number(steady.request_throughput)} requests a second"
        tokens = f"{number(steady.output_throughput)} tokens a second"
        rows.append(("steady window", f"{span}, {rate}, {tokens}"))
    return Table(("what", "value"), tuple(rows))


def use(summary: Summary) -> Table:
    """What the target used, by its own counts."""
    found = summary.use
    if found is None:
        return Table(("what", "value"), ())
    told = {
        "memory of a sequence": _told(found.memory_per_sequence, mib),
        "rows of a decode forward": _told(found.effective_batch, number),
        "flushes": _told(found.flushes, lambda x: f"{x:,}"),
        "flushes an output token": _told(found.flushes_per_token, number),
        "decode forwards with a flush": _told(found.flushing_share, percent),
        "mean decode forward without": _told(found.plain_ms, lambda x: f"{number(x)} ms"),
        "mean decode forward with one": _told(found.flushing_ms, lambda x: f"{number(x)} ms"),
        "drafts accepted": _told(found.acceptance_rate, percent),
        "evictions": _told(found.evictions, lambda x: f"{x:,}"),
    }
    rows = tuple((name, text) for name, text in told.items() if text)
    return Table(("what", "value"), rows, "From the first sample to the last.")


def _told(value: T | None, show: Callable[[T], str]) -> str:
    return "" if value is None else show(value)


def energy(result: LoadResult) -> Table:
    """Joules over the whole run; empty where they were not measured."""
    found = result.energy
    if found.joules is None:
        return Table(("what", "value"), ())
    told = {
        "energy": f"{number(found.joules)} J",
        "counters": f"{found.source}, {count(found.devices, 'device')}",
        "an output token": _told(found.j_per_output_token, lambda x: f"{number(x)} J"),
        "a request that succeeded": _told(found.j_per_request, lambda x: f"{number(x)} J"),
        "a request that kept every limit": _told(
            found.j_per_good_request, lambda x: f"{number(x)} J"
        ),
    }
    rows = tuple((name, text) for name, text in told.items() if text)
    return Table(
        ("what", "value"),
        rows,
        "Over the whole run, warm-ups included; idle power is not subtracted.",
    )


def trace(result: LoadResult) -> Table:
    """Where the requests came from, and what was done to them."""
    found = result.trace
    rows = [
        ("source", found.source),
        ("sha256", found.sha256 or NONE),
        ("format", found.format),
        ("rows read", f"{found.rows:,}"),
        ("malformed rows left out", f"{found.bad_rows:,}"),
        *((f"left out: {reason}", f"{n:,}") for reason, n in found.dropped.items()),
        *((f"step {i}", step) for i, step in enumerate(found.conversions, 1)),
        ("requests", f"{result.num_prompts:,}"),
        ("arrivals", _arrivals(found.concurrency)),
    ]
    return Table(("what", "value"), tuple(rows))


def _arrivals(concurrency: int | None) -> str:
    if concurrency is None:
        return "at the times of the trace"
    return f"closed loop, {concurrency:,} in flight"


def settings(result: LoadResult) -> Table:
    """Every setting of the run, and what the user wanted to be kept."""
    rows = [(name, NONE if value is None else str(value)) for name, value in result.config.items()]
    rows += [(f"metadata: {name}", value) for name, value in result.metadata.items()]
    return Table(("setting", "value"), tuple(rows))


def manifest(result: LoadResult) -> Table:
    """What ran where."""
    m = result.manifest
    rows = [
        *stamps.command(m),
        ("model", result.model_id),
        ("target", TARGETS.get(result.backend, result.backend)),
        *stamps.machine(m),
        *stamps.software(m),
    ]
    notes = "" if result.backend == "replayssm" else "The machine is the client's."
    return Table(("what", "value"), tuple(rows), notes)
