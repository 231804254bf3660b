"""``replayssm compare A B``: what changed between two evaluations of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import JSON_OPTION, ExitCode, console, print_json, print_table
from replayssm.cli.rollout import code_of_status

if TYPE_CHECKING:
    from replayssm.evaluate.decisions.compare import Changes


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of the earlier evaluation.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the later evaluation.")],
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Compare two evaluations of a plan, cohort by cohort.

    Exit code 3 when a cohort lost its change or a variant got slower, 4 when that is undecided.
    """
    from replayssm.evaluate.decisions.compare import compare_results
    from replayssm.evaluate.decisions.result import read

    changes = compare_results(read(a), read(b))
    code = code_of_status(changes.status)
    if as_json:
        print_json(_fields(changes, code))
    else:
        _print(changes)
    raise typer.Exit(int(code))


def _fields(changes: Changes, code: ExitCode) -> dict[str, object]:
    return {
        "schema_version": 1,
        "exit_code": int(code),
        "conditions": list(changes.conditions),
        "missing": list(changes.missing),
        "cohorts": [
            {
                "cohort": c.cohort,
                "before": c.before.value,
                "after": c.after.value,
                "route_before": c.route_before,
                "route_after": c.route_after,
            }
            for c in changes.cohorts
        ],
        "metrics": [
            {
                "cohort": m.cohort,
                "variant": m.variant,
                "metric": m.metric,
                "ratio": m.ratio.value,
                "low": m.ratio.low,
                "high": m.ratio.high,
            }
            for m in changes.metrics
        ],
    }


def _print(changes: Changes) -> None:
    from replayssm.evaluate.report.words import ratio_range

    out = console()
    for line in (*changes.conditions, *changes.missing):
        out.print(f"Note: {line}", style="dim")
    print_table(
        ("cohort", "A", "B", "served in A by", "in B by"),
        [
            (c.cohort, c.before.value, c.after.value, c.route_before, c.route_after)
            for c in changes.cohorts
        ],
    )
    out.print()
    print_table(
        ("cohort", "variant", "metric", "B against A"),
        [(m.cohort, m.variant, m.metric, ratio_range(m.ratio)) for m in changes.metrics],
    )
