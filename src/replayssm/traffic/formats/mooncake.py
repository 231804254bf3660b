"""Mooncake: JSONL, milliseconds, and the identity of each 512-token block of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.traffic.formats.rows import BadValueError, integer, integers, number
from replayssm.traffic.trace import BLOCK_SIZE, TraceRequest

if TYPE_CHECKING:
    from replayssm.traffic.formats.rows import Source

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(source: Source) -> list[TraceRequest]:
    """Read a Mooncake trace."""
    source.notes.append("timestamps from milliseconds")
    return source.json_rows(_row)


def _row(values: dict[str, object]) -> TraceRequest:
    at, prompt = number(values, "timestamp") / 1000, integer(values, "input_length")
    output, blocks = integer(values, "output_length"), integers(values, "hash_ids")
    if len(blocks) != -(-prompt // BLOCK_SIZE):
        expected = f"one block for every {BLOCK_SIZE} tokens of input_length ({prompt})"
        raise BadValueError("hash_ids", expected, f"{len(blocks)} blocks")
    return TraceRequest(at, prompt, output, prefix_blocks=blocks)
