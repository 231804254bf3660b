"""An engine in a thread of its own, for callers that live in an event loop or in other threads."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOG = logging.getLogger("replayssm.engine")
EventT = TypeVar("EventT", covariant=True)


class Steppable(Protocol[EventT]):
    """An engine, or several of them behind one front."""

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        ...

    def step(self) -> Sequence[EventT]:
        """Run one iteration."""
        ...


class EngineHost(Generic[EventT]):
    """Steps an engine as long as it has something to do. Only its thread touches the engine.

    Args:
        engine: The engine; nobody else may use it from now on.
        deliver: Called in the thread with the events of every step.
        fail: Called in the thread with what a step or a piece of work raised; that ends it.

    Attributes:
        failure: What ended the thread, if something did.
    """

    def __init__(
        self,
        engine: Steppable[EventT],
        deliver: Callable[[Sequence[EventT]], None],
        fail: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._engine, self._deliver, self._fail = engine, deliver, fail
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.failure: BaseException | None = None
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine is being stepped."""
        return self._thread.is_alive()

    def do(self, work: Callable[[], None]) -> None:
        """Have something done between two steps."""
        self._inbox.put(work)

    def close(self) -> None:
        """Stop after the step in progress; live requests stay where they are."""
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._work():
                if events := self._engine.step():
                    self._deliver(events)
        except BaseException as error:
            self.failure = error
            LOG.exception("the engine stopped")
            self._fail(error)

    def _work(self) -> bool:
        """Do what is in the inbox, waiting while the engine is idle; False ends the thread."""
        while True:
            try:
                work = self._inbox.get(block=self._engine.is_idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
