"""Counting acceptance, and checking it against what the two distributions allow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.engine.speculative.draft import MAX_NODES
from replayssm.engine.speculative.sampling import normalised
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from replayssm.engine.speculative.acceptance import Accepted
    from replayssm.engine.speculative.draft import Draft


@dataclass(slots=True)
class AcceptanceStats:
    """Counts over the rounds of one request or cohort.

    A round without a draft is a plain step: it is counted apart and enters no rate.

    Attributes:
        plain: Rounds whose draft was empty.
        verifies: Rounds with a draft.
        drafted: Nodes verified.
        accepted: Nodes accepted.
        drafted_at: ``[64]`` rounds whose draft reached position i (a tree: depth i).
        accepted_at: ``[64]`` rounds whose accepted path reached position i.
    """

    plain: int = 0
    verifies: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_NODES, np.int64))
    accepted_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_NODES, np.int64))

    def record_(self, draft: Draft, accepted: Accepted) -> None:
        """Mutates the counts: add one round.

        Raises:
            ContractError: The path is not one of the draft's; nothing was counted.
        """
        path = accepted.path
        parents = [-1, *path][: len(path)]
        steps = zip(path, parents, strict=True)
        if any(not 0 <= node < len(draft) or draft.parents[node] != up for node, up in steps):
            raise ContractError("accepted", "a path of the draft", path)
        if not len(draft):
            self.plain += 1
            return
        self.verifies += 1
        self.drafted += len(draft)
        self.accepted += len(path)
        self.drafted_at[: draft.depths().max() + 1] += 1
        self.accepted_at[: len(path)] += 1

    def merge_(self, other: AcceptanceStats) -> None:
        """Mutates the counts: add another record's."""
        for name in ("plain", "verifies", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.drafted_at += other.drafted_at
        self.accepted_at += other.accepted_at

    @property
    def rate(self) -> float:
        """Acceptance rate: accepted / drafted, a fraction; NaN before the first draft."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def length(self) -> float:
        """Acceptance length: mean entries kept per verify, 1 + accepted / verifies; or NaN."""
        return 1 + self.accepted / self.verifies if self.verifies else math.nan

    def position_rates(self) -> NDArray[np.float64]:
        """Return ``[P]`` float64, accepted / drafted at each of the P positions ever drafted."""
        depth = int(np.count_nonzero(self.drafted_at))
        return np.asarray(self.accepted_at[:depth] / self.drafted_at[:depth])


@dataclass(slots=True)
class OverlapCheck:
    """Accepted drafts against the number the distributions allow.

    At a node reached with model law p, a token sampled from q is accepted with probability
    sum min(p, q); for deterministic candidates q is a point mass each, and the sum is p over the
    children. Given the past these trials are independent, so the count of acceptances has mean
    ``expected`` and variance ``variance``. p must come from an independent plain decode: a verifier
    that drifted towards its drafter shows as a positive deviation.

    Attributes:
        trials: Nodes reached that had a child.
        accepted: Trials in which a child was accepted.
        expected: Sum of the acceptance probabilities.
        variance: Sum of probability times its complement.
    """

    trials: int = 0
    accepted: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def record_(
        self, probabilities: NDArray[np.floating[Any]], draft: Draft, accepted: Accepted
    ) -> None:
        """Mutates the sums: add the nodes one round reached.

        Args:
            probabilities: ``[N + 1, vocab]`` p; rows as in the acceptance rules.
            draft: The draft, with q if it was sampled.
            accepted: The outcome.
        """
        for step, node in enumerate((-1, *accepted.path)):
            children = np.flatnonzero(draft.parents == node)
            if not len(children):
                continue
            p = normalised("probabilities", probabilities[node + 1])
            if draft.q is None:
                chance = float(p[draft.tokens[children]].sum())
            else:
                chance = float(np.minimum(p, normalised("q", draft.q[children[0]])).sum())
            self.trials += 1
            self.accepted += step < len(accepted.path)
            self.expected += chance
            self.variance += chance * (1 - chance)

    @property
    def deviation(self) -> float:
        """Standard deviations by which acceptances exceed their mean (0 when they are equal)."""
        excess = self.accepted - self.expected
        # 1e-9 a trial: room for rounding where every acceptance was certain
        if abs(excess) <= 1e-9 * max(self.trials, 1):
            return 0.0
        return (
            excess / math.sqrt(self.variance)
            if self.variance > 0
            else math.copysign(math.inf, excess)
        )
