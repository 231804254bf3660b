"""BurstGPT: CSV with seconds from the first midnight. Columns are read by name.

Older releases lack ``Session ID`` and ``Elapsed time``. A failed request has no response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.traffic.formats.rows import integer, number, text
from replayssm.traffic.trace import TraceRequest

if TYPE_CHECKING:
    from replayssm.traffic.formats.rows import Source

COLUMNS = ("Timestamp", "Request tokens", "Response tokens", "Log Type")
FAILED = "failed in the source (no response tokens)"


def read(source: Source) -> list[TraceRequest]:
    """Read a BurstGPT trace; the first arrival becomes 0, the kind of log becomes the cohort."""

    def row(values: dict[str, str]) -> tuple[float, int, int, str, str | None] | None:
        at, prompt = number(values, "Timestamp"), integer(values, "Request tokens", 0)
        output = integer(values, "Response tokens", 0)
        cohort = text(values, "Log Type").lower().removesuffix(" log")
        if output == 0 or prompt == 0:
            source.dropped[FAILED if output == 0 else "empty prompt"] += 1
            return None
        return at, prompt, output, cohort, values.get("Session ID") or None

    rows = source.csv_rows(COLUMNS, row)
    if not rows:
        return []
    start = min(at for at, *_ in rows)
    source.notes.append(f"seconds since second {start:g} of the source")
    return [
        TraceRequest(at - start, prompt, output, cohort=cohort, session=session)
        for at, prompt, output, cohort, session in rows
    ]
