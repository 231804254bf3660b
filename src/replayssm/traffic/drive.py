"""Drive a target with a trace: send every request when it is due, record what came back."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from replayssm.errors import ContractError, UnsupportedError
from replayssm.traffic.record import Status
from replayssm.traffic.run import Run, Sample, Settings
from replayssm.traffic.sending import Sending
from replayssm.traffic.target import Call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replayssm.traffic.prompts import Prompts
    from replayssm.traffic.run import Watch
    from replayssm.traffic.target import Target
    from replayssm.traffic.trace import Trace, TraceRequest

# calls that are made out before they are due, and the time that must be left for it
AHEAD = 32
SPARE_S = 0.005
LEAD_S = 0.25
RECENT = 1000


async def drive(
    trace: Trace,
    target: Target,
    prompts: Prompts,
    settings: Settings | None = None,
    watch: Watch | None = None,
) -> Run:
    """Send every request of a trace when it is due and return one record for each.

    A turn of a session waits for the turn before it.

    Args:
        trace: Requests in order of arrival.
        target: Where they are sent.
        prompts: Makes out prompts.
        settings: How they are sent; None is the defaults.
        watch: Told about progress.

    Raises:
        ContractError: The trace is empty.
        UnsupportedError: The trace has moves and the target cannot move. Nothing was sent.
    """
    if not trace.requests:
        raise ContractError("trace", "at least one request", "none")
    if not target.can_move and any(r.move_after is not None for r in trace.requests):
        raise UnsupportedError("the trace moves sequences between pools; this target cannot")
    with _few_collections():
        return await _Drive(trace, target, prompts, settings or Settings(), watch).run()


@contextmanager
def _few_collections() -> Iterator[None]:
    """Keep the garbage collector from walking everything that was there before, again and again.

    A full collection stops the event loop for tens of milliseconds, and what it delays would be
    taken for the target's doing.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Drive:
    def __init__(
        self,
        trace: Trace,
        target: Target,
        prompts: Prompts,
        settings: Settings,
        watch: Watch | None,
    ) -> None:
        self._trace, self._target, self._prompts = trace, target, prompts
        self._settings, self._watch = settings, watch
        # that of the event loop is ``time.monotonic``, unless it is a virtual one
        self._now = asyncio.get_running_loop().time
        self._zero = 0.0
        self._calls: deque[Call] = deque()
        self._built = 0
        self._sendings: list[Sending] = []
        self._running: set[Sending] = set()
        self._tasks: list[asyncio.Task[Sending]] = []
        self._last_turn: dict[str, asyncio.Task[Sending]] = {}
        self._turns: Counter[str] = Counter()
        self._samples: list[Sample] = []
        self._ttfts: deque[float] = deque(maxlen=RECENT)
        self._sent = self._failed = self._tokens = 0
        self._limit = trace.concurrency or settings.max_concurrency
        # a place holds the instant at which it became free
        self._places: asyncio.Queue[float] = asyncio.Queue()
        self._is_over = False

    async def run(self) -> Run:
        warm = [await self._warm_up(number) for number in range(self._settings.num_warmups)]
        while self._built < min(AHEAD, len(self._trace.requests)):
            self._build_next()
        self._zero, zero_unix = self._now() + LEAD_S, time.time() + LEAD_S
        for _ in range(self._limit or 0):
            self._places.put_nowait(self._zero)
        await self._take_sample()
        try:
            async with asyncio.TaskGroup() as group:
                sampler = group.create_task(self._sample())
                await self._dispatch(group)
                await self._drain()
                sampler.cancel()
        except BaseExceptionGroup as errors:
            # no failure of a request, which is recorded, but of the program
            raise errors.exceptions[0] from None
        await self._take_sample()
        records = tuple(s.record(self._zero) for s in (*warm, *self._sendings))
        return Run(records, round(self._zero * 1e9), zero_unix, tuple(self._samples))

    async def _warm_up(self, number: int) -> Sending:
        request = self._trace.requests[number % len(self._trace.requests)]
        # a place before the trace draws a prompt that the trace does not have
        index, now = -1 - number, self._now()
        plain = replace(request, cancel_after=None, move_after=None)
        sending = Sending(plain, self._call(index, plain), index, 0, True, now, now)
        await sending.run(self._target)
        return sending

    def _call(self, index: int, request: TraceRequest) -> Call:
        is_text = self._settings.use_text or request.text is not None
        call = Call(
            request_id=f"r{index}" if index >= 0 else f"w{-1 - index}",
            prompt_ids=None if is_text else tuple(self._prompts.ids(index, request)),
            text=self._prompts.text(index, request) if is_text else None,
            max_tokens=request.output_tokens,
            cohort=request.cohort,
        )
        self._target.prepare(call)
        return call

    def _build_next(self) -> None:
        self._calls.append(self._call(self._built, self._trace.requests[self._built]))
        self._built += 1

    async def _dispatch(self, group: asyncio.TaskGroup) -> None:
        for index, request in enumerate(self._trace.requests):
            due = self._zero + request.at
            if not self._calls:
                self._build_next()
            await self._build_ahead(due)
            await asyncio.sleep(max(0.0, due - self._now()))
            previous = self._last_turn.get(request.session or "")
            is_waiting = previous is not None and not previous.done()
            freed = due if is_waiting else await self._take_place(due)
            sending = self._make(index, request, due, freed)
            task = group.create_task(self._serve(sending, previous if is_waiting else None))
            self._tasks.append(task)
            if request.session is not None:
                self._last_turn[request.session] = task

    async def _build_ahead(self, due: float) -> None:
        """Make out calls while there is time to spare, and let others run in between."""
        while (
            len(self._calls) < AHEAD
            and self._built < len(self._trace.requests)
            and self._now() < due - SPARE_S
        ):
            self._build_next()
            await asyncio.sleep(0)

    def _make(self, index: int, request: TraceRequest, due: float, freed: float) -> Sending:
        scheduled = due if self._trace.concurrency is None else freed
        turn, is_warmup = 0, request.at < self._settings.warmup_s
        if request.session is not None:
            turn = self._turns[request.session]
            self._turns[request.session] += 1
        call = self._calls.popleft()
        sending = Sending(request, call, index, turn, is_warmup, scheduled, freed)
        self._sendings.append(sending)
        return sending

    async def _serve(self, sending: Sending, previous: asyncio.Task[Sending] | None) -> Sending:
        if previous is not None:
            ended = (await previous).end
            sending.released = max(ended, await self._take_place(ended))
        if self._is_over:
            sending.skip()
        else:
            self._sent += 1
            self._running.add(sending)
            await sending.run(self._target)
            self._running.discard(sending)
        if self._limit is not None:
            self._places.put_nowait(sending.end)
        self._failed += sending.status is Status.FAILED
        self._tokens += len(sending.clock.times)
        if sending.clock.times:
            self._ttfts.append(sending.clock.times[0] - sending.start)
        return sending

    async def _take_place(self, since: float) -> float:
        """Wait for a free place and return when it became free, at ``since`` at the earliest."""
        return since if self._limit is None else max(since, await self._places.get())

    async def _drain(self) -> None:
        await asyncio.wait(self._tasks, timeout=self._settings.drain_s)
        self._is_over = True
        for sending in self._sendings:
            sending.stop(Status.CUT)
        await asyncio.gather(*self._tasks)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sample_s)
            await self._take_sample()

    async def _take_sample(self) -> None:
        sample = Sample(
            at_s=self._now() - self._zero,
            sent=self._sent,
            running=len(self._running),
            failed=self._failed,
            tokens=self._tokens + sum(len(s.clock.times) for s in self._running),
            ttft_ms=median(self._ttfts) * 1e3 if self._ttfts else None,
            counters=await self._target.counters(),
        )
        self._samples.append(sample)
        if self._watch is not None:
            self._watch.update(sample)
