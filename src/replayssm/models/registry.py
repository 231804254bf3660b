"""Which adapter serves a mixer, and which modules no adapter can serve, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replayssm.models.delta import GdnAdapter, KdaAdapter
from replayssm.models.mamba2 import Mamba2Adapter

if TYPE_CHECKING:
    from torch import nn

    from replayssm.models.adapters import Adapter
    from replayssm.types import LayerSpec

ADAPTERS: tuple[Adapter, ...] = (Mamba2Adapter(), GdnAdapter(), KdaAdapter())

_MAMBA1 = "Mamba-1: its decay is per state element, which is outside the algebra"
_UNKNOWN = {
    r"(?i)rg_?lru$": "RG-LRU: a vector recurrence without keys, outside the algebra",
    r"^Rwkv\w*Attention$": "RWKV: no adapter for its recurrence",
    r"^xLSTM(Block|Layer)$": "xLSTM: no adapter for its recurrence",
    r"Lightning\w*$": "lightning attention: the ops cover it, no adapter yet",
    r"(GatedDeltaNet|DeltaAttention|Mamba2?Mixer)$": "an unknown variant: no adapter matches it",
}


@dataclass(frozen=True, slots=True)
class Mixer:
    """A recurrent layer of a model that an adapter serves.

    Attributes:
        name: Module path in the model.
        module: The mixer.
        adapter: Its adapter.
        spec: Geometry of its recurrence; that of its convolution is :func:`conv_spec`.
        layer_idx: Index of its cache layer.
    """

    name: str
    module: nn.Module
    adapter: Adapter
    spec: LayerSpec
    layer_idx: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A recurrent layer that no adapter serves.

    Attributes:
        name: Module path in the model.
        kind: Its class name.
        reason: Why it is not served.
        layer_idx: Index of its cache layer, -1 where it has none.
    """

    name: str
    kind: str
    reason: str
    layer_idx: int


def recognise(module: nn.Module) -> Adapter | None:
    """Return the adapter that serves ``module``, or None."""
    return next((adapter for adapter in ADAPTERS if adapter.matches(module)), None)


def refusal(module: nn.Module) -> str | None:
    """Return why a recurrent module that no adapter matches is refused; None if not recurrent."""
    if hasattr(module, "A_log") and hasattr(module, "x_proj") and hasattr(module, "dt_proj"):
        return _MAMBA1
    # Zamba keeps its Mamba-1 projections as bare parameters
    if hasattr(module, "A_log") and hasattr(module, "x_proj_weight"):
        return _MAMBA1
    name = type(module).__name__
    return next((why for pattern, why in _UNKNOWN.items() if re.search(pattern, name)), None)


def find_mixers(model: nn.Module) -> tuple[tuple[Mixer, ...], tuple[Refused, ...]]:
    """Return a model's served mixers in order of their cache layers, and what is refused."""
    mixers, refused = [], []
    for name, module in model.named_modules():
        adapter = recognise(module)
        if adapter is not None:
            at: Any = module
            mixers.append(Mixer(name, module, adapter, adapter.spec(module), int(at.layer_idx)))
            continue
        why = refusal(module)
        if why is not None:
            index = getattr(module, "layer_idx", None)
            at_layer = index if isinstance(index, int) else -1
            refused.append(Refused(name, type(module).__name__, why, at_layer))
    return tuple(sorted(mixers, key=lambda m: m.layer_idx)), tuple(refused)
