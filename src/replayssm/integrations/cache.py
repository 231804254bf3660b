"""A transformers cache whose recurrent layers keep their state in our rows.

A cache is bound on its first forward through an enabled model: each of its recurrent layers is
exchanged for one of a subclass, which hands out a :class:`StateHook` while its mixer runs and a
materialised tensor at any other time. Convolution states and attention keys and values stay with
transformers. ``disable`` exchanges the layers back and leaves plain tensors behind.

One :class:`CacheBinding` serves all recurrent layers of a cache. A forward is opened by the first
recurrent layer and closed by the last: it is a *step* (at most ``max_block`` tokens on live rows)
or a *prefill* (anything else: the model's own chunk function runs from the materialised state and
the result is admitted at the new position).
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.errors import (
    ContractError,
    DriftError,
    SlotError,
    UnsupportedError,
)
from replayssm.integrations.hooks import Call, StateHook
from replayssm.integrations.layer import BoundLayer, bound_class, exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.integrations.rows import Rows
    from replayssm.integrations.transformers import Enabled


class LiveState(StateHook):
    """The state of one recurrent layer of a bound cache, as its mixer sees it."""

    __slots__ = ("binding", "layer")

    def __init__(self, binding: CacheBinding, layer: int) -> None:
        self.binding, self.layer = binding, layer

    def serve(self, call: Call) -> object:
        """Serve a step or chunk function from the rows, or run it as a prefill."""
        return self.binding.serve(self.layer, call, self)


@dataclass(slots=True)
class _Forward:
    """One forward through the recurrent layers: what it is and how far it came."""

    rows: int
    tokens: int
    is_step: bool
    initial: list[Tensor] | None = None
    results: list[Tensor] = field(default_factory=list)
    done: int = 0
    served: bool = False


class CacheBinding:
    """What one bound cache holds: its rows, its position and the forward in progress.

    Args:
        handle: The enabled model.
        cache: The cache; held weakly, so that its memory goes with its last user.
        position: Tokens the cache holds already.

    Attributes:
        handle: The enabled model.
        rows: Their states; None before the first prefill and after a reset.
        position: Tokens that every row has seen, padding included.
    """

    def __init__(self, handle: Enabled, cache: Any, position: int) -> None:  # noqa: ANN401
        self.handle = handle
        self._cache: weakref.ref[Any] | None = weakref.ref(cache)
        self._indices = tuple(mixer.layer_idx for mixer in handle.mixers)
        self.rows: Rows | None = None
        self.position = position
        self._forward: _Forward | None = None
        self._failed = False
        self._active: int | None = None
        self._state_dtype = torch.float32

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheBinding:
        if self._forward is not None:
            raise SlotError("cache: cannot be copied in the middle of a forward")
        twin = CacheBinding.__new__(CacheBinding)
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            if name not in ("handle", "_cache"):
                twin.__dict__[name] = copy.deepcopy(value, memo)
        cache = None if self._cache is None else self._cache()
        # a copy of the whole cache is in the memo before its layers are copied
        copied = memo.get(id(cache))
        twin.handle, twin._cache = self.handle, None if copied is None else weakref.ref(copied)
        self.handle.track(twin)
        return twin

    def adopt(self, container: list[Any]) -> None:
        """Put bound layers in the place of the plain ones and take over any state they hold."""
        plain = [container[i] for i in self._indices]
        for ordinal, layer in enumerate(plain):
            kind: type = type(layer)
            bound = exchange(layer, bound_class(kind))
            del bound.__dict__["recurrent_states"]
            bound.is_recurrent_states_initialized = dict.fromkeys(
                layer.is_recurrent_states_initialized, False
            )
            bound.binding, bound.ordinal = self, ordinal
            container[self._indices[ordinal]] = bound
        held = [layer.recurrent_states[0] for layer in plain]
        if all(layer.has_previous_state[0] for layer in plain) and None not in held:
            pairs = zip(self.handle.mixers, held, strict=True)
            self._state_dtype = held[0].dtype
            self._admit([m.adapter.from_model(state) for m, state in pairs])

    def restore(self) -> None:
        """Undo :meth:`adopt`: plain layers with plain tensors in the model's own layout.

        A half-written cache stays bound, so that reading it goes on raising.
        """
        cache = None if self._cache is None else self._cache()
        if cache is None or self._failed or self._forward is not None:
            return
        states: list[Tensor | None] = [None] * len(self._indices)
        if self.rows is not None:
            states = list(self._model_states())
        for index, state in zip(self._indices, states, strict=True):
            layer = cache.layers[index]
            plain = exchange(layer, type(layer).plain)
            del plain.binding, plain.ordinal
            plain.recurrent_states = dict.fromkeys(range(layer.number_of_states))
            plain.recurrent_states[0] = state
            plain.is_recurrent_states_initialized[0] = state is not None
            cache.layers[index] = plain

    def enter(self, layer: int, rows: int, tokens: int) -> None:
        """Start a mixer's forward; the first recurrent layer opens the forward.

        Raises:
            SlotError: An earlier forward stopped between layers; the state is half-written.
            ContractError: The batch has another number of rows than the cache.
        """
        at = self._forward
        in_order = at.done == layer if at is not None else layer == 0
        same = at is None or (at.rows, at.tokens) == (rows, tokens)
        if self._failed or not in_order or not same:
            self._fail()
        if at is None:
            self._forward = self._open(rows, tokens)
        self._active = layer

    def leave(self, *, finished: bool) -> None:
        """End a mixer's forward; the last recurrent layer commits or admits.

        Args:
            finished: Whether the mixer returned; otherwise the forward stays open, half-written.
        """
        self._active = None
        at = self._forward
        if at is None or not finished:
            return
        if not at.served:
            raise DriftError(f"recurrent layer {at.done} ran without calling a function we serve")
        at.done, at.served = at.done + 1, False
        if at.done < len(self._indices):
            return
        self._forward = None
        if at.is_step and self.rows is not None:
            self.rows.commit()
        else:
            self._admit(at.results, at.tokens)
        self.position += at.tokens

    def view(self, layer: int) -> Tensor | StateHook | None:
        """Return what ``recurrent_states[0]`` shows: the hook to its mixer, else a tensor."""
        if self._active == layer:
            return None if self.rows is None else LiveState(self, layer)
        if self._failed or self._forward is not None:
            raise SlotError(
                "cache: a forward is open or stopped between its recurrent layers, so the "
                "recurrent state cannot be read; start from a fresh cache"
            )
        return None if self.rows is None else self._model_states()[layer]

    def serve(self, layer: int, call: Call, hook: StateHook) -> object:
        """Serve a call of a mixer's step or chunk function on a live state."""
        at, rows = self._forward, self.rows
        if at is None or rows is None or self._active != layer:
            raise DriftError(f"{call.site.name} was called outside its mixer's forward")
        if not at.is_step:
            if at.initial is None:
                raise DriftError(f"{call.site.name} was handed a state that was never materialised")
            return call.run_original(**{call.site.state: at.initial[layer]})
        if self.handle.model.training and torch.is_grad_enabled():
            raise UnsupportedError(
                "training through cached decode steps; use model.eval() or torch.no_grad()"
            )
        arguments = call.arguments
        with torch.no_grad():
            block = call.adapter.block(call.site, arguments, self.handle.specs[layer])
            y = rows.step(layer, block, self.handle.read)
            at.served = True
            return call.adapter.finish(call.site, arguments, y, hook)

    def update(self, layer: int, state: Tensor | StateHook) -> Tensor | StateHook:
        """Take what a mixer hands back: the final state of a prefill; nothing after a step."""
        at = self._forward
        if isinstance(state, StateHook):
            return state
        if at is None or at.is_step or self._active != layer:
            raise ContractError(
                "recurrent_states",
                "to be set by the model's own prefill",
                "a tensor at another time",
                "build a fresh cache and prefill it",
            )
        adapter = self.handle.mixers[layer].adapter
        self._state_dtype = state.dtype
        at.results.append(adapter.from_model(state.detach()))
        at.served = True
        return state

    def reset(self) -> None:
        """Forget every row; the next forward is a first prefill."""
        self.rows, self._forward, self._failed, self._active = None, None, False, None
        self.position = 0

    def select(self, index: Sequence[int]) -> None:
        """Make row i the sequence of row ``index[i]``."""
        if self._failed or self._forward is not None:
            self._fail()
        if self.rows is not None:
            self.rows.select(index)

    def _open(self, rows: int, tokens: int) -> _Forward:
        if self.rows is None:
            return _Forward(rows, tokens, is_step=False)
        if rows != self.rows.count:
            raise ContractError("input_ids", f"{self.rows.count} rows, as the cache has", rows)
        if tokens <= self.handle.max_block:
            self.rows.begin(tokens)
            return _Forward(rows, tokens, is_step=True)
        return _Forward(rows, tokens, is_step=False, initial=self._model_states())

    def _admit(self, states: Sequence[Tensor], tokens: int = 0) -> None:
        if self.rows is None:
            self.rows = self.handle.new_rows(int(states[0].shape[0]), states[0].device)
            self.handle.track(self)
        self.rows.admit(states, self.position + tokens)

    def _model_states(self) -> list[Tensor]:
        if self.rows is None:
            raise SlotError("cache: holds no recurrent state yet")
        pairs = zip(self.handle.mixers, self.rows.materialise(), strict=True)
        return [m.adapter.to_model(state.to(self._state_dtype)) for m, state in pairs]

    def _fail(self) -> None:
        self._failed = True
        raise SlotError(
            "cache: an earlier forward stopped between its recurrent layers, so the state is "
            "half-written; start from a fresh cache or call cache.reset()"
        )


def bind(handle: Enabled, cache: Any, tokens: int) -> CacheBinding:  # noqa: ANN401 - transformers' Cache
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
