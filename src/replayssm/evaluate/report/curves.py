"""Curves that the reports of a rollout and of a load run share: ECDFs, and things over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import NullFormatter

from replayssm.evaluate.report.plots import STYLES, legend, margin_line
from replayssm.evaluate.report.theme import FAINT, INK, SERIES, drawing, figure, to_svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from numpy.typing import ArrayLike

PANEL = 4.1
WIDE = 9.6
FAR = 2.0
SKEWED = 8.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """What a figure is called and how large it is.

    Attributes:
        name: Keeps the ids of several figures on a page apart.
        title: Above the figure.
        description: What it shows, for screen readers.
        xlabel: Of the horizontal axis.
        ylabel: Of the vertical axis.
        width: Inches.
        height: Inches.
    """

    name: str
    title: str
    description: str
    xlabel: str
    ylabel: str
    width: float = PANEL
    height: float = 3.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A series.

    Attributes:
        ys: Values; of an ECDF ascending ones.
        xs: Where they are; of an ECDF nothing.
        style: How it is drawn, its label included.
        is_area: Whether it is drawn as the area under it.
    """

    ys: ArrayLike
    xs: ArrayLike = ()
    style: dict[str, Any] = field(default_factory=dict)
    is_area: bool = False


def side(i: int, label: str) -> dict[str, Any]:
    """Return the style of the i-th of several series; none is told by colour alone."""
    # a name is no formula, and none is left out of the legend
    shown = label.replace("$", r"\$")
    shown = f" {shown}" if shown.startswith("_") else shown
    return {"color": SERIES[2 + i % 7], "linestyle": STYLES[i % len(STYLES)], "label": shown}


def ecdf(frame: Frame, curves: Sequence[Curve], limit_ms: float | None) -> str:
    """Draw latencies in ms, given at evenly spaced quantiles, with their limit."""
    highest = middle = 0.0
    with drawing(frame.name):
        fig, (ax, *_) = figure(frame.width, frame.height)
        for curve in curves:
            values = np.asarray(curve.ys, float)
            if values.size:
                highest = max(highest, float(values.max()))
                middle = max(middle, float(np.median(values)))
            # a single value is a step as well
            values = values.repeat(2) if values.size == 1 else values
            ax.step(values, np.linspace(0, 1, values.size), where="post", **curve.style)
        if limit_ms is not None:
            _limit(ax, limit_ms, is_far=limit_ms > FAR * highest > 0)
        _name(ax, frame)
        ax.set_ylim(0, 1.02)
        if highest > SKEWED * middle > 0:
            ax.set_xscale("log")
            _plain(ax.xaxis)
        else:
            ax.set_xlim(0, None)
        if any("label" in curve.style for curve in curves):
            legend(fig, ax, columns=2)
        return to_svg(fig, frame.description)


def _limit(ax: Axes, limit_ms: float, *, is_far: bool) -> None:
    if is_far:
        # on the axis it would leave the curves no room
        text, at, across = f"SLO {limit_ms:,g} ms \N{RIGHTWARDS ARROW}", (1.0, 0.03), "right"
        ax.annotate(text, at, xycoords="axes fraction", ha=across, fontsize=8.5)
        return
    ax.axvline(limit_ms, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.annotate("SLO", (limit_ms, 0.03), xytext=(3, 0), textcoords="offset points", fontsize=8.5)


def over_time(
    frame: Frame,
    curves: Sequence[Curve],
    cap: tuple[float, str] | None = None,
    *,
    is_log: bool = False,
) -> str:
    """Draw what holds from each instant to the next; a cap where it is near enough to matter.

    Args:
        frame: Names and size.
        curves: At least one.
        cap: A limit and its name.
        is_log: Whether values are drawn by their magnitude; they are above 0 then.
    """
    with drawing(frame.name):
        fig, (ax, *_) = figure(frame.width, frame.height)
        for curve in curves:
            if curve.is_area:
                ax.fill_between(curve.xs, curve.ys, step="post", linewidth=0, **curve.style)
            else:
                ax.step(curve.xs, curve.ys, where="post", **{"linewidth": 1.3, **curve.style})
        highest = max(float(np.nanmax(c.ys)) for c in curves)
        if cap is not None and (is_log or highest > cap[0] / 3):
            margin_line(ax, *cap)
        _name(ax, frame)
        ax.set_xlim(0, None)
        if is_log:
            lowest = min(float(np.nanmin(c.ys)) for c in curves)
            ax.set_yscale("log")
            ax.set_ylim(10.0 ** np.floor(np.log10(lowest)), None)
            _plain(ax.yaxis)
        else:
            ax.set_ylim(0, None)
            ax.axhline(0, color=FAINT, linewidth=0.5)
        if len(curves) > 1:
            legend(fig, ax)
        return to_svg(fig, frame.description)


def step_times(frame: Frame, line: Curve, flushing: Curve) -> str:
    """Draw step times in ms over time, those with a flush marked."""
    with drawing(frame.name):
        fig, (ax, *_) = figure(frame.width, frame.height)
        ax.plot(line.xs, line.ys, linewidth=0.9, **line.style)
        ax.plot(flushing.xs, flushing.ys, "^", color=SERIES[6], markersize=3.5, **flushing.style)
        _name(ax, frame)
        ax.set_ylim(0, None)
        ax.set_xlim(0, None)
        legend(fig, ax)
        return to_svg(fig, frame.description)


def _name(ax: Axes, frame: Frame) -> None:
    ax.set(xlabel=frame.xlabel, ylabel=frame.ylabel, title=frame.title)


def _plain(axis: Axis) -> None:
    """Write the powers of ten of a logarithmic axis as numbers, and nothing between them."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
