"""What rows hold, in the layout of the model's own cache layers, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replayssm.integrations.forward import newest
from replayssm.models.adapters import conv_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from replayssm.integrations.rows import Rows
    from replayssm.models.registry import Mixer


def model_states(rows: Rows, mixers: Sequence[Mixer], dtype: torch.dtype) -> list[Tensor]:
    """Return every layer's recurrent state as its model keeps it, fresh tensors."""
    pairs = zip(mixers, rows.materialise(), strict=True)
    return [mixer.adapter.to_model(state.to(dtype)) for mixer, state in pairs]


def model_convs(rows: Rows) -> list[Tensor]:
    """Return every layer's ``[B, C, width]`` convolution state as its model keeps it.

    The model keeps one input more than its convolution reads; it shows as 0 and nothing reads it.
    """
    return [newest(window, window.shape[-1] + 1) for window in rows.windows()]


def from_layers(
    layers: Sequence[Any], mixers: Sequence[Mixer]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return the states and windows that plain cache layers hold; None where some hold none."""
    states, windows = [], []
    for layer, mixer in zip(layers, mixers, strict=True):
        if not layer.has_previous_state[0] or layer.recurrent_states[0] is None:
            return None
        states.append(mixer.adapter.from_model(layer.recurrent_states[0]))
        windows.append(newest(layer.conv_states[0], conv_spec(mixer.module).width - 1))
    return states, windows
