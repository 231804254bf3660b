"""Tables of the sixth decision: the whole replay, its latencies, flushes and operations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from replayssm.evaluate.report.rollout_tables import RATIOS, ratio_of
from replayssm.evaluate.report.tables import Table
from replayssm.evaluate.report.words import NONE, number, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.evaluate.decisions.outcome import Latencies
    from replayssm.evaluate.decisions.result import Rollout

LATENCIES = ("ttft", "tpot", "e2el")


def latencies(result: Rollout) -> Table:
    """Latencies of the whole replay, with n and no bare tail."""
    found: Sequence[Latencies] = () if result.outcome is None else result.outcome.latencies
    rows = []
    for lat in found:
        for name in LATENCIES:
            values = getattr(lat, name)
            if values:
                p99 = number(_at(values, 0.99)) if lat.n >= 1000 else NONE
                cells = (number(_at(values, 0.5)), number(_at(values, 0.95)), p99)
                rows.append((lat.cohort, lat.routing, name.upper(), str(lat.n), *cells))
    columns = ("cohort", "routing", "latency", "n", "p50 ms", "p95 ms", "p99 ms")
    return Table(columns, tuple(rows), "From the schedule. No p99 under 1,000 requests.")


def whole(result: Rollout) -> Table:
    """The whole replay: absolute numbers and ratios per cohort."""
    rows: list[tuple[str, ...]] = []
    for experiment in () if result.outcome is None else result.outcome.experiments:
        routed = next(
            n for n in (s.variant for s in experiment.samples) if n != experiment.baseline
        )
        for metric in RATIOS:
            before, after = (
                sum(v) / len(v)
                for v in (
                    experiment.values(experiment.baseline, metric),
                    experiment.values(routed, metric),
                )
            )
            rows.append(
                (
                    experiment.cohort,
                    metric.replace("_", " "),
                    NONE if math.isnan(before) else number(before),
                    NONE if math.isnan(after) else number(after),
                    ratio_of(experiment, routed, metric),
                )
            )
        shares = [
            sum(v) / len(v)
            for v in (
                experiment.values(experiment.baseline, "attainment"),
                experiment.values(routed, "attainment"),
            )
        ]
        rows.append((experiment.cohort, "SLO attainment", *(percent(s) for s in shares), NONE))
    columns = ("cohort", "metric", "all standard", "routed", "ratio, above 1 is better")
    notes = "Latencies in seconds, memory in bytes; means over the rounds."
    if result.outcome is not None:
        notes += f" Energy: {result.outcome.energy}."
    return Table(columns, tuple(rows), notes)


def flush_costs(result: Rollout) -> Table:
    """What flushes cost among decode steps."""
    rows = tuple(
        (
            c.routing,
            str(c.steps),
            str(c.flushing),
            number(c.p50_ms),
            number(c.p99_ms),
            number(c.plain_ms),
            number(c.flushing_ms),
        )
        for c in (() if result.outcome is None else result.outcome.flush_costs)
    )
    columns = (
        "routing",
        "decode steps",
        "with a flush",
        "p50 ms",
        "p99 ms",
        "mean without, ms",
        "mean with, ms",
    )
    return Table(columns, rows, "Last round. No 99th percentile under 1,000 steps.")


def operations(result: Rollout) -> Table:
    """Drill, leaks, canary."""
    if result.outcome is None:
        return Table(("what", "found"), ())
    o = result.outcome.operations
    drilled = {True: "pass", False: "fail", None: "not asked for"}[o.drilled]
    rows = [
        ("fallback drill", drilled),
        *(("rehearsed", line) for line in o.drill),
        ("slots free after all runs", f"{o.free} of {o.slots}"),
        ("canary", "same tokens before and after" if o.canary_same else "tokens changed"),
    ]
    return Table(("what", "found"), tuple(rows))


def _at(values: Sequence[float], share: float) -> float:
    """Return a quantile of values that lie at evenly spaced quantiles."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
