"""Virtual time: an event loop that never sleeps, for simulations and tests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing else is left to run.

    Only for coroutines that wait for each other and for timers: nothing may come from a thread, a
    process or the network.
    """

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            due: float = self._scheduled[0].when()  # type: ignore[attr-defined]
            self._virtual_now = max(self._virtual_now, due)
        super()._run_once()  # type: ignore[misc]


def run(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
