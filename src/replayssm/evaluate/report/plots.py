"""The report's figures, each returned as inline SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.container import ErrorbarContainer

from replayssm.evaluate.report.theme import FAINT, GRID, INK, SERIES, drawing, figure, to_svg
from replayssm.evaluate.report.words import limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from replayssm.evaluate.bottleneck import Profile
    from replayssm.evaluate.precision import ArmPrecision
    from replayssm.evaluate.result import Result
    from replayssm.evaluate.stats import Estimate
    from replayssm.evaluate.window import Cell

FLOOR = 1e-8
STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))


def colors(result: Result) -> dict[str, str]:
    """Return one placeholder colour per arm, the same in every figure."""
    names = [arm.name for arm in result.plan.arms]
    return {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}


def with_interval(
    ax: Axes,
    xs: Sequence[float],
    estimates: Sequence[Estimate],
    color: str,
    label: str,
    *,
    floor: float = 0.0,
    linestyle: str = "-",
) -> None:
    """Draw estimates with their intervals as one series."""
    values = np.maximum([e.value for e in estimates], floor)
    low = values - np.maximum([e.low for e in estimates], floor)
    high = np.array([e.high for e in estimates]) - values
    spread = np.maximum(np.array([low, high]), 0)
    ax.errorbar(
        xs,
        values,
        yerr=spread,
        color=color,
        label=label,
        marker="o",
        capsize=2.5,
        elinewidth=1.1,
        linestyle=linestyle,
    )


def categories(ax: Axes, labels: Iterable[object]) -> None:
    """Label the x axis 0, 1, 2, .. with names."""
    names = [str(x) for x in labels]
    ax.set_xticks(range(len(names)), names)
    ax.set_xlim(-0.45, len(names) - 0.55)
    ax.grid(axis="x", visible=False)


def margin_line(ax: Axes, at: float, text: str) -> None:
    """Draw a margin with its name beside the frame."""
    ax.axhline(at, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    # beside the frame, where no curve can run through it
    ax.annotate(
        text.replace(" ", "\n", 1),
        (1, at),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        fontsize=8.5,
        annotation_clip=False,
    )


def legend(fig: Figure, ax: Axes, columns: int = 4) -> None:
    """Put one legend under a figure."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=1.6)


def limit_ratio(ax: Axes, values: Sequence[Estimate]) -> None:
    """Fit the axis to the intervals; a wild one is cut, with an arrow, to leave the others tall."""
    if not values:
        return
    most = max(1.15, max(v.value for v in values))
    top = min(max(1.25 * most, 1.06 * max(v.high for v in values)), 2 * most)
    ax.set_ylim(0, top)
    for series in ax.containers:
        if not isinstance(series, ErrorbarContainer):
            continue
        for bars in series.lines[2]:
            cut = [x for (x, _), (_, high) in bars.get_segments() if high > top]
            shade = bars.get_edgecolor()
            ax.plot(cut, [0.975 * top] * len(cut), "^", color=shade[0], markersize=6)


def limit_log(ax: Axes, margin: float, highs: Iterable[float]) -> None:
    """Put a logarithmic axis around a margin and everything that was drawn."""
    ax.set_yscale("log")
    ax.set_ylim(top=max(8 * margin, 1.5 * max(highs, default=0.0)))


def speed_by_batch(result: Result) -> str:
    """Speed-up of the state update over batch, at the plan's window."""
    cells = result.window.row(result.plan.scope.window)
    with drawing("speed-batch"):
        fig, (ax, *_) = figure()
        shown = _speed_lines(ax, result, cells)
        categories(ax, [c.batch for c in cells])
        ax.set(xlabel="batch", ylabel="speed-up of a state update")
        ax.set_title(f"By batch, window {result.plan.scope.window}")
        _speed_frame(ax, result, shown)
        legend(fig, ax)
        return to_svg(fig, "Speed-up of the state update by batch")


def speed_by_window(result: Result) -> str:
    """Speed-up of the state update over the window, at the largest batch."""
    batch = max(c.batch or 0 for c in result.window.cells)
    cells = sorted((c for c in result.window.cells if c.batch == batch), key=lambda c: c.window)
    with drawing("speed-window"):
        fig, (ax, *_) = figure()
        shown = _speed_lines(ax, result, cells)
        categories(ax, [c.window for c in cells])
        ax.set(xlabel="window", ylabel="speed-up of a state update")
        ax.set_title(f"By window, batch {batch}")
        _speed_frame(ax, result, shown)
        legend(fig, ax)
        return to_svg(fig, "Speed-up of the state update by window")


def _speed_lines(ax: Axes, result: Result, cells: Sequence[Cell]) -> list[Estimate]:
    shown: list[Estimate] = []
    names = [arm.name for arm in result.plan.arms[1:]]
    step = 0.07
    for i, name in enumerate(names):
        points = [(x, c.timing(name).speedup) for x, c in enumerate(cells)]
        known = [(x, s) for x, s in points if s is not None]
        if not known:
            continue
        offset = (i - (len(names) - 1) / 2) * step
        estimates = [s for _, s in known]
        xs = [x + offset for x, _ in known]
        style = "--" if name.startswith("standard") else "-"
        with_interval(ax, xs, estimates, colors(result)[name], name, linestyle=style)
        shown += estimates
    return shown


def _speed_frame(ax: Axes, result: Result, shown: Sequence[Estimate]) -> None:
    ax.axhline(1, color=FAINT, linewidth=1)
    margin_line(ax, result.plan.margins.speedup, f"margin {result.plan.margins.speedup:g}x")
    limit_ratio(ax, shown)


def bottleneck(result: Result) -> str:
    """Where a decode step goes, by batch."""
    return shares(result.bottleneck.profiles)


def shares(profiles: Sequence[Profile]) -> str:
    """Share of a decode step by part, one bar per batch."""
    with drawing("bottleneck"):
        fig, (ax, *_) = figure(height=0.62 * len(profiles) + 1.3)
        for y, p in enumerate(profiles):
            update = min(max(p.update_share.value, 0.0), 1.0)
            mixers = max(p.mixer_share.value - update, 0.0)
            parts = (
                ("state updates", update, SERIES[2]),
                ("rest of the recurrent mixers", mixers, SERIES[5]),
                ("rest of the model", max(1 - update - mixers, 0.0), GRID),
            )
            left = 0.0
            for label, width, color in parts:
                ax.barh(
                    y, width, left=left, color=color, height=0.62, label=label if y == 0 else None
                )
                left += width
            ax.annotate(
                f"ceiling {p.ceiling.value:.2f}x", (1.015, y), va="center", annotation_clip=False
            )
        ax.set_yticks(range(len(profiles)), [f"batch {p.batch}" for p in profiles])
        ax.invert_yaxis()
        ax.set_xlim(0, 1)
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        ax.grid(axis="y", visible=False)
        ax.set_title("Share of a decode step, standard f32")
        legend(fig, ax)
        return to_svg(fig, "Share of a decode step by part and batch")


def agreement(result: Result) -> str:
    """Largest logit error along the compared steps."""
    found = result.compatibility.agreements
    shades = colors(result)
    prompts = sorted({a.prefill for a in found})
    styles = {n: STYLES[i % len(STYLES)] for i, n in enumerate(prompts)}
    with drawing("agreement"):
        fig, (ax, *_) = figure()
        seen: set[str] = set()
        for a in found:
            label = a.arm if a.block == 1 else f"{a.arm}, blocks of {a.block}"
            color = shades[a.arm] if a.block == 1 else SERIES[6]
            xs = (np.arange(len(a.curve)) + 1) * a.steps / len(a.curve)
            ax.plot(
                xs,
                np.maximum(a.curve, FLOOR),
                color=color,
                linewidth=1.1,
                linestyle=styles[a.prefill],
                alpha=0.85,
                label=None if label in seen else label,
            )
            seen.add(label)
        for n, style in styles.items():
            ax.plot([], [], color=INK, linewidth=1.1, linestyle=style, label=f"prompt of {n}")
        ax.set(xlabel="decode step", ylabel="largest logit error / logit std")
        ax.set_title("Against transformers' own step, one line per prompt length")
        margin = result.plan.margins.logit_error
        margin_line(ax, margin, f"margin {limit(margin)}")
        limit_log(ax, margin, [max(a.curve) for a in found])
        legend(fig, ax)
        return to_svg(fig, "Logit error along the decode steps")


def divergence(result: Result) -> str:
    """Mean and 99th percentile KL by length bucket."""
    arms = result.precision.arms[1:]
    margins = result.plan.margins
    with drawing("divergence"):
        fig, axes = figure(width=9.6, height=3.6, columns=2)
        panels = (
            ("mean_kl", "Mean KL", margins.mean_kl),
            ("p99_kl", "99th percentile of KL", margins.p99_kl),
        )
        for ax, (field, title, margin) in zip(axes, panels, strict=True):
            _buckets(ax, result, arms, field)
            ax.set_title(title)
            margin_line(ax, margin, f"margin {limit(margin)}")
            shown = [getattr(b, field) for arm in arms for b in arm.buckets]
            limit_log(ax, margin, [e.high for e in shown if e is not None])
            if not any(shown):
                ax.annotate(
                    "too few tokens",
                    (0.5, 0.5),
                    xycoords="axes fraction",
                    ha="center",
                    va="center",
                    color=FAINT,
                )
        axes[0].set_ylabel("nats per token")
        legend(fig, axes[0], columns=5)
        return to_svg(fig, "KL from the reference by length bucket")


def _buckets(ax: Axes, result: Result, arms: Sequence[ArmPrecision], field: str) -> None:
    buckets = result.precision.arms[0].buckets
    for i, arm in enumerate(arms):
        points = [(x, getattr(b, field)) for x, b in enumerate(arm.buckets)]
        known = [(x, e) for x, e in points if e is not None]
        if not known:
            continue
        offset = (i - (len(arms) - 1) / 2) * 0.07
        xs = [x + offset for x, _ in known]
        style = "--" if arm.arm.startswith("standard") else "-"
        with_interval(
            ax,
            xs,
            [e for _, e in known],
            colors(result)[arm.arm],
            arm.arm,
            floor=FLOOR,
            linestyle=style,
        )
    categories(ax, [f"{b.start}-{b.stop}" for b in buckets])
    ax.set_xlabel("position in the context, tokens")


def recall(result: Result) -> str:
    """Share of probes answered right by kind and length."""
    arms = result.precision.arms
    kinds = sorted({r.kind for r in arms[0].recall})
    with drawing("recall"):
        fig, axes = figure(width=9.6, height=3.3, columns=max(1, len(kinds)))
        for ax, kind in zip(axes, kinds, strict=True):
            lengths = sorted({r.length for r in arms[0].recall if r.kind == kind})
            for i, arm in enumerate(arms):
                by_length = {r.length: r.right for r in arm.recall if r.kind == kind}
                offset = (i - (len(arms) - 1) / 2) * 0.09
                xs = [x + offset for x in range(len(lengths))]
                with_interval(
                    ax,
                    xs,
                    [by_length[n] for n in lengths],
                    colors(result)[arm.arm],
                    arm.arm,
                    linestyle="none",
                )
            categories(ax, lengths)
            ax.set_ylim(-0.03, 1.03)
            ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
            ax.set(xlabel="probe length, tokens", title=kind.replace("_", "-"))
        axes[0].set_ylabel("answered right")
        legend(fig, axes[0], columns=5)
        return to_svg(fig, "Recall by kind and length")
