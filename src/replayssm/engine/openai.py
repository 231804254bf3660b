"""Reading OpenAI requests and writing OpenAI replies: completions and chat, whole or streamed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replayssm.engine.request import Sampling
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEFAULT_TOKENS = 16
PARTIAL = "�"
KNOWN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "seed", "stream", "stream_options", "stop_token_ids", "ignore_eos", "n", "cohort", "user",
    "return_token_ids", "request_id",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a client.

    Attributes:
        prompt: Token ids.
        max_tokens: Most tokens to emit.
        sampling: How they are drawn.
        stop_tokens: Tokens after which nothing more is emitted.
        cohort: What the client calls its traffic.
        is_chat: Which of the two endpoints was asked.
        is_stream: Whether tokens are sent as they come.
        wants_usage: Whether a stream ends with the counts.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    cohort: str
    is_chat: bool
    is_stream: bool
    wants_usage: bool


def read(body: object, encode: Callable[[bytes], list[int]], *, is_chat: bool) -> Asked:
    """Return what the JSON body of a request asks for.

    Fields that would change the reply and are not served are refused rather than ignored.

    Args:
        body: The JSON value.
        encode: Text to token ids.
        is_chat: Which endpoint was asked.

    Raises:
        ContractError: A field is missing, unknown or out of range.
    """
    if not isinstance(body, dict):
        raise ContractError("body", "a JSON object", type(body).__name__)
    unknown = sorted(name for name in set(body) - KNOWN if body[name] is not None)
    if unknown:
        raise ContractError("body", f"fields among {sorted(KNOWN)}", unknown)
    if body.get("n", 1) != 1:
        raise ContractError("n", "1", body["n"])
    tokens = body.get("max_completion_tokens", body.get("max_tokens", DEFAULT_TOKENS))
    seed, options = body.get("seed"), body.get("stream_options") or {}
    stop = body.get("stop_token_ids") or ()
    return Asked(
        prompt=_prompt(body, encode, is_chat=is_chat),
        max_tokens=_number("max_tokens", tokens, int),
        sampling=Sampling(
            _number("temperature", body.get("temperature", 1.0), float),
            _number("top_p", body.get("top_p", 1.0), float),
            time.time_ns() % 2**32 if seed is None else _number("seed", seed, int),
        ),
        stop_tokens=tuple(_number("stop_token_ids", token, int) for token in stop),
        cohort=str(body.get("cohort", "default")),
        is_chat=is_chat,
        is_stream=bool(body.get("stream", False)),
        wants_usage=bool(options.get("include_usage", False)),
    )


def _number(name: str, value: object, kind: type) -> Any:  # noqa: ANN401 - an int or a float
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise ContractError(name, f"a number ({kind.__name__})", value)
    return kind(value)


def _prompt(
    body: Mapping[str, Any], encode: Callable[[bytes], list[int]], *, is_chat: bool
) -> tuple[int, ...]:
    if is_chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ContractError("messages", "a list with at least one message", messages)
        return tuple(encode(_transcript(messages).encode()))
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return tuple(encode(prompt.encode()))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise ContractError("prompt", "a text or a list of token ids", type(prompt).__name__)


def _transcript(messages: Sequence[Any]) -> str:
    """Return messages as the text that a model without a chat template continues."""
    lines = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ContractError("messages", "objects with role and content as text", message)
        lines.append(f"{message.get('role', 'user')}: {message['content']}\n")
    return "".join(lines) + "assistant:"


class Reply:
    """The reply to one request, as it grows.

    Args:
        name: The reply's id.
        model: Name of the model.
        asked: What was asked.
        decode: Token ids to text.
    """

    def __init__(
        self, name: str, model: str, asked: Asked, decode: Callable[[list[int]], str]
    ) -> None:
        self._name, self._model, self._asked, self._decode = name, model, asked, decode
        self._created = int(time.time())
        self._tokens: list[int] = []
        self._sent = 0

    def chunk(self, tokens: Sequence[int], finish: str | None) -> dict[str, Any]:
        """Mutates the reply: append tokens; return the chunk of a stream that tells of them.

        Text that ends inside a character is held back until the character is whole.
        """
        is_first = not self._tokens
        self._tokens += tokens
        text = self._decode(self._tokens)
        if finish is None:
            text = text.rstrip(PARTIAL)
        delta, self._sent = text[self._sent :], max(self._sent, len(text))
        if self._asked.is_chat:
            role = {"role": "assistant"} if is_first else {}
            own: dict[str, Any] = {"delta": {**role, "content": delta}}
        else:
            own = {"text": delta}
        choice = {"index": 0, **own, "token_ids": list(tokens), "finish_reason": finish}
        return self._envelope([choice], is_chunk=True)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream: no choice, but the counts."""
        return {**self._envelope([], is_chunk=True), "usage": self._usage()}

    def whole(self, finish: str) -> dict[str, Any]:
        """Return the reply in one piece."""
        text = self._decode(self._tokens)
        if self._asked.is_chat:
            own: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            own = {"text": text}
        choice = {"index": 0, **own, "token_ids": self._tokens, "finish_reason": finish}
        return {**self._envelope([choice], is_chunk=False), "usage": self._usage()}

    def append(self, tokens: Sequence[int]) -> None:
        """Mutates the reply: append tokens that are not streamed."""
        self._tokens += tokens

    def _usage(self) -> dict[str, int]:
        prompt, new = len(self._asked.prompt), len(self._tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
        }

    def _envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._asked.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self._name,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
