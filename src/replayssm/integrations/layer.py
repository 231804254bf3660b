"""The cache layers of a bound cache: transformers' own, with their recurrent state elsewhere."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.errors import UnsupportedError
from replayssm.integrations.hooks import StateHook

if TYPE_CHECKING:
    from replayssm.integrations.cache import CacheBinding


class BoundLayer:
    """Mixed into the class of a transformers cache layer while its cache is bound.

    Overrides everything that reads or moves ``recurrent_states``; the layer's other parts
    (convolution states, keys and values) keep transformers' own code.
    """

    plain: type
    binding: CacheBinding
    ordinal: int

    # is_compileable stays as it is: for static caches, masks are made by it
    is_croppable = False

    @property
    def recurrent_states(self) -> dict[int, Tensor | StateHook | None]:
        """State 0 as :meth:`CacheBinding.view` shows it; other states do not exist."""
        states: dict[int, Tensor | StateHook | None] = dict.fromkeys(range(self._states()))
        states[0] = self.binding.view(self.ordinal)
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor | StateHook, state_idx: int = 0, **_kwargs: object
    ) -> Tensor | StateHook:
        """Take the final state of a prefill, or the hook after a step."""
        if state_idx != 0:
            raise UnsupportedError(
                f"recurrent state {state_idx} of a layer; only state 0 is served"
            )
        return self.binding.update(self.ordinal, recurrent_states)

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
        self._select_everywhere(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies side by side."""
        conv: dict[int, Tensor | None] = self.conv_states  # type: ignore[attr-defined]
        rows = next((int(state.shape[0]) for state in conv.values() if state is not None), 0)
        self._select_everywhere(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens; removing none is allowed.

        Raises:
            UnsupportedError: ``tokens_to_remove`` is not 0.
        """
        if tokens_to_remove != 0:
            raise UnsupportedError(
                f"crop({tokens_to_remove}): a bound cache cannot take tokens back yet; "
                "prefill a fresh cache instead"
            )
        if self.record_past:  # type: ignore[attr-defined]
            super().crop(0)  # type: ignore[misc]

    def _states(self) -> int:
        return int(self.number_of_states)  # type: ignore[attr-defined]

    def _select_rows(self, index: list[int]) -> None:
        if self.ordinal == 0:
            self.binding.select(index)

    def _select_everywhere(self, indices: Tensor) -> None:
        conv: dict[int, Tensor | None] = self.conv_states  # type: ignore[attr-defined]
        for i, state in conv.items():
            if state is not None:
                conv[i] = state.index_select(0, indices.to(state.device))
        # layers that also hold keys and values have their own method for those
        if hasattr(super(), "batch_select_indices"):
            super().batch_select_indices(indices)  # type: ignore[misc]
        self._select_rows(indices.tolist())


@functools.cache
def bound_class(plain: type) -> type:
    """Return the bound form of a class of transformers cache layers."""
    return type(f"Bound{plain.__name__}", (BoundLayer, plain), {"plain": plain})


def exchange(layer: Any, kind: Any) -> Any:  # noqa: ANN401 - transformers' cache layers
    """Return an object of ``kind`` with the attributes of ``layer``."""
    twin = kind.__new__(kind)
    twin.__dict__.update(layer.__dict__)
    return twin
