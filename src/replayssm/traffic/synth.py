"""Generated traces: open arrivals, a closed loop, an offline batch, a day with its night."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError
from replayssm.traffic.arrivals import along, gaps
from replayssm.traffic.trace import Provenance, Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

GENERATED = "synthetic"
DAY_PARTS = 64


class Profile(StrEnum):
    """Shape of a generated load."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CLOSED = "closed"
    OFFLINE = "offline"
    DAY_NIGHT = "day-night"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and outputs.

    Attributes:
        prompt: Tokens of a prompt.
        output: Tokens of an output.
        spread: Lengths are drawn evenly from ``[(1 - spread) x, (1 + spread) x]``.
    """

    prompt: int = 512
    output: int = 128
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise ContractError(name, "at least 1 token", getattr(self, name))
        if not 0 <= self.spread <= 1:
            raise ContractError("spread", "0 to 1", self.spread)

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Return ``count`` pairs of prompt and output tokens, each at least 1."""
        low, high = 1 - self.spread, 1 + self.spread
        prompts = np.rint(self.prompt * rng.uniform(low, high, count)).astype(int)
        outputs = np.rint(self.output * rng.uniform(low, high, count)).astype(int)
        return [(max(1, int(p)), max(1, int(o))) for p, o in zip(prompts, outputs, strict=True)]


@dataclass(frozen=True, slots=True)
class DayNight:
    """One day, shrunk to ``span`` seconds: two thirds of it day, one third night.

    Attributes:
        span: Seconds from morning to morning.
        day: Requests by day, most of them at noon.
        long_share: Share of those with a long history.
        long_factor: How many times longer their prompts are.
        sessions: Interactive sessions at night.
        turns: Turns of each; every prompt holds the turns before it.
        lengths: Lengths of a request by day and of one turn at night.
    """

    span: float = 600.0
    day: int = 1000
    long_share: float = 0.05
    long_factor: int = 8
    sessions: int = 4
    turns: int = 6
    lengths: Lengths = Lengths(spread=0.5)

    def __post_init__(self) -> None:
        if not 0 < self.span < np.inf:
            raise ContractError("span", "more than 0 seconds", self.span)
        if not 0 <= self.long_share <= 1:
            raise ContractError("long_share", "0 to 1", self.long_share)
        for name in ("day", "long_factor", "sessions", "turns"):
            if getattr(self, name) < 1:
                raise ContractError(name, "at least 1", getattr(self, name))


def open_arrivals(
    count: int, rate: float, lengths: Lengths, *, burstiness: float = 1.0, seed: int = 0
) -> Trace:
    """Return requests that arrive whether or not others are done; burstiness 1 is Poisson."""
    rng = np.random.default_rng((seed, 1))
    at = np.cumsum(gaps(_positive(count), rate, burstiness, seed))
    requests = [
        TraceRequest(float(t), prompt, output)
        for t, (prompt, output) in zip(at, lengths.draw(count, rng), strict=True)
    ]
    step = f"{count} requests, {rate:g} a second, burstiness {burstiness:g}, {lengths}, seed {seed}"
    return _trace(requests, step)


def closed_loop(count: int, concurrency: int, lengths: Lengths, *, seed: int = 0) -> Trace:
    """Return requests of which ``concurrency`` are kept in flight."""
    drawn = lengths.draw(_positive(count), np.random.default_rng((seed, 1)))
    step = f"{count} requests, {concurrency} in flight, {lengths}, seed {seed}"
    return _trace([TraceRequest(0.0, *pair) for pair in drawn], step, concurrency)


def offline(count: int, lengths: Lengths, *, seed: int = 0) -> Trace:
    """Return requests that all arrive at 0."""
    drawn = lengths.draw(_positive(count), np.random.default_rng((seed, 1)))
    step = f"{count} requests at once, {lengths}, seed {seed}"
    return _trace([TraceRequest(0.0, *pair, cohort="batch") for pair in drawn], step)


def day_night(spec: DayNight, *, seed: int = 0) -> Trace:
    """Return a day at high concurrency with some long histories, and a few sessions at night.

    Cohorts are ``day``, ``long`` and ``night``.
    """
    requests = [*_day(spec, seed), *_night(spec, seed)]
    return _trace(sorted(requests, key=lambda r: r.at), f"{spec}, seed {seed}")


def _day(spec: DayNight, seed: int) -> list[TraceRequest]:
    rng = np.random.default_rng((seed, 2))
    # no traffic at dawn and dusk, a smooth peak at noon
    shape = np.sin(np.pi * (np.arange(DAY_PARTS) + 0.5) / DAY_PARTS) ** 2
    at = along(shape, spec.day, spec.span * 2 / 3, seed)
    is_long = rng.random(spec.day) < spec.long_share
    made = []
    drawn = spec.lengths.draw(spec.day, rng)
    for t, (prompt, output), long in zip(at, drawn, is_long, strict=True):
        tokens = prompt * spec.long_factor if long else prompt
        made.append(TraceRequest(float(t), tokens, output, cohort="long" if long else "day"))
    return made


def _night(spec: DayNight, seed: int) -> list[TraceRequest]:
    rng = np.random.default_rng((seed, 3))
    night, made = spec.span / 3, []
    for session in range(spec.sessions):
        start = spec.span - night + rng.uniform(0, night / 4)
        pauses = rng.exponential(1.0, spec.turns)
        # the last turn still begins before morning
        at = start + np.cumsum(pauses) / pauses.sum() * (spec.span - start) * 0.95
        history = 0
        for t, (prompt, output) in zip(at, spec.lengths.draw(spec.turns, rng), strict=True):
            tokens = history + prompt
            made.append(
                TraceRequest(float(t), tokens, output, cohort="night", session=f"night-{session}")
            )
            history = tokens + output
    return made


def _positive(count: int) -> int:
    if count < 1:
        raise ContractError("num_prompts", "at least 1 request", count)
    return count


def _trace(requests: Sequence[TraceRequest], step: str, concurrency: int | None = None) -> Trace:
    origin = Provenance(GENERATED, None, GENERATED, len(requests), conversions=(step,))
    return Trace(tuple(requests), origin, concurrency=concurrency)
