"""The course of a run: load over time out of its records, the target over time out of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError
from replayssm.traffic.record import Status
from replayssm.traffic.steady import running
from replayssm.traffic.use import known

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from replayssm.traffic.record import Record
    from replayssm.traffic.run import Sample

    Array = NDArray[np.float64]
    Whole = NDArray[np.int64]

BINS, FEWEST = 120, 20
SPANS = 120


@dataclass(frozen=True, slots=True)
class Load:
    """Requests over time, warm-ups left out, in bins of one width.

    Attributes:
        width_s: Width of a bin.
        edges_s: ``[bins + 1]`` where each begins, and where the last one ends.
        running: ``[bins]`` most requests in flight.
        scheduled: ``[bins]`` requests a second that the trace asked for.
        completed: ``[bins]`` requests a second that succeeded.
        failed: ``[bins]`` requests a second that failed.
        tokens: ``[bins]`` output tokens a second, those of all requests.
        lag_ms: ``[bins]`` longest schedule lag of those due in it; NaN where none was.
        client_lag_ms: ``[bins]`` longest of the client's part of it.
    """

    width_s: float
    edges_s: Array
    running: Array
    scheduled: Array
    completed: Array
    failed: Array
    tokens: Array
    lag_ms: Array
    client_lag_ms: Array


@dataclass(frozen=True, slots=True)
class Target:
    """The target over time by its own counts; NaN where it does not say or nothing ran.

    Attributes:
        edges_s: ``[spans + 1]`` when it was asked; neighbours are joined into at most 120 spans.
        step_ms: ``[spans]`` mean step, prefills included.
        plain_ms: ``[spans]`` mean decode forward without a flush.
        flushing_ms: ``[spans]`` mean decode forward with one.
        used_bytes: ``[spans]`` most bytes in use.
        allocated_bytes: ``[spans]`` most bytes allocated.
        running: ``[spans]`` most sequences that held a slot.
        waiting: ``[spans]`` most sequences that waited for one.
    """

    edges_s: Array
    step_ms: Array
    plain_ms: Array
    flushing_ms: Array
    used_bytes: Array
    allocated_bytes: Array
    running: Array
    waiting: Array


def load(records: Sequence[Record]) -> Load:
    """Return the requests of a run over time.

    Raises:
        ContractError: There is no record beside warm-ups.
    """
    kept = [r for r in records if not r.warmup]
    if not kept:
        raise ContractError("records", "at least one that is no warm-up", "none")
    span = max(r.end_s for r in kept) - min(r.scheduled_s for r in kept)
    # of a few requests, bins of one each would show nothing
    width = _width(span, min(BINS, max(FEWEST, len(kept) // 2)))

    def bins(times: Iterable[float]) -> Whole:
        return np.floor(np.fromiter(times, float) / width).astype(np.int64)

    due, ended = bins(r.scheduled_s for r in kept), bins(r.end_s for r in kept)
    first, count = due.min(), int(ended.max() - due.min()) + 1

    def rate(places: Whole) -> Array:
        return np.bincount(places - first, minlength=count) / width

    instants, in_flight = running(kept)
    states = np.array([r.status for r in kept])
    return Load(
        width_s=width,
        edges_s=width * (first + np.arange(count + 1)),
        running=_most(bins(instants) - first, in_flight, count),
        scheduled=rate(due),
        completed=rate(ended[states == Status.OK]),
        failed=rate(ended[states == Status.FAILED]),
        tokens=rate(bins(chain.from_iterable(r.token_times_s for r in kept))),
        lag_ms=_longest(due - first, [r.lag for r in kept], count),
        client_lag_ms=_longest(due - first, [r.client_lag for r in kept], count),
    )


def target(samples: Sequence[Sample]) -> Target | None:
    """Return the target of a run over time; None where it tells nothing of what is drawn."""
    told = [(sample.at_s, known(sample.counters)) for sample in samples]
    told = [(at, counts) for at, counts in told if counts]
    if len(told) < 2:
        return None
    size = math.ceil((len(told) - 1) / SPANS)
    # the first sample only says where the counts begin
    groups = [told[i : i + size] for i in range(1, len(told), size)]

    def most(name: str) -> Array:
        return np.array([max(c.get(name, math.nan) for _, c in group) for group in groups])

    ends = [told[0], *(group[-1] for group in groups)]

    def grown(name: str) -> Array:
        return np.diff([counts.get(name, math.nan) for _, counts in ends])

    forwards, seconds = grown("forwards.decode"), grown("decode_seconds")
    flushing, held = grown("flushing_forwards"), grown("flushing_seconds")
    found = Target(
        edges_s=np.array([at for at, _ in ends]),
        step_ms=_mean_ms(grown("step_seconds"), grown("steps")),
        plain_ms=_mean_ms(seconds - held, forwards - flushing),
        flushing_ms=_mean_ms(held, flushing),
        used_bytes=most("used_bytes"),
        allocated_bytes=most("allocated_bytes"),
        running=most("running"),
        waiting=most("waiting"),
    )
    drawn = (found.step_ms, found.plain_ms, found.flushing_ms, found.used_bytes, found.running)
    return found if any(np.isfinite(values).any() for values in drawn) else None


def _width(span: float, bins: int) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that makes at most so many bins."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / bins))
    return next(m * power for m in (1, 2, 5, 10) if m * power * bins >= span)


def _most(places: Whole, values: Whole, count: int) -> Array:
    """Return the largest value in each bin of what changes at instants in order."""
    before = np.searchsorted(places, np.arange(count)) - 1
    # what held at the beginning of a bin, and then what came in it
    most = np.where(before >= 0, values[before], 0).astype(float)
    np.maximum.at(most, places, values)
    return most


def _longest(places: Whole, seconds: Sequence[float], count: int) -> Array:
    longest = np.full(count, math.nan)
    np.fmax.at(longest, places, np.array(seconds) * 1e3)
    return longest


def _mean_ms(seconds: Array, count: Array) -> Array:
    mean: Array = seconds / np.where(count > 0, count, math.nan) * 1e3
    return mean
