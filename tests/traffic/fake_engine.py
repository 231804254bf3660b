"""An engine without a model, which keeps to the contract and counts what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from replayssm.errors import CapacityError, ContractError


@dataclass(frozen=True)
class Ask:
    id: str
    tokens: int


@dataclass(frozen=True)
class Event:
    request_id: str
    kind: str
    at: float
    reason: str = ""


@dataclass
class Stats:
    steps: int = 0
    by_kind: dict = field(default_factory=dict)
    running: int = 0
    name: str = "not a number"


class Clock:
    def __init__(self):
        self.time = 100.0

    def now(self):
        return self.time

    def advance(self, seconds):
        assert seconds >= 0
        self.time += seconds


class FakeEngine:
    """Emits ``per_step`` tokens of every seated request in a step that costs ``cost`` seconds."""

    def __init__(self, slots=4, *, clock=None, cost=0.01, per_step=1, longest=1000):
        self.slots, self.clock, self.cost = slots, clock or Clock(), cost
        self.per_step, self.longest = per_step, longest
        self.waiting: list[Ask] = []
        self.left: dict[str, int] = {}
        self.log: list[str] = []
        self.news: list[Event] = []
        self.breaks_at: str | None = None
        self.counts = Stats()

    @property
    def is_idle(self):
        return not (self.waiting or self.left or self.news)

    def submit(self, ask):
        if ask.tokens > self.longest:
            raise ContractError("max_new_tokens", f"at most {self.longest}", ask.tokens)
        self.waiting.append(ask)

    def step(self):
        self.counts.steps += 1
        events, self.news = self.news, []
        while self.waiting and len(self.left) < self.slots:
            ask = self.waiting.pop(0)
            self.left[ask.id] = ask.tokens
            events.append(Event(ask.id, "admitted", self.clock.now()))
        self.clock.advance(self.cost)
        for name in list(self.left):
            if name == self.breaks_at:
                raise RuntimeError("the engine broke")
            for _ in range(min(self.per_step, self.left[name])):
                events.append(Event(name, "token", self.clock.now()))
                self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
                events.append(Event(name, "finished", self.clock.now(), "length"))
        return events

    def cancel(self, name):
        known = len(self.waiting) + len(self.left)
        self.waiting = [ask for ask in self.waiting if ask.id != name]
        self.left.pop(name, None)
        assert known - len(self.waiting) - len(self.left) == 1, f"{name} is not here"
        self.log.append(f"cancel {name}")
        self.news.append(Event(name, "cancelled", self.clock.now()))

    def export(self, name):
        self.log.append(f"export {name}")
        return name, self.left.pop(name)

    def import_(self, image):
        if len(self.left) >= self.slots:
            raise CapacityError("no free slot")
        name, left = image
        self.left[name] = left
        self.log.append(f"import {name}")

    def stats(self):
        self.counts.running = len(self.left)
        self.counts.by_kind = {"decode": self.counts.steps}
        return self.counts


def ask(call) -> Ask:
    return Ask(call.request_id, call.max_tokens)
