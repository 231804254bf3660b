"""Keys and values of a model's attention layers in slots, for batches of rows at any positions.

A slot holds the last R tokens of one sequence: the token at position p lies at index ``p % R``.
Attention that sees everything has R = the longest sequence; attention that sees the last W tokens
has R = W + max_block - 1, so that a block never overwrites what its first token still sees, and a
rejected draft needs no undoing: whatever it overwrote is out of sight already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from replayssm.errors import ContractError, DriftError, UnsupportedError
from replayssm.models.tiny import attention_window
from replayssm.ring import RingSpec
from replayssm.slots import SlotRef, SlotTable, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MASKED_ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What the attention layers of a model keep for one token.

    Attributes:
        layers: Indices of the cache layers with keys and values.
        keys: ``(heads, dim)`` of each.
        values: ``(heads, dim)`` of each.
        dtype: dtype of both.
        window: Tokens that a query sees, itself included; None for all.
        is_additive: Whether masks are added to scores rather than boolean.
    """

    layers: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    window: int | None
    is_additive: bool

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers."""
        elements = sum(heads * dim for heads, dim in (*self.keys, *self.values))
        return elements * self.dtype.itemsize

    def entries(self, context: int, max_block: int) -> int:
        """Return R, the tokens that a slot holds."""
        if not self.layers:
            return 0
        return context if self.window is None else min(context, self.window + max_block - 1)


@torch.no_grad()
def probe(model: Any) -> KvSpec:  # noqa: ANN401 - a transformers model
    """Return what a model's attention layers keep, from one forward of one token.

    Raises:
        UnsupportedError: Its attention takes no mask of ours, or its layers see different windows.
    """
    from transformers import DynamicCache

    from replayssm.integrations.hooks import cache_argument

    config = model.config.get_text_config()
    implementation = config._attn_implementation
    window = attention_window(implementation)
    cache: Any = DynamicCache(config=config)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    model(ids, **{cache_argument(model): cache}, use_cache=True)
    found = [(i, x) for i, x in enumerate(cache.layers) if getattr(x, "keys", None) is not None]
    windows = {getattr(x, "sliding_window", None) or window for _, x in found}
    if len(windows) > 1:
        raise UnsupportedError(f"attention layers that see different windows: {windows}")
    if found and window is None and implementation not in MASKED_ATTENTION:
        raise UnsupportedError(
            f"attention {implementation!r} takes no mask by row; load the model with one of "
            f"{MASKED_ATTENTION}"
        )
    return KvSpec(
        layers=tuple(i for i, _ in found),
        keys=tuple((x.keys.shape[1], x.keys.shape[3]) for _, x in found),
        values=tuple((x.values.shape[1], x.values.shape[3]) for _, x in found),
        dtype=found[0][1].keys.dtype if found else torch.float32,
        window=windows.pop() if windows else None,
        is_additive=implementation == "eager",
    )


class KvStore:
    """Slots of keys and values, ``[S, heads, R, dim]`` a layer.

    Args:
        spec: What one token takes.
        slots: S.
        context: Most tokens of one sequence.
        max_block: Largest T of one block.
        device: Where everything lives.
    """

    def __init__(
        self, spec: KvSpec, slots: int, context: int, max_block: int, device: torch.device
    ) -> None:
        self.spec, self.entries = spec, spec.entries(context, max_block)
        self._layers = [
            tuple(
                torch.zeros(slots, heads, self.entries, dim, dtype=spec.dtype, device=device)
                for heads, dim in (keys, values)
            )
            for keys, values in zip(spec.keys, spec.values, strict=True)
        ]
        self._slots = SlotTable(slots, RingSpec())
        self._device = device
        self._plan: BlockKv | ChunkKv | None = None

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Slots that :meth:`take` can hand out."""
        return self._slots.num_free

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot."""
        return self.entries * self.spec.token_nbytes

    def take(self) -> SlotRef:
        """Hand out a free slot, all zeros.

        Raises:
            CapacityError: No slot is free.
        """
        ref = self._slots.take()
        for layer in self._layers:
            for held in layer:
                # what a mask hides still enters a product with 0, and 0 times NaN is NaN
                held[ref.slot].zero_()
        return ref

    def release(self, ref: SlotRef) -> None:
        """Give a slot back; its name goes stale."""
        self._slots.release(ref)

    def plan_block(
        self, refs: Sequence[SlotRef], positions: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> Tensor:
        """Plan a forward over one block a row; return its ``[B, 1, T, N]`` mask.

        Args:
            refs: Slot of each row.
            positions: ``[B]`` position of each row's first token.
            lengths: ``[B]`` tokens of each row.
        """
        slots = np.array(self._slots.check_all(refs, Status.LIVE), np.int64)
        last = positions + lengths - 1
        used = min(self.entries, int(last.max()) + 1)
        query = positions[:, None] + np.arange(lengths.max())
        index = np.arange(used)
        key = last[:, None] - (last[:, None] - index) % max(self.entries, 1)
        self._plan = BlockKv(slots, positions, lengths, self.entries, used)
        return self._mask(query, key)

    def plan_chunk(self, ref: SlotRef, position: int, tokens: int) -> Tensor:
        """Plan a forward over the next tokens of one prompt; return its ``[1, 1, T, N]`` mask."""
        slot = self._slots.check(ref, Status.LIVE)
        seen = position if self.spec.window is None else self.spec.window - 1
        past = np.arange(max(0, position - seen), position)
        query = np.arange(position, position + tokens)
        self._plan = ChunkKv(slot, past, query, self.entries)
        return self._mask(query[None], np.concatenate([past, query])[None])

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the ``[B, heads, T, dim]`` of a forward; return what its queries are to see."""
        if self._plan is None:
            raise DriftError("attention ran outside of a forward of the engine")
        held = self._layers[layer]
        return self._plan.exchange(held[0], keys), self._plan.exchange(held[1], values)

    def read(self, ref: SlotRef, position: int) -> tuple[Tensor, ...]:
        """Return copies of a slot, ``[heads, n, dim]`` in order of position, keys and values."""
        slot, index = self._slots.check(ref, Status.LIVE), self._held(position)
        return tuple(x[slot][:, index] for layer in self._layers for x in layer)

    def check(self, position: int, held: Sequence[Tensor]) -> None:
        """Refuse what :meth:`read` of a store like this would not have returned.

        Raises:
            ContractError: A tensor does not fit.
        """
        tensors = [x for layer in self._layers for x in layer]
        if len(held) != len(tensors):
            raise ContractError("kv", f"{len(tensors)} tensors", len(held))
        for own, given in zip(tensors, held, strict=True):
            shape = (own.shape[1], len(self._held(position)), own.shape[3])
            if tuple(given.shape) != shape or given.dtype != own.dtype:
                got = f"{given.dtype} {tuple(given.shape)}"
                raise ContractError("kv", f"{own.dtype} {shape}", got)

    def write(self, ref: SlotRef, position: int, held: Sequence[Tensor]) -> None:
        """Overwrite a slot with what :meth:`read` returned; :meth:`check` has passed."""
        slot, index = self._slots.check(ref, Status.LIVE), self._held(position)
        tensors = [x for layer in self._layers for x in layer]
        for own, given in zip(tensors, held, strict=True):
            own[slot].movedim(1, 0)[index] = given.to(own.device).movedim(1, 0)

    def nbytes(self) -> int:
        """Return the bytes of everything allocated."""
        return self.num_slots * self.slot_nbytes

    def _held(self, position: int) -> list[int]:
        """Return where a slot's tokens lie, oldest first: those that some later token can see."""
        window = self.spec.window
        seen = position if window is None else min(position, window - 1)
        return [p % self.entries for p in range(position - seen, position)] if self.entries else []

    def _mask(self, query: NDArray[np.int64], key: NDArray[np.int64]) -> Tensor:
        distance = query[:, :, None] - key[:, None, :]
        seen = (distance >= 0) & (key >= 0)[:, None, :]
        if self.spec.window is not None:
            seen &= distance < self.spec.window
        mask = torch.from_numpy(seen).unsqueeze(1).to(self._device)
        if not self.spec.is_additive:
            return mask
        floor = torch.finfo(self.spec.dtype).min
        return torch.zeros_like(mask, dtype=self.spec.dtype).masked_fill(~mask, floor)


class BlockKv:
    """Where a block of every row goes, and the slots that its queries see."""

    def __init__(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        lengths: NDArray[np.int64],
        entries: int,
        used: int,
    ) -> None:
        rows, tokens = (np.arange(lengths.max()) < lengths[:, None]).nonzero()
        at = (positions[rows] + tokens) % max(entries, 1)
        self._slots, self._used = torch.from_numpy(slots), used
        self._rows, self._tokens = torch.from_numpy(rows), torch.from_numpy(tokens)
        self._target, self._at = torch.from_numpy(slots[rows]), torch.from_numpy(at)

    def exchange(self, held: Tensor, new: Tensor) -> Tensor:
        """Store ``new`` ``[B, heads, T, dim]``; return ``[B, heads, N, dim]``."""
        held[self._target, :, self._at] = new[self._rows, :, self._tokens]
        return held[:, :, : self._used].index_select(0, self._slots.to(held.device))


class ChunkKv:
    """Where the next tokens of one prompt go, and the past that they see."""

    def __init__(
        self, slot: int, past: NDArray[np.int64], new: NDArray[np.int64], entries: int
    ) -> None:
        self._slot, self._count = slot, min(len(new), entries)
        self._past = torch.from_numpy(past % max(entries, 1))
        self._at = torch.from_numpy(new[len(new) - self._count :] % max(entries, 1))

    def exchange(self, held: Tensor, new: Tensor) -> Tensor:
        """Store ``new`` ``[1, heads, T, dim]``; return it behind its past."""
        slot = held[self._slot]
        seen = torch.cat([slot[:, self._past].unsqueeze(0), new], dim=2)
        slot[:, self._at] = new[0, :, new.shape[2] - self._count :]
        return seen


class SlottedLayer:
    """Mixed into the class of a cache layer with keys and values: they go to a :class:`KvStore`."""

    store: KvStore
    place: int

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store what a forward adds and return what it sees."""
        return self.store.exchange(self.place, key_states, value_states)


def slot_layers(layers: list[Any], store: KvStore) -> None:
    """Mutates a cache's ``layers``: put slotted ones in the place of those with keys and values."""
    for place, index in enumerate(store.spec.layers):
        kind: type = type(layers[index])
        twin: Any = object.__new__(type(f"Slotted{kind.__name__}", (SlottedLayer, kind), {}))
        twin.__dict__.update(layers[index].__dict__)
        twin.store, twin.place = store, place
        layers[index] = twin
