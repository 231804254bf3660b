"""Time as an engine sees it: real, or made by a cost function."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Work:
    """One forward, as a cost function sees it.

    Attributes:
        kind: ``prefill``, ``decode`` or ``shadow``.
        rows: Sequences.
        tokens: Tokens of all rows.
        replay_rows: Rows on the replay path.
        high_rows: Rows that read the high plane only.
        flushes: Folds that were due, one a value tile of a row.
        cohorts: Cohorts of the rows, one entry a row.
    """

    kind: str
    rows: int
    tokens: int
    replay_rows: int
    high_rows: int
    flushes: int
    cohorts: tuple[str, ...]


class Clock(Protocol):
    """Where an engine reads the time."""

    def now(self) -> float:
        """Return seconds since some fixed instant; never decreases."""
        ...

    def spend(self, work: Work) -> None:
        """Take note of a forward that has just run."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds since some fixed instant."""
        return time.perf_counter()

    def spend(self, work: Work) -> None:
        """Mutates nothing: the forward has taken its time already."""


class VirtualClock:
    """A clock that only forwards and :meth:`advance` move.

    Args:
        cost: Seconds that a forward takes.
    """

    def __init__(self, cost: Callable[[Work], float]) -> None:
        self._cost, self._now = cost, 0.0

    def now(self) -> float:
        """Return seconds since the clock was made."""
        return self._now

    def spend(self, work: Work) -> None:
        """Mutates the time: add what the forward costs."""
        self.advance(self._cost(work))

    def advance(self, seconds: float) -> None:
        """Mutates the time: let ``seconds`` pass.

        Raises:
            ContractError: They are negative.
        """
        if not seconds >= 0:
            raise ContractError("seconds", "a number >= 0", seconds)
        self._now += seconds
