"""What every command shares: consoles, the JSON line, exit codes."""

from __future__ import annotations

import json
import os
import sys
from enum import IntEnum
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from replayssm.errors import ContractError, ReplayError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PLAIN_WIDTH = 120


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    GATE_FAILED = 3
    INCONCLUSIVE = 4


JSON_OPTION = typer.Option("--json", help="Print one JSON object as the last line of stdout.")
MODEL_HELP = "Bundled model, or path or hub id of a transformers model."


def console(*, stderr: bool = False) -> Console:
    """Return a console; where the output is not a terminal, a wide plain one."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=False)


def print_json(fields: dict[str, object]) -> None:
    """Print one JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], title: str = "") -> None:
    """Print a table to stdout."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell.strip() for cell in row))
    console().print(table)


def code_of(error: ReplayError) -> ExitCode:
    """Return the exit code of an error of this package: wrong arguments are usage errors."""
    return ExitCode.USAGE if isinstance(error, ContractError) else ExitCode.FAILURE


def report_error(message: str, code: ExitCode) -> int:
    """Print an error in one line, and as a JSON object where ``--json`` was asked for."""
    line = " ".join(message.split())
    sys.stderr.write(f"replayssm: {line}\n")
    if "--json" in sys.argv[1:]:
        print_json({"error": line, "exit_code": int(code)})
    return int(code)


def make_folder(option: str, folder: Path) -> None:
    """Make a folder to write into, before a run: its results are not to be lost for want of one.

    Raises:
        ContractError: It cannot be made or written into.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        expected = "a folder to write into"
        raise ContractError(option, expected, f"{folder.name} ({error.strerror})") from error


def use_threads(threads: int | None) -> None:
    """Set the threads of torch and of the compiled kernels; call it before either has run.

    Raises:
        ContractError: The number is below 1.
    """
    if threads is None:
        return
    if threads < 1:
        raise ContractError("--threads", "a positive integer", threads)
    os.environ["NUMBA_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)


def quiet_transformers() -> None:
    """Keep transformers' notes and loading bars out of our output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
