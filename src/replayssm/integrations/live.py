"""What the mixers of an enabled model get to see of a bound cache while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from replayssm.integrations.hooks import Call, StateHook

if TYPE_CHECKING:
    from torch import Tensor


class Servant(Protocol):
    """What serves the calls of mixers; see :class:`cache.CacheBinding`."""

    def serve(self, layer: int, call: Call, hook: StateHook, /) -> object:
        """Serve a step or chunk function."""
        ...

    def convolve(self, layer: int, call: Call, inputs: Tensor, /) -> Tensor:
        """Serve a convolution."""
        ...


class LiveState(StateHook):
    """The state of one recurrent layer of a bound cache, as its mixer sees it."""

    __slots__ = ("binding", "layer")

    def __init__(self, binding: Servant, layer: int) -> None:
        self.binding, self.layer = binding, layer

    def serve(self, call: Call) -> object:
        """Serve a step or chunk function from the rows, or run it as a prefill."""
        return self.binding.serve(self.layer, call, self)


class LiveConv(StateHook):
    """The convolution of one recurrent layer: its state, or the inputs of a block of tokens."""

    __slots__ = ("binding", "inputs", "layer")

    def __init__(self, binding: Servant, layer: int, inputs: Tensor | None = None) -> None:
        self.binding, self.layer, self.inputs = binding, layer, inputs

    def serve(self, call: Call) -> object:
        """Serve a convolution function from the rows."""
        inputs = call.arguments["hidden_states"] if self.inputs is None else self.inputs
        return self.binding.convolve(self.layer, call, inputs)
