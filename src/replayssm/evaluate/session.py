"""A session: one batch of sequences decoded by a model under one arm, teacher forced."""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.models.registry import find_mixers
from replayssm.models.tiny import attention_window
from replayssm.ops.dispatch import choose
from replayssm.types import Impl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from replayssm.evaluate.arms import Arm


@contextmanager
def enabled(
    model: PreTrainedModel, arm: Arm | None, *, window: int, max_block: int = 1
) -> Iterator[Any]:
    """Enable an arm on a model for the duration; None leaves the model as transformers has it."""
    if arm is None:
        yield None
        return
    from replayssm.integrations.transformers import enable

    with enable(
        model,
        path=arm.path,
        state=arm.state,
        read=arm.read,
        window=window,
        max_block=max_block,
        self_test=False,
    ) as handle:
        yield handle


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of its own that shares every parameter and buffer with ``model``."""
    shared: dict[int, object] = {id(p): p for p in model.parameters()}
    shared.update({id(b): b for b in model.buffers()})
    return copy.deepcopy(model, shared)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and the compiled kernels on one thread.

    For steps too small to share, where waking others costs more. Both together: they may share an
    OpenMP runtime, in which a kernel on several threads gives torch as many again.
    """
    before, kernels = torch.get_num_threads(), _kernel_threads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _kernel_threads(kernels)
        torch.set_num_threads(before)


def _kernel_threads(count: int) -> int:
    if choose(Impl.AUTO, torch.device("cpu")) is not Impl.CPU:
        return count
    from replayssm.ops.cpu.threads import set_threads

    return set_threads(count)


class Session:
    """Feeds tokens to a model and keeps its cache.

    Args:
        model: The model, with an arm enabled or without one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.position = 0
        self.cache: Any = None
        names = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument; 5.17 to 5.23 know the old one
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._takes_positions = "position_ids" in names

    @torch.inference_mode()
    def feed(self, ids: Tensor, *, last_only: bool = False) -> Tensor:
        """Run ``[B, T]`` tokens and return ``[B, T, vocabulary]`` fp32 logits.

        Args:
            ids: Token ids that follow everything fed before.
            last_only: Return the logits of the last token only, ``[B, 1, vocabulary]``.
        """
        extra: dict[str, Any] = {self._cache_name: self.cache} if self.cache is not None else {}
        tokens = ids.shape[1]
        if self._takes_positions:
            # without explicit positions some models number a continuation from 0
            at = torch.arange(self.position, self.position + tokens, device=ids.device)
            extra["position_ids"] = at.expand(ids.shape[0], -1)
        if last_only:
            extra["logits_to_keep"] = 1
        out = self.model(input_ids=ids, use_cache=True, **extra)
        self.cache = getattr(out, "cache", None) or out.past_key_values
        self.position += tokens
        logits: Tensor = out.logits
        return logits.float()

    def fork(self, model: PreTrainedModel) -> Session:
        """Return a session of a twin of the model that goes on from a copy of the cache."""
        other = Session(model)
        other.cache, other.position = copy.deepcopy(self.cache), self.position
        return other

    def forget(self) -> None:
        """Drop the keys and values that windowed attention no longer sees.

        Mutates the cache; no later logit changes, and a step no longer copies the whole context.
        Models with other attention keep everything.
        """
        width = attention_window(self.model.config._attn_implementation or "")
        if width is None:
            return
        for layer in self.cache.layers:
            if getattr(layer, "keys", None) is not None:
                first = max(0, layer.keys.shape[2] - width + 1)
                layer.keys, layer.values = (x[:, :, first:] for x in (layer.keys, layer.values))

    def close(self) -> None:
        """Drop the cache; disabling an arm would rebuild every state of a live one."""
        self.cache = None


def recurrent_states(session: Session, model: PreTrainedModel) -> list[Tensor]:
    """Return a copy of every recurrent layer's state, in the model's own layout."""
    layers = session.cache.layers
    mixers = find_mixers(model)[0]
    return [layers[m.layer_idx].recurrent_states[0].float().clone() for m in mixers]
