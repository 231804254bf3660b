"""What engines do without state replay, in the pool's own words: snapshot and recompute.

Both keep whole fp32 states, run the standard step, and offer the begin, step_, commit_ of a
:class:`~replayssm.state.StatePool`, so that a caller can hold any of the three:

* ``SnapshotPool``: a verify writes the state after every token to a place of its own; the commit
  picks one. It costs ``max_block + 1`` states a slot and writes T of them per verify.
* ``RecomputePool``: a verify runs on a second copy, which is thrown away unless everything was
  accepted; then the commit runs the accepted tokens again, from the checkpoint and in place. It
  costs two states a slot.

They serve chains only and take back nothing that was committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from replayssm.errors import ContractError, TicketError
from replayssm.ops import standard_
from replayssm.ops.dispatch import choose
from replayssm.ops.validation import check_admission, check_conv, check_position
from replayssm.ring import RingSpec
from replayssm.slots import SlotRef, SlotTable, Status
from replayssm.storage import StorageSpec
from replayssm.ticket import Ticket, check_lengths, per_row
from replayssm.types import Format, Impl, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan
    from replayssm.types import Block, LayerSpec

FP32 = 4


class VerifyPool(Protocol):
    """What the three ways to verify and commit have in common; see ``StatePool`` for the words."""

    @property
    def num_layers(self) -> int:
        """Recurrent layers served."""
        ...

    def nbytes(self) -> int:
        """Return the bytes of everything allocated: the peak, as no forward allocates states."""
        ...

    def committed(self, ref: SlotRef) -> int:
        """Return the token count of a slot."""
        ...

    def admit_(
        self,
        states: Sequence[Tensor] | None = None,
        position: int = 0,
        windows: Sequence[Tensor | None] | None = None,
    ) -> SlotRef:
        """Take a free slot and write a prefill state into it."""
        ...

    def begin(self, refs: Sequence[SlotRef | None], lengths: Sequence[int] | int = 1) -> Ticket:
        """Open a forward over rows."""
        ...

    def conv_(
        self, ticket: Ticket, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Run one layer's convolution in an open forward."""
        ...

    def step_(
        self, ticket: Ticket, layer: int, block: Block, *, out: Tensor | None = None
    ) -> Tensor:
        """Run one layer of an open forward."""
        ...

    def commit_(self, ticket: Ticket, num_accepted: Sequence[int | None] | int) -> None:
        """Keep the accepted entries of every row and close the forward."""
        ...

    def materialise(self, ref: SlotRef) -> list[Tensor]:
        """Return every layer's ``[HV, V, K]`` fp32 state."""
        ...

    def conv_windows(self, ref: SlotRef) -> list[Tensor | None]:
        """Return every layer's ``[C, width - 1]`` inputs, the newest last."""
        ...

    def release_(self, ref: SlotRef) -> None:
        """Give a slot back."""
        ...


class WholeStates:
    """Slots that hold one or several whole states each, one of which is the committed one.

    Args:
        layers: Geometry of the model's recurrent layers, in order.
        slots: Number of sequences that fit at once.
        max_block: Largest T of one block.
        dtype: dtype of convolution inputs.
        impl: Implementation of the standard step.
        device: Where everything lives.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        slots: int,
        *,
        max_block: int = 1,
        dtype: torch.dtype = torch.float32,
        impl: Impl | str = Impl.AUTO,
        device: torch.device | str = "cpu",
    ) -> None:
        if not layers:
            raise ContractError("layers", "at least one layer", "none")
        if slots < 1:
            raise ContractError("slots", "a positive integer", slots)
        self.ring = RingSpec(window=1, max_block=max_block)
        self.places = places = self._places(max_block)
        self.device = torch.device(device)
        self.impl = choose(Impl(impl), self.device)
        self.specs = tuple(StorageSpec(layer, Format.F32, self.ring, dtype) for layer in layers)
        # slot s owns the places s * places .. (s + 1) * places - 1
        self._states = [
            torch.zeros(slots * places, x.value_heads, x.value_dim, x.key_dim, device=self.device)
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
        self._current = np.zeros(slots, np.int64)

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
        """Return the bytes of all states and windows; no forward allocates more of them."""
        return sum(x.nbytes for x in (*self._states, *self._windows) if x is not None)

    def moved_bytes(self, tokens: int, accepted: int) -> float:
        """Return the state bytes that one row's verify of ``tokens`` and its commit move."""
        whole = sum(spec.layer.state_elements for spec in self.specs) * FP32
        return whole * self._moved_states(tokens, accepted)

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
        position = check_position(position)
        check_admission(self.specs, states, windows, self.device)
        ref = self._slots.take()
        self._current[ref.slot] = 0
        for i, (kept, past) in enumerate(zip(self._states, self._windows, strict=True)):
            kept[ref.slot * self.places] = 0 if states is None else states[i]
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
        return _Forward(tuple(refs), self._slots.plan(slots, counts), owner=self)

    def step_(
        self,
        ticket: Ticket,
        layer: int,
        block: Block,
        *,
        depth: ReadDepth | Sequence[ReadDepth] = ReadDepth.FULL,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer of an open forward; as ``StatePool.step_``.

        Mutates places of the slots that :meth:`_targets` names, and ``out``. The block's tensors
        may be read again by the commit and must not change before it. ``depth`` has no meaning
        here: there is one plane, and every step reads it.
        """
        del depth
        forward = self._own(ticket)
        with ticket.turn(self._slots, ticket.stepped, layer, self.num_layers):
            plan = ticket.plan
            y = standard_(
                self._states[layer],
                self.specs[layer].layer,
                self._at(plan, plan.lengths),
                block,
                impl=self.impl,
                out=out,
                targets=self._targets(plan, block.tokens),
            )
            forward.blocks[layer] = block
            return y

    @torch.no_grad()
    def conv_(
        self, ticket: Ticket, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Run one layer's convolution in an open forward; as ``StatePool.conv_``."""
        forward = self._own(ticket)
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
            forward.inputs[layer] = inputs
            mask = torch.from_numpy(np.arange(x.shape[1]) < plan.lengths[:, None])
            return torch.where(mask.to(x.device).unsqueeze(-1), y, 0.0).to(x.dtype)

    def commit_(self, ticket: Ticket, num_accepted: Sequence[int | None] | int) -> None:
        """Keep the accepted entries of every row and close the forward; as ``StatePool.commit_``.

        Mutates which place of a slot is the committed one, or the state there.
        """
        forward = self._own(ticket)
        counts = per_row("num_accepted", num_accepted, len(ticket.refs))
        rows = ticket.accepted_rows(self._slots, counts)
        if ticket.is_complete(self.num_layers, self.num_convs):
            by_slot = dict(rows)
            accepted = np.array([by_slot.get(s, 0) for s in ticket.plan.slots.tolist()], np.int64)
            self._keep_(forward, accepted)
            self._keep_windows(forward, accepted)
        ticket.close(self._slots, rows, self.num_layers, self.num_convs)

    def materialise(self, ref: SlotRef) -> list[Tensor]:
        """Return a copy of every layer's ``[HV, V, K]`` fp32 state."""
        slot = self._slots.check(ref, Status.LIVE)
        return [kept[self._place(slot)].clone() for kept in self._states]

    def conv_windows(self, ref: SlotRef) -> list[Tensor | None]:
        """Return copies of every layer's ``[C, width - 1]`` inputs, the newest last."""
        slot = self._slots.check(ref, Status.LIVE)
        return [None if past is None else past[slot].T.contiguous() for past in self._windows]

    def release_(self, ref: SlotRef) -> None:
        """Give a slot back; every name of it goes stale, whatever state it was in."""
        self._slots.release(ref)

    def _own(self, ticket: Ticket) -> _Forward:
        ticket.check_owner(self)
        if not isinstance(ticket, _Forward):
            raise TicketError("the ticket belongs to another pool")
        return ticket

    def _place(self, slot: int) -> int:
        return slot * self.places + int(self._current[slot])

    def _at(self, plan: BlockPlan, lengths: NDArray[np.int64]) -> BlockPlan:
        """Return a plan of places instead of slots."""
        places = plan.slots * self.places + self._current[plan.slots]
        return replace(plan, slots=np.where(plan.slots < 0, -1, places), lengths=lengths)

    def _keep_windows(self, forward: _Forward, accepted: NDArray[np.int64]) -> None:
        for count in np.unique(accepted[accepted > 0]).tolist():
            rows = torch.from_numpy(np.flatnonzero(accepted == count)).to(self.device)
            slots = torch.from_numpy(forward.plan.slots).to(self.device)[rows]
            for layer, inputs in forward.inputs.items():
                past = self._windows[layer]
                if past is not None:
                    newest = inputs[:, count : count + past.shape[1]]
                    # usually all rows keep as many, and need not be gathered
                    kept = newest if len(rows) == len(newest) else newest[rows]
                    past.index_copy_(0, slots, kept)

    def _places(self, max_block: int) -> int:
        """Return how many states a slot has room for."""
        raise NotImplementedError

    def _moved_states(self, tokens: int, accepted: int) -> int:
        raise NotImplementedError

    def _targets(self, plan: BlockPlan, tokens: int) -> NDArray[np.int64] | None:
        """Return where the state after each token goes, ``[B, T]``; None is in place."""
        raise NotImplementedError

    def _keep_(self, forward: _Forward, accepted: NDArray[np.int64]) -> None:
        """Make the state after the accepted tokens the committed one."""
        raise NotImplementedError


class SnapshotPool(WholeStates):
    """One state per entry: a verify writes T of them, the commit picks one."""

    def _places(self, max_block: int) -> int:
        return max_block + 1

    def _moved_states(self, tokens: int, accepted: int) -> int:
        return 1 + tokens

    def _targets(self, plan: BlockPlan, tokens: int) -> NDArray[np.int64]:
        after = self._current[plan.slots][:, None] + 1 + np.arange(tokens)
        return np.asarray(plan.slots[:, None] * self.places + after % self.places)

    def _keep_(self, forward: _Forward, accepted: NDArray[np.int64]) -> None:
        for slot, count in zip(forward.plan.slots, accepted, strict=True):
            if slot >= 0:
                self._current[slot] = (self._current[slot] + count) % self.places


class RecomputePool(WholeStates):
    """One checkpoint: a verify runs on a copy, the commit runs the accepted tokens again."""

    def _places(self, max_block: int) -> int:
        return 2

    def _moved_states(self, tokens: int, accepted: int) -> int:
        return 2 if accepted in (0, tokens) else 4

    def _targets(self, plan: BlockPlan, tokens: int) -> NDArray[np.int64]:
        other = plan.slots * self.places + 1 - self._current[plan.slots]
        return np.broadcast_to(other[:, None], (len(other), tokens))

    def _keep_(self, forward: _Forward, accepted: NDArray[np.int64]) -> None:
        plan = forward.plan
        is_whole = (accepted == plan.lengths) & (plan.slots >= 0)
        self._current[plan.slots[is_whole]] ^= 1
        again = np.where(is_whole, 0, accepted)
        if not again.any():
            return
        for layer, block in forward.blocks.items():
            spec = self.specs[layer].layer
            standard_(self._states[layer], spec, self._at(plan, again), block, impl=self.impl)


@dataclass(slots=True, eq=False)
class _Forward(Ticket):
    """A ticket that also holds what its commit needs again."""

    blocks: dict[int, Block] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
