"""Rehearsing what must not go wrong: every fault is planted, noticed and survived.

Each rehearsal runs a small engine of its own on greedy requests and knows what an undisturbed
engine emits. A rehearsal passes when the fault was noticed as it should be, no request was lost,
no slot leaked, and the tokens are the right ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replayssm.engine.clock import VirtualClock, Work
from replayssm.engine.engine import Engine
from replayssm.engine.guard import Guard, Tolerance
from replayssm.engine.image import RequestImage
from replayssm.engine.request import STANDARD, Limits, Request, Route
from replayssm.errors import ContractError
from replayssm.models.registry import find_mixers
from replayssm.state import StatePool
from replayssm.storage import EXACT_FORMATS
from replayssm.types import Format, Impl, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from replayssm.storage import LayerStore

TOKENS = 40
FAULT_AT = 8
PACE = 0.001
LIMIT = 0.01


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one rehearsal showed.

    Attributes:
        name: What was rehearsed.
        is_passed: Whether it went as it should.
        trips: ``reason -> where to`` of the guard, in order.
        requests: Requests served.
        lost: Requests that did not emit everything they were asked for.
        wrong: Tokens that differ from what they should be.
        note: What was wrong otherwise, or nothing.
    """

    name: str
    is_passed: bool
    trips: tuple[str, ...]
    requests: int
    lost: int
    wrong: int
    note: str = ""


@dataclass(slots=True)
class Run:
    """One engine at work.

    Attributes:
        engine: The engine.
        tokens: Emitted tokens by request.
        trip_at: Tokens that every request had emitted when the guard last tripped.
    """

    engine: Engine
    tokens: dict[str, list[int]] = field(default_factory=dict)
    trip_at: dict[str, int] = field(default_factory=dict)

    def steps(self) -> Iterator[int]:
        """Step until idle, yielding the number of every step before it is run."""
        number = 0
        while not self.engine.is_idle:
            yield number
            trips = len(self.engine.guard.trips)
            for event in self.engine.step():
                if event.kind == "token" and event.token is not None:
                    self.tokens.setdefault(event.request_id, []).append(event.token)
            if len(self.engine.guard.trips) > trips:
                self.trip_at = {name: len(own) for name, own in self.tokens.items()}
            self.engine.pools.check_whole()
            number += 1


class Drill:
    """Rehearses on one model.

    Args:
        model: A model the engine serves.
        prompts: Prompts, two at least.
        state: State format of the replay path.
        impl: Implementation.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        state: Format | str = Format.S32,
        impl: Impl | str = Impl.AUTO,
    ) -> None:
        if len(prompts) < 2:
            raise ContractError("prompts", "at least two", len(prompts))
        self._model, self._prompts = model, [tuple(prompt) for prompt in prompts]
        self._state, self._impl = Format(state), Impl(impl)
        self._context = max(len(prompt) for prompt in self._prompts) + TOKENS
        self._plain: dict[str, list[int]] | None = None

    def run(self) -> Iterator[Rehearsal]:
        """Yield every rehearsal as it ends."""
        yield self._precision()
        yield self._non_finite()
        yield self._latency()
        yield self._crash()
        yield self._swap()
        yield self._move()
        yield self._switch()

    def _engine(self, guard: Guard | None = None, clock: VirtualClock | None = None) -> Engine:
        return Engine(
            self._model,
            Limits(slots=2 * len(self._prompts), context=self._context),
            state=self._state,
            impl=self._impl,
            guard=guard,
            clock=clock,
        )

    def _start(self, engine: Engine, route: Route) -> Run:
        for number, prompt in enumerate(self._prompts):
            engine.submit(Request(str(number), prompt, TOKENS, route=route))
        return Run(engine)

    def _expected(self) -> dict[str, list[int]]:
        """Return what undisturbed requests emit with full reads."""
        if self._plain is None:
            with self._engine() as engine:
                run = self._start(engine, Route())
                for _ in run.steps():
                    pass
                self._plain = run.tokens
        return self._plain

    def _expected_if_exact(self) -> dict[str, list[int]] | None:
        """Return the same where another way to the state leads to the same state, else None."""
        return self._expected() if self._state in EXACT_FORMATS else None

    def _rest_on_standard(self, run: Run) -> dict[str, list[int]]:
        """Return what the standard path makes of the tokens that were served before the trip."""
        expected = {}
        with Engine(
            self._model,
            Limits(slots=len(self._prompts), context=self._context),
            impl=self._impl,
        ) as engine:
            for number, prompt in enumerate(self._prompts):
                name = str(number)
                served = run.tokens[name][: run.trip_at[name]]
                left = TOKENS - len(served)
                expected[name] = served
                if left:
                    engine.submit(Request(name, (*prompt, *served), left, route=STANDARD))
            rest = Run(engine)
            for _ in rest.steps():
                pass
        return {name: own + rest.tokens.get(name, []) for name, own in expected.items()}

    def _precision(self) -> Rehearsal:
        """Garble a checkpoint: a shadow notices, full reads do not help, the standard path does."""
        guard = Guard(share=1.0, tolerance=Tolerance(delta_logprob=0.2))
        with self._engine(guard) as engine:
            run = self._start(engine, Route(depth=ReadDepth.HIGH))
            for step in run.steps():
                if step == FAULT_AT:
                    _disturb(engine, _garble)
            expected = self._rest_on_standard(run) if run.trip_at else {}
            wanted = ("tolerance -> full", "tolerance -> standard")
            return self._judge("precision", run, expected, wanted)

    def _non_finite(self) -> Rehearsal:
        """Write NaN into rings, twice: the cohort goes to full reads, then to standard."""
        guard = Guard(share=0.0)
        with self._engine(guard) as engine:
            run = self._start(engine, Route(depth=ReadDepth.HIGH))
            for step in run.steps():
                if step in (FAULT_AT, 2 * FAULT_AT):
                    _disturb(engine, _poison)
            expected = self._rest_on_standard(run) if run.trip_at else {}
            wanted = ("non-finite -> full", "non-finite -> standard")
            return self._judge("non-finite", run, expected, wanted)

    def _latency(self) -> Rehearsal:
        """Make the replay path slow on a virtual clock."""
        is_slow = False

        def cost(work: Work) -> float:
            return 2 * LIMIT if is_slow and work.replay_rows else PACE

        guard = Guard(share=0.0, tolerance=Tolerance(itl=LIMIT, itl_tokens=8))
        with self._engine(guard, VirtualClock(cost)) as engine:
            run = self._start(engine, Route(depth=ReadDepth.HIGH))
            for step in run.steps():
                is_slow = is_slow or step == FAULT_AT
            wanted = ("latency -> full", "latency -> standard")
            return self._judge("latency", run, None, wanted)

    def _crash(self) -> Rehearsal:
        """Let a forward raise between its layers: its sequences are rebuilt from their tokens."""
        with self._engine() as engine:
            run = self._start(engine, Route())
            for step in run.steps():
                if step == FAULT_AT:
                    _break_once(self._model)
            note = "" if engine.stats().restarts == len(self._prompts) else "nothing was rebuilt"
            return self._judge("crash", run, self._expected_if_exact(), (), note)

    def _swap(self) -> Rehearsal:
        """Swap every live request out and in again."""
        with self._engine() as engine:
            run = self._start(engine, Route())
            for step in run.steps():
                if step in (FAULT_AT, 2 * FAULT_AT):
                    for name in engine.live():
                        engine.preempt(name)
            swaps = engine.stats().preemptions
            note = "" if swaps == 2 * len(self._prompts) else f"{swaps} swaps"
            return self._judge("swap", run, self._expected(), (), note)

    def _move(self) -> Rehearsal:
        """Move every live request to another engine, as bytes."""
        with self._engine() as home, self._engine() as other:
            run = self._start(home, Route())
            for step in run.steps():
                if step == FAULT_AT:
                    for name in home.live():
                        other.import_(RequestImage.from_bytes(home.export(name).to_bytes()))
                    break
            home.run()
            moved = Run(other, run.tokens)
            for _ in moved.steps():
                pass
            note = "" if home.pools.taken == 0 else "seats were left behind"
            return self._judge("move", moved, self._expected(), (), note)

    def _switch(self) -> Rehearsal:
        """Switch all live requests replay -> standard -> replay in mid-stream."""
        with self._engine() as engine:
            run = self._start(engine, Route())
            for step in run.steps():
                route = {FAULT_AT: STANDARD, 2 * FAULT_AT: Route()}.get(step)
                if route is not None:
                    for name in engine.live():
                        engine.reroute(name, route)
            return self._judge("switch", run, self._expected_if_exact(), ())

    def _judge(
        self,
        name: str,
        run: Run,
        expected: dict[str, list[int]] | None,
        wanted: tuple[str, ...],
        note: str = "",
    ) -> Rehearsal:
        trips = tuple(f"{trip.reason} -> {trip.to}" for trip in run.engine.guard.trips)
        lost = sum(len(run.tokens.get(str(i), ())) != TOKENS for i in range(len(self._prompts)))
        wrong = 0
        for request_id, right in (expected or {}).items():
            wrong += sum(a != b for a, b in zip(run.tokens[request_id], right, strict=False))
        if trips != wanted:
            note = note or f"expected trips {wanted}"
        if run.engine.pools.taken:
            note = note or f"{run.engine.pools.taken} seats leaked"
        is_passed = not (lost or wrong or note)
        return Rehearsal(name, is_passed, trips, len(self._prompts), lost, wrong, note)


def _disturb(engine: Engine, fault: Callable[[LayerStore, int], None]) -> None:
    """Mutates every recurrent layer's slot of one running sequence."""
    seat = engine.seat(engine.live()[0])
    if seat is None or not isinstance(seat.pool, StatePool):
        raise ContractError("drill", "a running request on the replay path", seat)
    for store in seat.pool.stores:
        fault(store, seat.ref.slot)


def _garble(store: LayerStore, slot: int) -> None:
    store.high[slot] = store.high[slot].flip(-1)


def _poison(store: LayerStore, slot: int) -> None:
    store.v[slot] = math.nan


def _break_once(model: nn.Module) -> None:
    """Mutates a model: the next forward raises in its last recurrent layer."""
    mixers, _ = find_mixers(model)

    def fail(*_: object) -> None:
        hook.remove()
        raise RuntimeError("planted by the drill")

    hook = mixers[-1].module.register_forward_pre_hook(fail)
