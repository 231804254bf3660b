"""``replayssm.enable(model)``: state replay for a loaded transformers model, on and off in a line.

    with replayssm.enable(model, state="q24", read="high", window=32):
        model.generate(**inputs, max_new_tokens=256)

``generate`` and plain forwards with a cache work as before. Every cache that goes through an
enabled model gets rows of its own (see :mod:`replayssm.integrations.cache`).
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from replayssm.errors import ContractError, UnsupportedError
from replayssm.integrations import hooks
from replayssm.integrations.bind import bind
from replayssm.integrations.handle import (
    PATHS,
    STANDARD_STATES,
    Handle,
    read_depth,
    with_keep,
)
from replayssm.ops.dispatch import choose
from replayssm.ring import RingSpec
from replayssm.storage import RING_DTYPES
from replayssm.types import Format, Impl, ReadDepth

if TYPE_CHECKING:
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

    from replayssm.integrations.cache import CacheBinding
    from replayssm.models.registry import Mixer

_ATTRIBUTE = "_replayssm_enabled"
_STATEFUL = "_is_stateful"


class Enabled(Handle):
    """An enabled model; ``with`` disables it on exit.

    Attributes:
        users: Engines that share the handle; 0 of a model that its owner enabled.
    """

    def __init__(
        self,
        model: nn.Module,
        mixers: tuple[Mixer, ...],
        *,
        path: str,
        state: Format,
        read: ReadDepth,
        ring: RingSpec,
        impl: Impl,
    ) -> None:
        super().__init__(model, mixers, path=path, state=state, read=read, ring=ring, impl=impl)
        self.users = 0
        self._removable: list[RemovableHandle] = []
        self._finalizer: weakref.finalize[..., nn.Module] | None = None

    @property
    def active(self) -> bool:
        """Whether the model is still enabled."""
        return getattr(self.model, _ATTRIBUTE, None) is self

    def __enter__(self) -> Enabled:
        return self

    def __deepcopy__(self, _memo: dict[int, object]) -> Enabled:
        # hooks and dispatchers of a copied model would go on serving from this one's handle
        raise UnsupportedError("a copy of an enabled model; disable() it, copy, enable() both")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.active:
            disable(self.model)

    def _install(self) -> None:
        keys = hooks.install(self.mixers)
        self._finalizer = weakref.finalize(self.model, hooks.uninstall, keys)
        self._finalizer.atexit = False
        for ordinal, mixer in enumerate(self.mixers):
            self._removable += _watch(self, ordinal, mixer.module)
        if self.path != "standard":
            # assisted generation refuses models that cannot take tokens back
            self.model.__dict__[_STATEFUL] = False

    def _uninstall(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable.clear()
        self.model.__dict__.pop(_STATEFUL, None)
        if self._finalizer is not None:
            self._finalizer()
        for binding in list(self._bindings):
            binding.restore()
        self._bindings.clear()
        self._latest = None


def enable(
    model: nn.Module,
    *,
    path: str = "replay",
    state: Format | str | None = None,
    read: ReadDepth | str = ReadDepth.FULL,
    window: int = 16,
    keep: int = 0,
    max_block: int = 1,
    impl: Impl | str = Impl.AUTO,
    self_test: bool = True,
) -> Enabled:
    """Serve the recurrent layers of a loaded transformers model from checkpoints and rings.

    Mutates ``model``: forward hooks on its mixers, and dispatchers in front of the step and chunk
    functions of its modeling module. :func:`disable` takes both away.

    Args:
        model: A loaded model with Mamba-2, Gated DeltaNet or Kimi Delta Attention layers.
        path: ``replay``; ``standard``, the same hooks around the standard step; or ``auto``, the
            faster of the two for every cache (``handle.choice`` tells which and why).
        state: State format, any (default ``s32``); of standard ``f32`` (default) or ``bf16``.
        read: Planes that a step reads; may be changed later through the handle.
        window: Tokens between two folds.
        keep: Newest tokens that ``cache.crop`` can take back at any time. A cache on which
            ``activate_past_recording()`` was called keeps at least 20, so this is for longer drafts
            and for caches that do not record.
        max_block: T tokens on a live cache with T <= max_block are one block of the ring; more are
            a prefill by the model's own chunk function. At least ``keep + 1`` where ``keep`` is
            not 0.
        impl: Implementation of the operations; ``handle.impl`` tells what ``auto`` chose.
        self_test: Compare each kind of layer with the model's own functions first.

    Returns:
        A handle; as a context manager it disables on exit.

    Raises:
        ContractError: An argument is out of range, or the model is enabled already.
        UnsupportedError: The model has a recurrent layer that no adapter serves, or cannot be
            hooked.
        DriftError: The model's own step disagrees with its adapter.
    """
    from replayssm.integrations.selftest import check_adapters
    from replayssm.integrations.support import require_supported

    if getattr(model, _ATTRIBUTE, None) is not None:
        raise ContractError("model", "one that is not enabled", "an enabled one", "disable() it")
    fmt, depth = _precision(path, state, read)
    mixers = require_supported(model)
    ring = _ring(path, window, keep, max_block)
    device = next(mixers[0].module.parameters()).device
    chosen = choose(Impl(impl), device)
    handle = Enabled(model, mixers, path=path, state=fmt, read=depth, ring=ring, impl=chosen)
    if handle.ring_dtype not in RING_DTYPES:
        raise UnsupportedError(f"model dtype {handle.ring_dtype}; load it in one of {RING_DTYPES}")
    if self_test:
        check_adapters(model, mixers)
    handle._install()
    model.__dict__[_ATTRIBUTE] = handle
    return handle


def disable(model: nn.Module) -> None:
    """Take every trace of :func:`enable` off a model; live caches go on with plain tensors.

    Raises:
        ContractError: The model is not enabled.
    """
    handle = getattr(model, _ATTRIBUTE, None)
    if handle is None:
        raise ContractError("model", "an enabled model", "one that is not enabled")
    del model.__dict__[_ATTRIBUTE]
    handle._uninstall()


def _precision(
    path: str, state: Format | str | None, read: ReadDepth | str
) -> tuple[Format, ReadDepth]:
    if path not in PATHS:
        raise ContractError("path", f"one of {PATHS}", path)
    if state is None:
        state = Format.F32 if path == "standard" else Format.S32
    try:
        fmt = Format(state)
    except ValueError:
        raise ContractError("state", f"one of {[f.value for f in Format]}", state) from None
    if path == "standard" and fmt not in STANDARD_STATES:
        names = [f.value for f in STANDARD_STATES]
        raise ContractError("state", f"one of {names} on the standard path", fmt.value)
    return fmt, read_depth(read, path)


def _ring(path: str, window: int, keep: int, max_block: int) -> RingSpec:
    if keep and path == "standard":
        raise ContractError("keep", "0 on the standard path, which cannot take tokens back", keep)
    ring = RingSpec(window=window, max_block=max_block)
    return with_keep(ring, keep) if keep else ring


def _watch(handle: Enabled, ordinal: int, mixer: nn.Module) -> list[RemovableHandle]:
    """Hook a mixer's forward: bind its cache and enter the layer before it, leave it after."""
    position = list(inspect.signature(mixer.forward).parameters).index(hooks.cache_argument(mixer))
    running: list[CacheBinding] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = args[position] if len(args) > position else None
        for name in hooks.CACHE_ARGUMENTS:
            cache = kwargs.get(name, cache) if cache is None else cache
        running.clear()
        if cache is None:
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        rows, tokens = int(hidden.shape[0]), int(hidden.shape[1])
        binding = bind(handle, cache, tokens)
        binding.enter(ordinal, rows, tokens)
        running.append(binding)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(_module: nn.Module, _args: object, output: object) -> None:
        while running:
            running.pop().leave(finished=output is not None)

    return [
        mixer.register_forward_pre_hook(before, with_kwargs=True),
        mixer.register_forward_hook(after, always_call=True),
    ]
