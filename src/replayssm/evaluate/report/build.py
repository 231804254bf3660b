"""Put results into the templates."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from replayssm.evaluate.report import advice, plots, speculation, tables, words
from replayssm.evaluate.result import dump

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from replayssm.evaluate.result import Result

FIGURES = {
    "agreement": plots.agreement,
    "bottleneck": plots.bottleneck,
    "speed_by_batch": plots.speed_by_batch,
    "speed_by_window": plots.speed_by_window,
    "divergence": plots.divergence,
    "recall": plots.recall,
    "speed_by_drafts": speculation.speed_by_drafts,
}
TABLES = {
    "summary": advice.reasons,
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
    "drafted": speculation.drafted,
    "rollbacks": speculation.rollbacks,
    "verified": speculation.verified,
    "speculation_memory": speculation.memory,
    "torture": speculation.torture,
    "margins": tables.margins,
    "manifest": tables.manifest,
}


def render(result: Result) -> str:
    """Return the report as one HTML document that needs no network."""
    # script content is plain text: a closing tag inside the data must not end it
    data = dump(result).replace("</", "<\\/")
    return template("template.html.j2").render(
        result=result,
        headlines=advice.headlines(result),
        plan=result.plan,
        machine=result.manifest.machine,
        figures={name: Markup(draw(result)) for name, draw in FIGURES.items()},
        tables={name: make(result) for name, make in TABLES.items()},
        data=Markup(data),
        style=Markup(read_part("style.css")),
        script=Markup(read_part("sort.js")),
        words=words,
    )


def render_overview(results: Sequence[Result]) -> str:
    """Return a page over several models that links to a report in each model's own folder."""
    return template("overview.html.j2").render(
        results=results,
        headlines=advice.headlines,
        summary=advice.reasons,
        words=words,
        style=Markup(read_part("style.css")),
    )


def write(result: Result, folder: Path) -> Path:
    """Write ``report.html`` into a folder and return its path."""
    return write_page(render(result), folder)


def write_overview(results: Sequence[Result], folder: Path) -> Path:
    """Write the overview as ``report.html`` into the folder that holds the models' folders."""
    return write_page(render_overview(results), folder)


def write_page(html: str, folder: Path) -> Path:
    """Write ``report.html`` into a folder, which is made if need be, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


def template(name: str) -> Template:
    """Return a template of this package."""
    environment = Environment(
        loader=PackageLoader("replayssm.evaluate.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(tone=tables.tone, duration=words.duration, cap=words.capital)
    return environment.get_template(name)


def read_part(name: str) -> str:
    """Return a text file of this package."""
    return (files("replayssm.evaluate.report") / name).read_text(encoding="utf-8")
