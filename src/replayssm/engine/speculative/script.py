"""Forced acceptance: a drafter that knows the answer and is wrong on schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.engine.speculative.draft import Draft, check_request
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence


class ScriptDrafter:
    """Proposes exactly as many correct tokens as the schedule says, then wrong ones.

    Args:
        sequence: The prompt and the continuation that plain decode emits.
        schedule: Accepted drafts wanted per round, repeated for ever. A number above the round's
            limit means all of them.
        vocab: Vocabulary size, at least 2: a wrong token is the right one plus 1, modulo vocab.

    Raises:
        ContractError: The schedule is empty or negative, or the vocabulary has no wrong token.
    """

    def __init__(self, sequence: Sequence[int], schedule: Sequence[int], vocab: int) -> None:
        if not schedule or min(schedule) < 0:
            raise ContractError("schedule", "at least one number >= 0", schedule)
        if vocab < 2:
            raise ContractError("vocab", "at least 2", vocab)
        self._sequence = sequence
        self._schedule = schedule
        self._vocab = vocab
        self._round = 0
        self._proposed = False

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Return a chain of ``limit`` tokens, shorter only where the sequence ends.

        Raises:
            ContractError: The context has left the sequence, so acceptance can not be forced.
        """
        check_request(context, limit)
        here = len(context)
        if here > len(self._sequence) or context[-1] != self._sequence[here - 1]:
            raise ContractError(
                "context", "a prefix of the scripted sequence", f"{context[-1]} at {here - 1}"
            )
        right = self._schedule[self._round % len(self._schedule)]
        truth = self._sequence[here : here + limit]
        self._proposed = len(truth) > 0
        return Draft.chain(
            [token if i < right else (token + 1) % self._vocab for i, token in enumerate(truth)]
        )

    def observe(self, accepted: Sequence[int]) -> None:
        """Mutates the schedule's position: one round on, unless the block was aborted."""
        if self._proposed and len(accepted):
            self._round += 1
        self._proposed = False


def even_schedule(mean: float, rounds: int) -> list[int]:
    """Return whole numbers of accepted drafts whose running mean stays within 1 / n of ``mean``.

    Args:
        mean: Accepted drafts per round, >= 0, not necessarily whole.
        rounds: Length of the schedule, at least 1.

    Raises:
        ContractError: An argument is out of range.
    """
    if mean < 0 or rounds < 1:
        raise ContractError("mean, rounds", "mean >= 0 and rounds >= 1", (mean, rounds))
    return [int((i + 1) * mean) - int(i * mean) for i in range(rounds)]
