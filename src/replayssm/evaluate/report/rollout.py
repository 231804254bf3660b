"""Put a rollout evaluation into its template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from replayssm.evaluate.checks import Status
from replayssm.evaluate.decisions.result import dump
from replayssm.evaluate.report import outcome_tables, words
from replayssm.evaluate.report import rollout_plots as plots
from replayssm.evaluate.report import rollout_tables as tables
from replayssm.evaluate.report.build import read_part, template, write_page

if TYPE_CHECKING:
    from pathlib import Path

    from replayssm.evaluate.decisions.gate import CohortVerdict
    from replayssm.evaluate.decisions.result import Rollout

FIGURES = {
    "bottleneck": plots.bottleneck,
    "surface": plots.surface,
    "acceptance": plots.acceptance,
    "precision": plots.precision,
    "latencies": plots.latencies,
    "timeline": plots.timeline,
    "memory": plots.memory,
}
TABLES = {
    "routes": tables.routes,
    "checks": tables.checks,
    "matrix": tables.matrix,
    "layers": tables.layers,
    "pins": tables.pins,
    "ratios": tables.ratios,
    "surface": tables.surface,
    "acceptances": tables.acceptances,
    "buckets": tables.buckets,
    "scores": tables.scores,
    "scores_by_length": tables.scores_by_length,
    "whole": outcome_tables.whole,
    "latencies": outcome_tables.latencies,
    "flush_costs": outcome_tables.flush_costs,
    "operations": outcome_tables.operations,
    "manifest": tables.manifest,
}
DRAWN = {
    "bottleneck": ("bottleneck",),
    "compatibility": (),
    "concurrency": ("surface",),
    "speculation": ("acceptance",),
    "precision": ("precision",),
    "outcome": ("latencies", "timeline", "memory"),
}
WIDE = ("timeline", "memory")
# title, table, whether it is open at once
SHOWN = {
    "bottleneck": (),
    "compatibility": (
        ("Engine, version, model and mode", "matrix", True),
        ("Recurrent layers", "layers", False),
        ("Pinned versions", "pins", False),
    ),
    "concurrency": (
        ("Speed-up surface, break-even and batch 1", "surface", True),
        ("Every metric under each cohort's own load", "ratios", False),
    ),
    "speculation": (("Acceptance, snapshots and evictions", "acceptances", True),),
    "precision": (
        ("Graded replies", "scores", True),
        ("Distributions by length", "buckets", False),
        ("Graded replies by length", "scores_by_length", False),
    ),
    "outcome": (
        ("The whole replay", "whole", True),
        ("Drill and leaks", "operations", True),
        ("Flush cost", "flush_costs", False),
        ("Latencies", "latencies", False),
    ),
}
ANSWERS = {
    Status.PASS: "Change it",
    Status.FAIL: "Leave it on the standard path",
    Status.OPEN: "Undecided: leave it on the standard path for now",
}


def render(result: Rollout) -> str:
    """Return the report as one HTML document that needs no network."""
    # script content is plain text: a closing tag inside the data must not end it
    data = dump(result).replace("</", "<\\/")
    made = {name: make(result) for name, make in TABLES.items()}
    made |= {
        "planned_cohorts": tables.planned_cohorts(result.plan),
        "planned_variants": tables.planned_variants(result.plan),
    }
    return template("rollout.html.j2").render(
        result=result,
        plan=result.plan,
        machine=result.stamp.manifest.machine,
        answers={v.cohort: ANSWERS[v.status] for v in result.verdicts},
        routes={r.cohort: tables.route_words(r.route) for r in result.routing.cohorts},
        marks={v.cohort: _marks(result, v) for v in result.verdicts},
        figures={name: [Markup(svg) for svg in draw(result)] for name, draw in FIGURES.items()},
        wide=WIDE,
        tables=made,
        decided={d.name: tables.decision(d) for d in result.decisions},
        drawn=DRAWN,
        shown=SHOWN,
        data=Markup(data),
        style=Markup(read_part("style.css")),
        script=Markup(read_part("sort.js")),
        words=words,
    )


def write(result: Rollout, folder: Path) -> Path:
    """Write ``report.html`` into a folder and return its path."""
    return write_page(render(result), folder)


def _marks(result: Rollout, verdict: CohortVerdict) -> dict[str, Markup]:
    """Return each decision's status of the variant that a cohort is shown with."""
    chip = template("macros.html.j2").module.chip  # type: ignore[attr-defined]
    marks = {}
    for d in result.decisions:
        found = d.about(verdict.cohort, verdict.considered)
        if found is None or (d.name == "outcome" and result.outcome is None):
            marks[d.name] = Markup('<span class="chip">not reached</span>')
        elif not found.required:
            marks[d.name] = Markup('<span class="chip">not needed</span>')
        else:
            marks[d.name] = chip(found.status.value)
    return marks
