"""ShareGPT: one JSON list of conversations; the first turn is a prompt, the second its answer.

There are no arrivals and no token counts: every request arrives at 0, and lengths are counted with
a tokenizer that the caller names.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError
from replayssm.traffic.formats.rows import BadValueError, text
from replayssm.traffic.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replayssm.traffic.formats.rows import Source

SPACE = " \t\r\n"


def read(source: Source, count_tokens: Callable[[str], int], seed: int) -> list[TraceRequest]:
    """Read conversations in an order drawn from ``seed``.

    Args:
        source: The file.
        count_tokens: Tokens of a text.
        seed: Seed of the order.
    """
    requests: list[TraceRequest] = []
    content = source.path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    for line, entry in _entries(content, source.path.name):
        with source.row(line):
            pair = _pair(entry)
            if pair is None:
                source.dropped["fewer than two turns"] += 1
                continue
            prompt, answer = (count_tokens(turn) for turn in pair)
            if not prompt or not answer:
                source.dropped["an empty turn"] += 1
                continue
            requests.append(TraceRequest(0.0, prompt, answer, text=pair[0]))
    source.notes.append(f"no arrivals in the source: all at 0, order drawn with seed {seed}")
    order = np.random.default_rng(seed).permutation(len(requests))
    return [requests[i] for i in order]


def _pair(entry: object) -> tuple[str, str] | None:
    if not isinstance(entry, dict):
        raise BadValueError("1", "a JSON object", entry)
    turns = entry.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadValueError("conversations", "a list of turns", turns)
    if len(turns) < 2:
        return None
    first, second = (turn.get("value") for turn in turns[:2])
    if first == "" or second == "":
        return str(first), str(second)
    return text(turns[0], "value"), text(turns[1], "value")


def _entries(content: str, name: str) -> Iterator[tuple[int, object]]:
    """Yield ``(line, entry)`` of a JSON list.

    Raises:
        ContractError: The text is not a JSON list; nothing after the fault can be read.
    """
    decoder, at, line, counted = json.JSONDecoder(), 0, 1, 0

    def fail(expected: str) -> ContractError:
        place = content.count("\n", 0, at) + 1
        column = at - content.rfind("\n", 0, at)
        got = repr(content[at : at + 20]) if at < len(content) else "the end of the file"
        return ContractError(f"{name} line {place}, column {column}", expected, got)

    def skip_space() -> None:
        nonlocal at
        while at < len(content) and content[at] in SPACE:
            at += 1

    skip_space()
    if content[at : at + 1] != "[":
        raise fail("a JSON list of conversations")
    at += 1
    skip_space()
    is_first = True
    while content[at : at + 1] != "]":
        if not is_first:
            if content[at : at + 1] != ",":
                raise fail("a comma or the end of the list")
            at += 1
            skip_space()
        is_first = False
        line, counted = line + content.count("\n", counted, at), at
        try:
            entry, at = decoder.raw_decode(content, at)
        except json.JSONDecodeError as error:
            at = error.pos
            raise fail(f"JSON ({error.msg})") from None
        yield line, entry
        skip_space()
