"""Engines in this process as a target: stepped in a thread of their own, or in virtual time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from replayssm.engine.host import EngineHost
from replayssm.errors import ReplayError
from replayssm.traffic.fleet import EngineEvent, Fleet
from replayssm.traffic.target import Outcome, SendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replayssm.traffic.fleet import EngineLike
    from replayssm.traffic.target import Call, OnTokens

    Work = Callable[[], None]

RequestT = TypeVar("RequestT")

# in virtual time a timer runs out when nothing else is left to run, so any time will do
BREATH_S = 1e-7


@dataclass(slots=True, eq=False)
class _Live:
    done: asyncio.Future[Outcome]
    on_tokens: OnTokens
    tokens: int = 0


class _FleetTarget(ABC, Generic[RequestT]):
    """The event loop's side: who waits for what. The other side runs the work and the steps."""

    def __init__(
        self, engines: Sequence[EngineLike[RequestT, Any]], make_request: Callable[[Call], RequestT]
    ) -> None:
        self._fleet, self._make = Fleet(engines), make_request
        self._requests: dict[str, RequestT] = {}
        self._live: dict[str, _Live] = {}
        self._asked: set[asyncio.Future[dict[str, float]]] = set()
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def _do(self, work: Work) -> None:
        """Have work done between two steps."""

    @abstractmethod
    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop."""

    @abstractmethod
    async def close(self) -> None:
        """Stop stepping; requests in flight are left as they are."""

    @property
    def can_move(self) -> bool:
        """Whether there is another engine to move to."""
        return self._fleet.can_move

    def prepare(self, call: Call) -> None:
        """Make out the engine's request."""
        self._requests[call.request_id] = self._make(call)

    async def send(self, call: Call, on_tokens: OnTokens) -> Outcome:
        """Serve a call; a cancelled task cancels the request in its engine."""
        self._check()
        name = call.request_id
        request = self._requests.pop(name, None) or self._make(call)
        live = self._live[name] = _Live(self._loop.create_future(), on_tokens)
        self._do(lambda: self._submit(name, request))
        try:
            return await live.done
        except asyncio.CancelledError:
            self._do(lambda: self._fleet.cancel(name))
            raise
        finally:
            del self._live[name]

    def move(self, request_id: str) -> None:
        """Move a running sequence to the next engine before its next step."""
        self._do(lambda: self._fleet.move(request_id))

    async def counters(self) -> dict[str, float]:
        """Return the engines' numbers, summed."""
        self._check()
        asked: asyncio.Future[dict[str, float]] = self._loop.create_future()
        self._asked.add(asked)
        self._do(lambda: self._tell(_settle, asked, self._fleet.stats()))
        try:
            return await asked
        finally:
            self._asked.discard(asked)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _submit(self, name: str, request: RequestT) -> None:
        try:
            self._fleet.submit(name, request)
        except ReplayError as error:
            self._tell(self._refuse, name, error)

    def _deliver(self, events: Sequence[EngineEvent], at: float) -> None:
        counts = Counter(event.request_id for event in events if event.kind == "token")
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                # cancelled on this side while the step ran
                continue
            if event.kind == "admitted":
                live.on_tokens(0, at)
            elif event.kind == "token" and (count := counts.pop(event.request_id, 0)):
                live.tokens += count
                live.on_tokens(count, at)
            elif event.kind == "finished":
                _settle(live.done, Outcome(event.reason, output_tokens=live.tokens))
            elif event.kind == "failed":
                _settle(live.done, SendError("failed", event.reason))

    def _refuse(self, name: str, error: ReplayError) -> None:
        if (live := self._live.get(name)) is not None:
            _settle(live.done, SendError("refused", str(error)))

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for live in self._live.values():
            _settle(live.done, error)
        for asked in self._asked:
            _settle(asked, error)


class EngineTarget(_FleetTarget[RequestT]):
    """Engines stepped in one thread. Use it inside one event loop and close it there.

    Args:
        engines: One engine, or several to move sequences between; a new request goes to the one
            that holds the fewest. Nobody else may use them.
        make_request: Turns a call into the engine's own request.
    """

    def __init__(
        self, engines: Sequence[EngineLike[RequestT, Any]], make_request: Callable[[Call], RequestT]
    ) -> None:
        super().__init__(engines, make_request)
        self._host: EngineHost[EngineEvent] = EngineHost(
            self._fleet,
            lambda events: self._tell(self._deliver, events, self._loop.time()),
            # raised again where somebody waits
            lambda error: self._tell(self._fail, error),
        )

    async def close(self) -> None:
        """Stop the thread; requests in flight are left as they are."""
        await asyncio.to_thread(self._host.close)

    def _do(self, work: Work) -> None:
        self._host.do(work)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)


class SettableClock(Protocol):
    """The virtual clock of an engine: its steps move it, and so can we."""

    def now(self) -> float:
        """Return seconds since some fixed instant."""
        ...

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        ...


class VirtualTarget(_FleetTarget[RequestT]):
    """Engines with a virtual clock, stepped in the event loop of :func:`traffic.virtual.run`.

    A step takes the virtual time that it costs, so a run is deterministic and takes no longer than
    its computations.

    Args:
        engines: As for :class:`EngineTarget`, with one clock.
        make_request: Turns a call into the engine's own request.
        clock: The clock of the engines.
    """

    def __init__(
        self,
        engines: Sequence[EngineLike[RequestT, Any]],
        make_request: Callable[[Call], RequestT],
        clock: SettableClock,
    ) -> None:
        super().__init__(engines, make_request)
        self._clock, self._offset = clock, clock.now() - self._loop.time()
        self._work: deque[Work] = deque()
        self._wake = asyncio.Event()
        self._stepping = self._loop.create_task(self._run())

    async def close(self) -> None:
        """Stop stepping; requests in flight are left as they are."""
        self._stepping.cancel()
        await asyncio.wait([self._stepping])

    def _do(self, work: Work) -> None:
        self._work.append(work)
        self._wake.set()

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)

    async def _run(self) -> None:
        try:
            while True:
                await self._step()
        except Exception as error:
            # raised again where somebody waits
            self._fail(error)

    async def _step(self) -> None:
        if self._fleet.is_idle and not self._work:
            self._wake.clear()
            await self._wake.wait()
            await asyncio.sleep(BREATH_S)
        while self._work:
            self._work.popleft()()
        if self._fleet.is_idle:
            return
        # the engine slept while it had nothing to do
        self._clock.advance(max(0.0, self._loop.time() + self._offset - self._clock.now()))
        events = self._fleet.step()
        await asyncio.sleep(max(0.0, self._clock.now() - self._offset - self._loop.time()))
        self._deliver(events, self._loop.time())
        # whoever waited for these events acts on them before the next step, not during it
        await asyncio.sleep(BREATH_S)


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
