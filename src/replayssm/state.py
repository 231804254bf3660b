"""StatePool: the slots of one model, their planes and rings, and the one number that moves.

The order of a forward is always the same::

    ticket = pool.begin(refs, lengths)           # decides where every row stands
    for layer in range(pool.num_layers):
        x = pool.conv_(ticket, layer, x, weight) # only layers with a convolution
        y = pool.step_(ticket, layer, block)     # every layer sees the same counts
    pool.commit_(ticket, num_accepted)           # the count moves, once

Rollback is a smaller ``num_accepted``. A slot with an open ticket accepts nothing else but
``release_``; a ticket that is committed before every layer was visited leaves its slots invalid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.errors import CapacityError, ContractError
from replayssm.ops import compact_, conv, conv_, fold_, materialise, reference, step_
from replayssm.ops.dispatch import choose
from replayssm.ops.validation import check_admission, check_position
from replayssm.ring import RingSpec
from replayssm.slots import SlotRef, SlotTable, Status
from replayssm.storage import StorageSpec, allocate
from replayssm.ticket import (
    Ticket,
    check_index,
    check_lengths,
    check_paths,
    per_row,
    tree_parents,
)
from replayssm.transfer import SlotImage, copy_slot_, read_slot, write_slot_
from replayssm.types import Block, Format, Impl, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class StatePool:
    """Slots that hold the recurrent state of sequences served by one model.

    Args:
        layers: Geometry of the model's recurrent layers, in order.
        slots: Number of sequences that fit at once.
        state: State format of the checkpoints.
        ring: Ring sizes.
        ring_dtype: dtype of ring keys and values; normally the model's.
        device: Where everything lives.
        impl: Implementation; ``pool.impl`` tells what ``auto`` chose.
        debug: Refuse NaN, infinite and growing (g > 0) inputs of every step and admission.
        exact: Outputs and states are the standard step's, bit for bit (``f32``, ``s32``; slower).
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        slots: int,
        *,
        state: Format | str = Format.S32,
        ring: RingSpec | None = None,
        ring_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        impl: Impl | str = Impl.AUTO,
        debug: bool = False,
        exact: bool = False,
    ) -> None:
        if not layers:
            raise ContractError("layers", "at least one layer", "none")
        if slots < 1:
            raise ContractError("slots", "a positive integer", slots)
        self.ring = ring or RingSpec()
        self.format = Format(state)
        self.device = torch.device(device)
        self.impl = choose(Impl(impl), self.device, tiles=self.ring.tiles, exact=exact)
        self.debug = debug
        self.specs = tuple(
            StorageSpec(layer, self.format, self.ring, ring_dtype, exact) for layer in layers
        )
        self.stores = tuple(allocate(spec, slots, self.device) for spec in self.specs)
        self.device = self.stores[0].high.device  # with the index that "cuda" leaves out
        self._slots = SlotTable(slots, self.ring)

    @property
    def num_layers(self) -> int:
        """Recurrent layers served."""
        return len(self.stores)

    @property
    def num_convs(self) -> int:
        """Layers with a convolution."""
        return sum(store.conv is not None for store in self.stores)

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Slots that :meth:`admit_` can hand out."""
        return self._slots.num_free

    def nbytes(self) -> int:
        """Return the bytes of all planes, scales and rings; exactly what was allocated."""
        return sum(spec.nbytes(self.num_slots) for spec in self.specs)

    def committed(self, ref: SlotRef) -> int:
        """Return the token count of a slot."""
        return int(self._slots.committed[self._slots.check(ref, Status.LIVE, Status.OPEN)])

    def oldest(self, ref: SlotRef) -> int:
        """Return the oldest position that :meth:`materialise` can rebuild."""
        return self._slots.newest_fold(self._slots.check(ref, Status.LIVE, Status.OPEN))

    @torch.no_grad()
    def admit_(
        self,
        states: Sequence[Tensor] | None = None,
        position: int = 0,
        windows: Sequence[Tensor | None] | None = None,
    ) -> SlotRef:
        """Take a free slot and write a prefill state into its planes.

        Args:
            states: One ``[HV, V, K]`` state per layer, any float dtype; None is the zero state.
            position: Tokens that the state has seen.
            windows: Per layer the raw inputs of its convolution before ``position``,
                ``[C, width - 1]`` with the newest last, or None for zeros.

        Returns:
            The slot's name.

        Raises:
            CapacityError: No slot is free.
            ContractError: A state does not fit its layer; nothing was changed.
        """
        position = check_position(position)
        check_admission(self.specs, states, windows, self.device, finite=self.debug)
        ref = self._slots.take()
        for i, store in enumerate(self.stores):
            if states is None:
                reference.clear_(store, ref.slot)
            else:
                reference.admit_(store, ref.slot, states[i])
            if store.conv is not None:
                conv.admit_(store, ref.slot, position, None if windows is None else windows[i])
        self._slots.set_counts(ref.slot, position, position, position)
        return ref

    def begin(
        self,
        refs: Sequence[SlotRef | None],
        lengths: Sequence[int] | int = 1,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Ticket:
        """Open a forward over rows.

        Args:
            refs: Slot of each row; None is a pad row, which reads and writes nothing.
            lengths: Tokens of each row's block (one number for all), 1 .. ``max_block``.
            parents: Per row, the token of the block that each token continues, -1 for the committed
                sequence; None when every row is a chain.

        Returns:
            A ticket for :meth:`step_` and :meth:`commit_`.

        Raises:
            SlotError: A slot is free, stale, invalid, named twice or already in a forward.
            ContractError: A length or a parent is out of range.
        """
        counts = check_lengths(lengths, len(refs), self.ring.max_block)
        slots = self._slots.check_rows(refs, Status.LIVE)
        plan = self._slots.plan(slots, counts, tree_parents(parents, counts))
        self._slots.mark(slots, Status.OPEN)
        return Ticket(tuple(refs), plan, owner=self)

    def step_(
        self,
        ticket: Ticket,
        layer: int,
        block: Block,
        *,
        depth: ReadDepth | Sequence[ReadDepth] = ReadDepth.FULL,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer of an open forward; see :func:`replayssm.ops.step_`.

        Mutates the layer's planes, rings and ``out``; counts do not move.

        Raises:
            TicketError: The ticket is spent, foreign, or has run this layer already.
            SlotError: A slot was released since the ticket was opened.
        """
        ticket.check_owner(self)
        with ticket.turn(self._slots, ticket.stepped, layer, self.num_layers):
            return step_(
                self.stores[layer],
                ticket.plan,
                block,
                depth=depth,
                impl=self.impl,
                out=out,
                debug=self.debug,
            )

    def conv_(
        self, ticket: Ticket, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Run one layer's convolution in an open forward; see :func:`replayssm.ops.conv_`.

        Mutates the ring of the convolution's inputs; counts do not move. Errors as :meth:`step_`.
        """
        ticket.check_owner(self)
        with ticket.turn(self._slots, ticket.convolved, layer, self.num_layers):
            plan, store = ticket.plan, self.stores[layer]
            return conv_(store, plan, x, weight, bias, impl=self.impl, debug=self.debug)

    def commit_(self, ticket: Ticket, num_accepted: Sequence[int | None] | int) -> None:
        """Move every row's count and close the forward.

        Args:
            ticket: An open ticket; it is spent afterwards.
            num_accepted: Entries to keep per row (1 + accepted drafts; 0 aborts the block), one
                number for all, or None for a row whose slot was released in the meantime. Ignored
                for pad rows.

        Raises:
            TicketError: The ticket is spent or foreign (nothing changed), or only some layers ran
                (its slots are invalid now and can only be released), or none did and entries are
                to be kept (the forward is closed, nothing else changed).
            SlotError: A slot was released and its entry is not None; nothing changed.
            ContractError: A number is out of range; nothing changed.
        """
        ticket.check_owner(self)
        counts = per_row("num_accepted", num_accepted, len(ticket.refs))
        if ticket.plan.parents is not None:
            self.commit_paths_(ticket, [None if n is None else range(n) for n in counts])
        else:
            rows = ticket.accepted_rows(self._slots, counts)
            ticket.close(self._slots, rows, self.num_layers, self.num_convs)

    def commit_paths_(self, ticket: Ticket, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep one root-to-node path of every row's tree and close the forward.

        Moves the path's entries to the front of the block in every layer's rings, then the counts.

        Args:
            ticket: An open ticket; it is spent afterwards.
            paths: Per row the kept nodes, oldest first (empty aborts the block), or None as in
                :meth:`commit_`, whose errors are raised here too.

        Raises:
            ContractError: A path does not go down its row's tree from a root; nothing was changed.
        """
        ticket.check_owner(self)
        kept = check_paths(ticket, paths)
        counts = [None if path is None else len(path) for path in kept]
        rows = ticket.accepted_rows(self._slots, counts)
        if ticket.is_complete(self.num_layers, self.num_convs):
            for store in self.stores:
                compact_(store, ticket.plan, kept, impl=self.impl)
        ticket.close(self._slots, rows, self.num_layers, self.num_convs)

    def settle_(
        self, ticket: Ticket, folded: NDArray[np.int64], committed: NDArray[np.int64]
    ) -> None:
        """Close a ticket whose forwards a device ran by itself; see :meth:`Ticket.settle`."""
        ticket.check_owner(self)
        ticket.settle(self._slots, folded, committed)

    def crop_(self, refs: Sequence[SlotRef], tokens: Sequence[int] | int) -> None:
        """Take back the newest committed entries of slots: their counts move, nothing else does.

        Args:
            refs: Slots.
            tokens: Entries to take back, per slot or one number; up to ``keep`` at every phase.

        Raises:
            ContractError: Some entries are folded already; nothing was changed.
        """
        slots = self._slots.check_all(refs, Status.LIVE)
        counts = per_row("tokens", tokens, len(slots))
        self._slots.crop(slots, counts)

    def fold_(self, refs: Sequence[SlotRef]) -> None:
        """Bring slots' planes to their newest boundary now; the next step would do the same."""
        slots = self._slots.check_all(refs, Status.LIVE)
        plan = self._slots.plan(slots, [0] * len(slots))
        for store in self.stores:
            fold_(store, plan, impl=self.impl)
        for slot in slots:
            self._slots.advance(slot, 0)

    def release_(self, ref: SlotRef) -> None:
        """Give a slot back; every name of it goes stale, whatever state it was in."""
        self._slots.release(ref)

    def fork_(self, ref: SlotRef) -> SlotRef:
        """Copy a slot into a free one: planes, rings and counts; the copies share nothing.

        Raises:
            CapacityError: No slot is free.
        """
        source = self._slots.check(ref, Status.LIVE)
        copy = self._slots.take()
        copy_slot_(self.stores, source, copy.slot)
        self._slots.set_counts(copy.slot, *self._slots.counts(source))
        return copy

    def reorder_(self, refs: Sequence[SlotRef], index: Sequence[int]) -> list[SlotRef]:
        """Give row i the sequence of row ``index[i]`` (beam search).

        Rows that several beams continue are copied, rows that none continues are released. Only the
        returned names are to be used afterwards.

        Raises:
            CapacityError: Too few free slots for the copies; nothing was changed.
            ContractError: An index is no row of ``refs``; nothing was changed.
        """
        self._slots.check_all(refs, Status.LIVE)
        source = check_index(index, len(refs))
        dropped = [i for i in range(len(refs)) if i not in source]
        if len(source) - len(set(source)) > self.num_free + len(dropped):
            raise CapacityError("reorder_: too few free slots for the copies; nothing was changed")
        for i in dropped:
            self.release_(refs[i])
        first_use: set[int] = set()
        moved = []
        for i in source:
            if i in first_use:
                moved.append(self.fork_(refs[i]))
            else:
                first_use.add(i)
                moved.append(refs[i])
        return moved

    def materialise(self, ref: SlotRef, position: int | None = None) -> list[Tensor]:
        """Return every layer's ``[HV, V, K]`` fp32 state at a position; the slot is untouched.

        Args:
            ref: Slot.
            position: Absolute token count from :meth:`oldest` to ``committed`` (the default).
        """
        slot, at = self._slots.rebuildable(ref, position)
        base, folded, _ = self._slots.counts(slot)
        return [materialise(s, slot, base, folded, at, impl=self.impl) for s in self.stores]

    def conv_windows(self, ref: SlotRef, position: int | None = None) -> list[Tensor | None]:
        """Return every layer's ``[C, width - 1]`` inputs before a position, the newest last.

        Args:
            ref: Slot.
            position: As in :meth:`materialise`: wherever a state can be rebuilt, so can these.

        Returns:
            Copies in the ring's dtype; None for a layer without a convolution.
        """
        slot, at = self._slots.rebuildable(ref, position)
        return [None if s.conv is None else conv.window(s, slot, at) for s in self.stores]

    def export(self, ref: SlotRef) -> SlotImage:
        """Return a self-describing copy of a slot: planes, scales, live entries and counts."""
        slot = self._slots.check(ref, Status.LIVE)
        return read_slot(self.stores, slot, *self._slots.counts(slot))

    @torch.no_grad()
    def import_(self, image: SlotImage) -> SlotRef:
        """Admit an exported slot, bit for bit, at the phase it was exported in.

        Raises:
            ContractError: The image's schema does not fit this pool; nothing was changed.
            CapacityError: No slot is free.
        """
        image.check_fits(self.specs)
        ref = self._slots.take()
        write_slot_(self.stores, ref.slot, image)
        self._slots.set_counts(ref.slot, image.base, image.folded, image.committed)
        return ref
