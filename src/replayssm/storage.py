"""Tensors of one layer in a pool, and the one table that both sizes and allocates them.

Rings are head-major, so that the entries of one head are contiguous:

    k ``[S, H, R, K]``   v ``[S, HV, R, V]``
    g ``[S, HV, R]`` or ``[S, HV, R, K]``   w ``[S, HV, R]``

The raw inputs of a layer's convolution have a ring of their own, conv ``[S, Rc, C]``.

Planes are ``[S, HV, V, K]``, row scales ``[S, HV, V]`` and column scales ``[S, HV, tiles, K]``:
every value tile has its own, so that it is encoded and decoded by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from replayssm.errors import ContractError, UnsupportedError
from replayssm.formats import FORMATS, Planes
from replayssm.ring import RingSpec
from replayssm.types import Format, LayerSpec

RING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIELDS = ("high", "low", "row_scale", "columns", "k", "v", "g", "w", "conv")
# the rings, and which dimension of one slot's ring counts its entries
RING_AXES = {"k": 1, "v": 1, "g": 1, "w": 1, "conv": 0}
# the formats that hold fp32 whole
EXACT_FORMATS = (Format.F32, Format.S32)


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """Everything that decides the shape and dtype of a layer's tensors, and what they promise.

    Attributes:
        layer: Geometry.
        format: State format of the checkpoint.
        ring: Ring sizes.
        ring_dtype: dtype of k, v and conv entries; gates and write strengths are always fp32.
        exact: States are rebuilt entry by entry with the standard step's own operations, so outputs
            and states are those of the same implementation's standard step, bit for bit.
    """

    layer: LayerSpec
    format: Format
    ring: RingSpec
    ring_dtype: torch.dtype = torch.float32
    exact: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", Format(self.format))
        if self.ring_dtype not in RING_DTYPES:
            raise ContractError("ring_dtype", f"one of {RING_DTYPES}", self.ring_dtype)
        if self.ring.tiles > self.layer.value_dim:
            raise ContractError(
                "tiles", f"at most value_dim ({self.layer.value_dim})", self.ring.tiles
            )
        if self.exact and (self.format not in EXACT_FORMATS or self.ring.tiles != 1):
            raise UnsupportedError(
                "exact=True: needs a state in f32 or s32 and whole slots folded at once (tiles=1), "
                f"not {self.format.value} and tiles={self.ring.tiles}"
            )

    def shapes(self, slots: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return ``{field: (shape, dtype)}`` of every tensor that exists for this spec."""
        at, fmt, entries = self.layer, FORMATS[self.format], self.ring.ring_len
        hv, h, k_dim, v_dim = at.value_heads, at.key_heads, at.key_dim, at.value_dim
        table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        table["high"] = ((slots, hv, v_dim, k_dim), fmt.high)
        if fmt.low is not None:
            table["low"] = ((slots, hv, v_dim, k_dim), fmt.low)
        if fmt.scaled:
            table["row_scale"] = ((slots, hv, v_dim), torch.float32)
            table["columns"] = ((slots, hv, self.ring.tiles, k_dim), torch.bfloat16)
        gate = at.gate_shape()
        table["k"] = ((slots, h, entries, k_dim), self.ring_dtype)
        table["v"] = ((slots, hv, entries, v_dim), self.ring_dtype)
        table["g"] = ((slots, hv, entries, *gate[1:]), torch.float32)
        table["w"] = ((slots, hv, entries), torch.float32)
        if at.conv is not None:
            length = self.ring.conv_len(at.conv.width)
            table["conv"] = ((slots, length, at.conv.channels), self.ring_dtype)
        return table

    def live_entries(self, name: str, live: range) -> list[int]:
        """Return the ring indices, oldest first, that a slot's ``live`` positions need.

        These are their own entries; of a convolution's inputs also the ``width - 1`` before them.
        """
        conv = self.layer.conv
        if name != "conv" or conv is None:
            return [p % self.ring.ring_len for p in live]
        length = self.ring.conv_len(conv.width)
        return [p % length for p in range(live.start - conv.width + 1, live.stop)]

    def nbytes(self, slots: int) -> int:
        """Return the exact bytes that :func:`allocate` takes for ``slots`` slots."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes(slots).values())

    def ring_nbytes(self, slots: int) -> int:
        """Return the part of :meth:`nbytes` that rings take."""
        rings = [entry for name, entry in self.shapes(slots).items() if name in RING_AXES]
        return sum(prod(shape) * dtype.itemsize for shape, dtype in rings)


@dataclass(frozen=True, slots=True)
class LayerStore:
    """The tensors of one layer; fields are as in :meth:`StorageSpec.shapes`, None where absent.

    Any tensor may be a strided view over slots as long as its last dimension is contiguous; a GPU
    may ask for slots that start at multiples of 16 elements.
    """

    spec: StorageSpec
    high: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor
    low: Tensor | None = None
    row_scale: Tensor | None = None
    columns: Tensor | None = None
    conv: Tensor | None = None

    @property
    def slots(self) -> int:
        """S."""
        return int(self.high.shape[0])

    def present(self) -> dict[str, Tensor]:
        """Return the tensors that exist, by field name."""
        found = {name: getattr(self, name) for name in FIELDS}
        return {name: x for name, x in found.items() if x is not None}

    def planes(self, slot: int) -> Planes:
        """Return views of one slot's planes: ``[HV, V, K]``, row scales ``[HV, V]``."""
        low = None if self.low is None else self.low[slot]
        row_scale = None if self.row_scale is None else self.row_scale[slot]
        return Planes(self.high[slot], low, row_scale)


def allocate(spec: StorageSpec, slots: int, device: torch.device) -> LayerStore:
    """Allocate a layer's tensors, zeroed so that no slot ever shows foreign memory."""
    # a tensor made in inference mode could not be written outside of it
    with torch.inference_mode(False):
        tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in spec.shapes(slots).items()
        }
    return LayerStore(spec, **tensors)
