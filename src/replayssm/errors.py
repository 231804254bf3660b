"""One small family of exceptions.

Every message names the argument, what was expected, what came and, where it helps, what to do.
"""

from __future__ import annotations


class ReplayError(Exception):
    """Base of every error raised on purpose by this package."""


class ContractError(ReplayError, ValueError):
    """An argument has a wrong shape, dtype, device or value. Nothing was changed."""

    def __init__(self, argument: str, expected: str, got: object, action: str = "") -> None:
        self.argument = argument
        self._given = (argument, expected, str(got), action)
        message = f"{argument}: expected {expected}, got {got}"
        super().__init__(f"{message}; {action}" if action else message)

    def __reduce__(self) -> tuple[type[ContractError], tuple[str, str, str, str]]:
        # an exception is rebuilt from its arguments when it crosses to another process
        return type(self), self._given


class UnsupportedError(ReplayError, NotImplementedError):
    """A valid request that this implementation, model or version cannot serve."""


class SlotError(ReplayError, LookupError):
    """A slot is unknown, free, stale, invalid or in the middle of a forward."""


class TicketError(ReplayError, RuntimeError):
    """A ticket was spent, belongs to another pool, or its forward did not visit every layer."""


class CapacityError(ReplayError, MemoryError):
    """The pool has no free slot for the request."""


class DriftError(ReplayError, RuntimeError):
    """A model's own step no longer agrees with its adapter."""
