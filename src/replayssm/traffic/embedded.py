"""The engine in this process as a target: its steps run in one thread, ours in the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from replayssm.errors import CapacityError, ContractError, ReplayError
from replayssm.traffic.target import Outcome, SendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from _typeshed import DataclassInstance

    from replayssm.traffic.target import Call, OnTokens

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
    """What the target needs of an engine."""

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


@dataclass(slots=True, eq=False)
class _Live:
    done: asyncio.Future[Outcome]
    on_tokens: OnTokens
    tokens: int = 0


class EngineTarget(Generic[RequestT, ImageT]):
    """Serves calls with engines of this process. Use it inside one event loop and close it there.

    Args:
        engines: One engine, or several to move sequences between; a new request goes to the one
            that holds the fewest.
        make_request: Turns a call into the engine's own request.
    """

    def __init__(
        self,
        engines: Sequence[EngineLike[RequestT, ImageT]],
        make_request: Callable[[Call], RequestT],
    ) -> None:
        if not engines:
            raise ContractError("engines", "at least one", "none")
        self._engines, self._make = tuple(engines), make_request
        self._requests: dict[str, RequestT] = {}
        self._live: dict[str, _Live] = {}
        self._asked: set[asyncio.Future[dict[str, float]]] = set()
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        # below: only the thread looks at it
        self._holders: dict[str, EngineLike[RequestT, ImageT]] = {}
        self._refused_moves = 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def can_move(self) -> bool:
        """Whether there is another pool to move to."""
        return len(self._engines) > 1

    def prepare(self, call: Call) -> None:
        """Make out the engine's request."""
        self._requests[call.request_id] = self._make(call)

    async def send(self, call: Call, on_tokens: OnTokens) -> Outcome:
        """Serve a call; a cancelled task cancels the request in the engine."""
        self._check()
        name = call.request_id
        request = self._requests.pop(name, None) or self._make(call)
        live = self._live[name] = _Live(self._loop.create_future(), on_tokens)
        self._work.put(lambda: self._submit(name, request))
        try:
            return await live.done
        except asyncio.CancelledError:
            self._work.put(lambda: self._cancel(name))
            raise
        finally:
            del self._live[name]

    def move(self, request_id: str) -> None:
        """Move a running sequence to the next engine before its next step."""
        self._work.put(lambda: self._move(request_id))

    async def counters(self) -> dict[str, float]:
        """Return the engines' numbers, summed."""
        self._check()
        asked: asyncio.Future[dict[str, float]] = self._loop.create_future()
        self._asked.add(asked)
        self._work.put(lambda: self._tell(_settle, asked, self._stats()))
        try:
            return await asked
        finally:
            self._asked.discard(asked)

    async def close(self) -> None:
        """Stop the thread; requests in flight are left as they are."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while self._do_work():
                for engine in self._engines:
                    if not engine.is_idle:
                        self._step(engine)
        except BaseException as error:
            # handed to whoever waits in the event loop
            self._tell(self._fail, error)

    def _do_work(self) -> bool:
        """Do what was asked for since the last step; wait for it when there is nothing to step."""
        is_idle = all(engine.is_idle for engine in self._engines)
        while True:
            try:
                work = self._work.get(block=is_idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            is_idle = False

    def _step(self, engine: EngineLike[RequestT, ImageT]) -> None:
        events = engine.step()
        at = time.monotonic()
        for event in events:
            if event.kind in ENDS:
                self._holders.pop(event.request_id, None)
        self._tell(self._deliver, events, at)

    def _submit(self, name: str, request: RequestT) -> None:
        loads = Counter(id(engine) for engine in self._holders.values())
        engine = min(self._engines, key=lambda each: loads[id(each)])
        try:
            engine.submit(request)
            self._holders[name] = engine
        except ReplayError as error:
            self._tell(self._refuse, name, error)

    def _cancel(self, name: str) -> None:
        # it may have finished before the thread came to this
        if (holder := self._holders.pop(name, None)) is not None:
            holder.cancel(name)

    def _move(self, name: str) -> None:
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

    def _stats(self) -> dict[str, float]:
        total: dict[str, float] = {"refused_moves": self._refused_moves}
        for engine in self._engines:
            for name, value in _numbers(asdict(engine.stats())):
                total[name] = total.get(name, 0) + value
        return total

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

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


def _numbers(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, int | float):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
