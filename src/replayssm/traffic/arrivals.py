"""Arrival processes: gaps between requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def gaps(count: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Return ``[count]`` gaps in seconds before each arrival; the first is 0.

    Gamma distributed with shape ``burstiness`` (1 is Poisson, less is burstier, more is smoother),
    scaled so that the last arrival is where the rate says it should be.

    Args:
        count: Requests.
        rate: Requests per second; infinite puts every arrival at 0.
        burstiness: Shape of the gamma distribution; the variance of a gap is its mean squared
            over the shape.
        seed: Seed.

    Raises:
        ContractError: A rate or a burstiness that is not positive.
    """
    if not rate > 0:
        raise ContractError("request_rate", "more than 0 a second", rate)
    if not 0 < burstiness < np.inf:
        raise ContractError("burstiness", "more than 0", burstiness)
    drawn = np.zeros(count)
    if count < 2 or np.isinf(rate):
        return drawn
    drawn[1:] = np.random.default_rng(seed).gamma(burstiness, size=count - 1)
    total = drawn.sum()
    # shapes near 0 can draw nothing but zeros, which no scale brings to the rate
    return drawn * ((count - 1) / rate / total) if total > 0 else drawn


def along(profile: NDArray[np.float64], count: int, span: float, seed: int) -> NDArray[np.float64]:
    """Return ``[count]`` sorted instants in ``[0, span)`` whose density follows ``profile``.

    Args:
        profile: ``[N]`` relative rates of N equal parts of the span.
        count: Requests.
        span: Seconds.
        seed: Seed.
    """
    edges = np.concatenate([[0.0], np.cumsum(profile, dtype=float)])
    uniform = np.sort(np.random.default_rng(seed).random(count)) * edges[-1]
    at: NDArray[np.float64] = np.interp(uniform, edges, np.linspace(0, span, len(edges)))
    return at
