"""What the recurrent layers keep for one cache's rows, on either path, behind one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.errors import ContractError, UnsupportedError
from replayssm.ops import standard_
from replayssm.ring import BlockPlan
from replayssm.state import StatePool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.ring import RingSpec
    from replayssm.slots import SlotRef
    from replayssm.ticket import Ticket
    from replayssm.types import Block, Format, Impl, LayerSpec, ReadDepth


class Rows(Protocol):
    """What the recurrent layers of a model keep for B rows: states and convolution inputs.

    A forward is ``begin``, one ``conv`` and one ``step`` per layer, ``commit``; the rest needs no
    forward open.
    """

    @property
    def count(self) -> int:
        """B."""
        ...

    @property
    def pool(self) -> StatePool | None:
        """The pool behind the rows, None on the standard path."""
        ...

    @property
    def ring(self) -> RingSpec:
        """Sizes: blocks up to ``max_block`` are steps, ``keep`` tokens can be taken back."""
        ...

    def begin(self, tokens: int, parents: Sequence[int] | None = None) -> None:
        """Open a forward of ``tokens`` tokens over all rows; ``parents`` is the tree of each."""
        ...

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve ``x`` ``[B, T, C]`` behind the inputs before it; the same shape comes back."""
        ...

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Run one layer; returns ``[B, T, HV, V]`` fp32."""
        ...

    def commit(self, path: Sequence[int] | None = None) -> None:
        """Keep the tokens of ``path`` of the open forward, every token when None."""
        ...

    def admit(
        self, states: Sequence[Tensor] | None, windows: Sequence[Tensor] | None, position: int
    ) -> None:
        """Replace all rows by states after ``position`` tokens.

        Args:
            states: ``[B, HV, V, K]``, one a layer; None is the zero state.
            windows: ``[B, C, width - 1]``, one a layer: the newest convolution inputs; None: zeros.
            position: Tokens that the states have seen.
        """
        ...

    def materialise(self) -> list[Tensor]:
        """Return every layer's ``[B, HV, V, K]`` state, fresh tensors."""
        ...

    def windows(self) -> list[Tensor]:
        """Return every layer's ``[B, C, width - 1]`` newest convolution inputs, fresh tensors."""
        ...

    def select(self, index: Sequence[int]) -> None:
        """Make row i the sequence of row ``index[i]``; the number of rows may change."""
        ...

    def croppable(self) -> int:
        """Return how many of the newest tokens :meth:`crop` can take back now."""
        ...

    def crop(self, tokens: int) -> None:
        """Take back the newest ``tokens`` tokens of every row."""
        ...


@runtime_checkable
class RawRows(Protocol):
    """Rows whose kernels also do what a family does around the recurrence."""

    def step_raw(
        self, layer: int, block: Block, inside: dict[str, Any], depth: ReadDepth
    ) -> Tensor:
        """Run one layer on raw inputs.

        Args:
            layer: Layer.
            block: Inputs as :meth:`replayssm.models.adapters.Adapter.raw_block` maps them.
            inside: What to do inside, likewise.
            depth: Planes to read.

        Returns:
            ``[B, T, HV, V]`` in v's dtype.
        """
        ...


def _fp32_output(block: Block) -> Tensor:
    return torch.empty(block.v.shape, dtype=torch.float32, device=block.v.device)


class ReplayRows:
    """Rows in the slots of a :class:`StatePool` of their own."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        rows: int,
        *,
        state: Format,
        ring: RingSpec,
        ring_dtype: torch.dtype,
        device: torch.device,
        impl: Impl,
    ) -> None:
        self._specs, self._state, self._ring = tuple(specs), state, ring
        self._ring_dtype, self._device, self._impl = ring_dtype, device, impl
        self._pool = self._new_pool(rows)
        self._refs: list[SlotRef] = []
        self._rows = rows
        self._ticket: Ticket | None = None

    def _new_pool(self, rows: int) -> StatePool:
        return StatePool(
            self._specs,
            rows,
            state=self._state,
            ring=self._ring,
            ring_dtype=self._ring_dtype,
            device=self._device,
            impl=self._impl,
        )

    @property
    def count(self) -> int:
        """B."""
        return self._rows

    @property
    def pool(self) -> StatePool:
        """The pool."""
        return self._pool

    @property
    def ring(self) -> RingSpec:
        """Sizes of the pool's rings."""
        return self._ring

    @property
    def refs(self) -> tuple[SlotRef, ...]:
        """Slot of every row."""
        return tuple(self._refs)

    def begin(self, tokens: int, parents: Sequence[int] | None = None) -> None:
        """Open a ticket."""
        trees = None if parents is None else [list(parents)] * self._rows
        self._ticket = self._pool.begin(self._refs, tokens, trees)

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run one layer's convolution under the open ticket."""
        return self._pool.conv_(self._open(), layer, x, weight, bias)

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Run one layer of the open ticket."""
        out = _fp32_output(block)
        return self._pool.step_(self._open(), layer, block, depth=depth, out=out)

    def commit(self, path: Sequence[int] | None = None) -> None:
        """Commit the open ticket; it stays open where the path is refused."""
        ticket = self._open()
        if path is None:
            path = range(int(ticket.plan.lengths.max()))
        if ticket.plan.parents is not None:
            self._pool.commit_paths_(ticket, [path] * self._rows)
        elif list(path) == list(range(len(path))):
            self._pool.commit_(ticket, len(path))
        else:
            raise ContractError("path", "the first tokens of a chain", list(path))
        self._ticket = None

    def admit(
        self, states: Sequence[Tensor] | None, windows: Sequence[Tensor] | None, position: int
    ) -> None:
        """Release every slot and admit the states at ``position``."""
        for ref in self._refs:
            self._pool.release_(ref)
        self._refs = [
            self._pool.admit_(
                None if states is None else [state[row] for state in states],
                position,
                None if windows is None else [window[row] for window in windows],
            )
            for row in range(self._rows)
        ]

    def materialise(self) -> list[Tensor]:
        """Stack the slots' materialised states."""
        by_row = [self._pool.materialise(ref) for ref in self._refs]
        return [torch.stack(layer) for layer in zip(*by_row, strict=True)]

    def windows(self) -> list[Tensor]:
        """Stack the slots' newest convolution inputs."""
        by_row = [self._pool.conv_windows(ref) for ref in self._refs]
        return [torch.stack(layer) for layer in zip(*by_row, strict=True)]

    def select(self, index: Sequence[int]) -> None:
        """Reorder in place where B stays, else move into a pool of the new size."""
        if len(index) == self._rows:
            self._refs = self._pool.reorder_(self._refs, index)
            return
        fresh = self._new_pool(len(index))
        images = {row: self._pool.export(self._refs[row]) for row in set(index)}
        self._refs = [fresh.import_(images[row]) for row in index]
        self._pool, self._rows = fresh, len(index)

    def croppable(self) -> int:
        """Return ``keep``, or less where fewer tokens came since the last admission."""
        unfolded = (self._pool.committed(ref) - self._pool.oldest(ref) for ref in self._refs)
        return min(self._ring.keep, *unfolded)

    def crop(self, tokens: int) -> None:
        """Move the count of every slot back."""
        self._pool.crop_(self._refs, tokens)

    def _open(self) -> Ticket:
        if self._ticket is None:
            raise ContractError("rows", "an open forward", "none")
        return self._ticket


class StandardRows:
    """Rows in one plain ``[B, HV, V, K]`` tensor a layer, rewritten at every token."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        rows: int,
        *,
        ring: RingSpec,
        dtype: torch.dtype,
        impl: Impl,
    ) -> None:
        self._specs, self._rows, self._ring = tuple(specs), rows, ring
        self._dtype, self._impl = dtype, impl
        self._states: list[Tensor] = []
        self._windows: list[Tensor] = []
        self._plan: BlockPlan | None = None

    @property
    def count(self) -> int:
        """B."""
        return self._rows

    @property
    def pool(self) -> None:
        """There is no pool."""
        return

    @property
    def ring(self) -> RingSpec:
        """There is no ring; only ``max_block`` has a meaning."""
        return self._ring

    def begin(self, tokens: int, parents: Sequence[int] | None = None) -> None:
        """Make the plan that all layers share."""
        if parents is not None:
            raise UnsupportedError("trees on the standard path; enable(model, path='replay')")
        zero = np.zeros(self._rows, np.int64)
        slots = np.arange(self._rows, dtype=np.int64)
        self._plan = BlockPlan(slots, zero, zero, zero, np.full(self._rows, tokens, np.int64))

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve, and keep the newest inputs."""
        before = self._windows[layer]
        full = torch.cat([before, x.transpose(1, 2)], dim=-1)
        self._windows[layer] = full[..., full.shape[-1] - before.shape[-1] :]
        y = F.conv1d(full.to(weight.dtype), weight.unsqueeze(1), bias, groups=x.shape[2])
        return y.transpose(1, 2).to(x.dtype)

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Run the standard step; it always reads the whole state, whatever ``depth`` says."""
        if self._plan is None:
            raise ContractError("rows", "an open forward", "none")
        state, spec = self._states[layer], self._specs[layer]
        return standard_(state, spec, self._plan, block, impl=self._impl, out=_fp32_output(block))

    def commit(self, path: Sequence[int] | None = None) -> None:
        """Close the forward; the states were rewritten by the steps, so nothing can be dropped."""
        if path is not None and self._plan is not None and len(path) < self._plan.lengths[0]:
            raise UnsupportedError("rollback on the standard path; enable(model, path='replay')")
        self._plan = None

    def admit(
        self, states: Sequence[Tensor] | None, windows: Sequence[Tensor] | None, position: int
    ) -> None:
        """Copy the states in this path's dtype; ``position`` has no meaning here."""
        if states is None or windows is None:
            raise ContractError("states, windows", "one of each a layer", "none")
        self._states = [
            state.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
            for state in states
        ]
        self._windows = [window.clone() for window in windows]

    def materialise(self) -> list[Tensor]:
        """Return fp32 copies."""
        return [state.to(torch.float32, copy=True) for state in self._states]

    def windows(self) -> list[Tensor]:
        """Return copies."""
        return [window.clone() for window in self._windows]

    def select(self, index: Sequence[int]) -> None:
        """Gather rows."""
        self._states = [state[list(index)] for state in self._states]
        self._windows = [window[list(index)] for window in self._windows]
        self._rows = len(index)

    def croppable(self) -> int:
        """Return 0: a state that was rewritten is gone."""
        return 0

    def crop(self, tokens: int) -> None:
        """Refuse to take anything back."""
        if tokens:
            raise UnsupportedError("crop on the standard path; enable(model, path='replay')")
