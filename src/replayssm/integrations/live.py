"""What the mixers of an enabled model get to see of a bound cache while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.integrations.hooks import Call, StateHook

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.integrations.cache import CacheBinding


class LiveState(StateHook):
    """The state of one recurrent layer of a bound cache, as its mixer sees it."""

    __slots__ = ("binding", "layer")

    def __init__(self, binding: CacheBinding, layer: int) -> None:
        self.binding, self.layer = binding, layer

    def serve(self, call: Call) -> object:
        """Serve a step or chunk function from the rows, or run it as a prefill."""
        return self.binding.serve(self.layer, call, self)


class LiveConv(StateHook):
    """The convolution of one recurrent layer: its state, or the inputs of a block of tokens."""

    __slots__ = ("binding", "inputs", "layer")

    def __init__(self, binding: CacheBinding, layer: int, inputs: Tensor | None = None) -> None:
        self.binding, self.layer, self.inputs = binding, layer, inputs

    def serve(self, call: Call) -> object:
        """Serve a convolution function from the rows."""
        inputs = call.arguments["hidden_states"] if self.inputs is None else self.inputs
        return self.binding.convolve(self.layer, call, inputs)
