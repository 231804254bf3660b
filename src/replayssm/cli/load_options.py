"""Options that the load commands share, and what is recorded of a command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

PRIVATE = ("--header", "--base-url")

Goodput = Annotated[
    list[str] | None,
    typer.Option(help="A limit in ms, such as ttft:500; once for each.", show_default=False),
]
MaxConcurrency = Annotated[
    int | None, typer.Option(help="Most requests in flight.", show_default="no limit")
]
Warmups = Annotated[int, typer.Option(help="Requests sent before the schedule starts.")]
WarmupS = Annotated[float, typer.Option(help="First seconds that do not count.")]
DrainS = Annotated[
    float | None,
    typer.Option(help="Seconds after the last send until the rest is cut.", show_default="waits"),
]
Metadata = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE kept in the result; once for each.", show_default=False),
]
Label = Annotated[str | None, typer.Option(help="Name of the run.", show_default=False)]
ResultDir = Annotated[Path, typer.Option(help="Folder of the results.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def pairs(option: str, words: list[str] | None) -> dict[str, str]:
    """Read ``NAME=VALUE`` words."""
    found = [word.partition("=") for word in words or []]
    for name, equals, _ in found:
        if not name or not equals:
            # what follows the name may be a secret
            raise ContractError(option, "NAME=VALUE", "a word without it")
    return {name: value for name, _, value in found}


def manifest(seed: int) -> dict[str, object]:
    """Describe this run and machine; of the command line, no keys and no hosts."""
    from replayssm.evaluate.manifest import collect

    found = asdict(collect(seed=seed))
    return {**found, "argv": _redacted(found["argv"])}


def _redacted(argv: Sequence[str]) -> list[str]:
    """Leave keys and hosts out of a command line."""
    shown: list[str] = []
    for word in argv:
        option, equals, _ = word.partition("=")
        if shown and shown[-1] in PRIVATE:
            shown.append("...")
        else:
            shown.append(f"{option}=..." if equals and option in PRIVATE else word)
    return shown
