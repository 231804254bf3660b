"""The embedded engine: continuous batching over slots, one scheduler iteration a call.

    with Engine(model, Limits(slots=32)) as engine:
        engine.submit(Request("a", prompt, max_new_tokens=64))
        while not engine.is_idle:
            for event in engine.step():
                ...

A step seats waiting requests, works on at most ``prefill_chunk`` prompt tokens, then decodes every
request whose prompt is read. It runs in the caller's thread; nothing here is thread-safe.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from replayssm.engine.clock import Clock, MonotonicClock
from replayssm.engine.guard import Guard
from replayssm.engine.pools import Pools
from replayssm.engine.request import Event, Limits, Request, Route
from replayssm.engine.roster import Roster
from replayssm.engine.runner import Outcome, Runner
from replayssm.engine.sequence import Sequence
from replayssm.engine.speculative import NgramDrafter
from replayssm.engine.stats import EngineStats, count
from replayssm.errors import ContractError
from replayssm.integrations.batch import acquire, release
from replayssm.integrations.slotted import probe
from replayssm.ring import RingSpec
from replayssm.types import Format, Impl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from torch import nn

    from replayssm.engine.image import RequestImage
    from replayssm.engine.speculative import Draft, Drafter
    from replayssm.integrations.batch import Seat

T = TypeVar("T")
LOG = logging.getLogger("replayssm.engine")
MOST_RETRIES = 2
MAX_DRAFTS = 8


def plain_router(request: Request) -> Route:
    """Return the route of an engine that was given no router: replay, full reads, no drafts."""
    del request
    return Route()


class Engine:
    """Serves requests on a transformers hybrid.

    Args:
        model: A model with recurrent layers; engines on one model share its hooks.
        limits: Memory, lengths and sizes of a step.
        state: State format of the replay path.
        ring: Ring sizes of the replay path; ``max_block`` - 1 drafts fit a round.
        impl: Implementation of both paths.
        router: Says how to serve a request that brings no route.
        clock: Where the time is read.
        guard: Watches cohorts; without one only values that are not finite trip a cohort.
        drafters: Makes a request's drafter, by the name in its route; ``ngram`` is always there.

    Raises:
        ContractError: The model was enabled by someone else, or limits leave no seat.
        UnsupportedError: The model cannot be served.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: Limits,
        *,
        state: Format | str = Format.S32,
        ring: RingSpec | None = None,
        impl: Impl | str = Impl.AUTO,
        router: Callable[[Request], Route] = plain_router,
        clock: Clock | None = None,
        guard: Guard | None = None,
        drafters: Mapping[str, Callable[[], Drafter]] | None = None,
    ) -> None:
        self.limits, self.router = limits, router
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.guard = Guard(share=0.0) if guard is None else guard
        self._drafters = {"ngram": NgramDrafter, **(drafters or {})}
        kv = probe(model)
        self._handle = acquire(model)
        self._vocab = int(self._handle.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self.pools = Pools(
            self._handle,
            kv,
            limits,
            state=Format(state),
            ring=RingSpec(max_block=MAX_DRAFTS + 1) if ring is None else ring,
            impl=Impl(impl),
        )
        self._stats = EngineStats()
        self._runner = Runner(self.pools, self.clock, self._stats)
        self._roster = Roster(self.pools, self.clock, self._stats)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the model go; live requests are dropped."""
        release(self._handle)

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no event undelivered."""
        return not (len(self._roster) or self._roster.has_news)

    def live(self) -> tuple[str, ...]:
        """Return the ids of all live requests."""
        return tuple(sequence.id for sequence in self._roster.live())

    def seat(self, request_id: str) -> Seat | None:
        """Return what a live request holds in memory, None while it waits.

        Raises:
            ContractError: It is not live.
        """
        return self._roster.find(request_id).seat

    def stats(self) -> EngineStats:
        """Return a copy of the counts, and where the engine stands."""
        found = copy.deepcopy(self._stats)
        found.running = len(self._roster.running)
        found.waiting = len(self._roster.waiting)
        found.live_shadows = self.pools.taken - found.running
        found.used = self.pools.used / self.pools.capacity
        found.used_bytes, found.allocated_bytes = self.pools.used_nbytes(), self.pools.nbytes()
        return found

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContractError: It can never be served as it is; nothing was changed.
            CapacityError: One sequence on its route takes more than the whole budget.
        """
        self._check_new(request)
        route = self.router(request) if request.route is None else request.route
        self._check_route(route)
        sequence = Sequence(request, route)
        sequence.route = self.guard.apply(route, request.cohort)
        self._roster.waiting.append(sequence)

    def step(self) -> list[Event]:
        """Run one scheduler iteration; return what happened since the last one."""
        started = self.clock.now()
        self._admit()
        if self._roster.running:
            self._stats.steps += 1
            self._prefill()
            self._decode()
        self._stats.step_seconds += self.clock.now() - started
        return self._roster.collect()

    def run(self) -> list[Event]:
        """Step until idle; return everything that happened."""
        events = []
        while not self.is_idle:
            events += self.step()
        return events

    def cancel(self, request_id: str) -> None:
        """Drop a live request, whatever it is doing.

        Raises:
            ContractError: It is not live.
        """
        self._roster.leave(self._roster.find(request_id), "cancelled")
        self._stats.cancelled += 1

    def preempt(self, request_id: str) -> None:
        """Swap a running request out; it comes back, bit for bit, when there is room.

        Raises:
            ContractError: It holds no seat.
        """
        if request_id not in self._roster.running:
            raise ContractError("request_id", "a request that holds a seat", request_id)
        self._roster.swap_out(self._roster.running[request_id])

    def reroute(self, request_id: str, route: Route) -> None:
        """Serve a live request another way from now on; its state is carried over.

        Raises:
            ContractError: It is not live, or cannot be served that way; nothing was changed.
            CapacityError: There is no room for it on that path, even alone.
        """
        sequence = self._roster.find(request_id)
        self._check_route(route)
        sequence.asked = route
        self._apply_guard(sequence, rebuild=False)

    def export(self, request_id: str) -> RequestImage:
        """Take a live request out of the engine, at whatever phase it is in.

        Raises:
            ContractError: It is not live.
        """
        sequence = self._roster.find(request_id)
        image = self._roster.image(sequence)
        self._roster.leave(sequence, "moved")
        self._stats.moved_out += 1
        return image

    def import_(self, image: RequestImage) -> None:
        """Queue a request that another engine exported; it goes on with the same bits.

        Raises:
            ContractError: It does not fit this engine; nothing was changed.
            CapacityError: One sequence on its route takes more than the whole budget.
        """
        self._check_new(image.request)
        self._check_route(image.route)
        if image.slot is not None:
            self.pools.check_image(image.slot, image.kv, image.position)
        self._roster.admit_image(image, self.guard.apply(image.route, image.request.cohort))
        self._stats.moved_in += 1

    def _admit(self) -> None:
        roster = self._roster
        while roster.waiting:
            sequence = roster.waiting[0]
            if self.pools.fits(sequence.route.path):
                is_new = not sequence.started
                roster.sit(sequence)
                if is_new and self._wants_shadow(sequence):
                    roster.add_shadow(sequence)
                continue
            quantum = self.limits.quantum
            rested = [x for x in roster.running.values() if quantum and x.resident >= quantum]
            if not rested:
                return
            roster.swap_out(max(rested, key=lambda x: x.resident))

    def _wants_shadow(self, sequence: Sequence) -> bool:
        is_sampled = sequence.route.path == "replay" and self.guard.samples(sequence.id)
        return is_sampled and self.pools.fits("standard")

    def _prefill(self) -> None:
        left = self.limits.prefill_chunk
        for sequence in list(self._roster.running.values()):
            size = min(left, sequence.unread)
            if size:
                left -= size
                run = partial(self._runner.prefill, sequence, size)
                self._settle(self._try([sequence], run))

    def _decode(self) -> None:
        running = self._roster.running
        ready = [x for x in running.values() if not x.unread][: self.limits.max_batch]
        if len(ready) < len(running):
            for sequence in ready:  # the others come first next time
                running[sequence.id] = running.pop(sequence.id)
        plain: list[tuple[Sequence, Draft]] = []
        drafted: list[tuple[Sequence, Draft]] = []
        for sequence in ready:
            for draft in self._try([sequence], partial(self._draft, sequence)):
                (drafted if len(draft) else plain).append((sequence, draft))
        for group in (plain, drafted):
            if group:
                rows = [sequence for sequence, _ in group]
                run = partial(self._runner.decode, rows, [draft for _, draft in group])
                self._settle(self._try(rows, run))

    def _draft(self, sequence: Sequence) -> list[Draft]:
        if sequence.drafter is None and sequence.route.drafter is not None:
            sequence.drafter = self._drafters[sequence.route.drafter]()
        return [sequence.propose()]

    def _try(self, sequences: list[Sequence], run: Callable[[], list[T]]) -> list[T]:
        """Return what ``run`` returns; where it raises, restart the sequences it was to serve."""
        try:
            return run()
        except Exception as error:
            LOG.exception("a forward of %d sequences failed", len(sequences))
            self._stats.faults += 1
            self.pools.model.abandon()
            for sequence in reversed(sequences):
                sequence.retries += 1
                if sequence.retries > MOST_RETRIES:
                    self._fail(sequence, f"{type(error).__name__}: {error}")
                else:
                    self._roster.restart(sequence)
            return []

    def _settle(self, outcomes: list[Outcome]) -> None:
        """Tell what a forward emitted, let the guard look at it, and finish what is done."""
        now, trips = self.clock.now(), []
        for outcome in outcomes:
            sequence = outcome.sequence
            cohort = sequence.request.cohort
            who = (cohort, sequence.id, sequence.route)
            if not outcome.is_finite:
                self._stats.non_finite += 1
                trips.append(self.guard.report_non_finite(*who, now))
                self._give_way(sequence)
                continue
            for token in outcome.emitted:
                self._roster.tell(sequence, "token", token)
            trips.append(self.guard.check_gaps(*who, outcome.gaps, now))
            if outcome.emitted:
                if sequence.last_at is not None:
                    pace = (now - sequence.last_at) / len(outcome.emitted)
                    trips += [self.guard.check_pace(*who, pace, now) for _ in outcome.emitted]
                sequence.last_at = now
            reason = sequence.finish_reason
            if reason:
                self._roster.leave(sequence, "finished", reason)
                count(self._stats.finished, reason)
        for trip in trips:
            if trip is not None:
                count(self._stats.fallbacks, trip.cohort)
                for sequence in self._roster.live():
                    if sequence.request.cohort == trip.cohort:
                        self._apply_guard(sequence, rebuild=trip.reason != "latency")

    def _give_way(self, sequence: Sequence) -> None:
        """Rebuild a sequence whose logits were not finite; the guard has changed its route."""
        if sequence.route.path == "standard":
            self._fail(sequence, "logits are not finite on the standard path")
        else:
            self._roster.restart(sequence)

    def _apply_guard(self, sequence: Sequence, *, rebuild: bool) -> None:
        """Serve a sequence as its guard allows, from its tokens or with the state it has."""
        route = self.guard.apply(sequence.asked, sequence.request.cohort)
        before, sequence.route = sequence.route, route
        if route.drafter != before.drafter:
            sequence.drafter = None
        if route.path == before.path:
            return
        if rebuild:
            self._roster.restart(sequence)
        else:
            self._roster.switch(sequence, route.path)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        self._roster.leave(sequence, "failed", reason)
        self._stats.failed += 1

    def _check_new(self, request: Request) -> None:
        if request.id in self.live():
            raise ContractError("id", "one that is not live", request.id)
        if max(request.prompt) >= self._vocab or min(request.prompt) < 0:
            raise ContractError("prompt", f"tokens from 0 to {self._vocab - 1}", "others")
        if request.length > self.limits.context:
            expected = f"at most {self.limits.context} tokens with the output (context)"
            raise ContractError("prompt", expected, request.length)

    def _check_route(self, route: Route) -> None:
        self.pools.check_ever(route.path)
        most = self.pools.ring.max_block - 1
        if route.draft_tokens > most:
            raise ContractError("draft_tokens", f"at most {most} (max_block - 1)", route)
        if route.drafter is not None and route.drafter not in self._drafters:
            raise ContractError("drafter", f"one of {sorted(self._drafters)}", route.drafter)
