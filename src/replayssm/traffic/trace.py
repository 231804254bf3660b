"""A trace: requests in order of arrival, and where they came from.

Times are seconds from the start of the trace, lengths are tokens. A format's own units are
converted when it is read (:mod:`replayssm.traffic.formats`), never later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        at: Arrival, seconds from the start of the trace.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens that are asked for.
        cohort: Kind of traffic it belongs to.
        session: Conversation it belongs to; turns of one session follow each other.
        prompt_ids: The prompt as token ids, ``[prompt_tokens]``.
        text: The prompt as text; ``prompt_tokens`` is then a count by some tokenizer.
        prefix_blocks: Identity of each block of the prompt: equal blocks are equal text.
        cancel_after: The client hangs up once it has this many tokens; 0 is before the first.
        move_after: The sequence moves to another pool once it has this many tokens.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    cohort: str = "default"
    session: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    text: str | None = None
    prefix_blocks: tuple[int, ...] | None = None
    cancel_after: int | None = None
    move_after: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at < math.inf:
            raise ContractError("at", "seconds from the start, 0 or more", self.at)
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ContractError(name, "at least 1", getattr(self, name))
        if self.prompt_ids is not None and len(self.prompt_ids) != self.prompt_tokens:
            raise ContractError("prompt_ids", f"{self.prompt_tokens} ids", len(self.prompt_ids))
        for name in ("cancel_after", "move_after"):
            after = getattr(self, name)
            if after is not None and after < 0:
                raise ContractError(name, "0 or more tokens", after)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a trace came from and what was done to it.

    Attributes:
        source: Name of the file, or of the generator.
        sha256: Hash of that file; None for a generated trace.
        format: Format that was read.
        rows: Rows of the file that became requests.
        bad_rows: Malformed rows that were left out on request.
        dropped: Well-formed rows left out, by reason.
        conversions: Everything done since, in order.
    """

    source: str
    sha256: str | None
    format: str
    rows: int
    bad_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    conversions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        requests: Sorted by ``at``.
        provenance: Where they came from.
        block_size: Tokens of a prefix block.
        concurrency: Sequences that a closed loop keeps in flight; None for open arrivals. In a
            closed loop a request is due when its predecessor's place is free.
    """

    requests: tuple[TraceRequest, ...]
    provenance: Provenance
    block_size: int = BLOCK_SIZE
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ContractError("concurrency", "at least 1", self.concurrency)
        previous = 0.0
        for i, request in enumerate(self.requests):
            if request.at < previous:
                raise ContractError("requests", "arrivals in order", f"request {i} before {i - 1}")
            previous = request.at
            blocks = request.prefix_blocks
            if blocks is not None and len(blocks) != -(-request.prompt_tokens // self.block_size):
                expected = f"one block for every {self.block_size} tokens of request {i}"
                raise ContractError("prefix_blocks", expected, len(blocks))

    @property
    def span(self) -> float:
        """Seconds from the start to the last arrival."""
        return self.requests[-1].at if self.requests else 0.0

    def converted(self, requests: Iterable[TraceRequest], step: str) -> Trace:
        """Return the trace with other requests, put in order, and ``step`` in its provenance."""
        ordered = tuple(sorted(requests, key=lambda request: request.at))
        noted = replace(self.provenance, conversions=(*self.provenance.conversions, step))
        return replace(self, requests=ordered, provenance=noted)
