"""The bundled tiny trained hybrid models and their windowed attention.

Four byte-level models, trained on Python text and on synthetic recall tasks by
``benchmarks/train_tiny.py``, ship as package data, each with a card (``README.md``):

===============  ============================  ===========================================
name             transformers architecture     recurrent layers
===============  ============================  ===========================================
``mamba2-tiny``  Bamba                         Mamba-2
``gdn-tiny``     Qwen3.5 (text)                Gated DeltaNet
``kda-tiny``     KimiLinear (dense)            Kimi Delta Attention
``draft-tiny``   Qwen3.5 (text), two layers    Gated DeltaNet; a draft model for the others
===============  ============================  ===========================================

Their attention layers see the last ``WINDOW`` positions only. That is an attention function
registered with transformers, so the same code serves training, prefill and cached decode, and
anything older reaches the output through the recurrent state alone.

transformers and torch are imported when a function needs them, not with this module.
"""

from __future__ import annotations

import lzma
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayssm.errors import ContractError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel

NAMES = ("mamba2-tiny", "gdn-tiny", "kda-tiny", "draft-tiny")
WINDOW = 64
_PREFIX = "replayssm_window"
ATTENTION = f"{_PREFIX}_{WINDOW}"


def encode(text: str) -> list[int]:
    """Return the token ids of ``text``: its UTF-8 bytes, 0..255."""
    return list(text.encode("utf-8"))


def decode(ids: list[int]) -> str:
    """Return the text of token ids; bytes that are not UTF-8 become the replacement character."""
    return bytes(ids).decode("utf-8", errors="replace")


def weights_path(name: str) -> Path:
    """Return the folder of a bundled model (``config.json``, ``model.safetensors``, card).

    Raises:
        ContractError: ``name`` is not one of ``NAMES``.
        FileNotFoundError: this installation does not hold the weights.
    """
    if name not in NAMES:
        raise ContractError("name", f"one of {NAMES}", name)
    path = Path(str(files("replayssm.models") / "weights" / name))
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(f"no weights of {name!r} at {path}")
    return path


def heldout_text() -> bytes:
    """Return the held-out Python text: standard-library files that no bundled model trained on."""
    packed = files("replayssm.models") / "weights" / "heldout.txt.xz"
    return lzma.decompress(packed.read_bytes())


def load(
    name: str, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Return a bundled model in evaluation mode.

    Args:
        name: one of ``NAMES``.
        dtype: parameter dtype; fp32 if omitted (the file holds bf16, gate parameters fp32).
        device: where the parameters go.

    Raises:
        ContractError: Unknown name.
        FileNotFoundError: the weights are not installed.
        UnsupportedError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise UnsupportedError(
            "transformers is not installed; pip install 'replayssm[transformers]'"
        )
    import torch
    from transformers import AutoModelForCausalLM

    path = weights_path(name)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32 if dtype is None else dtype,
        attn_implementation=register_window_attention(),
    )
    module: torch.nn.Module = model
    module.to(device).eval()
    return model


def register_window_attention(window: int = WINDOW) -> str:
    """Register the windowed attention with transformers and return its name.

    The name goes to ``from_pretrained(..., attn_implementation=name)``. A query sees itself and
    the ``window - 1`` positions before it, padding excluded. Registering twice is harmless.

    Raises:
        ContractError: ``window`` is below 1.
    """
    if window < 1:
        raise ContractError("window", "an integer >= 1", window)
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"{_PREFIX}_{window}"
    AttentionInterface.register(name, _attention_function(window))
    AttentionMaskInterface.register(name, _mask_function(window))
    return name


def attention_window(name: str) -> int | None:
    """Return the window of a registered attention by its name; None for any other attention."""
    prefix, _, window = name.rpartition("_")
    return int(window) if prefix == _PREFIX else None


def _attention_function(window: int) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        # transformers hands every attention function the extras of every other one.
        **_extras: object,
    ) -> tuple[torch.Tensor, None]:
        if dropout:
            raise ValueError(f"dropout must be 0 for windowed attention, got {dropout}")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if attention_mask is None:
            out = window_attention(query, key, value, window=window, scale=scale)
        else:
            out = _dense(query, *_repeat(query, key, value), attention_mask, scale)
        return out.transpose(1, 2).contiguous(), None

    return attend


def _mask_function(window: int) -> Callable[..., torch.Tensor | None]:
    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        use_vmap: bool = False,
        # transformers hands every mask function the extras of every other one.
        **_extras: object,
    ) -> torch.Tensor | None:
        from transformers.masking_utils import (
            and_masks,
            causal_mask_function,
            sdpa_mask,
            sliding_window_overlay,
        )

        base = causal_mask_function if mask_function is None else mask_function
        unpadded = attention_mask is None or bool(attention_mask.all())
        aligned = isinstance(q_offset, int) and q_offset + q_length == kv_length
        if unpadded and aligned and kv_offset == 0 and base is causal_mask_function:
            return None
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=and_masks(base, sliding_window_overlay(window)),
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )

    return mask


def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention over the last ``window`` positions, without padding.

    Work and memory grow with T times ``window``, not with T squared. The queries are the last T
    of the N key positions, so the same call serves prefill (T = N) and cached decode (T < N).

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, H_kv, N, D]`` with N >= T; H is a multiple of H_kv.
        value: ``[B, H_kv, N, V]``.
        window: positions a query sees, itself included.
        scale: factor on the scores.

    Returns:
        ``[B, H, T, V]`` in the dtype of ``value``.
    """
    import torch

    steps = query.shape[2]
    before = min(key.shape[2] - steps, window - 1)
    key, value = _repeat(query, key[:, :, -(steps + before) :], value[:, :, -(steps + before) :])
    if steps <= window:
        rows = torch.arange(steps, device=query.device)[:, None] + before
        columns = torch.arange(steps + before, device=query.device)[None]
        return _dense(query, key, value, (columns <= rows) & (columns > rows - window), scale)
    blocks = -(-steps // window)
    right = blocks * window - steps
    pad = torch.nn.functional.pad
    query = pad(query, (0, 0, 0, right)).unflatten(2, (blocks, window))
    key, value = (
        pad(x, (0, 0, window - before, right)).unflatten(2, (blocks + 1, window))
        for x in (key, value)
    )
    key, value = (torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in (key, value))
    rows = torch.arange(window, device=query.device)[:, None]
    columns = torch.arange(2 * window, device=query.device)[None]
    inside = ((columns > rows) & (columns <= rows + window)).repeat(blocks, 1, 1)
    inside[0] &= columns >= window - before
    return _dense(query, key, value, inside, scale).flatten(2, 3)[:, :, :steps]


def _repeat(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    import torch

    scores = (query @ key.transpose(-1, -2)).float() * scale
    # A finite floor: a padded query has no position to see, and must not become NaN.
    scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    return scores.softmax(dim=-1).to(value.dtype) @ value
