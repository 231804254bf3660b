"""The memory of an engine: both layouts of recurrent state, keys and values, under one budget.

Requests on the replay path lie in a ``StatePool``, those on the standard path in a
``StandardPool``; each is allocated when the first request asks for it, large enough to take the
whole budget. What counts against the budget are the seats that are taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.engine.standard import StandardImage, StandardPool
from replayssm.errors import CapacityError, ContractError
from replayssm.integrations.batch import BatchModel, Seat
from replayssm.integrations.slotted import KvSpec
from replayssm.ops.validation import check_admission
from replayssm.state import StatePool
from replayssm.storage import StorageSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from replayssm.engine.request import Limits
    from replayssm.integrations.transformers import Enabled
    from replayssm.ring import RingSpec
    from replayssm.slots import SlotRef
    from replayssm.transfer import SlotImage
    from replayssm.types import Format, Impl


class Pools:
    """Seats for sequences.

    Args:
        handle: The enabled model.
        kv: What its attention layers keep.
        limits: The budget and the longest sequence.
        state: State format of the replay path.
        ring: Ring sizes of the replay path.
        impl: Implementation of both paths.
    """

    def __init__(
        self,
        handle: Enabled,
        kv: KvSpec,
        limits: Limits,
        *,
        state: Format,
        ring: RingSpec,
        impl: Impl,
    ) -> None:
        self._handle, self._state, self.ring, self._impl = handle, state, ring, impl
        dtype = handle.ring_dtype
        shared = kv.entries(limits.context, ring.max_block) * kv.token_nbytes
        replay = sum(StorageSpec(x, state, ring, dtype).nbytes(1) for x in handle.specs)
        self.seat_nbytes = {
            "replay": replay + shared,
            "standard": StandardPool.slot_nbytes(handle.specs, dtype) + shared,
        }
        if limits.slots is None:
            self._cost, self.capacity = self.seat_nbytes, limits.memory_bytes or 0
        else:
            self._cost, self.capacity = dict.fromkeys(self.seat_nbytes, 1), limits.slots
        self._taken: dict[Seat, str] = {}
        self.replay: StatePool | None = None
        self.standard: StandardPool | None = None
        slots = max(1, self.capacity // min(self._cost.values()))
        self.model = BatchModel(
            handle, kv, slots=slots, context=limits.context, max_block=ring.max_block
        )

    @property
    def used(self) -> int:
        """Part of :attr:`capacity` that is taken: seats, or bytes where the limit is in bytes."""
        return sum(self._cost[path] for path in self._taken.values())

    @property
    def taken(self) -> int:
        """Seats that are taken."""
        return len(self._taken)

    def used_nbytes(self) -> int:
        """Return the bytes of the seats that are taken."""
        return sum(self.seat_nbytes[path] for path in self._taken.values())

    def nbytes(self) -> int:
        """Return the bytes of everything allocated."""
        pools = [pool.nbytes() for pool in (self.replay, self.standard) if pool is not None]
        return sum(pools) + self.model.kv.nbytes()

    def fits(self, path: str, *, instead: Seat | None = None) -> bool:
        """Whether one more seat is to be had now, in the place of ``instead`` if given."""
        freed = 0 if instead is None else self._cost[self._taken[instead]]
        return self.used - freed + self._cost[path] <= self.capacity

    def check_ever(self, path: str) -> None:
        """Refuse a path of which not even one seat fits.

        Raises:
            CapacityError: As said.
        """
        if self._cost[path] > self.capacity:
            raise CapacityError(
                f"one {path} sequence takes {self._cost[path]} bytes, the limit is {self.capacity}"
            )

    def take(self, path: str) -> Seat:
        """Return a seat with the zero state.

        Raises:
            CapacityError: None is free.
        """
        self._check_fits(path)
        pool = self._pool(path)
        return self._sit(path, pool, pool.admit_())

    def free(self, seat: Seat) -> None:
        """Give a seat back, whatever state it is in."""
        del self._taken[seat]
        seat.pool.release_(seat.ref)
        self.model.kv.release(seat.kv)

    def export(self, seat: Seat, position: int) -> tuple[SlotImage | StandardImage, list[Tensor]]:
        """Return copies of what a seat holds after ``position`` tokens."""
        pool = seat.pool
        if not isinstance(pool, StatePool | StandardPool):
            raise ContractError("seat", "a seat of this engine", type(pool).__name__)
        return pool.export(seat.ref), list(self.model.kv.read(seat.kv, position))

    def import_(
        self, image: SlotImage | StandardImage, kv: Sequence[Tensor], position: int
    ) -> Seat:
        """Return a seat that holds what was exported, bit for bit.

        Raises:
            CapacityError: None is free; nothing was changed.
            ContractError: The image does not fit; nothing was changed.
        """
        path = "standard" if isinstance(image, StandardImage) else "replay"
        self._check_fits(path)
        self.check_image(image, kv, position)
        ref: SlotRef
        if isinstance(image, StandardImage):
            ref = self._standard_pool().import_(image)
        else:
            ref = self._replay_pool().import_(image)
        seat = self._sit(path, self._pool(path), ref)
        self.model.kv.write(seat.kv, position, kv)
        return seat

    def check_image(
        self, image: SlotImage | StandardImage, kv: Sequence[Tensor], position: int
    ) -> None:
        """Refuse what :meth:`import_` could never take.

        Raises:
            ContractError: As said.
        """
        if isinstance(image, StandardImage):
            pool = self._standard_pool()
            check_admission(pool.specs, image.states, image.windows, pool.device)
        else:
            image.check_fits(self._replay_pool().specs)
        self.model.kv.check(position, kv)

    def switch(self, seat: Seat, path: str, position: int) -> None:
        """Mutates a seat: carry its state over to the other path's pool.

        Raises:
            CapacityError: The other path's slot does not fit; nothing was changed.
        """
        if self._taken[seat] == path:
            return
        if not self.fits(path, instead=seat):
            raise CapacityError(f"no room to carry a sequence over to the {path} path")
        states, windows = seat.pool.materialise(seat.ref), seat.pool.conv_windows(seat.ref)
        pool = self._pool(path)
        ref = pool.admit_(states, position, windows)
        seat.pool.release_(seat.ref)
        seat.pool, seat.ref = pool, ref
        self._taken[seat] = path

    def check_whole(self) -> None:
        """Refuse books that do not balance: live + free slots = all slots, of every kind.

        Raises:
            ContractError: Some slot is orphaned.
        """
        pools = {"replay": self.replay, "standard": self.standard}
        for path, pool in pools.items():
            live = sum(taken == path for taken in self._taken.values())
            if pool is not None and live + pool.num_free != pool.num_slots:
                books = f"{live} live, {pool.num_free} free of {pool.num_slots}"
                raise ContractError(f"{path} slots", "live + free = all", books)
        kv = self.model.kv
        if self.taken + kv.num_free != kv.num_slots:
            books = f"{self.taken} live, {kv.num_free} free of {kv.num_slots}"
            raise ContractError("kv slots", "live + free = all", books)

    def _check_fits(self, path: str) -> None:
        if not self.fits(path):
            raise CapacityError(f"no free seat: {self.used} of {self.capacity} are taken")

    def _sit(self, path: str, pool: StatePool | StandardPool, ref: SlotRef) -> Seat:
        seat = Seat(pool, ref, self.model.kv.take())
        self._taken[seat] = path
        return seat

    def _pool(self, path: str) -> StatePool | StandardPool:
        return self._replay_pool() if path == "replay" else self._standard_pool()

    def _replay_pool(self) -> StatePool:
        if self.replay is None:
            self.replay = StatePool(
                self._handle.specs,
                self.capacity // self._cost["replay"],
                state=self._state,
                ring=self.ring,
                ring_dtype=self._handle.ring_dtype,
                device=self.model.device,
                impl=self._impl,
            )
        return self.replay

    def _standard_pool(self) -> StandardPool:
        if self.standard is None:
            self.standard = StandardPool(
                self._handle.specs,
                self.capacity // self._cost["standard"],
                dtype=self._handle.ring_dtype,
                device=self.model.device,
                impl=self._impl,
            )
        return self.standard
