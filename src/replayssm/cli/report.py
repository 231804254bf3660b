"""``replayssm report FOLDER``: a report again, of an evaluation or a load run, from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from replayssm.cli.output import JSON_OPTION, console, print_json
from replayssm.errors import ContractError


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with a result.json.")],
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Write report.html again from the result.json in a folder, of an evaluation or a load run."""
    from replayssm.evaluate import load_run
    from replayssm.evaluate import report as reports
    from replayssm.evaluate import result as results
    from replayssm.evaluate.decisions import result as rollouts

    path = folder / "result.json"
    if not path.is_file():
        raise ContractError("FOLDER", "a folder with a result.json", folder.name)
    text = path.read_text(encoding="utf-8")
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ContractError("result.json", "JSON", str(error)) from error
    if load_run.is_load_run(fields):
        written = reports.write_load(load_run.read(folder), folder)
    elif isinstance(fields, dict) and "stamp" in fields:
        written = reports.write_rollout(rollouts.parse(text), folder)
    else:
        written = reports.write(results.parse(text), folder)
    if as_json:
        print_json({"report": str(written)})
    else:
        console().print(f"Report: {written}")
