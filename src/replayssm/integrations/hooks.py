"""Dispatchers in front of transformers' step and chunk functions.

A modeling module's function is replaced once, for all enabled models, by a dispatcher. It looks at
the state argument alone: when that is a :class:`StateHook` (our own object, which only an enabled
model's cache hands out) the hook serves the call, otherwise the original runs as if nothing were
there. When the last model that needs a function is disabled, the original is put back.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from replayssm.errors import UnsupportedError
from replayssm.models.adapters import modeling_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from torch import nn

    from replayssm.models.adapters import Adapter, Site
    from replayssm.models.registry import Mixer


CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step or chunk function on one of our states.

    Attributes:
        adapter: The family whose function it is.
        site: Which of its functions.
        original: The model's own function.
        parameters: Its parameter names, in order.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    adapter: Adapter
    site: Site
    original: Callable[..., Any]
    parameters: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by parameter name."""
        return {**dict(zip(self.parameters, self.args, strict=False)), **self.kwargs}

    def run_original(self, **replaced: Any) -> Any:  # noqa: ANN401 - what the model's own code returns
        """Run the model's own function with some arguments replaced."""
        return self.original(**{**self.arguments, **replaced})


class StateHook:
    """Stands in for a recurrent state in a mixer's hands; the mixer may only pass it on."""

    def serve(self, call: Call) -> object:
        """Answer a call of a step or chunk function that was handed this object."""
        raise NotImplementedError

    def to(self, *_args: object, **_kwargs: object) -> StateHook:
        """Return itself: a mixer may ask for fp32 before it hands a state back."""
        return self


@dataclass(slots=True)
class _Patch:
    home: ModuleType
    name: str
    original: Callable[..., Any]
    dispatcher: Callable[..., Any]
    users: int = field(default=0)


_PATCHES: dict[tuple[str, str], _Patch] = {}


def _dispatcher(adapter: Adapter, site: Site, original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = tuple(inspect.signature(original).parameters)
    position = parameters.index(site.state)

    # a state is not one tensor, so torch.compile breaks its graph here and around the mixers' hooks
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def serve(state: StateHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return state.serve(Call(adapter, site, original, parameters, args, kwargs))

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a transparent wrapper
        state = args[position] if len(args) > position else kwargs.get(site.state)
        if not isinstance(state, StateHook):
            return original(*args, **kwargs)
        return serve(state, args, kwargs)

    return dispatch


def install(mixers: Iterable[Mixer]) -> tuple[tuple[str, str], ...]:
    """Put dispatchers in front of every function that ``mixers`` call.

    Returns:
        Keys for :func:`uninstall`, one per use.
    """
    sites = {
        (modeling_module(m.module).__name__, site.name): (
            modeling_module(m.module),
            m.adapter,
            site,
        )
        for m in mixers
        for site in m.adapter.sites
    }
    for key, (home, adapter, site) in sites.items():
        if key not in _PATCHES:
            original = getattr(home, site.name)
            patch = _Patch(home, site.name, original, _dispatcher(adapter, site, original))
            setattr(home, site.name, patch.dispatcher)
            _PATCHES[key] = patch
        _PATCHES[key].users += 1
    return tuple(sites)


def uninstall(keys: Iterable[tuple[str, str]]) -> None:
    """Drop one use of each function; the last one puts the original back."""
    for key in keys:
        patch = _PATCHES[key]
        patch.users -= 1
        if patch.users:
            continue
        del _PATCHES[key]
        if getattr(patch.home, patch.name) is patch.dispatcher:
            setattr(patch.home, patch.name, patch.original)
        else:
            warnings.warn(
                f"{patch.home.__name__}.{patch.name} was replaced by someone else meanwhile and "
                "is left as it is; the dispatcher under it passes every call through",
                stacklevel=2,
            )


def cache_argument(mixer: nn.Module) -> str:
    """Return the name under which a mixer's ``forward`` takes its cache.

    Raises:
        UnsupportedError: There is none.
    """
    parameters = inspect.signature(mixer.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise UnsupportedError(f"{type(mixer).__name__}.forward takes no cache: {list(parameters)}")
