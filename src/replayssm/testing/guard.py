"""Guard pools: stores cut as strided views out of poisoned storage, and hashes of bystander bytes.

A kernel that assumes dense slots, reads a lane it should mask, or writes outside its slot shows up
as a NaN in its outputs or as a changed guard byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.storage import RING_AXES, LayerStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replayssm.state import StatePool
    from replayssm.storage import StorageSpec

# odd, so that a slot is aligned to nothing
GUARD_ELEMENTS = 17


@dataclass(frozen=True, slots=True)
class GuardedStore:
    """A layer's tensors inside wider storage.

    Attributes:
        store: What an implementation gets; slot stride is dense size + guard.
        storage: Whole storage by field, guards included.
        offset: Elements before slot 0, and between slots.
    """

    store: LayerStore
    storage: dict[str, Tensor]
    offset: int

    def guard_digest(self) -> str:
        """Return a hash of every guard byte; it must never change."""
        digest = blake2b(digest_size=16)
        for name, whole in self.storage.items():
            inside = torch.zeros(whole.shape, dtype=torch.bool)
            x = self.store.present()[name]
            inside.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
            digest.update(_bytes(whole[~inside]))
        return digest.hexdigest()


def guarded_store(spec: StorageSpec, slots: int, guard: int = GUARD_ELEMENTS) -> GuardedStore:
    """Return a poisoned store with ``guard`` poisoned elements before, between and after slots.

    Admit a slot before its planes are used; its ring stays poisoned until entries are written.
    """
    views, storage = {}, {}
    for name, (shape, dtype) in spec.shapes(slots).items():
        inner = prod(shape[1:])
        whole = torch.empty(guard + slots * (inner + guard), dtype=dtype)
        poison_(whole)
        stride = [prod(shape[i + 1 :]) for i in range(len(shape))]
        stride[0] = inner + guard
        views[name] = whole.as_strided(shape, stride, guard)
        storage[name] = whole
    return GuardedStore(LayerStore(spec, **views), storage, guard)


def guard_pool_(pool: StatePool) -> tuple[GuardedStore, ...]:
    """Replace the tensors of an empty CPU pool with guarded, poisoned ones."""
    guarded = tuple(guarded_store(spec, pool.num_slots) for spec in pool.specs)
    pool.stores = tuple(g.store for g in guarded)
    return guarded


def poison_(x: Tensor) -> None:
    """Fill a tensor with NaN, or an integer tensor with a value far from zero."""
    x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max - 4)


def poison_slot_(store: LayerStore, slot: int) -> None:
    """Poison everything of one slot: planes, scales and ring."""
    for x in store.present().values():
        poison_(x[slot])


def poison_dead_(store: LayerStore, slot: int, live: range) -> None:
    """Poison the rings of one slot except what the absolute positions ``live`` need."""
    for name, x in store.present().items():
        if name in RING_AXES:
            entries = x[slot].movedim(RING_AXES[name], 0)
            dead = set(range(len(entries))) - set(store.spec.live_entries(name, live))
            entries[sorted(dead)] = torch.nan


def slot_digest(store: LayerStore, slot: int) -> str:
    """Return a hash of every byte of one slot."""
    digest = blake2b(digest_size=16)
    for x in store.present().values():
        digest.update(_bytes(x[slot]))
    return digest.hexdigest()


def plane_digest(store: LayerStore, slot: int) -> str:
    """Return a hash of one slot's planes and scales, without its rings."""
    digest = blake2b(digest_size=16)
    for name, x in store.present().items():
        if name not in RING_AXES:
            digest.update(_bytes(x[slot]))
    return digest.hexdigest()


def bystander_digests(store: LayerStore, used: Iterable[int]) -> dict[int, str]:
    """Return hashes of the slots that a forward does not name; none may change."""
    named = set(used)
    return {slot: slot_digest(store, slot) for slot in range(store.slots) if slot not in named}


def pool_digest(pool: StatePool) -> dict[str, str]:
    """Return hashes of everything a pool owns: every slot's bytes, and its whole bookkeeping.

    Equal before and after an operation that was refused.
    """
    found = {
        f"layer {i} slot {slot}": slot_digest(store, slot)
        for i, store in enumerate(pool.stores)
        for slot in range(store.slots)
    }
    for name, value in vars(pool._slots).items():
        content = value.tolist() if isinstance(value, np.ndarray) else value
        found[f"bookkeeping {name}"] = repr(content)
    return found


def _bytes(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).numpy().tobytes())
