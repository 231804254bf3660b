"""Scores of the tiny models: held-out bits per byte, recall, recall without the recurrent state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache

from replayssm.evaluate.probes import KINDS, Probe, make_probes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _device(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel, text: bytes, *, window: int = 4096, tokens: int = 65536
) -> float:
    """Return the mean bits per byte of ``text``, cut into windows of ``window`` bytes.

    Each window starts from nothing; its first byte is context only. The rest is dropped.
    """
    rows = np.frombuffer(text[: len(text) // window * window], dtype=np.uint8).reshape(-1, window)
    total, count = 0.0, 0
    for start in range(0, len(rows), max(1, tokens // window)):
        part = torch.from_numpy(rows[start : start + max(1, tokens // window)].astype(np.int64))
        part = part.to(_device(model))
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )
        total += float(loss)
        count += part[:, 1:].numel()
    return total / count / math.log(2)


@torch.no_grad()
def recalled(
    model: PreTrainedModel, probes: list[Probe], *, zero_state: bool = False, tokens: int = 131072
) -> list[bool]:
    """Return for each probe whether the whole answer is the greedy continuation.

    All probes must share length, question length and answer length. Given the true answer so far,
    every byte must be the most likely one; that is exactly when greedy decoding gives the answer.
    With ``zero_state`` the context and the question are separate forwards, and the recurrent
    state (not the convolution inputs, not the attention window) is set to zero in between.
    """
    hits: list[bool] = []
    step = max(1, tokens // probes[0].length)
    for start in range(0, len(probes), step):
        part = probes[start : start + step]
        rows = [np.frombuffer(p.prompt + p.answer, dtype=np.uint8) for p in part]
        ids = torch.from_numpy(np.stack(rows).astype(np.int64)).to(_device(model))
        size = len(part[0].answer)
        if zero_state:
            logits = _after_zeroing(model, ids, ids.shape[1] - size - part[0].question)
        else:
            logits = model(input_ids=ids, use_cache=False).logits
        best = logits[:, -size - 1 : -1].argmax(-1)
        hits += (best == ids[:, -size:]).all(1).tolist()
    return hits


def _after_zeroing(model: PreTrainedModel, ids: torch.Tensor, split: int) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    for begin, end in ((0, split), (split, ids.shape[1])):
        logits = model(
            input_ids=ids[:, begin:end],
            # Bamba counts positions from 0 in every call that does not name them.
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            use_cache=True,
        ).logits
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                if state is not None:
                    state.zero_()
    return logits


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion."""
    rate = hits / count
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    half /= 1 + z * z / count
    return max(0.0, centre - half), min(1.0, centre + half)


def recall_table(
    model: PreTrainedModel,
    filler: bytes,
    lengths: list[int],
    count: int,
    *,
    kinds: tuple[str, ...] = KINDS,
    zero_state: bool = False,
    seed: int = 7,
) -> list[dict[str, float | int | str | bool]]:
    """Return one row per kind and length: hits, count and the Wilson interval."""
    rows: list[dict[str, float | int | str | bool]] = []
    for kind in kinds:
        for length in lengths:
            probes = make_probes(kind, length, count, filler=filler, seed=seed)
            hits = sum(recalled(model, probes, zero_state=zero_state))
            low, high = wilson(hits, count)
            rows.append(
                {
                    "kind": kind,
                    "length": length,
                    "zero_state": zero_state,
                    "hits": hits,
                    "count": count,
                    "rate": hits / count,
                    "low": low,
                    "high": high,
                }
            )
    return rows
