"""Engines of this process that sequences can move between, stepped in turn by one caller."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from replayssm.errors import CapacityError, ContractError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from _typeshed import DataclassInstance

RequestT = TypeVar("RequestT", contravariant=True)
ImageT = TypeVar("ImageT")

ENDS = ("finished", "cancelled", "failed")


class EngineEvent(Protocol):
    """What a step did to one request."""

    @property
    def request_id(self) -> str:
        """The request."""
        ...

    @property
    def kind(self) -> str:
        """What happened: ``admitted``, ``token``, ``finished``, ``cancelled``, ``failed``, ..."""
        ...

    @property
    def reason(self) -> str:
        """Why it finished or failed."""
        ...


class EngineLike(Protocol[RequestT, ImageT]):
    """What is needed of an engine."""

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        ...

    def submit(self, request: RequestT) -> None:
        """Queue a request; one that can never fit is refused."""
        ...

    def step(self) -> Sequence[EngineEvent]:
        """Run one iteration of the scheduler."""
        ...

    def cancel(self, request_id: str, /) -> None:
        """Stop a request and free what it holds."""
        ...

    def export(self, request_id: str, /) -> ImageT:
        """Take a sequence out of the engine."""
        ...

    def import_(self, image: ImageT, /) -> None:
        """Put a sequence into the engine."""
        ...

    def stats(self) -> DataclassInstance:
        """Return counters and gauges."""
        ...


class Fleet(Generic[RequestT, ImageT]):
    """Knows which engine holds which request. Not thread-safe, as the engines are not.

    Args:
        engines: One engine, or several to move sequences between.
    """

    def __init__(self, engines: Sequence[EngineLike[RequestT, ImageT]]) -> None:
        if not engines:
            raise ContractError("engines", "at least one", "none")
        self._engines = tuple(engines)
        self._holders: dict[str, EngineLike[RequestT, ImageT]] = {}
        self._refused_moves = 0

    @property
    def can_move(self) -> bool:
        """Whether there is another engine to move to."""
        return len(self._engines) > 1

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return all(engine.is_idle for engine in self._engines)

    def submit(self, name: str, request: RequestT) -> None:
        """Queue a request at the engine that holds the fewest.

        Raises:
            ReplayError: The engine refuses it.
        """
        loads = Counter(id(engine) for engine in self._holders.values())
        engine = min(self._engines, key=lambda each: loads[id(each)])
        engine.submit(request)
        self._holders[name] = engine

    def cancel(self, name: str) -> None:
        """Stop a request, unless it has ended already."""
        if (holder := self._holders.pop(name, None)) is not None:
            holder.cancel(name)

    def move(self, name: str) -> None:
        """Move a request to the next engine, unless it has ended; back if there is no room."""
        source = self._holders.get(name)
        if source is None:
            return
        after = self._engines[(self._engines.index(source) + 1) % len(self._engines)]
        image = source.export(name)
        try:
            after.import_(image)
            self._holders[name] = after
        except CapacityError:
            source.import_(image)
            self._refused_moves += 1

    def step(self) -> list[EngineEvent]:
        """Step every engine that has something to do."""
        events: list[EngineEvent] = []
        for engine in self._engines:
            if not engine.is_idle:
                events += engine.step()
        for event in events:
            if event.kind in ENDS:
                self._holders.pop(event.request_id, None)
        return events

    def stats(self) -> dict[str, float]:
        """Return the numbers of all engines, summed; nested ones as ``table.name``."""
        total: dict[str, float] = {"refused_moves": self._refused_moves}
        for engine in self._engines:
            for name, value in _numbers(asdict(engine.stats())):
                total[name] = total.get(name, 0) + value
        return total


def _numbers(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, int | float):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
