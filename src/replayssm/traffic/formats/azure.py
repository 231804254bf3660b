"""Azure LLM inference traces, 2023 and 2024: CSV with an instant and two lengths.

The rows of 2023 have seven fractional digits and no zone; those of 2024 have a zone, and fractions
only where they are not zero. Instants without a zone are taken as UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from replayssm.traffic.formats.rows import BadValueError, integer
from replayssm.traffic.trace import TraceRequest

if TYPE_CHECKING:
    from replayssm.traffic.formats.rows import Source

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(source: Source) -> list[TraceRequest]:
    """Read an Azure trace; the first instant becomes 0."""
    rows = source.csv_rows(COLUMNS, _row)
    if not rows:
        return []
    start = min(instant for instant, _, _ in rows)
    source.notes.append(f"seconds since {start.isoformat()}")
    return [
        TraceRequest((instant - start).total_seconds(), prompt, output)
        for instant, prompt, output in rows
    ]


def _row(values: dict[str, str]) -> tuple[datetime, int, int]:
    return (
        _instant(values["TIMESTAMP"]),
        integer(values, "ContextTokens"),
        integer(values, "GeneratedTokens"),
    )


def _instant(value: str) -> datetime:
    try:
        # digits beyond the microsecond are cut
        found = datetime.fromisoformat(value.strip())
    except ValueError:
        raise BadValueError("TIMESTAMP", "a date and time", value) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
