"""The ``replayssm`` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import replayssm
from replayssm.cli import env, evaluate, generate, plan_memory
from replayssm.cli.output import report_error
from replayssm.errors import ReplayError

app = typer.Typer(
    name="replayssm",
    help="Checkpoint-and-ring state for hybrid language models, and the evaluation that says "
    "whether it pays.",
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 gate failed, 4 inconclusive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("evaluate")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("plan-memory")(plan_memory.plan_memory)
app.command("env")(env.env)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"replayssm {replayssm.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; errors of this package become one line and an exit code."""
    try:
        app()
    except ReplayError as error:
        sys.exit(int(report_error(error)))
