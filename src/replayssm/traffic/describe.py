"""What a trace looks like: rate, burstiness, lengths, shared prefixes, and what to beware of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.traffic.trace import Trace

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
GRID_SHARE = 0.9
GRID_SLACK_S = 0.002
CROWDED = 0.5
COPIES = 0.01


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, middle and upper quantiles of a length.

    Attributes:
        minimum: Least.
        p50: Median.
        p90: 90th percentile.
        p99: 99th percentile.
        maximum: Most.
        total: Sum.
    """

    minimum: int
    p50: int
    p90: int
    p99: int
    maximum: int
    total: int


@dataclass(frozen=True, slots=True)
class Description:
    """What a trace looks like.

    Attributes:
        requests: Requests.
        span_s: Seconds from the start to the last arrival.
        rate: Arrivals per second from the first to the last; None when all arrive at once.
        gap_cv: Standard deviation of the gaps over their mean; 1 is Poisson. None under 3 requests.
        peak_rate: Most arrivals in any second of the clock.
        prompt: Tokens of prompts.
        output: Tokens of outputs.
        cohorts: Requests by cohort.
        sessions: Distinct sessions.
        shared_blocks: Share of prefix blocks seen earlier in the trace; None without blocks.
        concurrency: Sequences that a closed loop keeps in flight.
        cancellations: Requests that will be cancelled.
        moves: Requests that will be moved.
        warnings: What a reader should know before trusting a latency from it.
    """

    requests: int
    span_s: float
    rate: float | None
    gap_cv: float | None
    peak_rate: int
    prompt: Spread
    output: Spread
    cohorts: dict[str, int]
    sessions: int
    shared_blocks: float | None
    concurrency: int | None
    cancellations: int
    moves: int
    warnings: tuple[str, ...]


def describe(trace: Trace) -> Description:
    """Describe a trace that has requests."""
    requests = trace.requests
    at = np.array([r.at for r in requests])
    gaps = np.diff(at)
    mean = float(gaps.sum()) / max(1, len(gaps))
    return Description(
        requests=len(requests),
        span_s=trace.span,
        rate=1 / mean if mean > 0 else None,
        gap_cv=float(gaps.std() / mean) if len(gaps) > 1 and mean > 0 else None,
        peak_rate=max(Counter(np.floor(at).tolist()).values()),
        prompt=_spread([r.prompt_tokens for r in requests]),
        output=_spread([r.output_tokens for r in requests]),
        cohorts=dict(Counter(r.cohort for r in requests)),
        sessions=len({r.session for r in requests if r.session is not None}),
        shared_blocks=_shared(trace),
        concurrency=trace.concurrency,
        cancellations=sum(r.cancel_after is not None for r in requests),
        moves=sum(r.move_after is not None for r in requests),
        warnings=tuple(_warnings(trace, at)),
    )


def _spread(lengths: Sequence[int]) -> Spread:
    low, p50, p90, p99, high = np.quantile(lengths, QUANTILES)
    return Spread(int(low), round(p50), round(p90), round(p99), int(high), sum(lengths))


def _shared(trace: Trace) -> float | None:
    seen: set[int] = set()
    total = again = 0
    for request in trace.requests:
        for block in request.prefix_blocks or ():
            total += 1
            again += block in seen
            seen.add(block)
    return again / total if total else None


def _warnings(trace: Trace, at: NDArray[np.float64]) -> list[str]:
    found = []
    instants, counts = np.unique(at, return_counts=True)
    is_open = trace.concurrency is None
    if is_open and trace.span == 0 and len(at) > 1:
        found.append("no arrivals: every request is due at once")
    elif is_open and len(instants) <= CROWDED * len(at):
        grid = grid_of(instants)
        where = f"sit on a grid of {grid:g} s" if grid else "coincide"
        remedy = f"; --jitter {grid:g} spreads them" if grid else ""
        found.append(
            f"arrivals {where}, up to {counts.max()} at one instant: tails of TTFT are partly "
            f"that{remedy}"
        )
    shapes = Counter((r.at, r.prompt_tokens, r.output_tokens) for r in trace.requests)
    copies = sum(count - 1 for count in shapes.values())
    if copies > COPIES * len(at) and trace.span > 0:
        found.append(f"{copies} requests repeat another of the same instant and lengths")
    if len(at) < 1000:
        found.append(f"{len(at)} requests: a p99 needs 1,000")
    return found


def grid_of(instants: NDArray[np.float64]) -> float | None:
    """Return the spacing of a grid that most instants sit on, in seconds, or None."""
    gaps = np.diff(instants)
    if len(gaps) < 10:
        return None
    step = float(np.round(np.median(gaps), 2))
    if step <= GRID_SLACK_S * 10:
        return None
    off = np.abs(instants - np.round(instants / step) * step)
    return step if float(np.mean(off <= GRID_SLACK_S)) >= GRID_SHARE else None
