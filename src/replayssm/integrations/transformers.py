"""``replayssm.enable(model)``: state replay for a loaded transformers model, on and off in a line.

    with replayssm.enable(model, state="q24", read="high", window=32):
        model.generate(**inputs, max_new_tokens=256)

``generate`` and plain forwards with a cache work as before. Every cache that goes through an
enabled model gets rows of its own (see :mod:`replayssm.integrations.cache`).
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from replayssm.errors import ContractError, UnsupportedError
from replayssm.integrations import hooks
from replayssm.integrations.bind import bind
from replayssm.integrations.rows import ReplayRows, Rows, StandardRows
from replayssm.models.adapters import conv_spec
from replayssm.ops.dispatch import choose
from replayssm.ring import RingSpec
from replayssm.storage import RING_DTYPES
from replayssm.types import Format, Impl, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

    from replayssm.integrations.cache import CacheBinding
    from replayssm.models.registry import Mixer
    from replayssm.state import StatePool

PATHS = ("replay", "standard")
STANDARD_STATES = {Format.F32: torch.float32, Format.BF16: torch.bfloat16}
DEFAULT_DRAFT = 20
"""Tokens that transformers drafts a round unless told otherwise (``num_assistant_tokens``)."""
LONGEST_DRAFT = 64
_ATTRIBUTE = "_replayssm_enabled"
_STATEFUL = "_is_stateful"


class Enabled:
    """An enabled model; ``with`` disables it on exit.

    Attributes:
        model: The model.
        mixers: Its recurrent layers in order.
        specs: Their geometry, convolutions included.
        path: ``replay`` (checkpoint and rings) or ``standard`` (the state is rewritten per token).
        state: State format.
        ring: Ring sizes.
        ring_dtype: dtype of ring keys and values.
        impl: What serves the operations, resolved.
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
        self.model, self.mixers = model, mixers
        self.specs: tuple[LayerSpec, ...] = tuple(
            replace(mixer.spec, conv=conv_spec(mixer.module)) for mixer in mixers
        )
        self.path, self.state, self.ring, self.impl = path, state, ring, impl
        self.ring_dtype = parameter_dtype(mixers[0].module)
        self._read, self.users = read, 0
        self._bindings: weakref.WeakSet[CacheBinding] = weakref.WeakSet()
        self._latest: weakref.ref[CacheBinding] | None = None
        self._removable: list[RemovableHandle] = []
        self._finalizer: weakref.finalize[..., nn.Module] | None = None

    @property
    def read(self) -> ReadDepth:
        """Planes that steps read; setting it acts on the next step of every cache."""
        return self._read

    @read.setter
    def read(self, depth: ReadDepth | str) -> None:
        self._read = read_depth(depth, self.path)

    @property
    def window(self) -> int:
        """Tokens between two folds."""
        return self.ring.window

    @property
    def max_block(self) -> int:
        """Most tokens on a live cache that are served as one block rather than as a prefill."""
        return self.ring.max_block

    @property
    def pool(self) -> StatePool | None:
        """The pool of the cache prefilled last; None once that cache is dropped, or without one."""
        binding = None if self._latest is None else self._latest()
        return None if binding is None or binding.rows is None else binding.rows.pool

    @property
    def active(self) -> bool:
        """Whether the model is still enabled."""
        return getattr(self.model, _ATTRIBUTE, None) is self

    def ring_for(self, tokens: int, *, recording: bool) -> RingSpec:
        """Return the ring sizes for a forward of ``tokens`` tokens on a live cache.

        A cache that records its past, as transformers' assisted generation asks of it, keeps as
        many tokens as transformers drafts by default, and more once longer drafts arrive.
        """
        if self.path == "standard" or not recording:
            return self.ring
        keep = max(self.ring.keep, DEFAULT_DRAFT)
        if keep + 1 < tokens <= LONGEST_DRAFT + 1:
            keep = min(LONGEST_DRAFT, max(2 * keep, tokens - 1))
        return with_keep(self.ring, keep)

    def new_rows(self, rows: int, device: torch.device, ring: RingSpec) -> Rows:
        """Return empty rows for a new cache."""
        if self.path == "standard":
            dtype = STANDARD_STATES[self.state]
            return StandardRows(self.specs, rows, ring=ring, dtype=dtype, impl=self.impl)
        return ReplayRows(
            self.specs,
            rows,
            state=self.state,
            ring=ring,
            ring_dtype=self.ring_dtype,
            device=device,
            impl=self.impl,
        )

    def track(self, binding: CacheBinding) -> None:
        """Remember a bound cache, weakly, so that ``disable`` can give it back."""
        self._bindings.add(binding)
        self._latest = weakref.ref(binding)

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
        if self.path == "replay":
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
        path: ``replay``, or ``standard``: the same hooks around the standard step.
        state: State format. Default ``s32`` for replay (any format); ``f32`` for standard, which
            also takes ``bf16``, rounded at every token.
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


def with_keep(ring: RingSpec, keep: int) -> RingSpec:
    """Return a ring that keeps ``keep`` tokens and takes them and one more as one block."""
    return replace(ring, keep=keep, max_block=max(ring.max_block, keep + 1))


def read_depth(depth: ReadDepth | str, path: str) -> ReadDepth:
    """Return a read depth by its name.

    Raises:
        ContractError: There is no such depth, or not on this path.
    """
    try:
        found = ReadDepth(depth)
    except ValueError:
        raise ContractError("read", f"one of {[d.value for d in ReadDepth]}", depth) from None
    if path == "standard" and found is not ReadDepth.FULL:
        raise ContractError("read", "full on the standard path, which has no planes", found.value)
    return found


def parameter_dtype(mixer: nn.Module) -> torch.dtype:
    """Return the dtype a mixer computes in: that of its convolution, which is never quantised."""
    at: Any = mixer
    dtype: torch.dtype = at.conv1d.weight.dtype
    return dtype


def _precision(
    path: str, state: Format | str | None, read: ReadDepth | str
) -> tuple[Format, ReadDepth]:
    if path not in PATHS:
        raise ContractError("path", f"one of {PATHS}", path)
    if state is None:
        state = Format.S32 if path == "replay" else Format.F32
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
