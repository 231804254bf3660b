"""The recurrent states of one cache's rows, on either path, behind one small interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from replayssm.errors import ContractError
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
    """Recurrent states of B rows over all recurrent layers of a model.

    A forward is ``begin``, one ``step`` per layer, ``commit``; the rest needs no forward open.
    """

    @property
    def count(self) -> int:
        """B."""
        ...

    @property
    def pool(self) -> StatePool | None:
        """The pool behind the rows, None on the standard path."""
        ...

    def begin(self, tokens: int) -> None:
        """Open a forward of ``tokens`` tokens over all rows."""
        ...

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Run one layer; returns ``[B, T, HV, V]`` fp32."""
        ...

    def commit(self) -> None:
        """Keep every token of the open forward."""
        ...

    def admit(self, states: Sequence[Tensor], position: int) -> None:
        """Replace all rows by ``[B, HV, V, K]`` states, one a layer, at ``position`` tokens."""
        ...

    def materialise(self) -> list[Tensor]:
        """Return every layer's ``[B, HV, V, K]`` state, fresh tensors."""
        ...

    def select(self, index: Sequence[int]) -> None:
        """Make row i the sequence of row ``index[i]``; the number of rows may change."""
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
    def refs(self) -> tuple[SlotRef, ...]:
        """Slot of every row."""
        return tuple(self._refs)

    def begin(self, tokens: int) -> None:
        """Open a ticket."""
        self._ticket = self._pool.begin(self._refs, tokens)

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Run one layer of the open ticket."""
        if self._ticket is None:
            raise ContractError("step", "an open forward", "none")
        out = _fp32_output(block)
        return self._pool.step_(self._ticket, layer, block, depth=depth, out=out)

    def commit(self) -> None:
        """Commit the open ticket, every token accepted."""
        if self._ticket is None:
            raise ContractError("commit", "an open forward", "none")
        ticket, self._ticket = self._ticket, None
        self._pool.commit_(ticket, [int(n) for n in ticket.plan.lengths])

    def admit(self, states: Sequence[Tensor], position: int) -> None:
        """Release every slot and admit the states at ``position``."""
        for ref in self._refs:
            self._pool.release_(ref)
        self._refs = [
            self._pool.admit_([state[row] for state in states], position)
            for row in range(self._rows)
        ]

    def materialise(self) -> list[Tensor]:
        """Stack the slots' materialised states."""
        by_row = [self._pool.materialise(ref) for ref in self._refs]
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


class StandardRows:
    """Rows in one plain ``[B, HV, V, K]`` tensor a layer, rewritten at every token."""

    def __init__(
        self, specs: Sequence[LayerSpec], rows: int, *, dtype: torch.dtype, impl: Impl
    ) -> None:
        self._specs, self._rows = tuple(specs), rows
        self._dtype, self._impl = dtype, impl
        self._states: list[Tensor] = []
        self._plan: BlockPlan | None = None

    @property
    def count(self) -> int:
        """B."""
        return self._rows

    @property
    def pool(self) -> None:
        """There is no pool."""
        return

    def begin(self, tokens: int) -> None:
        """Make the plan that all layers share."""
        zero = np.zeros(self._rows, np.int64)
        slots = np.arange(self._rows, dtype=np.int64)
        self._plan = BlockPlan(slots, zero, zero, zero, np.full(self._rows, tokens, np.int64))

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Run the standard step; it always reads the whole state, whatever ``depth`` says."""
        if self._plan is None:
            raise ContractError("step", "an open forward", "none")
        state, spec = self._states[layer], self._specs[layer]
        return standard_(state, spec, self._plan, block, impl=self._impl, out=_fp32_output(block))

    def commit(self) -> None:
        """Close the forward; the states were rewritten by the steps."""
        self._plan = None

    def admit(self, states: Sequence[Tensor], position: int) -> None:
        """Copy the states in this path's dtype; ``position`` has no meaning here."""
        self._states = [
            state.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
            for state in states
        ]

    def materialise(self) -> list[Tensor]:
        """Return fp32 copies."""
        return [state.to(torch.float32, copy=True) for state in self._states]

    def select(self, index: Sequence[int]) -> None:
        """Gather rows."""
        self._states = [state[list(index)] for state in self._states]
        self._rows = len(index)
