"""Images of one slot: what export writes and import checks.

Only the live entries travel, in order of position, so an image fits a pool whose rings have another
length. Everything that decides the meaning of the bytes is in the schema and is compared.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.errors import ContractError
from replayssm.storage import RING_AXES, LayerStore, StorageSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "replayssm.slot/2"


@dataclass(frozen=True, slots=True)
class SlotImage:
    """A self-describing copy of one slot.

    Attributes:
        schema: Version of this layout.
        specs: Storage spec of every layer, as exported.
        base: Position of the checkpoint at admission.
        folded: Committed count the planes were brought to.
        committed: Token count.
        oldest: Absolute position of the first entry in every ring tensor.
        layers: Per layer, tensors by field: planes and scales ``[...]`` as in the store without the
            slot dimension; rings ``[heads, committed - oldest, ...]``; convolution inputs
            ``[committed - oldest + width - 1, C]``.
    """

    schema: str
    specs: tuple[StorageSpec, ...]
    base: int
    folded: int
    committed: int
    oldest: int
    layers: tuple[dict[str, Tensor], ...]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # pickle knows no uint16 tensors, torch's own format does
        blob = io.BytesIO()
        torch.save(self.layers, blob)
        own = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "layers"}
        return _unpickled, (own, blob.getvalue())

    def check_fits(self, specs: tuple[StorageSpec, ...]) -> None:
        """Refuse a pool in which these bytes would mean something else."""
        if self.schema != SCHEMA:
            raise ContractError("image", f"schema {SCHEMA}", self.schema)
        if len(self.specs) != len(specs):
            raise ContractError("image", f"{len(specs)} layers", len(self.specs))
        for i, (own, other) in enumerate(zip(self.specs, specs, strict=True)):
            for name, mine, theirs in (
                ("layer", own.layer, other.layer),
                ("format", own.format, other.format),
                ("ring_dtype", own.ring_dtype, other.ring_dtype),
                ("window", own.ring.window, other.ring.window),
                ("keep", own.ring.keep, other.ring.keep),
                ("tiles", own.ring.tiles, other.ring.tiles),
            ):
                if mine != theirs:
                    raise ContractError(f"image layer {i} {name}", str(theirs), str(mine))
        self._check_counts(specs)
        self._check_tensors(specs)

    def _check_counts(self, specs: tuple[StorageSpec, ...]) -> None:
        ring = specs[0].ring
        most = ring.most_unfolded
        oldest, newest = ring.oldest_needed(self.base, self.folded), self.committed
        if not 0 <= self.base <= oldest == self.oldest <= newest:
            expected = f"0 <= base <= oldest ({oldest}) <= committed"
            got = f"base {self.base}, oldest {self.oldest}, committed {newest}"
            raise ContractError("image", expected, got)
        if newest - oldest > most:
            expected = f"at most {most} live entries"
            raise ContractError("image", expected, newest - oldest, "fold_ it before the export")

    def _check_tensors(self, specs: tuple[StorageSpec, ...]) -> None:
        if len(self.layers) != len(specs):
            raise ContractError("image", f"tensors of {len(specs)} layers", len(self.layers))
        live = range(self.oldest, self.committed)
        for i, (spec, tensors) in enumerate(zip(specs, self.layers, strict=True)):
            for name, (shape, dtype) in spec.shapes(1).items():
                own = shape[1:]
                if name in RING_AXES:
                    axis = RING_AXES[name]
                    count = len(spec.live_entries(name, live))
                    own = (*own[:axis], count, *own[axis + 1 :])
                x = tensors.get(name)
                if x is None or tuple(x.shape) != own or x.dtype != dtype:
                    got = "nothing" if x is None else f"{x.dtype} {tuple(x.shape)}"
                    raise ContractError(f"image layer {i} {name}", f"{dtype} {own}", got)


def _unpickled(own: dict[str, Any], layers: bytes) -> SlotImage:
    return SlotImage(**own, layers=torch.load(io.BytesIO(layers), weights_only=True))


def read_slot(
    stores: Sequence[LayerStore], slot: int, base: int, folded: int, committed: int
) -> SlotImage:
    """Copy one slot of every layer into an image."""
    oldest = stores[0].spec.ring.oldest_needed(base, folded)
    live, layers = range(oldest, committed), []
    for store in stores:
        tensors = {}
        for name, x in store.present().items():
            axis, own = RING_AXES.get(name), x[slot]
            if axis is not None:
                index = torch.tensor(store.spec.live_entries(name, live), dtype=torch.int64)
                own = own.index_select(axis, index.to(x.device))
            tensors[name] = own.clone()
        layers.append(tensors)
    specs = tuple(store.spec for store in stores)
    return SlotImage(SCHEMA, specs, base, folded, committed, oldest, tuple(layers))


def write_slot_(stores: Sequence[LayerStore], slot: int, image: SlotImage) -> None:
    """Overwrite one slot of every layer with an image that has been checked."""
    live = range(image.oldest, image.committed)
    for store, tensors in zip(stores, image.layers, strict=True):
        for name, x in store.present().items():
            axis, given = RING_AXES.get(name), tensors[name].to(x.device)
            if axis is None:
                x[slot] = given
            else:
                index = store.spec.live_entries(name, live)
                x[slot].movedim(axis, 0)[index] = given.movedim(axis, 0)


def copy_slot_(stores: Sequence[LayerStore], source: int, target: int) -> None:
    """Overwrite one slot of every layer with another one: planes, scales and rings."""
    for store in stores:
        for x in store.present().values():
            x[target] = x[source]
