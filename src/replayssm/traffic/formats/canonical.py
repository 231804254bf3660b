"""Our own form: JSONL with a header line, then Mooncake's four fields and optional ones.

Times are milliseconds, kept to the microsecond, so reading a file and writing it again gives the
same bytes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from replayssm.errors import ContractError
from replayssm.traffic.formats.rows import (
    BadValueError,
    integer,
    integers,
    json_object,
    number,
    text,
)
from replayssm.traffic.trace import Provenance, Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from replayssm.traffic.formats.rows import Source

FORMAT = "replayssm-trace"
VERSION = 1
DEFAULT_COHORT = "default"


def write(trace: Trace, path: Path) -> None:
    """Write a trace to a file."""
    with path.open("w", encoding="utf-8") as file:
        file.write(_line(_header(trace)))
        for request in trace.requests:
            file.write(_line(_fields(request)))


def is_header(first_line: str) -> bool:
    """Whether a first line opens a file of this form."""
    try:
        return json_object(first_line).get("format") == FORMAT
    except BadValueError:
        return False


def read(source: Source) -> Trace:
    """Read a trace that :func:`write` wrote, or one written by hand in that form.

    Raises:
        ContractError: The header or, unless bad rows are skipped, a row is wrong.
    """
    with source.path.open(encoding="utf-8-sig") as file:
        first = file.readline()
    where = f"{source.path.name} line 1"
    try:
        trace = _trace(json_object(first))
    except BadValueError as error:
        place = f"{where}, column {error.column}"
        raise ContractError(place, error.expected, error.got) from None
    size = trace.block_size
    requests = source.json_rows(lambda values: _request(values, size), skip=1)
    return Trace(
        tuple(sorted(requests, key=lambda request: request.at)),
        trace.provenance,
        size,
        trace.concurrency,
    )


def _header(trace: Trace) -> dict[str, object]:
    origin = trace.provenance
    return {
        "format": FORMAT,
        "version": VERSION,
        "time_unit": "ms",
        "block_size": trace.block_size,
        "concurrency": trace.concurrency,
        "source": origin.source,
        "sha256": origin.sha256,
        "source_format": origin.format,
        "rows": origin.rows,
        "bad_rows": origin.bad_rows,
        "dropped": origin.dropped,
        "conversions": list(origin.conversions),
    }


def _trace(header: Mapping[str, object]) -> Trace:
    for key, expected in (("format", FORMAT), ("version", VERSION), ("time_unit", "ms")):
        if header.get(key) != expected:
            raise BadValueError(key, repr(expected), header.get(key))
    dropped, steps = header.get("dropped") or {}, header.get("conversions") or []
    if not isinstance(dropped, dict):
        raise BadValueError("dropped", "counts by reason", dropped)
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise BadValueError("conversions", "a list of texts", steps)
    concurrency = None if header.get("concurrency") is None else integer(header, "concurrency")
    digest = None if header.get("sha256") is None else text(header, "sha256")
    origin = Provenance(
        source=text(header, "source") if "source" in header else "unknown",
        sha256=digest,
        format=text(header, "source_format") if "source_format" in header else FORMAT,
        rows=integer(header, "rows", 0) if "rows" in header else 0,
        bad_rows=integer(header, "bad_rows", 0) if "bad_rows" in header else 0,
        dropped={str(reason): integer(dropped, reason, 0) for reason in dropped},
        conversions=tuple(steps),
    )
    return Trace((), origin, integer(header, "block_size"), concurrency)


def _fields(request: TraceRequest) -> dict[str, object]:
    fields: dict[str, object] = {
        "timestamp": _milliseconds(request.at),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.prefix_blocks,
        "cohort": None if request.cohort == DEFAULT_COHORT else request.cohort,
        "session_id": request.session,
        "prompt": request.text,
        "prompt_token_ids": request.prompt_ids,
        "cancel_after": request.cancel_after,
        "move_after": request.move_after,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _request(values: dict[str, object], block_size: int) -> TraceRequest:
    def given(key: str) -> bool:
        return values.get(key) is not None

    at, prompt = number(values, "timestamp") / 1000, integer(values, "input_length")
    output = integer(values, "output_length")
    blocks = integers(values, "hash_ids") if given("hash_ids") else None
    if blocks is not None and len(blocks) != -(-prompt // block_size):
        expected = f"one block for every {block_size} tokens of input_length ({prompt})"
        raise BadValueError("hash_ids", expected, f"{len(blocks)} blocks")
    ids = integers(values, "prompt_token_ids") if given("prompt_token_ids") else None
    if ids is not None and len(ids) != prompt:
        raise BadValueError("prompt_token_ids", f"{prompt} ids", f"{len(ids)} ids")
    return TraceRequest(
        at,
        prompt,
        output,
        cohort=text(values, "cohort") if given("cohort") else DEFAULT_COHORT,
        session=text(values, "session_id") if given("session_id") else None,
        prompt_ids=ids,
        text=text(values, "prompt") if given("prompt") else None,
        prefix_blocks=blocks,
        cancel_after=integer(values, "cancel_after", 0) if given("cancel_after") else None,
        move_after=integer(values, "move_after", 0) if given("move_after") else None,
    )


def _milliseconds(at: float) -> float | int:
    rounded = round(at * 1000, 3)
    return int(rounded) if rounded.is_integer() else rounded


def _line(fields: dict[str, object]) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(", ", ": ")) + "\n"
