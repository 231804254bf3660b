"""Figures of a load run as inline SVGs, one a panel so that a narrow page can stack them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.evaluate.decisions.outcome import quantiles
from replayssm.evaluate.report.curves import (
    MIB,
    Curve,
    Frame,
    ecdf,
    over_time,
    side,
    step_times,
)
from replayssm.evaluate.report.load_tables import NAMES
from replayssm.evaluate.report.plots import STYLES
from replayssm.evaluate.report.theme import INK, SERIES
from replayssm.traffic import course
from replayssm.traffic.record import Status
from replayssm.traffic.summary import LATE_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.evaluate.load_run import LoadRun
    from replayssm.traffic.record import Record

    Array = NDArray[np.float64]

ALWAYS = ("ttft", "tpot", "e2el")
COHORTS = 6
WIDTH, HEIGHT = 6.2, 2.7
FLOOR_MS = 0.01


def latencies(run: LoadRun) -> tuple[str, ...]:
    """Latency ECDFs of requests that succeeded, by cohort where there are several."""
    good = [r for r in run.records if not r.warmup and r.status is Status.OK]
    limits = {limit.metric: limit.limit_ms for limit in run.result.summary.limits}
    metrics = [m for m in NAMES if m in ALWAYS or m in limits]
    drawn = [_ecdf(metric, good, shown_cohorts(run), limits.get(metric)) for metric in metrics]
    return tuple(svg for svg in drawn if svg)


def shown_cohorts(run: LoadRun) -> tuple[str, ...]:
    """Return the cohorts that are drawn apart: the largest, none where there is only one."""
    found = run.result.summary.cohorts
    if len(found) < 2:
        return ()
    by_size = sorted(found, key=lambda name: -sum(found[name].requests.values()))
    return tuple(sorted(by_size[:COHORTS]))


def _ecdf(
    metric: str, good: Sequence[Record], cohorts: Sequence[str], limit_ms: float | None
) -> str:
    name = NAMES[metric]
    frame = Frame(
        name=f"latency-{metric}",
        title=name,
        description=f"Share of requests by {name}",
        xlabel="ms",
        ylabel="share of requests",
    )
    curves = [
        Curve(values, style=side(i, cohort))
        for i, cohort in enumerate(cohorts)
        if (values := _values(metric, [r for r in good if r.cohort == cohort]))
    ]
    if not cohorts and (values := _values(metric, good)):
        curves = [Curve(values, style={"color": SERIES[2]})]
    return ecdf(frame, curves, limit_ms) if curves else ""


def _values(metric: str, records: Sequence[Record]) -> tuple[float, ...]:
    return quantiles([getattr(r, metric) for r in records])


def load(run: LoadRun) -> tuple[str, ...]:
    """Requests in flight, arrivals against completions, tokens and schedule lag over time."""
    found = course.load(run.records)
    return (_in_flight(run, found), _arrivals(found), _tokens(found), _lag(found))


def _in_flight(run: LoadRun, found: course.Load) -> str:
    frame = _frame("in-flight", "Requests in flight", "most at once", found.width_s)
    limit = run.result.max_concurrency
    curve = _curve(found.edges_s, found.running, side(0, "in flight"))
    return over_time(frame, [curve], None if limit is None else (limit, f"limit {limit:,}"))


def _arrivals(found: course.Load) -> str:
    frame = _frame("arrivals", "Arrivals against completions", "requests a second", found.width_s)
    curves = [
        _curve(
            found.edges_s, found.scheduled, {"color": SERIES[5], "label": "scheduled"}, is_area=True
        ),
        _curve(found.edges_s, found.completed, {"color": INK, "label": "completed"}),
    ]
    if found.failed.any():
        style: dict[str, Any] = {"color": SERIES[6], "linestyle": STYLES[2], "label": "failed"}
        curves.append(_curve(found.edges_s, found.failed, style))
    return over_time(frame, curves)


def _tokens(found: course.Load) -> str:
    frame = _frame("tokens", "Output tokens", "tokens a second", found.width_s)
    return over_time(frame, [_curve(found.edges_s, found.tokens, side(0, "tokens"))])


def _lag(found: course.Load) -> str:
    frame = _frame("lag", "Schedule lag", "longest, ms", found.width_s)
    curves = [
        _curve(found.edges_s, np.maximum(found.lag_ms, FLOOR_MS), side(0, "send minus schedule"))
    ]
    if not np.array_equal(found.lag_ms, found.client_lag_ms, equal_nan=True):
        own = np.maximum(found.client_lag_ms, FLOOR_MS)
        curves.append(_curve(found.edges_s, own, side(1, "of it the client's")))
    return over_time(frame, curves, (LATE_MS, f"late {LATE_MS:g} ms"), is_log=True)


def _curve(edges: Array, values: Array, style: dict[str, Any], *, is_area: bool = False) -> Curve:
    """Return what holds between edges, to the last one."""
    return Curve(np.append(values, values[-1]), edges, style, is_area)


def _frame(name: str, title: str, ylabel: str, width_s: float) -> Frame:
    return _over_time(name, title, ylabel, f"seconds, in steps of {width_s:g}")


def _over_time(name: str, title: str, ylabel: str, xlabel: str = "seconds") -> Frame:
    return Frame(name, title, f"{title} over time", xlabel, ylabel, WIDTH, HEIGHT)


def target(run: LoadRun) -> tuple[str, ...]:
    """Steps, decode forwards, memory and slots of the target over time, as far as it tells them."""
    found = course.target(run.samples)
    if found is None:
        return ()
    drawn = (_steps(found), _forwards(found), _memory(found), _slots(run, found))
    return tuple(svg for svg in drawn if svg)


def _steps(found: course.Target) -> str:
    if not np.isfinite(found.step_ms).any():
        return ""
    frame = _over_time("steps", "Steps, prefills included", "mean, ms")
    return over_time(frame, [_curve(found.edges_s, found.step_ms, side(0, "steps"))])


def _forwards(found: course.Target) -> str:
    if not np.isfinite(found.plain_ms).any():
        return ""
    frame = _over_time("forwards", "Decode forwards", "mean, ms")
    middle = (found.edges_s[1:] + found.edges_s[:-1]) / 2
    plain = Curve(found.plain_ms, middle, {"color": SERIES[2], "label": "without a flush"})
    return step_times(frame, plain, Curve(found.flushing_ms, middle, {"label": "with one"}))


def _memory(found: course.Target) -> str:
    if not np.isfinite(found.used_bytes).any():
        return ""
    frame = _over_time("memory", "States, rings and attention caches", "MiB in use")
    curve = _curve(found.edges_s, found.used_bytes / MIB, side(0, "in use"))
    if not np.isfinite(found.allocated_bytes).any():
        return over_time(frame, [curve])
    most = float(np.nanmax(found.allocated_bytes)) / MIB
    return over_time(frame, [curve], (most, f"allocated {most:.3g}"))


def _slots(run: LoadRun, found: course.Target) -> str:
    if not np.isfinite(found.running).any():
        return ""
    frame = _over_time("slots", "Sequences at the target", "most at once")
    curves = [_curve(found.edges_s, found.running, side(0, "with a slot"))]
    if np.isfinite(found.waiting).any():
        curves.append(_curve(found.edges_s, found.waiting, side(1, "waiting")))
    return over_time(frame, curves, _all_slots(run.result.config))


def _all_slots(config: dict[str, Any]) -> tuple[float, str] | None:
    slots, engines = config.get("slots"), config.get("engines")
    if not isinstance(slots, int) or not isinstance(engines, int):
        return None
    return slots * engines, f"slots {slots * engines:,}"
