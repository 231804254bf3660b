"""What an enabled model and the caches bound to it know of each other."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from replayssm.errors import ContractError
from replayssm.integrations.rows import ReplayRows, Rows, StandardRows
from replayssm.models.adapters import conv_spec
from replayssm.policy import Choice, choose_path
from replayssm.storage import StorageSpec
from replayssm.types import Format, Impl, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from torch import nn

    from replayssm.models.registry import Mixer
    from replayssm.ring import RingSpec
    from replayssm.state import StatePool

PATHS = ("replay", "standard", "auto")
STANDARD_STATES = {Format.F32: torch.float32, Format.BF16: torch.bfloat16}
DEFAULT_DRAFT = 20
"""Tokens that transformers drafts a round unless told otherwise (``num_assistant_tokens``)."""
LONGEST_DRAFT = 64


class Bound(Protocol):
    """What a handle asks of a bound cache; see :class:`cache.CacheBinding`."""

    @property
    def rows(self) -> Rows | None:
        """Its rows, None before the first prefill."""
        ...

    def restore(self) -> None:
        """Give the cache back as transformers made it."""
        ...


class Handle:
    """An enabled model, as its bound caches know it.

    Attributes:
        model: The model.
        mixers: Its recurrent layers in order.
        specs: Their geometry, convolutions included.
        path: ``replay`` (checkpoint and rings), ``standard`` (the state is rewritten per token) or
            ``auto`` (the faster of the two, for every cache by its number of rows).
        choice: What ``auto`` chose for the cache that got its rows last, and why; None before.
        state: State format.
        ring: Ring sizes.
        ring_dtype: dtype of ring keys and values.
        impl: What serves the operations, resolved.
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
        self.choice: Choice | None = None
        self._read = read
        self._bindings: weakref.WeakSet[Bound] = weakref.WeakSet()
        self._latest: weakref.ref[Bound] | None = None

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
        if self._path_for(rows, device, ring) == "standard":
            # a format of planes is chosen for its grade, and fp32 is of no lower one
            dtype = STANDARD_STATES.get(self.state, torch.float32)
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

    def _path_for(self, rows: int, device: torch.device, ring: RingSpec) -> str:
        """Return the path of a new cache, and note why where it was ``auto`` that chose."""
        if self.path != "auto":
            return self.path
        if ring.keep or ring.max_block > 1:
            why = "the standard path cannot take tokens back"
            self.choice = Choice("replay", None, why)
        else:
            dtype = self.ring_dtype
            specs = [StorageSpec(layer, self.state, ring, dtype) for layer in self.specs]
            self.choice = choose_path(specs, rows, depth=self._read, device=device)
        return self.choice.path

    def track(self, binding: Bound) -> None:
        """Remember a bound cache, weakly, so that ``disable`` can give it back."""
        self._bindings.add(binding)
        self._latest = weakref.ref(binding)


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
