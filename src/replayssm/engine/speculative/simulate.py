"""Draft lengths tried out on a recorded trace of acceptance, in the cost model's time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from replayssm.engine.speculative.acceptance import recompute_path
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.engine.speculative.draft import Drafter
    from replayssm.engine.speculative.length import CostModel


@dataclass(frozen=True, slots=True, eq=False)
class AcceptanceTrace:
    """What a drafter would have offered before every token of a known sequence.

    Attributes:
        offered: ``[N]`` int64 drafts offered when token t was next.
        runs: ``[N]`` int64 leading ones of them that plain decode confirms; ``runs <= offered``.
    """

    offered: NDArray[np.int64]
    runs: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.offered.shape != self.runs.shape or self.runs.ndim != 1:
            raise ContractError("runs", f"shape {self.offered.shape}", self.runs.shape)
        if (self.runs < 0).any() or (self.runs > self.offered).any():
            raise ContractError("runs", "0 <= runs <= offered", "a run outside")

    def __len__(self) -> int:
        return len(self.runs)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Totals of one simulated trace.

    Attributes:
        tokens: Tokens emitted, the trace's length.
        rounds: Forwards of the verifier.
        drafted: Drafts verified.
        accepted: Drafts accepted, cut at the end of the trace.
        time: Time of all rounds.
        plain_time: Time plain decode needs for the same tokens.
    """

    tokens: int
    rounds: int
    drafted: int
    accepted: int
    time: float
    plain_time: float

    @property
    def loss(self) -> float:
        """Time lost to plain decode as a fraction of plain time; negative is a gain."""
        return self.time / self.plain_time - 1


class LengthRule(Protocol):
    """Anything that chooses draft lengths; :class:`AdaptiveLength` is one."""

    def choose(self, limit: int | None = None) -> int:
        """Return the number of drafts of the next round."""
        ...

    def update_(self, drafted: int, accepted: int, time: float | None = None) -> None:
        """Mutates the rule: learn what a round did."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The same draft length in every round; 0 is plain decode."""

    length: int

    def choose(self, limit: int | None = None) -> int:
        """Return the fixed length, or ``limit`` where that is less."""
        return self.length if limit is None else min(self.length, limit)

    def update_(self, drafted: int, accepted: int, time: float | None = None) -> None:
        """Mutates nothing."""


def record_runs(
    drafter: Drafter, sequence: Sequence[int], start: int, limit: int
) -> AcceptanceTrace:
    """Return a drafter's acceptance before every token of a sequence that plain decode emitted.

    Args:
        drafter: Fresh, of chains; it sees the true tokens only.
        sequence: Prompt and continuation.
        start: Length of the prompt, at least 1.
        limit: Drafts asked for each time.
    """
    context = list(sequence[:start])
    offered, runs = [], []
    for position in range(start, len(sequence)):
        draft = drafter.propose(context, limit)
        offered.append(len(draft))
        runs.append(len(recompute_path(draft, sequence[position : position + limit])))
        drafter.observe(sequence[position : position + 1])
        context.append(sequence[position])
    return AcceptanceTrace(np.array(offered, np.int64), np.array(runs, np.int64))


def simulate(trace: AcceptanceTrace, rule: LengthRule, cost: CostModel) -> Outcome:
    """Return what a rule makes of a trace, every round at its table time.

    Mutates the rule.

    Args:
        trace: N tokens.
        rule: Fresh rule.
        cost: Times that rounds take; normally the rule's own.
    """
    position = rounds = drafted = accepted = 0
    time = 0.0
    while position < len(trace):
        left = len(trace) - position - 1
        count = min(rule.choose(left), int(trace.offered[position]))
        kept = min(count, int(trace.runs[position]))
        rule.update_(count, kept)
        position += 1 + kept
        rounds += 1
        drafted += count
        accepted += kept
        time += cost.time(count)
    return Outcome(position, rounds, drafted, accepted, time, cost.plain * len(trace))
