"""How many tokens to draft next, from measured acceptance and cost. No clock inside.

**What pays.** With conditional acceptance a_i at position i, a round of n drafts emits
E(n) = 1 + a_1 + a_1 a_2 + ... + a_1 .. a_n tokens in time c(n). The best n maximises E(n) / c(n);
n = 0 is plain decode at 1 / c(0).

**What is safe.** A reserve of time, empty at the start, receives a fixed ``share`` of the time that
plain decode would have needed for every emitted token, and pays (or receives) each round's loss to
plain decode, c(n) - (1 + accepted) c(0). A draft is allowed only if the reserve covers its worst
case, no draft accepted. So the reserve never goes below zero, and summed over any trace

    time - plain time <= share * plain time,

whatever the acceptance does. The reserve is capped, which only discards gains: between any two
rounds the loss is at most cap + share * plain time. When rounds are given measured times, the bound
is off by no more than the last draft's excess over the table, and no draft runs until that is
earned back.

**Probing.** While plain decode looks best, the shortest length that could pay is tried now and
then: after 1, 2, 4, .. plain steps as long as probes fail, back to the start when one succeeds.
Probes are drafts like any other and live off the same reserve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIOR = 0.5
"""Conditional acceptance assumed at position 1 before any evidence."""
PRIOR_WEIGHT = 0.5
"""Trials the assumption is worth; at later positions the estimate of the one before is assumed."""


class CostModel:
    """Time of one round by draft length, from a measured table.

    Between measured lengths time is linear; beyond the last it goes on with the least-squares slope
    of the verify times. A longer draft never counts as cheaper than a shorter one, so that a
    drafter that offers fewer tokens than asked can not cost more than was planned.

    Args:
        table: ``{n: time}``: round time with n drafts, drafting included, in any one unit. Needs 0
            (the plain step) and at least one n >= 1.

    Attributes:
        plain: Time of a plain step, c(0).

    Raises:
        ContractError: A length or time is missing, negative or not finite.
    """

    def __init__(self, table: Mapping[int, float]) -> None:
        if 0 not in table or len(table) < 2 or min(table) < 0:
            raise ContractError("table", "lengths 0 and at least one n >= 1", sorted(table))
        if not all(0 < time < float("inf") for time in table.values()):
            raise ContractError("table", "positive finite times", dict(table))
        lengths = sorted(table)
        self._lengths = np.array(lengths, np.float64)
        self._times = np.maximum.accumulate([float(table[n]) for n in lengths])
        self.plain = float(self._times[0])
        fitted = slice(1, None) if len(lengths) > 2 else slice(None)
        x, y = self._lengths[fitted], self._times[fitted]
        self._slope = float((x - x.mean()) @ y / ((x - x.mean()) @ (x - x.mean())))

    def time(self, drafts: int) -> float:
        """Return the time of a round with ``drafts`` drafts."""
        beyond = max(drafts - float(self._lengths[-1]), 0.0)
        return float(np.interp(drafts, self._lengths, self._times)) + beyond * self._slope


class AdaptiveLength:
    """Chooses the draft length of each round; plain decode is one of the choices.

    One instance follows one request, or one cohort whose acceptance is alike. Every choice is a
    function of the updates before it.

    Args:
        cost: Round times; set the attribute again when the batch changes.
        limit: Longest draft, at least 1.
        share: Part of plain time that may be lost, in (0, 1).
        memory: Weight of the past per drafting round in the acceptance estimates, in [0, 1).
        patience: Most plain steps between two probes, at least 1.
        cap: Reserve kept at most, in plain steps; at least the worst case of the longest draft.

    Raises:
        ContractError: An argument is out of range.
    """

    def __init__(
        self,
        cost: CostModel,
        limit: int,
        *,
        share: float = 0.015,
        memory: float = 0.9,
        patience: int = 16,
        cap: float = 8.0,
    ) -> None:
        if limit < 1 or patience < 1:
            raise ContractError("limit, patience", "at least 1", (limit, patience))
        if not (0 < share < 1 and 0 <= memory < 1):
            raise ContractError(
                "share, memory", "share in (0, 1), memory in [0, 1)", (share, memory)
            )
        if cap < 0:
            raise ContractError("cap", "a number >= 0", cap)
        self.limit = limit
        self.cost = cost
        self.reserve = 0.0
        self._share = share
        self._memory = memory
        self._patience = patience
        self._cap = cap
        self._hits = [0.0] * limit
        self._trials = [0.0] * limit
        self._interval = 1
        self._waited = 0

    @property
    def cost(self) -> CostModel:
        """Round times in use."""
        return self._cost

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        self._cost = cost
        self._times = [cost.time(n) for n in range(self.limit + 1)]

    def acceptance(self) -> list[float]:
        """Return ``limit`` estimates of conditional acceptance, by position."""
        rates: list[float] = []
        before = PRIOR
        for hits, trials in zip(self._hits, self._trials, strict=True):
            before = (hits + PRIOR_WEIGHT * before) / (trials + PRIOR_WEIGHT)
            rates.append(before)
        return rates

    def choose(self, limit: int | None = None) -> int:
        """Return the number of tokens to draft in the next round, 0 for plain decode.

        Args:
            limit: Most drafts this round allows, such as the tokens left to emit; None for no
                limit but the constructor's.
        """
        most = self.limit if limit is None else min(limit, self.limit)
        best = self._best(most)
        if best == 0 and self._waited >= self._interval:
            return self._probe(most)
        return best

    def update_(self, drafted: int, accepted: int, time: float | None = None) -> None:
        """Mutates estimates and reserve: learn what a round did.

        Args:
            drafted: Drafts verified, which may be fewer than chosen.
            accepted: Drafts accepted.
            time: Measured time of the round, in the table's unit; None takes the table's.

        Raises:
            ContractError: A count is out of range; nothing was learned.
        """
        if not 0 <= accepted <= drafted <= self.limit:
            raise ContractError(
                "drafted, accepted",
                f"0 <= accepted <= drafted <= {self.limit}",
                (drafted, accepted),
            )
        spent = self._times[drafted] if time is None else time
        plain = self._times[0] * (1 + accepted) if drafted else spent
        self._settle(plain, spent)
        if not drafted:
            self._waited += 1
            return
        for i in range(self.limit):
            self._hits[i] = self._memory * self._hits[i] + (i < accepted)
            self._trials[i] = self._memory * self._trials[i] + (i < drafted and i <= accepted)
        self._waited = 0
        failed = self._best(self.limit) == 0
        self._interval = min(2 * self._interval, self._patience) if failed else 1

    def _settle(self, plain: float, spent: float) -> None:
        """Mutates the reserve: earn the share of plain time, pay the loss to it."""
        cap = max(self._cap * self._times[0], self._times[-1] - self._times[0])
        self.reserve = min(self.reserve + plain * (1 + self._share) - spent, cap)

    def _affordable(self, drafts: int) -> bool:
        """Return whether reserve and earnings cover the round if no draft is accepted."""
        return self._times[drafts] <= self.reserve + self._times[0] * (1 + self._share)

    def _best(self, most: int) -> int:
        """Return the affordable length with the most expected tokens per time."""
        best, best_rate = 0, 1 / self._times[0]
        expected = reach = 1.0
        for n, rate in enumerate(self.acceptance()[:most], start=1):
            reach *= rate
            expected += reach
            if expected > best_rate * self._times[n] and self._affordable(n):
                best, best_rate = n, expected / self._times[n]
        return best

    def _probe(self, most: int) -> int:
        """Return the shortest affordable length that would pay if all of it were accepted."""
        for n in range(1, most + 1):
            if (1 + n) * self._times[0] > self._times[n] and self._affordable(n):
                return n
        return 0
