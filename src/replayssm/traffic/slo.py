"""Limits on latency, and the share of requests that keep them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.errors import ContractError
from replayssm.traffic.record import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replayssm.traffic.record import Record

METRICS = ("ttft", "tpot", "e2el", "ttft_scheduled", "e2el_scheduled")


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit that one request keeps or misses.

    Attributes:
        metric: One of ``ttft``, ``tpot``, ``e2el``, ``ttft_scheduled``, ``e2el_scheduled``.
        limit_ms: Milliseconds.
    """

    metric: str
    limit_ms: float

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ContractError("goodput", f"one of {', '.join(METRICS)}", self.metric)
        if not 0 < self.limit_ms < math.inf:
            raise ContractError(f"goodput {self.metric}", "more than 0 ms", self.limit_ms)

    def is_met(self, record: Record) -> bool:
        """Whether a request keeps the limit; one without that time misses it.

        A reply of one token has no time per token after the first, and keeps any limit on it.
        """
        if record.status is not Status.OK:
            return False
        if self.metric == "tpot" and record.output_tokens < 2:
            return True
        value = getattr(record, self.metric)
        return value is not None and value * 1e3 <= self.limit_ms


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests kept their limits.

    Attributes:
        judged: Requests that count: those that ended by themselves, failed ones as misses. Those
            that the trace cancelled and those cut at the end of the run are left out.
        met: Requests that kept every limit.
        share: ``met`` over ``judged``; None when there are none.
        by_metric: Share that kept each limit.
        goodput: Requests a second that kept every limit.
        good_tokens: Their output tokens a second.
    """

    judged: int
    met: int
    share: float | None
    by_metric: dict[str, float | None]
    goodput: float
    good_tokens: float


def parse(words: Iterable[str]) -> tuple[Slo, ...]:
    """Read limits such as ``ttft:500 tpot:50``, in milliseconds.

    Raises:
        ContractError: A word is no limit, or names a metric again.
    """
    found: dict[str, Slo] = {}
    for word in words:
        metric, _, limit = word.partition(":")
        try:
            slo = Slo(metric, float(limit))
        except ValueError as error:
            if isinstance(error, ContractError):
                raise
            raise ContractError("goodput", "METRIC:MILLISECONDS", word) from None
        if metric in found:
            raise ContractError("goodput", "one limit a metric", word)
        found[metric] = slo
    return tuple(found.values())


def attain(records: Sequence[Record], slos: Sequence[Slo], span_s: float) -> Attainment:
    """Judge requests against limits; with no limits, a request that succeeded is good."""
    judged = [r for r in records if r.status in (Status.OK, Status.FAILED)]
    met = [r for r in judged if r.status is Status.OK and all(slo.is_met(r) for slo in slos)]
    by_metric = {s.metric: _share(sum(map(s.is_met, judged)), len(judged)) for s in slos}
    return Attainment(
        judged=len(judged),
        met=len(met),
        share=_share(len(met), len(judged)),
        by_metric=by_metric,
        goodput=len(met) / span_s if span_s > 0 else 0.0,
        good_tokens=sum(r.output_tokens for r in met) / span_s if span_s > 0 else 0.0,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
