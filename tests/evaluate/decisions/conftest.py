"""A backend without an engine: real tokens of a tiny model, times from a cost function."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("scipy")

from replayssm.engine.speculative import AcceptanceStats
from replayssm.evaluate.decisions.driving import Driver
from replayssm.evaluate.decisions.outcome import Operations
from replayssm.evaluate.decisions.plan import parse_plan
from replayssm.evaluate.decisions.serving import Job


@dataclass
class Clock:
    time: float = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


@dataclass
class FakeEngine:
    """Continuous batching on a virtual clock; tokens from ``speak``, step time from ``cost``.

    ``cost(routes, prefills)`` gives the seconds of one step; routes are those of its rows.
    """

    cost: object
    speak: object
    slots: int = 64
    window: int = 4
    noise: float = 0.0
    seed: int = 0
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._waiting, self._running = [], []
        self._flushes, self._acceptance = 0, AcceptanceStats()
        self._rng = np.random.default_rng(self.seed)

    def submit(self, request) -> None:
        self._waiting.append(request)

    def step(self):
        events, prefills = [], 0
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting.pop(0)
            self._running.append(SimpleNamespace(r=request, done=0, words=self.speak(request)))
            prefills += 1
        seconds = self.cost([x.r.variant for x in self._running], prefills)
        self.clock.advance(seconds * float(np.exp(self.noise * self._rng.standard_normal())))
        for row in list(self._running):
            drafts = row.r.variant.draft_tokens if row.done else 0
            take = min(1 + drafts // 2, row.r.output_tokens - row.done)
            if drafts:
                self._acceptance.verifies += 1
                self._acceptance.drafted += drafts
                self._acceptance.accepted += take - 1
                self._acceptance.accepted_at[: take - 1] += 1
            words = row.words[row.done : row.done + take]
            events += [self._event(row, "token", word) for word in words]
            self._flushes += (row.done + take) // self.window - row.done // self.window
            row.done += take
            if row.done == row.r.output_tokens:
                self._running.remove(row)
                events.append(self._event(row, "finished", None))
        return events

    def _event(self, row, kind, token):
        return SimpleNamespace(request_id=row.r.id, kind=kind, token=token, at=self.clock.now())

    def stats(self):
        kept = copy.deepcopy(self._acceptance)
        return SimpleNamespace(
            flushes=self._flushes, rollbacks=0, preemptions=0, restarts=0, drafted=kept.drafted,
            accepted=kept.accepted, running=len(self._running), acceptance={"all": kept},
            used_bytes=1000 * len(self._running),
        )  # fmt: skip

    @property
    def is_idle(self):
        return not self._waiting and not self._running


@dataclass
class FakeBackend:
    """Serves every variant from a :class:`FakeEngine`."""

    cost: object
    speak: object
    noise: float = 0.01
    leak: int = 0
    made: int = 0

    def _server(self, pick):
        self.made += 1
        engine = FakeEngine(self.cost, self.speak, noise=self.noise, seed=self.made)

        def request(job: Job):
            return SimpleNamespace(
                id=job.id, prompt=job.prompt, output_tokens=job.output_tokens, variant=pick(job)
            )

        return Driver(engine, request, lambda at: engine.clock.advance(at - engine.clock.now()))

    def server(self, variant):
        return self._server(lambda _: variant)

    def routed(self, routes):
        standard = next(iter(routes.values()))
        return self._server(lambda job: routes.get(job.cohort, standard))

    def operations(self, server, canary, *, drill):
        return Operations(
            True if drill else None, ("non-finite: passed, tripped",), 64, 64 - self.leak, True
        )


TABLE = {
    "name": "made-up",
    "model": "random-gdn",
    "hardware": {"context": 512, "max_batch": 16},
    "design": {"pairs": 8, "max_pairs": 8, "surface_pairs": 8},
    "cost": {"per_gpu_hour": 2.0},
    "traffic": {"trace": "trace.jsonl"},
    "cohorts": [
        {"name": "pool", "mode": "batch", "arrival": "closed", "concurrency": 8,
         "prompt_tokens": [8, 64], "output_tokens": [4, 16], "requests": 8, "graded": 8},
        {"name": "night", "mode": "interactive", "arrival": "closed", "concurrency": 1,
         "prompt_tokens": [65, 128], "output_tokens": [4, 16], "requests": 3, "graded": 8},
    ],
    "variants": [
        {"name": "standard", "path": "standard", "state": "f32"},
        {"name": "s32-full", "path": "replay", "state": "s32", "window": 4},
        {"name": "s32-drafts", "path": "replay", "state": "s32", "window": 4,
         "drafter": "ngram", "draft_tokens": 2},
    ],
    "decisions": {
        "bottleneck": {"margin": 1.0},
        "compatibility": {"steps": 8},
        "precision": {"metric": "mean_kl", "margin": 0.01, "adversarial": 4, "buckets": [64]},
        "outcome": {"metric": "throughput", "margin": 1.0},
    },
    "surface": {"batches": [1, 2], "prompts": [16], "output": 8},
}  # fmt: skip


@pytest.fixture
def table():
    return copy.deepcopy(TABLE)


@pytest.fixture
def plan(table):
    return parse_plan(table)


@pytest.fixture
def fake():
    return FakeBackend
