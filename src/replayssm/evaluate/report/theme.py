"""Colours and SVG clean-up, so that one drawing reads well on a light and on a dark page.

Figures are drawn in placeholder colours that are replaced by CSS variables; the page decides what
they look like. Text stays text and takes the page's font.
"""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes

INK, FAINT, GRID, PAGE = "#0a0001", "#0a0002", "#0a0003", "#0a0004"
SERIES = tuple(f"#0b00{i:02x}" for i in range(12))
_VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid", PAGE: "--page"} | {
    color: f"--s{i}" for i, color in enumerate(SERIES)
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Draw in the report's style; ``name`` keeps the ids of several figures on a page apart."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield


def figure(width: float = 6.2, height: float = 3.3, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, side by side; sizes in inches."""
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, list(fig.subplots(1, columns, squeeze=False)[0])


def to_svg(fig: Figure, title: str) -> str:
    """Return a figure as inline SVG without ids, sizes, fonts or addresses of its own.

    Args:
        fig: A figure drawn inside :func:`drawing`.
        title: What it shows, for screen readers.
    """
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    fig.savefig(buffer, format="svg", metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    head, tail = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    svg = f'{head} role="img" aria-label="{title}">{tail}'
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", "inherit", svg)
    svg = re.sub(r"font: ([\d.]+)px inherit", r"font-size: \1px", svg)
    svg = re.sub(r"font: bold ([\d.]+)px inherit", r"font-weight: 600; font-size: \1px", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg.strip()
