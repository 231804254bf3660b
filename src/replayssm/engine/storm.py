"""A storm: thousands of short requests with cancellations, swaps and moves, and nothing lost.

Two engines serve a seeded mix on every kind of route. What greedy requests with full reads emit is
compared with ``generate()`` of transformers, the books are balanced after every step, names of
slots that were given back must be refused, and a canary that runs alone before and after must leave
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replayssm.engine.engine import Engine
from replayssm.engine.image import RequestImage
from replayssm.engine.request import STANDARD, Limits, Request, Route, Sampling
from replayssm.errors import ContractError, SlotError
from replayssm.integrations.batch import acquire, release
from replayssm.integrations.speculation import Decoder
from replayssm.ring import RingSpec
from replayssm.types import Format, Impl, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replayssm.engine.request import Event
    from replayssm.integrations.batch import Seat

ROUTES = (
    Route(),
    STANDARD,
    Route(draft_tokens=4, drafter="ngram"),
    Route(depth=ReadDepth.HIGH),
)
BUDGET = 1e-3
"""Largest difference of logits at a divergence that is rounding."""
CANARY = "canary"
CANARY_TOKENS = 24
NAMES_KEPT = 1000


@dataclass(frozen=True, slots=True)
class StormPlan:
    """What blows.

    Attributes:
        requests: How many.
        cancel: Cancellations per new request, on average, of live ones drawn at random.
        swap: Swaps forced per step, on average.
        move: Moves to the other engine per step, on average.
        slots: Seats of each engine.
        arrivals: New requests per step, on average.
        new_tokens: Most tokens of one request.
        seed: Of everything.
    """

    requests: int = 10_000
    cancel: float = 0.2
    swap: float = 1.0
    move: float = 1.0
    slots: int = 48
    arrivals: float = 12.0
    new_tokens: int = 8
    seed: int = 0


@dataclass(slots=True)
class StormResult:
    """What was left.

    Attributes:
        requests: Submitted.
        finished: Emitted everything they were asked for.
        cancelled: Cancelled while live.
        lost: Neither.
        leaked: Seats still taken at the end.
        compared: Requests compared with ``generate()``.
        divergences: Of those, how many differ in some token.
        faults: Of those, how many are not rounding at a near tie.
        stale_names: Names of slots that were given back and refused afterwards, all of those kept.
        reused_names: Names that were not refused.
        canary_is_identical: Whether the canary left the same bits before and after.
        swaps: Swaps, forced and for want of room.
        moves: Moves, as bytes.
        steps: Steps of both engines.
        tokens: Tokens emitted.
        rollbacks: Blocks of which some draft was dropped.
        flushes: Folds.
    """

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    lost: int = 0
    leaked: int = 0
    compared: int = 0
    divergences: int = 0
    faults: int = 0
    stale_names: int = 0
    reused_names: int = 0
    canary_is_identical: bool = False
    swaps: int = 0
    moves: int = 0
    steps: int = 0
    tokens: int = 0
    rollbacks: int = 0
    flushes: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, leaked, wrong or reused."""
        bad = self.lost + self.leaked + self.faults + self.reused_names
        return not bad and self.canary_is_identical


class Storm:
    """Runs a plan on one model.

    Args:
        model: A model the engine serves, in fp32.
        prompts: Prompts to draw from; ``generate()`` runs once on each.
        plan: What blows.
        impl: Implementation.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a transformers model
        prompts: Sequence[Sequence[int]],
        plan: StormPlan,
        *,
        impl: Impl | str = Impl.AUTO,
    ) -> None:
        self._model, self._plan = model, plan
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._impl = Impl(impl)
        self._rng = np.random.default_rng(plan.seed)
        self._live: dict[str, Request] = {}
        self._got: dict[str, list[int]] = {}
        self._names: list[Seat] = []
        self._result = StormResult()

    def run(self, progress: Callable[[int], None] = lambda _: None) -> StormResult:
        """Run the storm; ``progress`` is told how many requests have ended."""
        expected = [self._generate(prompt) for prompt in self._prompts]
        context = max(len(prompt) for prompt in self._prompts)
        context += max(self._plan.new_tokens, CANARY_TOKENS)
        with self._engine(context) as home, self._engine(context) as other:
            engines = (home, other)
            before = self._canary(home)
            while self._result.requests < self._plan.requests or self._live:
                self._disturb(engines, self._submit(engines))
                for engine in engines:
                    self._take(engine.step(), expected)
                    engine.pools.check_whole()
                progress(self._result.finished + self._result.cancelled)
            self._result.canary_is_identical = before == self._canary(home)
            self._result.leaked = sum(engine.pools.taken for engine in engines)
            self._check_names(engines)
            for engine in engines:
                stats = engine.stats()
                for name in ("steps", "rollbacks", "flushes"):
                    own = getattr(self._result, name) + getattr(stats, name)
                    setattr(self._result, name, own)
                self._result.swaps += stats.preemptions
        ended = self._result.finished + self._result.cancelled
        self._result.lost = self._result.requests - ended
        return self._result

    def _engine(self, context: int) -> Engine:
        return Engine(
            self._model,
            Limits(slots=self._plan.slots, context=context, prefill_chunk=256, quantum=4),
            state=Format.S32,
            ring=RingSpec(max_block=5),
            impl=self._impl,
        )

    @torch.no_grad()
    def _generate(self, prompt: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([prompt], device=self._model.device)
        most = self._plan.new_tokens
        out = self._model.generate(ids, max_new_tokens=most, min_new_tokens=most, do_sample=False)
        emitted: list[int] = out[0, len(prompt) :].tolist()
        return emitted

    def _canary(self, engine: Engine) -> bytes:
        """Return the bits of a request that ran alone."""
        engine.submit(Request(CANARY, self._prompts[0], CANARY_TOKENS))
        emitted = 0
        while emitted < CANARY_TOKENS - 1:
            emitted += sum(event.kind == "token" for event in engine.step())
        image = engine.export(CANARY)
        engine.step()
        return image.to_bytes()

    def _submit(self, engines: tuple[Engine, ...]) -> int:
        """Submit what arrives in this step; return how many."""
        plan, rng = self._plan, self._rng
        left = plan.requests - self._result.requests
        arrived = min(left, int(rng.poisson(plan.arrivals)))
        for _ in range(arrived):
            number = self._result.requests
            place = int(rng.integers(len(self._prompts)))
            temperature = 0.8 if rng.random() < 0.1 else 0.0
            request = Request(
                f"{number}/{place}",
                self._prompts[place],
                int(rng.integers(1, plan.new_tokens + 1)),
                route=ROUTES[int(rng.integers(len(ROUTES)))],
                sampling=Sampling(temperature=temperature, seed=number),
            )
            engines[number % 2].submit(request)
            self._live[request.id] = request
            self._result.requests += 1
        return arrived

    def _disturb(self, engines: tuple[Engine, ...], arrived: int) -> None:
        """Cancel, swap and move at random, whatever the victims are doing."""
        for _ in range(self._rng.poisson(self._plan.cancel * arrived)):
            live = [name for engine in engines for name in engine.live()]
            if live:
                name = live[int(self._rng.integers(len(live)))]
                _holder(engines, name).cancel(name)
        for _ in range(self._rng.poisson(self._plan.swap)):
            engine = engines[int(self._rng.integers(2))]
            seated = [name for name in engine.live() if engine.seat(name) is not None]
            if seated:
                name = seated[int(self._rng.integers(len(seated)))]
                self._keep_name(engine, name)
                engine.preempt(name)
        for _ in range(self._rng.poisson(self._plan.move)):
            source = int(self._rng.integers(2))
            names = engines[source].live()
            if names:
                name = names[int(self._rng.integers(len(names)))]
                self._keep_name(engines[source], name)
                blob = engines[source].export(name).to_bytes()
                engines[1 - source].import_(RequestImage.from_bytes(blob))
                self._result.moves += 1

    def _take(self, events: list[Event], expected: list[list[int]]) -> None:
        for event in events:
            name = event.request_id
            if event.kind == "token" and event.token is not None:
                self._got.setdefault(name, []).append(event.token)
                self._result.tokens += 1
            elif event.kind == "cancelled":
                del self._live[name]
                self._got.pop(name, None)
                self._result.cancelled += 1
            elif event.kind in ("finished", "failed"):
                request, got = self._live.pop(name), self._got.pop(name, [])
                self._result.finished += len(got) == request.max_new_tokens
                self._compare(request, got, expected[int(name.partition("/")[2])])

    def _compare(self, request: Request, got: list[int], expected: list[int]) -> None:
        route = request.route
        if request.sampling.temperature or route is None or route.depth is ReadDepth.HIGH:
            return
        self._result.compared += 1
        first = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), -1)
        if first >= 0:
            self._result.divergences += 1
            is_rounding = is_near_tie(self._model, request.prompt, expected[:first], got[first])
            self._result.faults += not is_rounding

    def _keep_name(self, engine: Engine, name: str) -> None:
        seat = engine.seat(name)
        if seat is not None and len(self._names) < NAMES_KEPT:
            self._names.append(type(seat)(seat.pool, seat.ref, seat.kv))

    def _check_names(self, engines: tuple[Engine, ...]) -> None:
        stores = {id(engine.pools.replay): engine.pools.model.kv for engine in engines}
        stores |= {id(engine.pools.standard): engine.pools.model.kv for engine in engines}
        for seat in self._names:
            checks = (
                lambda seat=seat: seat.pool.materialise(seat.ref),
                lambda seat=seat: stores[id(seat.pool)].read(seat.kv, 1),
            )
            for check in checks:
                try:
                    check()
                    self._result.reused_names += 1
                except SlotError:
                    self._result.stale_names += 1


def is_near_tie(
    model: Any,  # noqa: ANN401 - a transformers model
    prompt: Sequence[int],
    agreed: Sequence[int],
    served: int,
    budget: float = BUDGET,
) -> bool:
    """Whether a token differs from that of ``generate()`` by rounding alone.

    Teacher-forced at the first divergence, the logits of the replay path must be those of the plain
    model within ``budget``, and the served token must be as good as the best within it.

    Args:
        model: The model, in fp32.
        prompt: The request's prompt.
        agreed: Tokens before the divergence.
        served: The token that was served.
        budget: In logits.
    """
    tokens = [*prompt, *agreed]
    with torch.no_grad():
        ids = torch.tensor([tokens], device=model.device)
        plain = model(ids, use_cache=False).logits[0, -1].float().cpu().numpy()
    handle = acquire(model)
    try:
        decoder = Decoder(handle)
        own = decoder.step(list(prompt))
        for token in agreed:
            own = decoder.step([token])
    finally:
        release(handle)
    is_within = float(np.abs(own - plain).max()) <= budget
    return bool(is_within and plain.max() - plain[served] <= budget)


def _holder(engines: tuple[Engine, ...], name: str) -> Engine:
    for engine in engines:
        if name in engine.live():
            return engine
    raise ContractError("name", "a live request", name)
