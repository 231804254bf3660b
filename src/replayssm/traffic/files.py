"""Files of a run, and the JSON Schemas of what is in them."""

from __future__ import annotations

import csv
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from replayssm.errors import ContractError
from replayssm.traffic.record import Record
from replayssm.traffic.run import Sample
from replayssm.traffic.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

RECORDS = "requests.jsonl"
TELEMETRY = "telemetry.csv"
OWN = ("at_s", "sent", "running", "failed", "tokens", "ttft_ms")
KINDS: dict[str, type] = {"record": Record, "summary": Summary}


@cache
def adapter(kind: str) -> TypeAdapter[Any]:
    """Return what reads and writes a kind of document: ``record`` or ``summary``."""
    return TypeAdapter(KINDS[kind])


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of ``record`` (a line of ``requests.jsonl``) or ``summary``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **adapter(kind).json_schema(mode="serialization"),
    }


def published(kind: str) -> dict[str, Any]:
    """Return the JSON Schema that is part of the package."""
    file = resources.files("replayssm.traffic") / "schemas" / f"{kind}.schema.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write_records(records: Iterable[Record], folder: Path) -> Path:
    """Write ``requests.jsonl`` into a folder and return its path."""
    path = folder / RECORDS
    with path.open("wb") as file:
        for record in records:
            file.write(adapter("record").dump_json(record) + b"\n")
    return path


def read_records(path: Path) -> list[Record]:
    """Read records back.

    Raises:
        ContractError: A line is no record.
    """
    found = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(adapter("record").validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                column = ".".join(str(part) for part in first["loc"]) or "1"
                where = f"{path.name} line {number}, column {column}"
                raise ContractError(where, first["msg"], str(first["input"])[:40]) from error
    return found


def as_json(summary: Summary) -> dict[str, Any]:
    """Return a summary as JSON values."""
    found: dict[str, Any] = adapter("summary").dump_python(summary, mode="json")
    return found


def write_samples(samples: Sequence[Sample], folder: Path) -> Path:
    """Write ``telemetry.csv``: a row a sample, our columns and then the target's own."""
    path = folder / TELEMETRY
    names = sorted({name for sample in samples for name in sample.counters})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*OWN, *names))
        for sample in samples:
            values = (getattr(sample, name) for name in OWN)
            writer.writerow((*values, *(sample.counters.get(name, "") for name in names)))
    return path


def read_samples(path: Path) -> list[Sample]:
    """Read samples back.

    Raises:
        ContractError: The file is no telemetry.
    """
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = list(csv.reader(file)) or [[]]
        if tuple(head[: len(OWN)]) != OWN:
            raise ContractError(f"{path.name} line 1", f"columns {', '.join(OWN)}", head[:6])
        # the target may count under our names: columns are told apart by their place
        names = head[len(OWN) :]
        return [_sample(path.name, n, names, row) for n, row in enumerate(rows, 2)]


def _sample(file: str, line: int, names: Sequence[str], row: Sequence[str]) -> Sample:
    try:
        at, sent, running, failed, tokens, ttft = row[: len(OWN)]
        told = zip(names, row[len(OWN) :], strict=True)
        return Sample(
            at_s=float(at),
            sent=int(sent),
            running=int(running),
            failed=int(failed),
            tokens=int(tokens),
            ttft_ms=float(ttft) if ttft else None,
            counters={name: float(value) for name, value in told if value},
        )
    except ValueError as error:
        raise ContractError(f"{file} line {line}", "a sample", str(error)) from error
