"""``replayssm drill``: plant every fault and see it noticed and survived."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import (
    JSON_OPTION,
    MODEL_HELP,
    ExitCode,
    console,
    print_json,
    print_table,
    quiet_transformers,
    use_threads,
)
from replayssm.types import Format

if TYPE_CHECKING:
    from replayssm.engine.drill import Rehearsal

PROMPT_TOKENS = (24, 40, 56)


def drill(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "gdn-tiny",
    state: Annotated[Format, typer.Option(help="State format of the replay path.")] = Format.S32,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads.", show_default="all cores")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Rehearse faults, swaps, moves and a switch of all live requests to standard and back."""
    use_threads(threads)
    quiet_transformers()
    logging.getLogger("replayssm").setLevel(logging.CRITICAL)  # planted faults are no news
    from replayssm.engine.drill import Drill
    from replayssm.evaluate.subject import load

    subject = load(model)
    tokens = subject.encode(subject.text)
    prompts = [tokens[100 * size : 101 * size] for size in PROMPT_TOKENS]
    found = list(Drill(subject.model, prompts, state=state).run())
    is_passed = all(rehearsal.is_passed for rehearsal in found)
    code = ExitCode.OK if is_passed else ExitCode.FAILURE
    if as_json:
        rows = [asdict(rehearsal) for rehearsal in found]
        print_json({"model": subject.name, "exit_code": int(code), "rehearsals": rows})
    else:
        columns = ("rehearsal", "passed", "trips", "lost", "wrong tokens", "note")
        print_table(columns, [_row(rehearsal) for rehearsal in found])
        lost = sum(rehearsal.lost for rehearsal in found)
        served = sum(rehearsal.requests for rehearsal in found)
        console().print(f"{served} requests, {lost} lost")
    raise typer.Exit(int(code))


def _row(rehearsal: Rehearsal) -> tuple[str, ...]:
    return (
        rehearsal.name,
        "yes" if rehearsal.is_passed else "NO",
        ", ".join(rehearsal.trips) or "none",
        str(rehearsal.lost),
        str(rehearsal.wrong),
        rehearsal.note,
    )
