"""Images of one slot: what export writes and import checks.

Only the live entries travel, in order of position, so an image fits a pool whose rings have another
length. Everything that decides the meaning of the bytes is in the schema and is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from replayssm.errors import ContractError
from replayssm.storage import RING_FIELDS, LayerStore, StorageSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.ring import RingSpec

SCHEMA = "replayssm.slot/1"


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
            slot dimension; rings ``[heads, committed - oldest, ...]``.
    """

    schema: str
    specs: tuple[StorageSpec, ...]
    base: int
    folded: int
    committed: int
    oldest: int
    layers: tuple[dict[str, Tensor], ...]

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
        self._check_counts(specs[0].ring)
        self._check_tensors(specs)

    def _check_counts(self, ring: RingSpec) -> None:
        oldest, newest = ring.oldest_needed(self.base, self.folded), self.committed
        if not 0 <= self.base <= oldest == self.oldest <= newest:
            expected = f"0 <= base <= oldest ({oldest}) <= committed"
            got = f"base {self.base}, oldest {self.oldest}, committed {newest}"
            raise ContractError("image", expected, got)
        if newest - oldest > ring.ring_len:
            expected = f"at most {ring.ring_len} live entries"
            raise ContractError("image", expected, newest - oldest)

    def _check_tensors(self, specs: tuple[StorageSpec, ...]) -> None:
        if len(self.layers) != len(specs):
            raise ContractError("image", f"tensors of {len(specs)} layers", len(self.layers))
        live = self.committed - self.oldest
        for i, (spec, tensors) in enumerate(zip(specs, self.layers, strict=True)):
            for name, (shape, dtype) in spec.shapes(1).items():
                own = shape[1:]
                if name in RING_FIELDS:
                    own = (own[0], live, *own[2:])
                x = tensors.get(name)
                if x is None or tuple(x.shape) != own or x.dtype != dtype:
                    got = "nothing" if x is None else f"{x.dtype} {tuple(x.shape)}"
                    raise ContractError(f"image layer {i} {name}", f"{dtype} {own}", got)


def read_slot(
    stores: Sequence[LayerStore], slot: int, base: int, folded: int, committed: int
) -> SlotImage:
    """Copy one slot of every layer into an image."""
    ring = stores[0].spec.ring
    oldest = ring.oldest_needed(base, folded)
    index = [p % ring.ring_len for p in range(oldest, committed)]
    layers = []
    for store in stores:
        tensors = store.present()
        layers.append(
            {
                name: (x[slot][:, index] if name in RING_FIELDS else x[slot]).clone()
                for name, x in tensors.items()
            }
        )
    specs = tuple(store.spec for store in stores)
    return SlotImage(SCHEMA, specs, base, folded, committed, oldest, tuple(layers))


def write_slot_(stores: Sequence[LayerStore], slot: int, image: SlotImage) -> None:
    """Overwrite one slot of every layer with an image that has been checked."""
    for store, tensors in zip(stores, image.layers, strict=True):
        ring_len = store.spec.ring.ring_len
        index = [p % ring_len for p in range(image.oldest, image.committed)]
        for name, x in store.present().items():
            if name in RING_FIELDS:
                x[slot][:, index] = tensors[name].to(x.device)
            else:
                x[slot] = tensors[name].to(x.device)
