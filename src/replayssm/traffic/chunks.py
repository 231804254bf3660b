"""What a chunk of an OpenAI-compatible stream says: tokens, usage, how it ended, what failed."""

from __future__ import annotations

import json
from typing import Any

from replayssm.traffic.target import Outcome, SendError


class StreamReader:
    """Reads the events of one reply.

    Tokens of a chunk are counted by the best evidence in it: a usage total that every chunk brings
    along, token ids, log-probabilities, and one for a chunk with text where there is nothing else.
    A chunk without text, such as the role of a chat, holds no token.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._has_running_usage: bool | None = None
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the target has said how the reply ended."""
        return self._finish is not None

    def read(self, event: str) -> int:
        """Return the number of new tokens in an event.

        Raises:
            SendError: The event is not JSON, or says that the request failed.
        """
        try:
            chunk = json.loads(event)
        except json.JSONDecodeError as error:
            raise SendError("protocol", f"an event is not JSON: {event[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise SendError("protocol", f"an event is no JSON object: {event[:80]!r}")
        if chunk.get("error"):
            raise SendError("stream error", _message(chunk["error"]))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = chunk.get("choices")
        if not choices:
            return 0
        choice = choices[0]
        self._finish = choice.get("finish_reason") or self._finish
        count = self._count(choice, usage if isinstance(usage, dict) else None)
        self._seen += count
        return count

    def outcome(self) -> Outcome:
        """Return how the reply ended."""
        usage = self._usage
        inputs = usage.get("prompt_tokens_details") or {}
        outputs = usage.get("completion_tokens_details") or {}
        accepted, rejected = (
            _whole(outputs.get(f"{kind}_prediction_tokens")) for kind in ("accepted", "rejected")
        )
        drafted = None if accepted is None or rejected is None else accepted + rejected
        return Outcome(
            finish_reason=self._finish,
            input_tokens=_whole(usage.get("prompt_tokens")),
            output_tokens=_whole(usage.get("completion_tokens")),
            cached_tokens=_whole(inputs.get("cached_tokens")),
            draft_tokens=drafted,
            accepted_tokens=accepted,
        )

    def _count(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> int:
        content, has_content = _tokens(choice)
        if not has_content:
            return 0
        if self._has_running_usage is None:
            # a total that comes with the last chunk only would put every token there
            self._has_running_usage = usage is not None and not choice.get("finish_reason")
        if self._has_running_usage and usage is not None:
            total = _whole(usage.get("completion_tokens"))
            return content if total is None else max(0, total - self._seen)
        return content


def _tokens(choice: dict[str, Any]) -> tuple[int, bool]:
    """Return the tokens in a choice by its own evidence, and whether there is anything in it."""
    delta = choice.get("delta")
    body = delta if isinstance(delta, dict) else choice
    ids = choice.get("token_ids")
    if ids:
        return len(ids), True
    logprobs = choice.get("logprobs") or {}
    listed = logprobs.get("tokens") or logprobs.get("content")
    if listed:
        return len(listed), True
    kinds = ("text", "content", "reasoning_content", "reasoning", "tool_calls")
    return (1, True) if any(body.get(kind) for kind in kinds) else (0, False)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _message(error: object) -> str:
    told = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(told).split())[:200]
