"""A draft model as two callables, and how it follows a sequence by counting tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


class DraftModel:
    """A draft model as two callables, and the number of tokens in its state.

    Args:
        step: ``step(tokens)`` appends tokens to the state and returns ``[vocab]`` logits after the
            last one.
        rollback: ``rollback(k)`` takes the newest k tokens back.

    Attributes:
        length: Tokens in the state.
    """

    def __init__(
        self,
        step: Callable[[Sequence[int]], NDArray[np.floating[Any]]],
        rollback: Callable[[int], None],
    ) -> None:
        self._step = step
        self._rollback = rollback
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Mutates the state: append tokens; return ``[vocab]`` logits after the last one."""
        logits = np.asarray(self._step(tokens))
        self.length += len(tokens)
        if logits.ndim != 1:
            raise ContractError("step(tokens)", "logits of shape [vocab]", logits.shape)
        return logits

    def take_back(self, count: int) -> None:
        """Mutates the state: drop the newest ``count`` tokens."""
        if count:
            self._rollback(count)
            self.length -= count

    def follow(self, context: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Mutates the state: bring it to the end of ``context``; return the logits there.

        Raises:
            ContractError: The state already holds more tokens than the context.
        """
        if self.length > len(context):
            raise ContractError("context", f"at least {self.length} tokens", len(context))
        if self.length == len(context):
            # nothing was emitted since: only forwarding gives logits
            self.take_back(1)
        return self.feed(list(context[self.length :]))

    def move(self, path: tuple[int, ...], target: tuple[int, ...]) -> NDArray[np.floating[Any]]:
        """Mutates the state: go from one path below the context to another; return its logits.

        Args:
            path: Tokens after the context that the state holds now.
            target: Tokens it shall hold; not a prefix of ``path``.
        """
        common = common_prefix(path, target)
        self.take_back(len(path) - common)
        return self.feed(target[common:])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
