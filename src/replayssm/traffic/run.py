"""How a trace is driven, and what that gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from replayssm.traffic.record import Record


@dataclass(frozen=True, slots=True)
class Settings:
    """How a trace is driven.

    Attributes:
        num_warmups: Requests sent one after the other before the schedule starts; the first ones
            of the trace, with prompts of their own.
        warmup_s: Requests due in the first seconds count as warm-up too.
        max_concurrency: Most requests in flight; those that are due wait, and their wait counts in
            latencies from the schedule. A closed loop has its own.
        drain_s: Seconds after the last send until requests still running are cut; None waits.
        sample_s: Seconds between samples of progress and of the target's counters.
        use_text: Send prompts as text, not as token ids.
    """

    num_warmups: int = 0
    warmup_s: float = 0.0
    max_concurrency: int | None = None
    drain_s: float | None = None
    sample_s: float = 1.0
    use_text: bool = False

    def __post_init__(self) -> None:
        for name in ("num_warmups", "warmup_s"):
            if getattr(self, name) < 0:
                raise ContractError(name, "0 or more", getattr(self, name))
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ContractError("max_concurrency", "at least 1", self.max_concurrency)
        if self.drain_s is not None and not self.drain_s >= 0:
            raise ContractError("drain_s", "0 or more seconds", self.drain_s)
        if not self.sample_s > 0:
            raise ContractError("sample_s", "more than 0 seconds", self.sample_s)


@dataclass(frozen=True, slots=True)
class Sample:
    """A run at one instant.

    Attributes:
        at_s: Seconds from schedule zero.
        sent: Requests sent so far.
        running: Requests in flight.
        failed: Requests that failed.
        tokens: Output tokens so far.
        ttft_ms: Median TTFT of the last thousand that ended.
        counters: The target's own counters and gauges.
    """

    at_s: float
    sent: int
    running: int
    failed: int
    tokens: int
    ttft_ms: float | None
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """What driving a trace gave.

    Attributes:
        records: One a request: warm-ups, then the trace in its order.
        zero_ns: Schedule zero on the monotonic clock, in nanoseconds.
        zero_unix_s: Schedule zero in seconds since 1970.
        samples: The run over time, its beginning and its end included.
    """

    records: tuple[Record, ...]
    zero_ns: int
    zero_unix_s: float
    samples: tuple[Sample, ...]


class Watch(Protocol):
    """Where a run reports to."""

    def update(self, sample: Sample) -> None:
        """A sample was taken."""
        ...
