"""One open forward: what a ticket names, and the shape of a block of drafts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError, ReplayError, TicketError
from replayssm.slots import SlotRef, SlotTable, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan


@dataclass(slots=True, eq=False)
class Ticket:
    """One open forward: its rows, where they stand, and the layers that have run.

    Attributes:
        refs: Slot of each row, None for a pad row.
        plan: The integers every layer uses.
        owner: The pool that opened it.
        stepped: Layers whose step has run.
        convolved: Layers whose convolution has run.
        is_spent: Whether it was committed.
    """

    refs: tuple[SlotRef | None, ...]
    plan: BlockPlan
    owner: object
    stepped: set[int] = field(default_factory=set)
    convolved: set[int] = field(default_factory=set)
    is_spent: bool = False

    def check_owner(self, pool: object) -> None:
        """Refuse a ticket that is spent or was opened by another pool."""
        if self.owner is not pool:
            raise TicketError("the ticket belongs to another pool")
        if self.is_spent:
            raise TicketError("the ticket is spent; begin a new forward")

    @contextmanager
    def turn(self, table: SlotTable, done: set[int], layer: int, layers: int) -> Iterator[None]:
        """Run one layer's work, once: record it in ``done``, or leave the slots invalid.

        Args:
            table: The slots of the pool.
            done: Layers that have done this work, :attr:`stepped` or :attr:`convolved`.
            layer: Whose turn it is.
            layers: Layers of the pool.

        Raises:
            ContractError: There is no such layer.
            TicketError: The layer has done this work already.
            SlotError: A slot was released since the ticket was opened.
        """
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise ContractError("layer", f"0 to {layers - 1}", layer)
        if layer in done:
            raise TicketError(f"layer {layer} has already run in this forward")
        for ref in self.refs:
            if ref is not None:
                table.check(ref, Status.OPEN)
        try:
            yield
        except ReplayError:
            raise  # refused before anything was written; the forward may be tried again
        except BaseException:
            table.mark(self.plan.slots.tolist(), Status.INVALID)
            raise
        done.add(layer)

    def accepted_rows(
        self, table: SlotTable, counts: Sequence[int | None]
    ) -> list[tuple[int, int]]:
        """Return ``(slot, entries to keep)`` of every row that is committed.

        Args:
            table: The slots of the pool.
            counts: Per row the entries to keep, None where the slot was released meanwhile.

        Raises:
            SlotError: A slot was released and its count is not None.
            ContractError: A number is out of range.
        """
        accepted = []
        for row, (ref, count) in enumerate(zip(self.refs, counts, strict=True)):
            if ref is None or (count is None and table.is_stale(ref)):
                continue
            table.check(ref, Status.OPEN)
            length = int(self.plan.lengths[row])
            if count is None or not 0 <= count <= length:
                raise ContractError("num_accepted", f"0 to {length} for row {row}", count)
            accepted.append((ref.slot, count))
        return accepted

    def is_complete(self, layers: int, convs: int) -> bool:
        """Whether every layer's step and every convolution has run."""
        return len(self.stepped) == layers and len(self.convolved) == convs

    def close(
        self, table: SlotTable, rows: Sequence[tuple[int, int]], layers: int, convs: int
    ) -> None:
        """Spend the ticket and move the counts of its rows.

        Args:
            table: The slots of the pool.
            rows: Slots and entries to keep, from :meth:`accepted_rows`.
            layers: Layers of the pool.
            convs: How many of them have a convolution.

        Raises:
            TicketError: Some layers never ran; the slots are invalid, or untouched if none did.
        """
        slots = [slot for slot, _ in rows]
        self.is_spent = True
        if (self.stepped or self.convolved) and not self.is_complete(layers, convs):
            table.mark(slots, Status.INVALID)
            steps, convolutions = layers - len(self.stepped), convs - len(self.convolved)
            missing = f"{steps} of {layers} layers"
            if not steps:
                missing = f"{convolutions} of {convs} convolutions"
            raise TicketError(
                f"{missing} never ran in this forward; its slots are invalid now, release them"
            )
        table.mark(slots, Status.LIVE)
        if self.stepped:
            for slot, accepted in rows:
                table.advance(slot, accepted)
        elif any(accepted for _, accepted in rows):
            raise TicketError("no layer ran in this forward; it was closed and nothing was changed")

    def settle(
        self, table: SlotTable, folded: NDArray[np.int64], committed: NDArray[np.int64]
    ) -> None:
        """Spend a ticket under which a device ran forwards and moved the counts itself.

        Args:
            table: The slots of the pool.
            folded: ``[B]`` where the planes of the rows are.
            committed: ``[B]`` where the rows stand.

        Raises:
            SlotError: A slot was released meanwhile; nothing changed.
        """
        live = [(row, ref) for row, ref in enumerate(self.refs) if ref is not None]
        slots = [table.check(ref, Status.OPEN) for _, ref in live]
        self.is_spent = True
        table.mark(slots, Status.LIVE)
        for slot, (row, _) in zip(slots, live, strict=True):
            base = table.counts(slot)[0]
            table.set_counts(slot, base, int(folded[row]), int(committed[row]))


def per_row(name: str, values: Sequence[int | None] | int, rows: int) -> list[int | None]:
    """Return one integer a row, from one number for all rows or any sequence of integers.

    Raises:
        ContractError: Another number of them, or one that is not an integer.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        counts = [plain] * rows if isinstance(plain, int) else list(plain)
        checked = [None if count is None else index(count) for count in counts]
    except TypeError:
        raise ContractError(name, "integers", values) from None
    if len(checked) != rows:
        raise ContractError(name, f"{rows} of them", len(checked))
    return checked


def check_index(values: Sequence[int], rows: int) -> list[int]:
    """Return row numbers as plain integers.

    Raises:
        ContractError: One of them is no row.
    """
    found = [i for i in per_row("index", values, len(values)) if i is not None and 0 <= i < rows]
    if len(found) != len(values):
        raise ContractError("index", f"rows 0 to {rows - 1}", list(values))
    return found


def check_lengths(lengths: Sequence[int] | int, rows: int, max_block: int) -> list[int]:
    """Return the tokens of every row's block.

    Raises:
        ContractError: Another number of rows, or a length that is not 1 to ``max_block``.
    """
    counts: list[int] = []
    for count in per_row("lengths", lengths, rows):
        if count is None or not 1 <= count <= max_block:
            raise ContractError("lengths", f"1 to max_block ({max_block})", count)
        counts.append(count)
    return counts


def tree_parents(
    parents: Sequence[Sequence[int]] | None, lengths: Sequence[int]
) -> NDArray[np.int64] | None:
    """Check a block's trees and pad them to ``[B, T]`` int64; None stays None.

    Raises:
        ContractError: A row has another number of nodes, or a parent that does not come before.
    """
    if parents is None:
        return None
    if len(parents) != len(lengths):
        raise ContractError("parents", f"{len(lengths)} rows", len(parents))
    table = np.full((len(lengths), max(lengths, default=0)), -1, np.int64)
    for row, (nodes, length) in enumerate(zip(parents, lengths, strict=True)):
        own = [p for p in per_row("parents", nodes, len(nodes)) if p is not None]
        if len(own) != length or any(not -1 <= p < t for t, p in enumerate(own)):
            expected = f"{length} integers with -1 <= parents[t] < t in row {row}"
            raise ContractError("parents", expected, list(nodes))
        table[row, :length] = own
    return table


def check_paths(
    ticket: Ticket, paths: Sequence[Sequence[int] | None]
) -> list[tuple[int, ...] | None]:
    """Check that every path goes down its row's tree from a root, and return them.

    Raises:
        ContractError: There is another number of rows, or a path skips a node.
    """
    plan = ticket.plan
    if len(paths) != plan.rows:
        raise ContractError("paths", f"{plan.rows} of them", len(paths))
    checked: list[tuple[int, ...] | None] = []
    for row, path in enumerate(paths):
        nodes = None if path is None or plan.slots[row] < 0 else tuple(path)
        if nodes:
            last = nodes[-1]
            whole = plan.ancestors(row, last) if 0 <= last < plan.lengths[row] else []
            if list(nodes) != whole:
                raise ContractError("paths", f"a root-to-node path in row {row}", list(nodes))
        checked.append(() if nodes is None and plan.slots[row] < 0 else nodes)
    return checked
