"""Rows of a file: values with their line and column, and what happens to a bad one."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

T = TypeVar("T")

EXAMPLES = 5
SHOWN = 40


class BadValueError(ValueError):
    """A value that its format does not allow; :meth:`Source.row` adds the file and the line."""

    def __init__(self, column: str, expected: str, got: object) -> None:
        super().__init__(column)
        self.column, self.expected = column, expected
        shown = repr(got)
        self.got = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."


@dataclass(slots=True)
class Source:
    """A file that is being read, and what was wrong with it.

    Attributes:
        path: The file.
        skip_bad: Count malformed rows and go on, instead of raising at the first.
        bad_rows: Malformed rows so far.
        examples: What was wrong with the first few.
        dropped: Well-formed rows left out, by reason.
        notes: What reading did to the values.
    """

    path: Path
    skip_bad: bool = False
    bad_rows: int = 0
    examples: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def row(self, line: int) -> Iterator[None]:
        """Read one row inside; a bad value is counted or raised with its place.

        Raises:
            ContractError: A value was bad and bad rows are not skipped.
        """
        try:
            yield
        except BadValueError as error:
            where = f"{self.path.name} line {line}, column {error.column}"
            told = ContractError(where, error.expected, error.got)
            if not self.skip_bad:
                raise told from None
            self.bad_rows += 1
            if len(self.examples) < EXAMPLES:
                self.examples.append(str(told))

    def csv_rows(
        self, required: tuple[str, ...], make: Callable[[dict[str, str]], T | None]
    ) -> list[T]:
        """Read a CSV file with a header.

        Args:
            required: Columns that must be there; others may be, in any order.
            make: Turns the values of a row, by column name, into what is wanted, or None to leave
                the row out.

        Raises:
            ContractError: A column is missing, or a row is bad and bad rows are not skipped.
        """
        made: list[T] = []
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in required if name not in header]
            if missing:
                got = f"no {', '.join(missing)}"
                expected = f"a header with {', '.join(required)}"
                raise ContractError(f"{self.path.name} line 1", expected, got)
            for cells in filter(None, reader):
                with self.row(reader.line_num):
                    _check_count(cells, header)
                    found = make(dict(zip(header, cells, strict=True)))
                    if found is not None:
                        made.append(found)
        return made

    def json_rows(self, make: Callable[[dict[str, object]], T | None], *, skip: int = 0) -> list[T]:
        """Read a file with one JSON object a line; blank lines do not count.

        Args:
            make: Turns an object into what is wanted, or None to leave it out.
            skip: Lines at the top that are something else.

        Raises:
            ContractError: A row is bad and bad rows are not skipped.
        """
        made: list[T] = []
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for line, content in enumerate(file, 1):
                if line <= skip or not content.strip():
                    continue
                with self.row(line):
                    found = make(json_object(content))
                    if found is not None:
                        made.append(found)
        return made


def _check_count(cells: list[str], header: list[str]) -> None:
    if len(cells) < len(header):
        raise BadValueError(header[len(cells)], f"{len(header)} columns", f"{len(cells)} columns")
    if len(cells) > len(header):
        extra = cells[len(header)]
        raise BadValueError(str(len(header) + 1), f"{len(header)} columns", extra)


def json_object(text: str) -> dict[str, object]:
    """Return the JSON object in a line."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        got = text[error.pos : error.pos + SHOWN].rstrip()
        raise BadValueError(str(error.colno), f"JSON ({error.msg})", got) from None
    if not isinstance(found, dict):
        raise BadValueError("1", "a JSON object", found)
    return found


def integer(row: Mapping[str, object], column: str, minimum: int = 1) -> int:
    """Return a whole number of at least ``minimum``."""
    value = row.get(column)
    if isinstance(value, str) and value.strip().isdecimal() and value.isascii():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise BadValueError(column, f"an integer of at least {minimum}", value)
    return value


def number(row: Mapping[str, object], column: str) -> float:
    """Return a finite number of at least 0."""
    value = row.get(column)
    try:
        found = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or not 0 <= found < math.inf:
        raise BadValueError(column, "a number of at least 0", value)
    return found


def text(row: Mapping[str, object], column: str) -> str:
    """Return a string that is not empty and can be written as UTF-8."""
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise BadValueError(column, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadValueError(column, "text in UTF-8", value[error.start : error.end]) from None
    return value


def integers(row: Mapping[str, object], column: str) -> tuple[int, ...]:
    """Return a list of whole numbers of at least 0."""
    value = row.get(column)
    if not isinstance(value, list) or not all(type(x) is int and x >= 0 for x in value):
        raise BadValueError(column, "a list of integers of at least 0", value)
    return tuple(value)


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
