"""One open forward: what a ticket names, and the shape of a block of drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan
    from replayssm.slots import SlotRef


@dataclass(slots=True, eq=False)
class Ticket:
    """One open forward: its rows, where they stand, and the layers that have run.

    Attributes:
        refs: Slot of each row, None for a pad row.
        plan: The integers every layer uses.
        owner: The pool that opened it.
        visited: Layers that have run.
        is_spent: Whether it was committed.
    """

    refs: tuple[SlotRef | None, ...]
    plan: BlockPlan
    owner: object
    visited: set[int] = field(default_factory=set)
    is_spent: bool = False


def per_row(name: str, values: Sequence[int | None] | int, rows: int) -> list[int | None]:
    """Return one integer a row, from one number for all rows or any sequence of integers.

    Raises:
        ContractError: Another number of them, or one that is not an integer.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    counts = [plain] * rows if isinstance(plain, int) else list(plain)
    if len(counts) != rows:
        raise ContractError(name, f"{rows} of them", len(counts))
    try:
        return [None if count is None else index(count) for count in counts]
    except TypeError:
        raise ContractError(name, "integers", counts) from None


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
        if len(nodes) != length or any(not -1 <= p < t for t, p in enumerate(nodes)):
            expected = f"{length} integers with -1 <= parents[t] < t in row {row}"
            raise ContractError("parents", expected, list(nodes))
        table[row, :length] = nodes
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
