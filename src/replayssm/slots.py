"""Who owns which slot, in which state, and where it stands: integers only, no tensors.

A slot is free, live, open (in a forward) or invalid (left half-written by a forward that failed).
Its generation moves on at every release, so a name that outlived its tenancy is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import CapacityError, ContractError, SlotError
from replayssm.ring import BlockPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.ring import RingSpec


class Status(IntEnum):
    """What may be done with a slot."""

    FREE = 0
    LIVE = 1
    OPEN = 2
    INVALID = 3


_REFUSALS = {
    Status.LIVE: "is in no forward",
    Status.OPEN: "is in a forward; commit its ticket first",
    Status.INVALID: "was left half-written by a forward that failed; release it",
}


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Name of one tenancy of a slot; it goes stale when the slot is released.

    Attributes:
        slot: Which.
        generation: Which tenancy of it.
        owner: What stands for the table that handed it out; other tables refuse the name.
    """

    slot: int
    generation: int
    owner: object = field(repr=False)


class SlotTable:
    """Ownership and counts of every slot of a pool.

    Attributes:
        base: ``[S]`` position of the checkpoint at admission.
        folded: ``[S]`` committed count the planes were brought to.
        committed: ``[S]`` token count.
    """

    def __init__(self, slots: int, ring: RingSpec) -> None:
        self.ring = ring
        self._key = object()  # not the table itself, which a name that is kept would keep alive
        self.base, self.folded, self.committed = (np.zeros(slots, np.int64) for _ in range(3))
        self._generation = np.zeros(slots, np.int64)
        self._status = np.full(slots, Status.FREE, np.int8)
        self._free = list(range(slots))[::-1]

    def __len__(self) -> int:
        return len(self._generation)

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self) -> SlotRef:
        """Hand out a free slot; its counts are the caller's to set."""
        if not self._free:
            raise CapacityError(f"no free slot: all {len(self)} are taken; release some first")
        slot = self._free.pop()
        self._status[slot] = Status.LIVE
        return SlotRef(slot, int(self._generation[slot]), self._key)

    def release(self, ref: SlotRef) -> None:
        """Take a slot back, whatever state it is in, and make every name of it stale."""
        slot = self.check(ref, Status.LIVE, Status.OPEN, Status.INVALID)
        self._generation[slot] += 1
        self._status[slot] = Status.FREE
        self._free.append(slot)

    def is_stale(self, ref: SlotRef) -> bool:
        """Whether the slot was released since ``ref`` was handed out."""
        return bool(self._generation[ref.slot] != ref.generation)

    def check(self, ref: SlotRef, *allowed: Status) -> int:
        """Return the slot index, or say why the slot may not be used now.

        Raises:
            SlotError: Another pool handed the name out, it is stale, or the status is not allowed.
        """
        if not isinstance(ref, SlotRef):
            raise ContractError("refs", "names handed out by the pool", ref)
        slot = ref.slot
        if ref.owner is not self._key:
            raise SlotError(f"slot {slot}: this name was handed out by another pool")
        status = Status(self._status[slot])
        if self.is_stale(ref) or status is Status.FREE:
            raise SlotError(f"slot {slot}: this name is stale, the slot was released since")
        if status not in allowed:
            raise SlotError(f"slot {slot} {_REFUSALS[status]}")
        return slot

    def check_rows(self, refs: Sequence[SlotRef | None], *allowed: Status) -> list[int]:
        """Return the slot of every row, -1 for a pad row.

        Raises:
            SlotError: As :meth:`check`, or two rows name the same slot.
        """
        slots = [-1 if ref is None else self.check(ref, *allowed) for ref in refs]
        live = [slot for slot in slots if slot >= 0]
        if len(set(live)) != len(live):
            raise SlotError(f"refs: expected every slot at most once, got {slots}")
        return slots

    def check_all(self, refs: Sequence[SlotRef], *allowed: Status) -> list[int]:
        """Return the slot of every name, none of them a pad row.

        Raises:
            ContractError: A row is a pad row.
            SlotError: As :meth:`check_rows`.
        """
        slots = self.check_rows(refs, *allowed)
        if -1 in slots:
            raise ContractError("refs", "a slot in every row", f"a pad row, row {slots.index(-1)}")
        return slots

    def mark(self, slots: Sequence[int], status: Status) -> None:
        """Set the status of slots that were checked before; -1 is a pad row."""
        self._status[[slot for slot in slots if slot >= 0]] = status

    def set_counts(self, slot: int, base: int, folded: int, committed: int) -> None:
        """Set where a slot stands."""
        self.base[slot], self.folded[slot], self.committed[slot] = base, folded, committed

    def counts(self, slot: int) -> tuple[int, int, int]:
        """Return ``(base, folded, committed)``."""
        return int(self.base[slot]), int(self.folded[slot]), int(self.committed[slot])

    def advance(self, slot: int, accepted: int) -> None:
        """Record that the planes reached ``committed``, then move it by the accepted entries."""
        self.folded[slot] = max(self.folded[slot], self.committed[slot])
        self.committed[slot] += accepted

    def crop(self, slots: Sequence[int], tokens: Sequence[int | None]) -> None:
        """Take back the newest entries of slots that were checked before.

        Raises:
            ContractError: Some of them are folded already; nothing was changed.
        """
        for slot, count in zip(slots, tokens, strict=True):
            most = int(self.committed[slot]) - self.newest_fold(slot)
            if count is None or not 0 <= count <= most:
                expected = f"0 to {most} (keep={self.ring.keep} is promised at every phase)"
                raise ContractError("tokens", expected, count, "open the pool with a larger keep")
        for slot, count in zip(slots, tokens, strict=True):
            self.committed[slot] -= count

    def newest_fold(self, slot: int) -> int:
        """Return the newest position that some tile's checkpoint has reached."""
        base, folded, _ = self.counts(slot)
        return max(self.ring.folded_to(i, base, folded) for i in range(self.ring.tiles))

    def rebuildable(self, ref: SlotRef, position: int | None) -> tuple[int, int]:
        """Return a live slot and a position of it that can be rebuilt, by default the newest.

        Raises:
            ContractError: Some tile's checkpoint is beyond the position, or nothing is there yet.
        """
        slot = self.check(ref, Status.LIVE)
        oldest, newest = self.newest_fold(slot), int(self.committed[slot])
        at = newest if position is None else position
        if not oldest <= at <= newest:
            raise ContractError("position", f"{oldest} to {newest}", position)
        return slot, at

    def plan(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        parents: NDArray[np.int64] | None = None,
    ) -> BlockPlan:
        """Freeze where rows stand; slot -1 is a pad row."""
        index = np.array(slots, np.int64)
        real = index >= 0
        return BlockPlan(
            slots=index,
            base=np.where(real, self.base[index], 0),
            folded=np.where(real, self.folded[index], 0),
            committed=np.where(real, self.committed[index], 0),
            lengths=np.where(real, np.array(lengths, np.int64), 0),
            parents=parents,
        )
