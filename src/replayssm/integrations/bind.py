"""Finding the binding of a transformers cache, or making it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replayssm.errors import ContractError
from replayssm.integrations.cache import CacheBinding
from replayssm.integrations.layer import BoundLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.integrations.handle import Handle


def bind(handle: Handle, cache: Any, tokens: int) -> CacheBinding:  # noqa: ANN401 - transformers' Cache
    """Return the binding of a cache, binding it first if this is its first forward.

    Args:
        handle: The enabled model.
        cache: A transformers ``Cache`` made for that model.
        tokens: Tokens of the forward that has just reached its first recurrent layer.

    Raises:
        ContractError: The cache was not made for this model, or is bound to another.
    """
    layers = getattr(cache, "layers", None)
    first = handle.mixers[0].layer_idx
    if layers is None or len(layers) <= max(m.layer_idx for m in handle.mixers):
        raise ContractError(
            "cache", "one made for this model", type(cache).__name__, "DynamicCache(config=config)"
        )
    if isinstance(layers[first], BoundLayer):
        binding: CacheBinding = layers[first].binding
        if binding.handle is not handle:
            raise ContractError("cache", "the cache of this model", "the cache of another one")
        return binding
    for mixer in handle.mixers:
        layer = layers[mixer.layer_idx]
        if not hasattr(layer, "recurrent_states"):
            got = type(layer).__name__
            raise ContractError(f"cache.layers[{mixer.layer_idx}]", "a recurrent layer", got)
    binding = CacheBinding(handle, cache, _position(layers, first, tokens))
    binding.adopt(layers)
    handle.track(binding)
    return binding


def _position(layers: Sequence[Any], first: int, tokens: int) -> int:
    """Return the tokens a cache holds before this forward, as its attention layers count them.

    Only the phase of the folds depends on it, so a cache without attention layers starts at 0.
    """
    for i, layer in enumerate(layers):
        if hasattr(layer, "get_seq_length"):
            seen = int(layer.get_seq_length())
            return max(0, seen - tokens) if i < first else seen
    return 0
