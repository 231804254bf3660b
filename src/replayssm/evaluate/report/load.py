"""Put a load run into its template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from replayssm.evaluate.report import load_plots as plots
from replayssm.evaluate.report import load_tables as tables
from replayssm.evaluate.report import words
from replayssm.evaluate.report.build import read_part, template, write_page

if TYPE_CHECKING:
    from pathlib import Path

    from replayssm.evaluate.load_run import LoadRun

FIGURES = {"latencies": plots.latencies, "load": plots.load, "target": plots.target}
OF_SUMMARY = {
    "latencies": tables.latencies,
    "cohort_latencies": tables.cohort_latencies,
    "cohorts": tables.cohorts,
    "ends": tables.ends,
    "limits": tables.limits,
    "rates": tables.rates,
    "use": tables.use,
}
OF_RESULT = {
    "energy": tables.energy,
    "trace": tables.trace,
    "settings": tables.settings,
    "manifest": tables.manifest,
}


def render(run: LoadRun) -> str:
    """Return the report as one HTML document that needs no network."""
    result = run.result
    # script content is plain text: a closing tag inside the data must not end it
    data = run.text.strip().replace("</", "<\\/")
    made = {name: make(result.summary) for name, make in OF_SUMMARY.items()}
    made |= {name: make(result) for name, make in OF_RESULT.items()}
    return template("load.html.j2").render(
        result=result,
        summary=result.summary,
        machine=result.manifest.machine,
        headlines=tables.headlines(result),
        target=tables.TARGETS.get(result.backend, result.backend),
        figures={name: [Markup(svg) for svg in draw(run)] for name, draw in FIGURES.items()},
        cohorts=plots.shown_cohorts(run),
        tables=made,
        data=Markup(data),
        style=Markup(read_part("style.css")),
        script=Markup(read_part("sort.js")),
        words=words,
    )


def write(run: LoadRun, folder: Path) -> Path:
    """Write ``report.html`` into a folder and return its path."""
    return write_page(render(run), folder)
