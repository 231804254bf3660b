"""A transformers cache whose recurrent layers keep what they remember in our rows.

A cache is bound on its first forward through an enabled model: each of its recurrent layers is
exchanged for one of a subclass, which hands out a :class:`StateHook` while its mixer runs and a
materialised tensor at any other time, for the recurrent state and for the convolution alike.
Attention keys and values stay with transformers. ``disable`` exchanges the layers back and leaves
plain tensors behind.

One :class:`CacheBinding` serves all recurrent layers of a cache. A forward is opened by the first
recurrent layer and closed by the last: it is a *step* (at most ``max_block`` tokens on live rows)
or a *prefill* (anything else: the model's own functions run from the materialised state and the
result is admitted at the new position). Where tokens are kept to be taken back, the newest ``keep``
tokens of a prefill go into the rings too, and :meth:`CacheBinding.crop` takes back any of them.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.errors import (
    ContractError,
    DriftError,
    SlotError,
    UnsupportedError,
)
from replayssm.integrations import crop as cropping
from replayssm.integrations.forward import Forward, run_step
from replayssm.integrations.hooks import Call, StateHook
from replayssm.integrations.layer import bind_layer, unbind_layer
from replayssm.integrations.layout import from_layers, model_convs, model_states
from replayssm.integrations.live import LiveConv, LiveState
from replayssm.models.adapters import conv_spec, conv_weights, refuse_packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.integrations.handle import Handle
    from replayssm.integrations.rows import Rows
    from replayssm.ring import RingSpec


class CacheBinding:
    """What one bound cache holds: its rows, its position and the forward in progress.

    Args:
        handle: The enabled model.
        cache: The cache; held weakly, so that its memory goes with its last user.
        position: Tokens the cache holds already.

    Attributes:
        handle: The enabled model.
        rows: What they keep; None before the first prefill and after a reset.
        position: Tokens that every row has seen, padding included.
        ring: Ring sizes of this cache alone; None takes the handle's.
    """

    def __init__(self, handle: Handle, cache: Any, position: int) -> None:  # noqa: ANN401
        self.handle = handle
        self._cache: weakref.ref[Any] | None = weakref.ref(cache)
        self._indices = tuple(mixer.layer_idx for mixer in handle.mixers)
        self.rows: Rows | None = None
        self.position = position
        self.ring: RingSpec | None = None
        self._forward: Forward | None = None
        self._held: Forward | None = None
        self._failed = False
        self._active: int | None = None
        self._state_dtype = torch.float32

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheBinding:
        if self._forward is not None or self._held is not None:
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

    @property
    def count(self) -> int:
        """B, 0 before the first prefill."""
        return 0 if self.rows is None else self.rows.count

    @property
    def keep(self) -> int:
        """Newest tokens that :meth:`crop` can take back at any time."""
        return self._ring(1).keep if self.rows is None else self.rows.ring.keep

    def adopt(self, container: list[Any]) -> None:
        """Put bound layers in the place of the plain ones and take over any state they hold."""
        plain = [container[i] for i in self._indices]
        for ordinal, layer in enumerate(plain):
            container[self._indices[ordinal]] = bind_layer(layer, self, ordinal)
        self._owner().crop = self.crop
        held = from_layers(plain, self.handle.mixers)
        if held is not None:
            self._state_dtype = held[0][0].dtype
            self._admit(*held, self.position)

    def restore(self) -> None:
        """Undo :meth:`adopt`: plain layers with plain tensors in the model's own layout.

        A half-written cache stays bound, so that reading it goes on raising.
        """
        cache = None if self._cache is None else self._cache()
        if cache is None or self._failed or self._forward is not None or self._held is not None:
            return
        states: list[Tensor | None] = [None] * len(self._indices)
        convs: list[Tensor | None] = list(states)
        if self.rows is not None:
            states, convs = list(self._model_states()), list(self._model_convs())
        del cache.__dict__["crop"]
        for index, state, conv in zip(self._indices, states, convs, strict=True):
            cache.layers[index] = unbind_layer(cache.layers[index], state, conv)

    def enter(self, layer: int, rows: int, tokens: int) -> None:
        """Start a mixer's forward; the first recurrent layer opens the forward.

        Raises:
            SlotError: An earlier forward stopped between layers; the state is half-written.
            ContractError: The batch has another number of rows than the cache.
        """
        self._check_committed()
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
        if not (at.is_served and at.is_convolved):
            raise DriftError(f"recurrent layer {at.done} ran without calling a function we serve")
        at.done, at.is_served, at.is_convolved = at.done + 1, False, False
        if at.done < len(self._indices):
            return
        if at.is_held:
            self._held, self._forward = at, None
            return
        if at.is_step:
            self._live_rows().commit()
        else:
            self._admit(at.states, at.windows, self.position + at.head)
            if at.tail:
                at.append_tail(self._live_rows(), self.handle.mixers, self.handle.read)
        self._forward = None
        self.position += at.tokens

    def hold(self, tokens: int, parents: Sequence[int] | None = None) -> None:
        """Open the next forward now, as a block whose commit is left to :meth:`commit`.

        Args:
            tokens: T of the block, at most ``max_block``.
            parents: The token of the block that each token continues, -1 for the committed
                sequence; None for a chain.
        """
        self._check_idle()
        rows = self._live_rows()
        rows.begin(tokens, parents)
        self._forward = Forward(rows.count, tokens, is_step=True, is_held=True)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the tokens of ``path`` of the block that :meth:`hold` opened: all layers follow.

        Raises:
            ContractError: No block awaits its commit, or the path does not go down its tree.
        """
        if self._held is None:
            raise ContractError("commit", "a block that was verified", "none")
        self._live_rows().commit(path)
        block, self._held = self._held.tokens, None
        cropping.keep_path(self._owner().layers, block, path)
        self.position += len(path)

    def view(self, layer: int) -> Tensor | StateHook | None:
        """Return what ``recurrent_states[0]`` shows: the hook to its mixer, else a tensor."""
        if self._active == layer:
            return None if self.rows is None else LiveState(self, layer)
        self._check_readable()
        return None if self.rows is None else self._model_states()[layer]

    def conv_view(self, layer: int) -> Tensor | StateHook | None:
        """Return what ``conv_states[0]`` shows: the hook to its mixer, else a tensor."""
        if self._active == layer:
            return None if self.rows is None else LiveConv(self, layer)
        self._check_readable()
        return None if self.rows is None else self._model_convs()[layer]

    def serve(self, layer: int, call: Call, hook: StateHook) -> object:
        """Serve a call of a mixer's step or chunk function on a live state."""
        at, rows = self._running(layer, call.site.name)
        if not at.is_step:
            return at.run_prefill(layer, call, hook, self.handle.specs[layer])
        self._check_inference()
        served = run_step(rows, layer, call, hook, self.handle)
        at.is_served = True
        return served

    def convolve(self, layer: int, call: Call, inputs: Tensor) -> Tensor:
        """Serve a call of a mixer's convolution; ``inputs`` and the result are ``[B, C, T]``."""
        from transformers.activations import ACT2FN

        at, rows = self._running(layer, call.site.name)
        self._check_inference()
        arguments = call.arguments
        refuse_packed(arguments)
        with torch.no_grad():
            weight, bias = arguments["weight"], arguments.get("bias")
            y = rows.conv(layer, inputs.transpose(1, 2), weight, bias).transpose(1, 2)
            activation = arguments.get("activation")
            at.is_convolved = True
            return y if activation is None else ACT2FN[activation](y)

    def update(self, layer: int, state: Tensor | StateHook) -> Tensor | StateHook:
        """Take what a mixer hands back: the final state of a prefill; nothing after a step."""
        at = self._forward
        if isinstance(state, StateHook):
            return state
        if at is None or at.is_step or self._active != layer:
            raise ContractError(
                "recurrent_states",
                "a state from a prefill of the bound model",
                "a tensor from elsewhere",
            )
        adapter = self.handle.mixers[layer].adapter
        self._state_dtype = state.dtype
        at.states.append(adapter.from_model(state.detach()))
        at.is_served = True
        return state

    def update_conv(self, layer: int, inputs: Tensor) -> Tensor | StateHook:
        """Take ``[B, C, T]`` convolution inputs; return what the convolution is to run on."""
        at = self._forward
        if at is None or self._active != layer:
            raise ContractError("conv_states", "inputs from a mixer's forward", "a tensor")
        if at.is_step:
            return LiveConv(self, layer, inputs)
        width = conv_spec(self.handle.mixers[layer].module).width
        return at.take_inputs(layer, inputs, width)

    def reset(self) -> None:
        """Forget every row; the next forward is a first prefill."""
        self.rows, self._forward, self._held = None, None, None
        self._failed, self._active, self.position = False, None, 0

    def select(self, index: Sequence[int]) -> None:
        """Make row i the sequence of row ``index[i]``."""
        self._check_idle()
        if self.rows is not None:
            self.rows.select(index)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest tokens of a cache back: recurrent states, convolutions, attention.

        This is ``cache.crop`` while the cache is bound.

        Args:
            tokens_to_remove: Minus the number of tokens, at most ``keep`` of them.

        Raises:
            ContractError: More tokens than can be taken back, or a positive number; nothing was
                changed.
            UnsupportedError: A layer of the cache cannot be cropped now; nothing was changed.
        """
        self._check_idle()
        layers = self._owner().layers
        count = -tokens_to_remove
        most = 0 if self.rows is None else self.rows.croppable()
        is_standard = self.rows is not None and self.rows.pool is None
        path = "standard" if is_standard else self.handle.path
        cropping.check(layers, tokens_to_remove, most, path=path)
        if self.rows is not None:
            self.rows.crop(count)
        cropping.crop_attention(layers, tokens_to_remove)
        self.position -= count

    def _open(self, rows: int, tokens: int) -> Forward:
        if self.rows is None:
            if not self.keep:
                return Forward(rows, tokens, is_step=False)
            self._start_empty(rows)
        else:
            self._make_room(tokens)
        at = self._live_rows()
        if rows != at.count:
            raise ContractError("input_ids", f"{at.count} rows, as the cache has", rows)
        if tokens <= at.ring.max_block:
            at.begin(tokens)
            return Forward(rows, tokens, is_step=True)
        tail = at.ring.keep
        initial, before = self._model_states(), at.windows()
        return Forward(rows, tokens, is_step=False, tail=tail, initial=initial, before=before)

    def _ring(self, tokens: int) -> RingSpec:
        if self.ring is not None:
            return self.ring
        recording = self._owner().layers[self._indices[0]].record_past
        return self.handle.ring_for(tokens, recording=recording)

    def _make_room(self, tokens: int) -> None:
        """Move the rows to wider rings where this forward needs them; rings never get narrower."""
        rows = self._live_rows()
        wanted, ring = self._ring(tokens), rows.ring
        if wanted.keep > ring.keep or wanted.max_block > ring.max_block:
            states, windows = rows.materialise(), rows.windows()
            self.rows = self.handle.new_rows(rows.count, states[0].device, wanted)
            self.rows.admit(states, windows, self.position)

    def _start_empty(self, rows: int) -> None:
        """Admit zero states, so that the first prefill runs on live rows like any other."""
        device = conv_weights(self.handle.mixers[0].module)[0].device
        self.rows = self.handle.new_rows(rows, device, self._ring(1))
        self.rows.admit(None, None, self.position)
        for index in self._indices:
            self._owner().layers[index].has_previous_state[0] = True
        self.handle.track(self)

    def _admit(self, states: Sequence[Tensor], windows: Sequence[Tensor], position: int) -> None:
        if self.rows is None:
            self.rows = self.handle.new_rows(len(states[0]), states[0].device, self._ring(1))
            self.handle.track(self)
        self.rows.admit(states, windows, position)

    def _model_states(self) -> list[Tensor]:
        return model_states(self._live_rows(), self.handle.mixers, self._state_dtype)

    def _model_convs(self) -> list[Tensor]:
        return model_convs(self._live_rows())

    def _owner(self) -> Any:  # noqa: ANN401 - transformers' Cache
        cache = None if self._cache is None else self._cache()
        if cache is None:
            raise SlotError("cache: these layers were taken out of the cache they are bound in")
        return cache

    def _live_rows(self) -> Rows:
        if self.rows is None:
            raise SlotError("cache: holds no recurrent state yet")
        return self.rows

    def _running(self, layer: int, name: str) -> tuple[Forward, Rows]:
        if self._forward is None or self.rows is None or self._active != layer:
            raise DriftError(f"{name} was called outside its mixer's forward")
        return self._forward, self.rows

    def _check_inference(self) -> None:
        if self.handle.model.training and torch.is_grad_enabled():
            raise UnsupportedError(
                "training through cached decode steps; use model.eval() or torch.no_grad()"
            )

    def _check_readable(self) -> None:
        self._check_committed()
        if self._failed or self._forward is not None:
            raise SlotError(
                "cache: a forward is open or stopped between its recurrent layers, so the "
                "recurrent state cannot be read; start from a fresh cache"
            )

    def _check_committed(self) -> None:
        if self._held is not None:
            raise SlotError("cache: a verified block awaits its commit")

    def _check_idle(self) -> None:
        self._check_committed()
        if self._failed or self._forward is not None:
            self._fail()

    def _fail(self) -> None:
        self._failed = True
        raise SlotError(
            "cache: an earlier forward stopped between its recurrent layers, so the state is "
            "half-written; start from a fresh cache or call cache.reset()"
        )
