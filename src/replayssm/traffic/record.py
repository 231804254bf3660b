"""One record per request; every number of a summary can be computed from them again.

Times are seconds from schedule zero on a monotonic clock. The definitions:

* TTFT: from the send to the first token, whatever was sent before it (a chat's role).
* E2EL: from the send to the last token. Both also from the schedule, which adds the wait for a free
  place, for the turn before, and for a client that is late.
* TPOT: (E2EL - TTFT) / (output tokens - 1); none for outputs of one token.
* ITL: gaps between tokens. A chunk of n tokens gives n entries that share its gap; the extra tokens
  of the first chunk come 0 ms after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from replayssm.errors import ContractError

RESOLUTION = 6


class Status(StrEnum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Record:
    """One request as the client saw it.

    Attributes:
        request_id: Unique in the run.
        index: Place in the trace.
        cohort: Kind of traffic.
        session_id: Conversation it belongs to.
        turn: Turn of that conversation, from 0.
        warmup: Left out of statistics.
        status: ``ok``; ``failed``; ``cancelled`` because the trace says so; ``cut`` by the end of
            the run.
        finish_reason: Why the target stopped, where it says.
        error: What went wrong, as ``kind: message``.
        scheduled_s: When the trace asks for it; in a closed loop, when its place became free.
        released_s: When it could be sent: the schedule, or later the free place or the turn before.
        send_s: When it was sent.
        first_token_s: When the first token came.
        last_token_s: When the last token came.
        end_s: When it was over.
        token_times_s: When each token came.
        coalesced_tokens: Tokens that came together with another one before them, so that their
            times are shared out and not seen.
        uncounted_tokens: Tokens that the target counted and the stream did not show one by one.
        requested_input_tokens: Prompt tokens that were meant.
        input_tokens: Prompt tokens that the target counted.
        cached_tokens: Of those, not computed again.
        requested_output_tokens: Output tokens that were asked for.
        output_tokens: Output tokens that came.
        draft_tokens: Tokens drafted for it.
        accepted_tokens: Drafted tokens that were accepted.
        moved: Whether it was told to move to another pool.
    """

    request_id: str
    index: int
    cohort: str
    session_id: str | None
    turn: int
    warmup: bool
    status: Status
    finish_reason: str | None
    error: str | None
    scheduled_s: float
    released_s: float
    send_s: float
    first_token_s: float | None
    last_token_s: float | None
    end_s: float
    token_times_s: tuple[float, ...]
    coalesced_tokens: int
    uncounted_tokens: int
    requested_input_tokens: int
    input_tokens: int | None
    cached_tokens: int | None
    requested_output_tokens: int
    output_tokens: int
    draft_tokens: int | None
    accepted_tokens: int | None
    moved: bool

    def __post_init__(self) -> None:
        times = (self.scheduled_s, self.released_s, self.send_s, *self.token_times_s, self.end_s)
        if not all(math.isfinite(t) for t in times) or list(times) != sorted(times):
            raise ContractError(f"record {self.request_id}", "times in order", times[:8])
        ends = (
            (self.token_times_s[0], self.token_times_s[-1]) if self.token_times_s else (None,) * 2
        )
        if (self.first_token_s, self.last_token_s) != ends:
            told = (self.first_token_s, self.last_token_s)
            raise ContractError(f"record {self.request_id}", f"first and last token {ends}", told)

    @property
    def ttft(self) -> float | None:
        """Seconds from the send to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.send_s

    @property
    def ttft_scheduled(self) -> float | None:
        """Seconds from the schedule to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def e2el(self) -> float | None:
        """Seconds from the send to the last token."""
        return None if self.last_token_s is None else self.last_token_s - self.send_s

    @property
    def e2el_scheduled(self) -> float | None:
        """Seconds from the schedule to the last token."""
        return None if self.last_token_s is None else self.last_token_s - self.scheduled_s

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Seconds between tokens."""
        times = self.token_times_s
        return tuple(b - a for a, b in pairwise(times))

    @property
    def lag(self) -> float:
        """Seconds from the schedule to the send."""
        return self.send_s - self.scheduled_s

    @property
    def client_lag(self) -> float:
        """Seconds by which the client itself was late."""
        return self.send_s - self.released_s


@dataclass(slots=True)
class TokenClock:
    """Times of tokens out of chunks of tokens.

    Attributes:
        times: When each token came, on the clock of the chunks.
        coalesced: Tokens that came together with another one before them.
    """

    times: list[float] = field(default_factory=list)
    coalesced: int = 0

    def add(self, count: int, at: float) -> None:
        """Note ``count`` tokens that came at ``at``; nothing for 0."""
        if count < 1:
            return
        if not self.times:
            self.times.extend([at] * count)
        else:
            last = self.times[-1]
            # the clock of another thread may be read before ours
            gap = max(0.0, at - last) / count
            self.times.extend(last + gap * i for i in range(1, count))
            self.times.append(max(last, at))
        self.coalesced += count - 1
