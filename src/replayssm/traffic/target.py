"""What load is sent to: one call at a time, tokens reported as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from replayssm.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable

    # tokens that came together, and when, on the event loop's clock; the first call, with 0 tokens,
    # says that the request was accepted
    OnTokens = Callable[[int, float], None]


class SendError(ReplayError, RuntimeError):
    """One request failed.

    Attributes:
        kind: A short name by which failures are counted.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass(frozen=True, slots=True)
class Call:
    """A request with its prompt made out.

    Attributes:
        request_id: Unique in the run.
        prompt_ids: ``[prompt tokens]`` ids; None where only the text is known.
        text: The prompt as text; None where only ids are used.
        max_tokens: Tokens that are asked for.
        cohort: Kind of traffic it belongs to.
    """

    request_id: str
    prompt_ids: tuple[int, ...] | None
    text: str | None
    max_tokens: int
    cohort: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended, as the target tells it; None is not told.

    Attributes:
        finish_reason: Why it ended.
        input_tokens: Tokens of the prompt.
        output_tokens: Tokens of the output.
        cached_tokens: Tokens of the prompt that were not computed again.
        draft_tokens: Tokens drafted for it.
        accepted_tokens: Drafted tokens that were accepted.
    """

    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None


class Target(Protocol):
    """Something that serves requests."""

    @property
    def can_move(self) -> bool:
        """Whether a running sequence can be moved to another pool."""
        ...

    def prepare(self, call: Call) -> None:
        """Do ahead of time what should not count as latency, such as encoding the prompt."""
        ...

    async def send(self, call: Call, on_tokens: OnTokens) -> Outcome:
        """Serve one call. When the task is cancelled, the target stops working on the call.

        Args:
            call: What was prepared, or not.
            on_tokens: Called in the event loop with the tokens that came and when.

        Raises:
            SendError: The request failed.
        """
        ...

    def move(self, request_id: str) -> None:
        """Move a running sequence to another pool."""
        ...

    async def counters(self) -> dict[str, float]:
        """Return the target's own counters and gauges by name."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...
