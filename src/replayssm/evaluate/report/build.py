"""Put a result into the template."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from replayssm.evaluate.report import plots, tables, words
from replayssm.evaluate.result import dump

if TYPE_CHECKING:
    from pathlib import Path

    from replayssm.evaluate.result import Result

FIGURES = {
    "agreement": plots.agreement,
    "bottleneck": plots.bottleneck,
    "speed_by_batch": plots.speed_by_batch,
    "speed_by_window": plots.speed_by_window,
    "divergence": plots.divergence,
    "recall": plots.recall,
}
TABLES = {
    "summary": tables.summary,
    "routes": tables.routes,
    "settings": tables.settings,
    "checks": tables.checks,
    "layers": tables.layers,
    "agreements": tables.agreements,
    "profiles": tables.profiles,
    "whole_model": tables.whole_model,
    "timings": tables.timings,
    "equal_memory": tables.equal_memory,
    "break_even": tables.break_even,
    "buckets": tables.buckets,
    "recalls": tables.recalls,
    "margins": tables.margins,
    "manifest": tables.manifest,
}


def render(result: Result) -> str:
    """Return the report as one HTML document that needs no network."""
    # plain <script> content: a closing tag inside the data must not end it
    data = dump(result).replace("</", "<\\/")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(tone=tables.tone, duration=words.duration, percent=words.percent)
    source = files("replayssm.evaluate.report") / "template.html.j2"
    template = environment.from_string(source.read_text(encoding="utf-8"))
    return template.render(
        result=result,
        judgement=result.judgement,
        plan=result.plan,
        machine=result.manifest.machine,
        figures={name: Markup(draw(result)) for name, draw in FIGURES.items()},
        tables={name: make(result) for name, make in TABLES.items()},
        data=Markup(data),
        words=words,
    )


def write(result: Result, folder: Path) -> Path:
    """Write ``report.html`` into a folder and return its path."""
    path = folder / "report.html"
    path.write_text(render(result), encoding="utf-8")
    return path
