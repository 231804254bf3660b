"""The cache layers of a bound cache: transformers' own, with their recurrent part elsewhere."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from replayssm.errors import UnsupportedError
from replayssm.integrations.hooks import StateHook

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARTS = ("recurrent_states", "conv_states")


class States(Protocol):
    """What holds the states of all layers of a cache; see :class:`cache.CacheBinding`."""

    @property
    def count(self) -> int:
        """B."""
        ...

    @property
    def keep(self) -> int:
        """Newest tokens that can be taken back at any time."""
        ...

    def view(self, layer: int) -> Tensor | StateHook | None:
        """Return what ``recurrent_states[0]`` shows."""
        ...

    def conv_view(self, layer: int) -> Tensor | StateHook | None:
        """Return what ``conv_states[0]`` shows."""
        ...

    def update(self, layer: int, state: Tensor | StateHook) -> Tensor | StateHook:
        """Take what a mixer hands back."""
        ...

    def update_conv(self, layer: int, inputs: Tensor) -> Tensor | StateHook:
        """Take convolution inputs; return what the convolution is to run on."""
        ...

    def reset(self) -> None:
        """Forget every row."""
        ...

    def select(self, index: Sequence[int]) -> None:
        """Make row i the sequence of row ``index[i]``."""
        ...


class BoundLayer:
    """Mixed into the class of a transformers cache layer while its cache is bound.

    Overrides everything that reads or moves ``recurrent_states`` and ``conv_states``; keys and
    values, where the layer has them too, keep transformers' own code.
    """

    plain: type
    binding: States
    ordinal: int
    number_of_states: int
    has_previous_state: dict[int, bool]

    # is_compileable stays as it is: for static caches, masks are made by it

    @property
    def is_croppable(self) -> bool:
        """Whether the binding keeps tokens to take back, and the keys and values can be cropped."""
        return self.binding.keep > 0 and bool(getattr(self._attention(), "is_croppable", True))

    @property
    def recurrent_states(self) -> dict[int, Tensor | StateHook | None]:
        """State 0 as :meth:`States.view` shows it; other states do not exist."""
        states: dict[int, Tensor | StateHook | None] = dict.fromkeys(range(self.number_of_states))
        states[0] = self.binding.view(self.ordinal)
        return states

    @property
    def conv_states(self) -> dict[int, Tensor | StateHook | None]:
        """State 0 as :meth:`States.conv_view` shows it; other states do not exist."""
        states: dict[int, Tensor | StateHook | None] = dict.fromkeys(range(self.number_of_states))
        states[0] = self.binding.conv_view(self.ordinal)
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor | StateHook, state_idx: int = 0, **_kwargs: object
    ) -> Tensor | StateHook:
        """Take the final state of a prefill, or the hook after a step."""
        _only_state_0("recurrent", state_idx)
        return self.binding.update(self.ordinal, recurrent_states)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **_kwargs: object
    ) -> Tensor | StateHook:
        """Take ``[B, C, T]`` inputs and return what the convolution is to see."""
        _only_state_0("convolution", state_idx)
        self.has_previous_state[0] = True
        return self.binding.update_conv(self.ordinal, conv_states)

    def reset(self) -> None:
        """Reset the layer; the first recurrent layer resets the rows."""
        super().reset()  # type: ignore[misc]
        if self.ordinal == 0:
            self.binding.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at ``indices``."""
        # layers that also hold keys and values have their own method for those
        if hasattr(super(), "batch_select_indices"):
            super().batch_select_indices(indices)  # type: ignore[misc]
        self._select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies side by side."""
        if hasattr(super(), "batch_repeat_interleave"):
            super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._select_rows([row for row in range(self.binding.count) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to crop one layer alone: one count moves all of them.

        Raises:
            UnsupportedError: ``tokens_to_remove`` is not 0.
        """
        if tokens_to_remove:
            raise UnsupportedError(
                f"crop({tokens_to_remove}) of one layer: all recurrent layers move together; "
                "use cache.crop()"
            )

    def crop_attention(self, tokens_to_remove: int) -> None:
        """Crop the keys and values of a layer that has them beside its recurrent state."""
        attention: Any = self._attention()
        if hasattr(attention, "crop"):
            attention.crop(tokens_to_remove)

    def _attention(self) -> object:
        """Return this layer as its attention class sees it."""
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        return super(LinearAttentionCacheLayerMixin, self)

    def _select_rows(self, index: list[int]) -> None:
        if self.ordinal == 0:
            self.binding.select(index)


def _only_state_0(what: str, state_idx: int) -> None:
    if state_idx != 0:
        raise UnsupportedError(f"{what} state {state_idx} of a layer; only state 0 is served")


def bind_layer(layer: Any, binding: States, ordinal: int) -> Any:  # noqa: ANN401 - transformers' cache layers
    """Return the bound form of a plain layer, without the states it holds."""
    kind: type = type(layer)
    bound = _exchange(layer, _bound_class(kind))
    for part in _PARTS:
        del bound.__dict__[part]
        flags = f"is_{part}_initialized"
        setattr(bound, flags, dict.fromkeys(getattr(layer, flags), False))
    bound.binding, bound.ordinal = binding, ordinal
    return bound


def unbind_layer(layer: Any, state: Tensor | None, conv: Tensor | None) -> Any:  # noqa: ANN401
    """Return the plain form of a bound layer, with states in the model's own layout."""
    plain = _exchange(layer, type(layer).plain)
    del plain.binding, plain.ordinal
    for part, tensor in zip(_PARTS, (state, conv), strict=True):
        setattr(plain, part, dict.fromkeys(range(layer.number_of_states)))
        getattr(plain, part)[0] = tensor
        getattr(plain, f"is_{part}_initialized")[0] = tensor is not None
    if conv is not None:
        plain.conv_kernel_size[0] = conv.shape[-1]
        plain.dtype, plain.device = conv.dtype, conv.device
    return plain


@functools.cache
def _bound_class(plain: type) -> type:
    return type(f"Bound{plain.__name__}", (BoundLayer, plain), {"plain": plain})


def _exchange(layer: Any, kind: Any) -> Any:  # noqa: ANN401
    twin = kind.__new__(kind)
    twin.__dict__.update(layer.__dict__)
    return twin
