"""How the kernels of a layer are launched: block sizes and warps."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.formats import FORMATS
from replayssm.ops.triton.call import power_of_two
from replayssm.storage import StorageSpec
from replayssm.types import Decay, Write


@dataclass(frozen=True, slots=True)
class Launch:
    """Block sizes of one layer's kernels.

    Attributes:
        chunk: Value rows of one program of the step kernel.
        read_rows: Value rows that it reads at a time.
        fold_rows: Value rows that it folds at a time.
        warps: Warps of the step kernel.
        pull_warps: Warps of the pull-back kernel.
    """

    chunk: int
    read_rows: int
    fold_rows: int
    warps: int = 1
    pull_warps: int = 1
    fold_programs: int = 0
    fold_warps: int = 1
    fold_chunk: int = 64


def is_parallel(spec: StorageSpec) -> bool:
    """Whether the layer's pull-back needs no order: additive writes with scalar decays."""
    return spec.layer.write is Write.ADDITIVE and spec.layer.decay is Decay.SCALAR


def default_launch(spec: StorageSpec, rows: int) -> Launch:
    """Return the size rule for a device without a launch table."""
    per_tile = spec.layer.value_dim // spec.ring.tiles
    whole = power_of_two(per_tile)
    if FORMATS[spec.format].scaled:
        return Launch(per_tile, min(whole, 64), min(whole, 16))
    read = min(whole, 16)
    return Launch(min(per_tile, 64), read, min(read, 16))
