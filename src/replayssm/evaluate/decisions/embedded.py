"""Servers of the engine in this package: one engine per variant, all with the same memory limit."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from replayssm.engine.clock import MonotonicClock
from replayssm.engine.drill import Drill
from replayssm.engine.engine import Engine
from replayssm.engine.request import STANDARD, Limits, Request, Route
from replayssm.errors import ContractError
from replayssm.evaluate.decisions.driving import Driver
from replayssm.evaluate.decisions.outcome import Operations
from replayssm.evaluate.decisions.routing import RouteRow, route_of
from replayssm.evaluate.decisions.serving import Job
from replayssm.evaluate.drafting import engine_drafters
from replayssm.evaluate.session import twin
from replayssm.ring import RingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from replayssm.engine.clock import Clock
    from replayssm.engine.drill import Rehearsal
    from replayssm.engine.speculative import Drafter
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.serving import Server
    from replayssm.evaluate.decisions.tables import Variant
    from replayssm.evaluate.subject import Subject

MIB = 1 << 20
PROMPT = 64


class Embedded:
    """Makes servers on the embedded engine; a context manager, which lets the model go on exit.

    Args:
        subject: The model; a twin that shares its parameters is served, so that it stays free for
            the other decisions.
        plan: Memory, lengths and sizes.
        clock: Makes each engine's clock.
    """

    def __init__(
        self, subject: Subject, plan: RolloutPlan, clock: Callable[[], Clock] = MonotonicClock
    ) -> None:
        self._model, self._plan, self._clock = twin(subject.model), plan, clock
        self._engines: list[Engine] = []
        self._subject, self._held = subject, ExitStack()
        self._drafters: dict[str, Callable[[], Drafter]] = {}

    def __enter__(self) -> Embedded:
        made = engine_drafters(self._subject, self._plan.variants)
        self._drafters = self._held.enter_context(made)
        gc.freeze()  # the collection before every run need not look at all that was loaded
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.unfreeze()
        for engine in self._engines:
            engine.close()
        self._held.close()

    def server(self, variant: Variant) -> Driver:
        """Return a server that gives every request to one variant."""
        route = to_engine(route_of(variant))
        return self._serve(variant, lambda _: route, variant.draft_tokens)

    def routed(self, routes: Mapping[str, Variant]) -> Driver:
        """Return a server that routes by cohort; all replay routes share one pool.

        Raises:
            ContractError: They do not.
        """
        replay = [v for v in routes.values() if v.is_replay]
        if len({v.pool for v in replay}) > 1:
            raise ContractError("routes", "one state format and window", [v.pool for v in replay])
        known = {name: to_engine(route_of(variant)) for name, variant in routes.items()}
        pool = replay[0] if replay else next(iter(routes.values()))
        most = max((v.draft_tokens for v in replay), default=0)
        return self._serve(pool, lambda request: known.get(request.cohort, STANDARD), most)

    def operations(self, server: Server, canary: Job, *, drill: bool) -> Operations:
        """Rehearse the fallback, look for leaks, and run a canary before and after the drill.

        Raises:
            ContractError: The server is not one of these, or its books do not balance.
        """
        engine = server.engine if isinstance(server, Driver) else None
        if not isinstance(engine, Engine):
            raise ContractError("server", "one of the embedded engine", type(server).__name__)
        before = server.run([canary]).served[0].tokens
        rehearsed = self._rehearse(canary) if drill else []
        after = server.run([canary]).served[0].tokens
        engine.pools.check_whole()
        kv = engine.pools.model.kv
        lines = tuple(_line(r) for r in rehearsed)
        passed = all(r.is_passed for r in rehearsed) if drill else None
        return Operations(passed, lines, kv.num_slots, kv.num_free, before == after)

    def _serve(self, pool: Variant, router: Callable[[Request], Route], drafts: int) -> Driver:
        hardware = self._plan.hardware
        engine = Engine(
            self._model,
            Limits(
                memory_bytes=int(hardware.memory_mib * MIB),
                context=hardware.context,
                prefill_chunk=hardware.prefill_chunk,
                max_batch=hardware.max_batch,
            ),
            state=pool.state,
            ring=RingSpec(window=pool.window, max_block=drafts + 1),
            router=router,
            clock=self._clock(),
            drafters=self._drafters,
        )
        self._engines.append(engine)
        return Driver(engine, _request, lambda at: _wait(engine.clock, at))

    def _rehearse(self, canary: Job) -> list[Rehearsal]:
        # a state format that promises tokens, since wrong ones are counted; short prompts, since
        # what a rehearsal shows does not depend on their length
        drill = Drill(self._model, [canary.prompt[-PROMPT:], canary.prompt[: PROMPT // 2]])
        log = logging.getLogger("replayssm")
        level = log.level
        log.setLevel(logging.CRITICAL)  # planted faults are no news
        try:
            return list(drill.run())
        finally:
            log.setLevel(level)


def to_engine(row: RouteRow) -> Route:
    """Return the engine's route for a row of ``routing.json``."""
    return Route(path=row.path, depth=row.depth, draft_tokens=row.draft_tokens, drafter=row.drafter)


def _line(rehearsal: Rehearsal) -> str:
    word = "passed" if rehearsal.is_passed else f"failed ({rehearsal.note or 'wrong tokens'})"
    trips = f", {'; '.join(rehearsal.trips)}" if rehearsal.trips else ""
    return f"{rehearsal.name}: {word}{trips}"


def _request(job: Job) -> Request:
    return Request(job.id, job.prompt, job.output_tokens, cohort=job.cohort)


def _wait(clock: Clock, at: float) -> None:
    advance = getattr(clock, "advance", None)
    if advance is not None:
        advance(max(0.0, at - clock.now()))
    else:
        time.sleep(max(0.0, at - clock.now()))
