"""Trace formats: each module reads one, with its units fixed by the format."""

from __future__ import annotations

import csv
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from replayssm.errors import ContractError
from replayssm.traffic.formats import azure, burstgpt, canonical, mooncake, sharegpt
from replayssm.traffic.formats.rows import BadValueError, Source, json_object, sha256
from replayssm.traffic.trace import Provenance, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_BYTES = 1 << 16


class TraceFormat(StrEnum):
    """A format of trace files."""

    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    SHAREGPT = "sharegpt"
    REPLAYSSM = "replayssm"


def load(
    path: Path,
    fmt: TraceFormat | None = None,
    *,
    skip_bad: bool = False,
    count_tokens: Callable[[str], int] | None = None,
    seed: int = 0,
) -> tuple[Trace, list[str]]:
    """Read a trace file.

    Args:
        path: The file.
        fmt: Its format; None finds it out from the first line.
        skip_bad: Count malformed rows and go on, instead of raising at the first.
        count_tokens: Tokens of a text, for formats that hold texts without lengths.
        seed: Seed of the order of formats that have none.

    Returns:
        The trace, and what was wrong with the first few bad rows.

    Raises:
        ContractError: The file is missing, in no known format, has no requests, or has a bad row.
    """
    if not path.is_file():
        raise ContractError("TRACE", "a file that exists", path.name)
    chosen = detect(path) if fmt is None else fmt
    source = Source(path, skip_bad)
    if chosen is TraceFormat.REPLAYSSM:
        trace = canonical.read(source)
        bad = trace.provenance.bad_rows + source.bad_rows
        trace = replace(trace, provenance=replace(trace.provenance, bad_rows=bad))
    else:
        trace = _read(source, chosen, count_tokens, seed)
    if not trace.requests:
        raise ContractError(path.name, "at least one request", f"none in format {chosen}")
    return trace, source.examples


def _read(
    source: Source, fmt: TraceFormat, count_tokens: Callable[[str], int] | None, seed: int
) -> Trace:
    if fmt is TraceFormat.SHAREGPT:
        if count_tokens is None:
            raise ContractError("tokenizer", "one to count the tokens of texts with", "none")
        requests = sharegpt.read(source, count_tokens, seed)
    else:
        readers = {
            TraceFormat.AZURE: azure.read,
            TraceFormat.BURSTGPT: burstgpt.read,
            TraceFormat.MOONCAKE: mooncake.read,
        }
        requests = readers[fmt](source)
    ordered = sorted(requests, key=lambda request: request.at)
    if ordered != requests:
        source.notes.append("rows put in order of arrival")
    origin = Provenance(
        source=source.path.name,
        sha256=sha256(source.path),
        format=fmt.value,
        rows=len(requests),
        bad_rows=source.bad_rows,
        dropped=dict(source.dropped),
        conversions=tuple(source.notes),
    )
    return Trace(tuple(ordered), origin)


def detect(path: Path) -> TraceFormat:
    """Return the format of a file by its first line.

    Raises:
        ContractError: The line fits no format.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    first = head.partition("\n")[0]
    if head.startswith("["):
        return TraceFormat.SHAREGPT
    if canonical.is_header(first):
        return TraceFormat.REPLAYSSM
    if head.startswith("{"):
        try:
            keys = json_object(first).keys()
        except BadValueError:
            keys = {}.keys()
        if set(mooncake.KEYS) <= keys:
            return TraceFormat.MOONCAKE
    names = [name.strip() for name in next(csv.reader([first]), [])]
    for fmt, columns in (
        (TraceFormat.AZURE, azure.COLUMNS),
        (TraceFormat.BURSTGPT, burstgpt.COLUMNS),
    ):
        if set(columns) <= set(names):
            return fmt
    known = ", ".join(TraceFormat)
    raise ContractError(path.name, f"a trace in one of {known}", f"the first line {first[:60]!r}")
