"""How many requests are in flight over time, and the part of a run at full load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replayssm.traffic.record import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.traffic.record import Record

NEAR = 0.9


@dataclass(frozen=True, slots=True)
class Steady:
    """The part of a run at full load: from the first to the last instant near the plateau.

    Attributes:
        plateau: Requests in flight for at least half of the run.
        start_s: First instant at 90 % of the plateau or above.
        end_s: Last such instant.
        request_throughput: Requests that succeeded and ended in it, a second.
        output_throughput: Tokens that came in it, a second.
    """

    plateau: int
    start_s: float
    end_s: float
    request_throughput: float
    output_throughput: float


def running(records: Sequence[Record]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return instants and the number of requests in flight from each to the next."""
    times = np.array([t for r in records for t in (r.send_s, r.end_s)], float)
    steps = np.tile(np.array([1, -1]), len(records))
    # an end at the instant of a send comes first, or a closed loop would exceed its limit
    order = np.lexsort((steps, times))
    return times[order], np.cumsum(steps[order])


def most_running(records: Sequence[Record]) -> int:
    """Return the most requests in flight at once."""
    return int(running(records)[1].max(initial=0))


def steady_window(records: Sequence[Record]) -> Steady | None:
    """Return the part of a run at full load, or None when it is idle for most of it."""
    times, counts = running(records)
    spans = np.diff(times)
    if not len(spans) or spans.sum() <= 0:
        return None
    plateau = _weighted_median(counts[:-1], spans)
    if not plateau:
        return None
    near = np.flatnonzero((counts[:-1] >= NEAR * plateau) & (spans > 0))
    start, end = float(times[near[0]]), float(times[near[-1] + 1])
    seconds = end - start
    done = sum(r.status is Status.OK and start <= r.end_s <= end for r in records)
    tokens = sum(start <= t <= end for r in records for t in r.token_times_s)
    return Steady(plateau, start, end, done / seconds, tokens / seconds)


def _weighted_median(values: NDArray[np.int64], weights: NDArray[np.float64]) -> int:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    # the largest value that is reached or exceeded for at least half of the time
    middle = np.searchsorted(total, total[-1] / 2, side="right")
    return int(values[order][min(middle, len(order) - 1)])
