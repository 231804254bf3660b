"""The ``replayssm`` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import replayssm
from replayssm.cli import (
    bench,
    compare,
    drill,
    env,
    evaluate,
    generate,
    plan_memory,
    report,
    serve,
    trace,
    tune,
)
from replayssm.cli.output import ExitCode, code_of, report_error
from replayssm.errors import ReplayError

# typer brings its own click or uses the installed one, depending on its version
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

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
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("drill")(drill.drill)
app.command("plan-memory")(plan_memory.plan_memory)
app.command("tune")(tune.tune)
app.command("env")(env.env)
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")


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
    """Run the command line; an expected error becomes one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except ReplayError as error:
        code = report_error(str(error), code_of(error))
    except UsageError as error:
        code = _usage(error)
    except typer.Abort:
        code = report_error("interrupted", ExitCode.FAILURE)
    sys.exit(code or 0)


def _usage(error: Exception) -> int:
    if len(sys.argv) == 1:
        # no arguments: the message is the help text
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.USAGE)
    message = getattr(error, "format_message", error.__str__)()
    return report_error(f"{message} (see replayssm --help)", ExitCode.USAGE)
