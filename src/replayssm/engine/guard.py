"""The guard: watches cohorts on the replay path and takes them down when they break a promise.

A sampled share of requests is run a second time on the standard path, from admission and with the
tokens that were served. A gap beyond the tolerance, a value that is not finite, or tokens that come
too slowly trip the request's cohort: first to full reads, then to the standard path.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from replayssm.engine.request import STANDARD
from replayssm.errors import ContractError
from replayssm.types import ReadDepth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replayssm.engine.request import Route

Reason = Literal["tolerance", "non-finite", "latency"]
LOG = logging.getLogger("replayssm.guard")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a cohort promises.

    Attributes:
        delta_logprob: Largest ``|log p served - log p shadow|`` of a served token, in nats.
        itl: Longest mean time between two tokens, in seconds; None promises nothing.
        itl_tokens: Tokens that the mean is taken over.
    """

    delta_logprob: float = 0.5
    itl: float | None = None
    itl_tokens: int = 64

    def __post_init__(self) -> None:
        if not self.delta_logprob > 0:
            raise ContractError("delta_logprob", "a positive number", self.delta_logprob)
        if self.itl is not None and not self.itl > 0:
            raise ContractError("itl", "a positive number of seconds", self.itl)
        if self.itl_tokens < 1:
            raise ContractError("itl_tokens", "at least 1", self.itl_tokens)


@dataclass(frozen=True, slots=True)
class Trip:
    """One step down of a cohort, with its evidence.

    Attributes:
        cohort: Which.
        to: ``full`` reads or the ``standard`` path.
        reason: Which promise was broken.
        request_id: The request that showed it.
        measured: What was seen: nats, or seconds.
        allowed: What was promised.
        at: Seconds on the engine's clock.
    """

    cohort: str
    to: str
    reason: Reason
    request_id: str
    measured: float
    allowed: float
    at: float


class Guard:
    """Watches every cohort of one engine.

    Args:
        share: Part of the requests that get a shadow, in [0, 1].
        tolerance: What every cohort promises.
        by_cohort: What single cohorts promise instead.
        seed: Of the choice of requests, which is a function of their ids.

    Attributes:
        trips: Every trip, oldest first.
    """

    def __init__(
        self,
        share: float = 0.05,
        tolerance: Tolerance = Tolerance(),
        by_cohort: Mapping[str, Tolerance] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if not 0 <= share <= 1:
            raise ContractError("share", "a number in [0, 1]", share)
        self._share, self._seed = share, seed
        self._default, self._tolerances = tolerance, dict(by_cohort or {})
        self._floor: dict[str, str] = {}
        self._times: dict[str, deque[float]] = {}
        self.trips: list[Trip] = []

    def tolerance(self, cohort: str) -> Tolerance:
        """Return what a cohort promises."""
        return self._tolerances.get(cohort, self._default)

    def samples(self, request_id: str) -> bool:
        """Whether a request gets a shadow."""
        return zlib.crc32(f"{self._seed}/{request_id}".encode()) < self._share * 2**32

    def apply(self, route: Route, cohort: str) -> Route:
        """Return the route that is left of ``route`` after the cohort's trips."""
        floor = self._floor.get(cohort)
        if floor is None or route.path == "standard":
            return route
        return STANDARD if floor == "standard" else route.with_full_reads()

    def reset(self, cohort: str) -> None:
        """Mutates the guard: let a cohort have its own route again; its trips stay on record."""
        self._floor.pop(cohort, None)
        self._times.pop(cohort, None)

    def check_gaps(
        self, cohort: str, request_id: str, route: Route, gaps: Sequence[float], at: float
    ) -> Trip | None:
        """Mutates the guard: compare a request with its shadow; return the trip, if any."""
        allowed = self.tolerance(cohort).delta_logprob
        worst = max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap, default=0.0)
        if worst <= allowed:
            return None
        return self._trip(cohort, "tolerance", request_id, route, worst, allowed, at)

    def check_pace(
        self, cohort: str, request_id: str, route: Route, seconds: float, at: float
    ) -> Trip | None:
        """Mutates the guard: take note of the time before one token; return the trip, if any."""
        promise = self.tolerance(cohort)
        if promise.itl is None or route.path == "standard":
            return None
        times = self._times.setdefault(cohort, deque(maxlen=promise.itl_tokens))
        times.append(seconds)
        mean = sum(times) / len(times)
        if len(times) < promise.itl_tokens or mean <= promise.itl:
            return None
        return self._trip(cohort, "latency", request_id, route, mean, promise.itl, at)

    def report_non_finite(
        self, cohort: str, request_id: str, route: Route, at: float
    ) -> Trip | None:
        """Mutates the guard: a request's logits held NaN or infinity; return the trip, if any."""
        return self._trip(cohort, "non-finite", request_id, route, math.nan, 0.0, at)

    def _trip(
        self,
        cohort: str,
        reason: Reason,
        request_id: str,
        route: Route,
        measured: float,
        allowed: float,
        at: float,
    ) -> Trip | None:
        if route.path == "standard":
            return None  # nothing is left to fall back to
        to = "full" if route.depth is ReadDepth.HIGH else "standard"
        self._floor[cohort] = to
        self._times.pop(cohort, None)
        trip = Trip(cohort, to, reason, request_id, measured, allowed, at)
        self.trips.append(trip)
        LOG.warning("%s", json.dumps(asdict(trip)))
        return trip
