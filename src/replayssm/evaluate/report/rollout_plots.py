"""Figures of a rollout evaluation as inline SVGs, one a panel so that a narrow page can stack them.

Nothing is told by colour alone: series have markers or dashes of their own, cells their numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.evaluate.decisions.outcome import ROUTED
from replayssm.evaluate.report.curves import (
    MIB,
    PANEL,
    WIDE,
    Curve,
    Frame,
    ecdf,
    over_time,
    step_times,
)
from replayssm.evaluate.report.plots import (
    STYLES,
    categories,
    legend,
    limit_log,
    margin_line,
    shares,
    with_interval,
)
from replayssm.evaluate.report.theme import INK, SERIES, drawing, figure, to_svg
from replayssm.evaluate.report.words import limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from replayssm.evaluate.decisions.outcome import Latencies, Timeline
    from replayssm.evaluate.decisions.result import Rollout
    from replayssm.evaluate.decisions.tables import Cohort

BETTER, WORSE = SERIES[2], SERIES[6]
FLOOR = 1e-9
FULL_SHADE = math.log(2)


def bottleneck(result: Rollout) -> tuple[str, ...]:
    """Share of step time by batch."""
    return (shares(result.profiles),)


def surface(result: Rollout) -> tuple[str, ...]:
    """Speed-up over batch and prompt length, one panel a variant, with the break-even line."""
    return tuple(
        _surface(result, variant) for variant in dict.fromkeys(c.variant for c in result.surface)
    )


def _surface(result: Rollout, variant: str) -> str:
    mine = {(c.prompt, c.batch): c.ratio.value for c in result.surface if c.variant == variant}
    batches = sorted({batch for _, batch in mine})
    prompts = sorted({prompt for prompt, _ in mine})
    cells = np.array([[mine[p, b] for b in batches] for p in prompts])
    with drawing(f"surface-{variant}"):
        fig, (ax, *_) = figure(width=PANEL, height=0.6 * len(prompts) + 1.4)
        _heat(ax, cells)
        _edges(ax, cells)
        ax.set_xticks(range(len(batches)), [str(b) for b in batches])
        ax.set_yticks(range(len(prompts)), [str(p) for p in prompts])
        ax.set(xlabel="batch", ylabel="prompt tokens", title=f"{variant}, tokens per second")
        return to_svg(fig, f"Speed-up of {variant} by batch and prompt length, break-even drawn")


def _heat(ax: Axes, cells: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    from matplotlib.patches import Rectangle

    for (y, x), value in np.ndenumerate(cells):
        depth = min(1.0, abs(math.log(value)) / FULL_SHADE)
        color = BETTER if value > 1 else WORSE
        alpha = 0.08 + 0.5 * depth
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=color, alpha=alpha, linewidth=0))
        ax.annotate(f"{value:.2f}x", (x, y), ha="center", va="center", fontsize=9)
    ax.set_xlim(-0.5, cells.shape[1] - 0.5)
    ax.set_ylim(cells.shape[0] - 0.5, -0.5)
    ax.grid(visible=False)
    ax.tick_params(length=0)


def _edges(ax: Axes, cells: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Draw the line between cells that are faster and cells that are not."""
    faster = cells > 1
    rows, columns = cells.shape
    for y in range(rows):
        for x in range(columns):
            if x + 1 < columns and faster[y, x] != faster[y, x + 1]:
                ax.plot([x + 0.5] * 2, [y - 0.5, y + 0.5], color=INK, linewidth=2)
            if y + 1 < rows and faster[y, x] != faster[y + 1, x]:
                ax.plot([x - 0.5, x + 0.5], [y + 0.5] * 2, color=INK, linewidth=2)


def precision(result: Rollout) -> tuple[str, ...]:
    """Mean KL by length, one panel a cohort, with the margin drawn."""
    plan = result.plan
    # drafts change no distribution: variants that differ by them only are one line
    distinct = {(v.pool, v.read): v.name for v in reversed(plan.candidates)}
    names = [v.name for v in plan.candidates if v.name in distinct.values()]
    shown = [c for c in plan.cohorts if any(q.cohort == c.name for q in result.qualities)]
    return tuple(_precision(result, cohort, names) for cohort in shown)


def _precision(result: Rollout, cohort: Cohort, names: Sequence[str]) -> str:
    with drawing(f"quality-{cohort.name}"):
        fig, (ax, *_) = figure(width=PANEL)
        highs = _quality_lines(ax, result, cohort, names)
        margin = _kl_margin(result, cohort)
        ax.set(title=cohort.name, xlabel="length, tokens", ylabel="mean KL, nats a token")
        if margin is not None:
            margin_line(ax, margin, f"margin {limit(margin)}")
        limit_log(ax, margin or FLOOR, highs)
        legend(fig, ax, columns=2)
        return to_svg(fig, f"Mean KL by length for {cohort.name}, against its margin")


def _quality_lines(
    ax: Axes, result: Rollout, cohort: Cohort, variants: Sequence[str]
) -> list[float]:
    stops = sorted({b.stop for q in result.qualities if q.cohort == cohort.name for b in q.buckets})
    highs = []
    for i, name in enumerate(variants):
        found = next(q for q in result.qualities if (q.cohort, q.variant) == (cohort.name, name))
        for source, style in (("replies", "-"), ("adversarial", STYLES[1])):
            mine = [b for b in found.buckets if b.source == source]
            if not mine:
                continue
            xs = [stops.index(b.stop) + 0.06 * (i - len(variants) / 2) for b in mine]
            label = f"{name}, {source}"
            estimates = [b.mean_kl for b in mine]
            with_interval(ax, xs, estimates, SERIES[2 + i % 7], label, floor=FLOOR, linestyle=style)
            highs += [e.high for e in estimates]
    categories(ax, stops)
    return highs


def _kl_margin(result: Rollout, cohort: Cohort) -> float | None:
    target = result.plan.decisions.precision
    if target.metric == "mean_kl":
        return result.plan.margin("precision", cohort)
    return target.also.get("mean_kl")


def acceptance(result: Rollout) -> tuple[str, ...]:
    """How many entries a verify kept, by cohort and variant."""
    found = [a for a in result.acceptances if sum(a.histogram)]
    if not found:
        return ()
    most = max(len(a.histogram) for a in found)
    with drawing("acceptance"):
        fig, (ax, *_) = figure()
        width = 0.8 / len(found)
        hatches = ("", "////", "....", "xxxx", "----")
        for i, a in enumerate(found):
            counts = np.array([*a.histogram, *([0] * (most - len(a.histogram)))][1:], float)
            xs = np.arange(len(counts)) + (i - (len(found) - 1) / 2) * width
            color = SERIES[2 + i % 7]
            ax.bar(
                xs,
                counts / counts.sum(),
                width * 0.9,
                facecolor=color,
                edgecolor=INK,
                linewidth=0.5,
                hatch=hatches[i % len(hatches)],
                label=f"{a.cohort}, {a.variant}",
            )
        categories(ax, range(1, most))
        ax.set(xlabel="entries kept per verify", ylabel="share of verifies")
        ax.set_ylim(0, None)
        legend(fig, ax, columns=2)
        return (to_svg(fig, "Entries kept per verify by cohort"),)


def latencies(result: Rollout) -> tuple[str, ...]:
    """Latency ECDFs of the whole replay, a panel a cohort, with the limit drawn."""
    if result.outcome is None:
        return ()
    return tuple(_ecdf(cohort, result.outcome.latencies) for cohort in result.plan.cohorts)


def _ecdf(cohort: Cohort, found: Sequence[Latencies]) -> str:
    metric = shown_latency(cohort)
    frame = Frame(
        name=f"latency-{cohort.name}",
        title=cohort.name,
        description=f"{metric.upper()} of {cohort.name}, routed against all standard",
        xlabel=f"{metric.upper()}, ms",
        ylabel="share of requests",
    )
    curves = [
        Curve(getattr(x, metric), style=_side(x.routing)) for x in found if x.cohort == cohort.name
    ]
    return ecdf(frame, curves, getattr(cohort.slo, f"{metric}_ms"))


def _side(routing: str) -> dict[str, Any]:
    if routing == ROUTED:
        return {"color": SERIES[2], "linestyle": "-", "label": "routed"}
    return {"color": SERIES[0], "linestyle": STYLES[1], "label": "all standard"}


def shown_latency(cohort: Cohort) -> str:
    """Return the latency a cohort is looked at by: the one its SLO limits, else by its mode."""
    order = ("tpot", "ttft", "e2el") if cohort.mode == "interactive" else ("e2el", "ttft", "tpot")
    limited = [m for m in order if getattr(cohort.slo, f"{m}_ms") is not None]
    return (limited or list(order))[0]


def timeline(result: Rollout) -> tuple[str, ...]:
    """Step times of the routed replay, steps with a flush marked."""
    found = _timelines(result).get(ROUTED)
    if found is None:
        return ()
    at, ms = np.array(found.at), np.array(found.ms)
    marked = np.array(found.flushes) > 0
    frame = Frame(
        name="timeline",
        title="Step times, routed, last round",
        description="Step times with flushes marked",
        xlabel="seconds",
        ylabel="step time, ms",
        width=WIDE,
        height=2.8,
    )
    steps = Curve(ms, at, {"color": SERIES[0], "label": "step"})
    return (step_times(frame, steps, Curve(ms[marked], at[marked], {"label": "with a flush"})),)


def memory(result: Rollout) -> tuple[str, ...]:
    """Memory in use over time under both routings."""
    found = _timelines(result)
    if not found:
        return ()
    frame = Frame(
        name="memory",
        title="States, rings and attention caches",
        description="Memory in use over time",
        xlabel="seconds",
        ylabel="MiB in use",
        width=WIDE,
        height=2.6,
    )
    curves = [Curve(np.array(x.live_bytes) / MIB, x.at, _side(name)) for name, x in found.items()]
    cap = result.plan.hardware.memory_mib
    return (over_time(frame, curves, (cap, f"limit {cap:g}")),)


def _timelines(result: Rollout) -> dict[str, Timeline]:
    return {} if result.outcome is None else {t.routing: t for t in result.outcome.timelines}
