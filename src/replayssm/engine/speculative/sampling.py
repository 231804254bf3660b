"""Probabilities and one draw from them: the same few lines for plain decode, drafts and acceptance.

One token costs exactly one uniform number. So plain sampling and sampled acceptance of
deterministic candidates, given the same generator, emit the same tokens and not just the same law.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUM_TOLERANCE = 0.01
"""How far a row of probabilities may be from 1 in sum (low-precision softmax) before scaling."""


def check_sampling(temperature: float, rng: np.random.Generator | None) -> None:
    """Refuse a negative temperature, and sampling without a generator.

    Raises:
        ContractError: As said.
    """
    if temperature < 0:
        raise ContractError("temperature", "a number >= 0", temperature)
    if temperature > 0 and rng is None:
        raise ContractError("rng", "a generator when temperature > 0", None)


def softmax(logits: NDArray[np.floating[Any]], temperature: float = 1.0) -> NDArray[np.float64]:
    """Return ``[..., vocab]`` float64 probabilities, exp(logits / temperature) over their sum.

    Args:
        logits: ``[..., vocab]``; -inf excludes a token.
        temperature: Positive; for greedy decoding take the argmax instead.

    Raises:
        ContractError: The temperature is not positive, or a row has NaN, +inf or no finite logit.
    """
    if not temperature > 0:
        raise ContractError("temperature", "a positive number", temperature)
    wide = np.asarray(logits, np.float64)
    top = wide.max(axis=-1, keepdims=True)
    if not np.isfinite(top).all():
        raise ContractError("logits", "a finite maximum in every row", "NaN, +inf or only -inf")
    weights = np.exp((wide - top) / temperature)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def normalised(name: str, row: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return one row of probabilities as float64 with sum 1.

    Raises:
        ContractError: An element is negative or NaN, or the sum is not 1 within 0.01.
    """
    wide = np.asarray(row, np.float64)
    total = float(wide.sum())
    if not (wide.min() >= 0 and abs(total - 1) <= SUM_TOLERANCE):
        raise ContractError(name, "probabilities: >= 0, sum 1", f"min {wide.min()}, sum {total}")
    return wide / total


def sample_token(weights: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Return one token drawn by inverting the cumulative sum; a zero weight is never drawn.

    Args:
        weights: ``[vocab]`` float64, >= 0, with a positive sum.
        rng: Advanced by one uniform number.
    """
    cumulative = np.cumsum(weights)
    # u times a subnormal sum may round up to the sum itself, past the last token that has weight
    highest = np.searchsorted(cumulative, cumulative[-1], side="left")
    drawn = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return int(min(drawn, highest))
