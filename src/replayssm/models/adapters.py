"""What an adapter is: one family of transformers mixers, mapped to the algebra.

A mixer computes its projections and gates itself. For its convolution and for its recurrence it
calls functions of its modeling module: for each of them a *step* function for one token on a live
state, and a *chunk* function for several. An adapter names all four, reads the mixer's geometry,
turns the arguments of the recurrence into a :class:`~replayssm.types.Block`, and turns the block's
outputs into what that function returns.
Nothing here imports transformers: an adapter knows functions by name and mixers by attribute.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replayssm.errors import ContractError, UnsupportedError
from replayssm.types import ConvSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch import Tensor, nn

    from replayssm.types import Block, LayerSpec


@dataclass(frozen=True, slots=True)
class Site:
    """A module-level function that a mixer calls.

    Attributes:
        name: Its name in the mixer's modeling module.
        state: Its parameter that takes the recurrent state (or what stands for it).
        per_token: Its parameters with a token dimension, dimension 1; none for a step function
            whose arguments carry no such dimension.
    """

    name: str
    state: str
    per_token: tuple[str, ...] = ()

    @property
    def tokens(self) -> bool:
        """Whether the arguments carry a token dimension."""
        return bool(self.per_token)

    def between(self, arguments: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the arguments for tokens ``start`` to ``stop`` of a call for several tokens."""
        cut = {
            name: arguments[name][:, start:stop]
            for name in self.per_token
            if arguments.get(name) is not None
        }
        return {**arguments, **cut}


CONV_STEP = Site("causal_conv1d_update", "conv_state")
CONV_CHUNK = Site("causal_conv1d_fn", "hidden_states")
"""The functions of the convolution; the second has no state, so its input stands for it."""


class Adapter:
    """One family of mixers. Subclasses are stateless; every method may be called at any time.

    Attributes:
        family: ``mamba2``, ``gdn`` or ``kda``.
        step: The function for one token.
        chunk: The function for several tokens.
        transposed: Whether the model keeps its state as K x V instead of V x K.
        attributes: Attributes that a mixer of this family must have.
    """

    family: str
    step: Site
    chunk: Site
    transposed: bool
    attributes: tuple[str, ...]

    def matches(self, mixer: nn.Module) -> bool:
        """Tell whether ``mixer`` is of this family: its attributes, and its module's functions."""
        if not all(hasattr(mixer, name) for name in ("layer_idx", "conv1d", *self.attributes)):
            return False
        home = modeling_module(mixer)
        return all(hasattr(home, site.name) for site in self.sites)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every function of the modeling module that is served."""
        return self.step, self.chunk, CONV_STEP, CONV_CHUNK

    def spec(self, mixer: nn.Module) -> LayerSpec:
        """Return the geometry of a mixer that :meth:`matches`."""
        raise NotImplementedError

    def block(self, site: Site, arguments: Mapping[str, Any], spec: LayerSpec) -> Block:
        """Map a function's arguments to a block.

        Args:
            site: Which function was called.
            arguments: Its arguments by parameter name.
            spec: The layer's geometry.

        Raises:
            UnsupportedError: An argument asks for something outside the algebra.
        """
        raise NotImplementedError

    def raw_block(
        self, site: Site, arguments: Mapping[str, Any], spec: LayerSpec
    ) -> tuple[Block, dict[str, Any]] | None:
        """Map a function's arguments as they are, for kernels that do the rest themselves.

        Args:
            site: Which function was called.
            arguments: Its arguments by parameter name.
            spec: The layer's geometry.

        Returns:
            The block and what is to be done inside, fields of
            :class:`replayssm.ops.triton.call.Fused`; None where the arguments ask for something
            else. Outputs then need :meth:`finish_raw` only.
        """
        raise NotImplementedError

    def finish_raw(
        self, site: Site, arguments: Mapping[str, Any], y: Tensor, state: object
    ) -> object:
        """Turn outputs of a raw block, ``[B, T, HV, V]``, into what the function returns."""
        raise NotImplementedError

    def finish(self, site: Site, arguments: Mapping[str, Any], y: Tensor, state: object) -> object:
        """Turn a block's outputs into what the function returns.

        Args:
            site: Which function was called.
            arguments: Its arguments by parameter name.
            y: ``[B, T, HV, V]`` fp32 outputs of the block.
            state: What to hand back where the function returns a state.
        """
        raise NotImplementedError

    def from_model(self, state: Tensor) -> Tensor:
        """Return a model's recurrent state as ``[B, HV, V, K]``."""
        return state.transpose(-1, -2) if self.transposed else state

    def to_model(self, state: Tensor) -> Tensor:
        """Return a ``[B, HV, V, K]`` state in the model's own layout, contiguous."""
        return (state.transpose(-1, -2) if self.transposed else state).contiguous()

    @property
    def layout(self) -> str:
        """The model's own state layout, in words."""
        return "[B, HV, K, V]" if self.transposed else "[B, HV, V, K]"


def conv_spec(mixer: nn.Module) -> ConvSpec:
    """Return the geometry of a mixer's convolution."""
    at: Any = mixer
    channels, _, width = at.conv1d.weight.shape
    return ConvSpec(channels, width)


def conv_weights(mixer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a mixer's convolution weights ``[C, width]`` and bias ``[C]``."""
    at: Any = mixer
    return at.conv1d.weight.squeeze(1), at.conv1d.bias


def modeling_module(mixer: nn.Module) -> ModuleType:
    """Return the module whose functions a mixer's ``forward`` calls."""
    return sys.modules[type(mixer).__module__]


def ungroup(x: Tensor, heads: int, name: str) -> Tensor:
    """Undo a repeat of key heads: keep one head of every group that carries the same numbers.

    Args:
        x: ``[B, T, H or HV, K]``.
        heads: H.
        name: Argument name, for the error.

    Raises:
        ContractError: The heads of ``x`` are no multiple of H.
    """
    given = x.shape[2]
    if given == heads:
        return x
    if given % heads:
        raise ContractError(name, f"a multiple of {heads} heads", given)
    return x[:, :, :: given // heads]


def refuse_packed(arguments: Mapping[str, Any]) -> None:
    """Refuse packed sequences: their boundaries inside a row have no place in a slot.

    Raises:
        UnsupportedError: ``cu_seqlens`` or ``seq_idx`` is given.
    """
    for name in ("cu_seqlens", "seq_idx"):
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"{name}: packed sequences cannot be served on a live cache; pass one a row"
            )
