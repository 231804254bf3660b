"""Taking tokens back from every layer of a bound cache, or from none of them.

Recurrent layers move a count; what is here does the same to keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replayssm.errors import ContractError, UnsupportedError
from replayssm.integrations.layer import BoundLayer

if TYPE_CHECKING:
    from collections.abc import Sequence


def check(layers: Sequence[Any], tokens_to_remove: int, most: int, *, path: str) -> None:
    """Refuse what cannot be taken back whole; changes nothing.

    Args:
        layers: All layers of the cache.
        tokens_to_remove: Minus the number of tokens.
        most: Tokens that the recurrent layers can take back.
        path: Path of ``enable``.

    Raises:
        ContractError: The number is positive, or more than ``most``.
        UnsupportedError: The standard path, or attention that has dropped what it would need.
    """
    if tokens_to_remove > 0:
        raise ContractError("tokens_to_remove", "minus the number of tokens", tokens_to_remove)
    if tokens_to_remove == 0:
        return
    if path == "standard":
        raise UnsupportedError(
            f"crop({tokens_to_remove}) on the standard path, which rewrites the state at every "
            "token; enable(model, path='replay')"
        )
    if -tokens_to_remove > most:
        raise ContractError(
            "tokens_to_remove",
            f"{-most} to 0, the tokens this cache can take back now",
            tokens_to_remove,
            "call cache.activate_past_recording() before those tokens, or enable(model, keep=...)",
        )
    for i, layer in enumerate(layers):
        if _holds_something(layer) and not (layer.is_croppable and _has_recorded(layer)):
            raise UnsupportedError(
                f"crop({tokens_to_remove}): cache layer {i} ({type(layer).__name__}) has dropped "
                "what it would need; call cache.activate_past_recording() before those tokens"
            )


def crop_attention(layers: Sequence[Any], tokens_to_remove: int) -> None:
    """Mutates every layer that has keys and values; :func:`check` has passed."""
    for layer in layers:
        if not _holds_something(layer):
            continue
        # removing nothing still lets a layer that records the past drop what is too old
        if tokens_to_remove or getattr(layer, "record_past", False):
            crop = layer.crop_attention if isinstance(layer, BoundLayer) else layer.crop
            crop(tokens_to_remove)


def keep_path(layers: Sequence[Any], block: int, path: Sequence[int]) -> None:
    """Mutates every layer that has keys and values: of the newest block, keep one path.

    Args:
        layers: All layers of the cache.
        block: Tokens of the block, which is the newest part of every layer.
        path: Tokens of it to keep, oldest first.
    """
    if list(path) != list(range(len(path))):
        for layer in layers:
            if getattr(layer, "keys", None) is not None:
                for held in (layer.keys, layer.values):
                    newest = held[..., -block:, :]
                    # indexing by a list copies, so that every token is loaded before one is stored
                    newest[..., : len(path), :] = newest[..., list(path), :]
    crop_attention(layers, len(path) - block)


def _holds_something(layer: Any) -> bool:  # noqa: ANN401 - a transformers cache layer
    """Whether a layer is more than a placeholder, e.g. for an MLP."""
    convs = getattr(layer, "is_conv_states_initialized", {})
    return isinstance(layer, BoundLayer) or hasattr(layer, "get_seq_length") or any(convs.values())


def _has_recorded(layer: Any) -> bool:  # noqa: ANN401
    """Whether a layer still has the past that a crop lays open again."""
    if not getattr(layer, "is_sliding", False) or getattr(layer, "record_past", True):
        return True
    return bool(layer.get_seq_length() < layer.sliding_window)
