"""What is asked of an engine and what it answers: plain frozen values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from replayssm.errors import ContractError, UnsupportedError
from replayssm.types import ReadDepth

if TYPE_CHECKING:
    from collections.abc import Mapping

PATHS = ("standard", "replay")
Kind = Literal[
    "admitted", "token", "finished", "cancelled", "preempted", "resumed", "moved", "failed"
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: Smallest probability mass that the drawn token comes from, in (0, 1].
        seed: Of the request's own generator; one token costs one uniform number.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ContractError("temperature", "a number >= 0", self.temperature)
        if not 0 < self.top_p <= 1:
            raise ContractError("top_p", "a number in (0, 1]", self.top_p)
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ContractError("seed", "an integer >= 0", self.seed)


@dataclass(frozen=True, slots=True)
class Route:
    """Which way a request is served; the rows of ``routing.json``.

    Attributes:
        path: ``standard`` (the state is rewritten per token) or ``replay``.
        depth: Planes that a step reads on the replay path.
        draft_tokens: Most drafts a round; 0 decodes plainly.
        drafter: Name of what proposes them: ``ngram``, ``model``; None where there are no drafts.
    """

    path: str = "replay"
    depth: ReadDepth = ReadDepth.FULL
    draft_tokens: int = 0
    drafter: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", ReadDepth(self.depth))
        if self.path not in PATHS:
            raise ContractError("path", f"one of {PATHS}", self.path)
        if not isinstance(self.draft_tokens, int) or self.draft_tokens < 0:
            raise ContractError("draft_tokens", "an integer >= 0", self.draft_tokens)
        if (self.drafter is None) != (self.draft_tokens == 0):
            expected = "a drafter with draft_tokens, or neither"
            raise ContractError("drafter", expected, (self.drafter, self.draft_tokens))
        if self.path == "standard" and self.draft_tokens:
            raise UnsupportedError("drafts on the standard path, which cannot take tokens back")
        if self.path == "standard" and self.depth is not ReadDepth.FULL:
            raise ContractError("depth", "full on the standard path, which has no planes", "high")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Route:
        """Return a route from what :meth:`to_dict` wrote.

        Raises:
            ContractError: A field is unknown or out of range.
        """
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown:
            raise ContractError("route", f"{sorted(cls.__dataclass_fields__)}", unknown)
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON fields."""
        return {**asdict(self), "depth": self.depth.value}

    def with_full_reads(self) -> Route:
        """Return the same route with full reads."""
        return replace(self, depth=ReadDepth.FULL)


STANDARD = Route(path="standard")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue.

    Attributes:
        id: Unique among the engine's live requests.
        prompt: Token ids, at least one.
        max_new_tokens: Most tokens to emit, at least one.
        cohort: What kind of traffic it is; routes and guards go by it.
        route: How to serve it; None asks the engine's router.
        sampling: How tokens are drawn.
        stop_tokens: Tokens after which nothing more is emitted.
    """

    id: str
    prompt: tuple[int, ...] = field(repr=False)
    max_new_tokens: int
    cohort: str = "default"
    route: Route | None = None
    sampling: Sampling = Sampling()
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        if not self.prompt:
            raise ContractError("prompt", "at least one token", "none")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ContractError("max_new_tokens", "an integer >= 1", self.max_new_tokens)

    @property
    def length(self) -> int:
        """Tokens of the sequence when everything asked for was emitted."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request.

    Attributes:
        request_id: Whose.
        kind: What.
        token: The token, of a ``token`` event.
        at: Seconds on the engine's clock.
        reason: Why: ``stop`` or ``length`` of ``finished``, the error of ``failed``.
    """

    request_id: str
    kind: Kind
    token: int | None
    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine may use: exactly one of ``slots`` and ``memory_bytes``.

    Attributes:
        slots: Sequences in memory at once, whatever their path.
        memory_bytes: Bytes of recurrent state, keys and values at once; a sequence costs what its
            path needs.
        context: Most tokens of one sequence, prompt and output.
        prefill_chunk: Most prompt tokens that one step works on.
        max_batch: Most rows that one step decodes.
        quantum: Emitted tokens after which a sequence gives its place up to a waiting one, by swap;
            None lets every sequence finish.
    """

    slots: int | None = None
    memory_bytes: int | None = None
    context: int = 2048
    prefill_chunk: int = 256
    max_batch: int = 64
    quantum: int | None = None

    def __post_init__(self) -> None:
        if (self.slots is None) == (self.memory_bytes is None):
            expected = "exactly one of them"
            raise ContractError("slots, memory_bytes", expected, (self.slots, self.memory_bytes))
        for name in ("slots", "memory_bytes", "context", "prefill_chunk", "max_batch", "quantum"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ContractError(name, "a positive integer", value)
