"""An engine in a thread of its own, for callers that live in an event loop or in other threads."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from replayssm.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.engine.engine import Engine
    from replayssm.engine.request import Event

    Work = Callable[[Engine], None]

LOG = logging.getLogger("replayssm.engine")


class EngineHost:
    """Steps an engine as long as it has something to do. Only its thread touches the engine.

    Args:
        engine: The engine; nobody else may use it from now on.
        deliver: Called in the thread with the events of every step.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Event]], None]) -> None:
        self._engine, self._deliver = engine, deliver
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.failure: BaseException | None = None
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine is being stepped."""
        return self._thread.is_alive()

    def do(self, work: Work) -> None:
        """Have something done between two steps; what it raises on purpose is only logged."""
        self._inbox.put(work)

    def close(self) -> None:
        """Stop after the step in progress; live requests stay where they are."""
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._work():
                events = self._engine.step()
                if events:
                    self._deliver(events)
        except BaseException as error:
            self.failure = error
            LOG.exception("the engine stopped")

    def _work(self) -> bool:
        """Do everything in the inbox, waiting while the engine is idle; False ends the thread."""
        while True:
            try:
                work = self._inbox.get(block=self._engine.is_idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            try:
                work(self._engine)
            except ReplayError as error:
                LOG.warning("refused: %s", error)
