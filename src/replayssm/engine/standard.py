"""Slots of the standard path: one fp32 state a layer, rewritten at every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.errors import ContractError, UnsupportedError
from replayssm.ops import standard_
from replayssm.ops.dispatch import choose
from replayssm.ops.validation import check_admission, check_conv
from replayssm.ring import RingSpec
from replayssm.slots import SlotRef, SlotTable, Status
from replayssm.storage import StorageSpec
from replayssm.ticket import Ticket, check_lengths, per_row
from replayssm.types import Format, Impl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.types import Block, LayerSpec, ReadDepth

MAX_BLOCK = 65
"""Most tokens of one block: a shadow follows as many as one verify may keep."""


@dataclass(frozen=True, slots=True)
class StandardImage:
    """A copy of one slot.

    Attributes:
        committed: Token count.
        states: ``[HV, V, K]`` fp32 a layer.
        windows: ``[C, width - 1]`` newest convolution inputs a layer; None without a convolution.
    """

    committed: int
    states: tuple[Tensor, ...]
    windows: tuple[Tensor | None, ...]


class StandardPool:
    """Slots whose state every step rewrites; the verbs are those of a ``StatePool``.

    Nothing that was written can be taken back, so a commit keeps every token of a block.

    Args:
        layers: Geometry of the model's recurrent layers, in order.
        slots: Sequences that fit at once.
        dtype: dtype of convolution inputs.
        device: Where everything lives.
        impl: Implementation of the standard step.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        impl: Impl | str = Impl.AUTO,
    ) -> None:
        self.ring = RingSpec(window=1, max_block=MAX_BLOCK)
        self.device = torch.device(device)
        self.impl = choose(Impl(impl), self.device)
        self.specs = tuple(StorageSpec(x, Format.F32, self.ring, dtype) for x in layers)
        self._states = [
            torch.zeros(slots, x.value_heads, x.value_dim, x.key_dim, device=self.device)
            for x in layers
        ]
        self._windows = [
            None
            if x.conv is None
            else torch.zeros(
                slots, x.conv.width - 1, x.conv.channels, dtype=dtype, device=self.device
            )
            for x in layers
        ]
        self.device = self._states[0].device
        self._slots = SlotTable(slots, self.ring)

    @staticmethod
    def slot_nbytes(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
        """Return the bytes of one slot."""
        convs = [x.conv for x in layers if x.conv is not None]
        inputs = sum((conv.width - 1) * conv.channels for conv in convs) * dtype.itemsize
        return sum(x.state_elements for x in layers) * torch.float32.itemsize + inputs

    @property
    def num_layers(self) -> int:
        """Recurrent layers served."""
        return len(self.specs)

    @property
    def num_convs(self) -> int:
        """Layers with a convolution."""
        return sum(window is not None for window in self._windows)

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Slots that :meth:`admit_` can hand out."""
        return self._slots.num_free

    def nbytes(self) -> int:
        """Return the bytes of everything allocated."""
        return sum(x.nbytes for x in (*self._states, *self._windows) if x is not None)

    def committed(self, ref: SlotRef) -> int:
        """Return the token count of a slot."""
        return int(self._slots.committed[self._slots.check(ref, Status.LIVE, Status.OPEN)])

    @torch.no_grad()
    def admit_(
        self,
        states: Sequence[Tensor] | None = None,
        position: int = 0,
        windows: Sequence[Tensor | None] | None = None,
    ) -> SlotRef:
        """Take a free slot and write a prefill state into it; as ``StatePool.admit_``."""
        check_admission(self.specs, states, windows, self.device)
        ref = self._slots.take()
        for i, (kept, past) in enumerate(zip(self._states, self._windows, strict=True)):
            kept[ref.slot] = 0 if states is None else states[i]
            window = None if windows is None else windows[i]
            if past is not None:
                past[ref.slot] = 0 if window is None else window.T
        self._slots.set_counts(ref.slot, position, position, position)
        return ref

    def begin(self, refs: Sequence[SlotRef | None], lengths: Sequence[int] | int = 1) -> Ticket:
        """Open a forward over rows; as ``StatePool.begin``, chains only."""
        counts = check_lengths(lengths, len(refs), self.ring.max_block)
        slots = self._slots.check_rows(refs, Status.LIVE)
        self._slots.mark(slots, Status.OPEN)
        return Ticket(tuple(refs), self._slots.plan(slots, counts), owner=self)

    def step_(
        self,
        ticket: Ticket,
        layer: int,
        block: Block,
        *,
        depth: ReadDepth | Sequence[ReadDepth],
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer of an open forward; mutates its states and ``out``.

        ``depth`` has no meaning here: there is one plane, and every step reads it.
        """
        del depth
        ticket.check_owner(self)
        with ticket.turn(self._slots, ticket.stepped, layer, self.num_layers):
            spec = self.specs[layer].layer
            return standard_(self._states[layer], spec, ticket.plan, block, impl=self.impl, out=out)

    @torch.no_grad()
    def conv_(
        self, ticket: Ticket, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Run one layer's convolution in an open forward; mutates its newest inputs."""
        ticket.check_owner(self)
        with ticket.turn(self._slots, ticket.convolved, layer, self.num_layers):
            plan = ticket.plan
            check_conv(self.specs[layer], plan, x, weight, bias, self.device)
            past = self._windows[layer]
            if past is None:
                raise ContractError("layer", "a layer with a convolution", "one without")
            slots = torch.from_numpy(plan.slots.clip(min=0)).to(self.device)
            inputs = torch.cat([past[slots], x.to(past.dtype)], 1)
            y = torch.zeros(x.shape, device=x.device)
            if bias is not None:
                y += bias.float()
            for tap in range(weight.shape[1]):
                y += weight[:, tap].float() * inputs[:, tap : tap + x.shape[1]].float()
            rows = np.flatnonzero(plan.slots >= 0)
            newest = plan.lengths[rows, None] + np.arange(past.shape[1])
            past[slots[rows]] = inputs[rows[:, None], newest]
            mask = torch.from_numpy(np.arange(x.shape[1]) < plan.lengths[:, None])
            return torch.where(mask.to(x.device).unsqueeze(-1), y, 0.0).to(x.dtype)

    def commit_(self, ticket: Ticket, num_accepted: Sequence[int | None] | int) -> None:
        """Close a forward and move the counts over all of its tokens.

        Raises:
            UnsupportedError: Fewer are to be kept; nothing was changed.
        """
        ticket.check_owner(self)
        rows = ticket.accepted_rows(
            self._slots, per_row("num_accepted", num_accepted, len(ticket.refs))
        )
        whole = dict(zip(ticket.plan.slots.tolist(), ticket.plan.lengths.tolist(), strict=True))
        if any(count != whole[slot] for slot, count in rows):
            raise UnsupportedError("rollback on the standard path, which rewrites its states")
        ticket.close(self._slots, rows, self.num_layers, self.num_convs)

    def materialise(self, ref: SlotRef) -> list[Tensor]:
        """Return a copy of every layer's ``[HV, V, K]`` fp32 state."""
        slot = self._slots.check(ref, Status.LIVE)
        return [kept[slot].clone() for kept in self._states]

    def conv_windows(self, ref: SlotRef) -> list[Tensor | None]:
        """Return copies of every layer's ``[C, width - 1]`` inputs, the newest last."""
        slot = self._slots.check(ref, Status.LIVE)
        return [None if past is None else past[slot].T.contiguous() for past in self._windows]

    def release_(self, ref: SlotRef) -> None:
        """Give a slot back; every name of it goes stale, whatever state it was in."""
        self._slots.release(ref)

    def export(self, ref: SlotRef) -> StandardImage:
        """Return a copy of a slot."""
        states, windows = self.materialise(ref), self.conv_windows(ref)
        return StandardImage(self.committed(ref), tuple(states), tuple(windows))

    def import_(self, image: StandardImage) -> SlotRef:
        """Take a free slot and write an image into it, bit for bit."""
        return self.admit_(image.states, image.committed, image.windows)
