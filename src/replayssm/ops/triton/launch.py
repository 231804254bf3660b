"""How the kernels of a layer are launched: block sizes, warps and grids, by device.

``tables/<device>.json`` has a list of rules for the replay step and one for the standard step; of
each the first that matches decides. ``replayssm tune`` writes such a table. A device without one
takes a rule of sizes and says so once.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from replayssm.formats import FORMATS
from replayssm.ops.triton.call import power_of_two
from replayssm.policy import FOLDER, device_name, find_table
from replayssm.types import Decay, Write

if TYPE_CHECKING:
    from replayssm.storage import StorageSpec
    from replayssm.types import LayerSpec


LEAST_FOLD = 8
"""Value rows that a fold takes at least, masked where a tile has fewer."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Block sizes of one layer's kernels.

    Attributes:
        chunk: Value rows of one program of the step and read kernels; one that folds takes a tile
            of a scaled format whole.
        read_rows: Value rows that it reads at a time.
        full_rows: The most of them where both planes are read: joined they are twice the registers
            of two bytes, four times those of one.
        fold_rows: Value rows that it folds at a time.
        warps: Warps of the step and read kernels.
        pull_warps: Warps of the pull-back kernel.
        whole: Whether a step of one token makes its pull-back beside each chunk that it reads, for
            additive writes with scalar decays; with ``fold_programs`` tiles that fold have a launch
            of their own.
        early_read: Whether reads start while the pull-back runs: for a step that fits the chip.
        fold_programs: Programs that fold and read the tiles which are due, beside the read of the
            others; 0 does everything in one launch.
        fold_warps: Warps of one of them.
        fold_chunk: Value rows that it takes at a time, with the same exception.
        pull_registers: Most registers of a thread of the pull-back; 0 leaves it to the compiler.
        fold_registers: The same of the kernel of the due tiles.
    """

    chunk: int
    read_rows: int
    fold_rows: int
    warps: int = 1
    pull_warps: int = 1
    fold_programs: int = 0
    fold_warps: int = 1
    fold_chunk: int = 64
    pull_registers: int = 0
    fold_registers: int = 0
    full_rows: int = 32
    early_read: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class StandardLaunch:
    """Block sizes of the standard step.

    Attributes:
        rows: Value rows of a program.
        warps: Warps of a program.
    """

    rows: int
    warps: int = 1


def is_parallel(spec: StorageSpec) -> bool:
    """Whether the layer's pull-back needs no order: additive writes with scalar decays."""
    return spec.layer.write is Write.ADDITIVE and spec.layer.decay is Decay.SCALAR


def choose_launch(spec: StorageSpec, rows: int, tokens: int, device: torch.device) -> Launch:
    """Return how a layer is launched on ``device`` for a block of ``rows`` rows."""
    for rule in table_of(device)["rules"]:
        if _matches(rule["when"], spec.layer, spec.format.value, rows, tokens):
            return fitted(Launch(**rule["launch"]), spec)
    return default_launch(spec)


def fitted(launch: Launch, spec: StorageSpec) -> Launch:
    """Return a launch for the tiles of a layer: rows within one, chunks that cut one evenly."""
    per_tile = spec.layer.value_dim // spec.ring.tiles
    whole = power_of_two(per_tile)

    def share(chunk: int) -> int:
        # rows of a chunk beyond the tile are computed and thrown away; they come in eights
        count = max(1, round(per_tile / chunk))
        return min(-(-per_tile // (8 * count)) * 8, whole)

    return replace(
        launch, chunk=share(launch.chunk), fold_chunk=share(launch.fold_chunk),
        read_rows=min(launch.read_rows, whole), full_rows=min(launch.full_rows, whole),
        fold_rows=min(launch.fold_rows, max(whole, LEAST_FOLD)),
    )  # fmt: skip


def choose_standard(
    layer: LayerSpec, dtype: torch.dtype, rows: int, tokens: int, device: torch.device
) -> StandardLaunch:
    """Return how the standard step is launched; ``dtype`` is that of the state."""
    name = "bf16" if dtype is torch.bfloat16 else "f32"
    for rule in table_of(device)["standard"]:
        if _matches(rule["when"], layer, name, rows, tokens):
            sizes = dict(rule["launch"])
            return StandardLaunch(min(sizes.pop("rows"), power_of_two(layer.value_dim)), **sizes)
    return StandardLaunch(min(32 // dtype.itemsize, power_of_two(layer.value_dim)))


def default_launch(spec: StorageSpec) -> Launch:
    """Return the size rule for a device without a launch table."""
    return fitted(Launch(64, 64 if FORMATS[spec.format].scaled else 16, 16), spec)


def _matches(when: dict[str, Any], layer: LayerSpec, state: str, rows: int, tokens: int) -> bool:
    """Whether a rule's conditions hold: lists of values, and least numbers of rows and tokens."""
    return (
        rows >= when.get("rows", 1)
        and tokens >= when.get("tokens", 1)
        and state in when.get("formats", [state])
        and layer.write.value in when.get("writes", [layer.write.value])
        and layer.decay.value in when.get("decays", [layer.decay.value])
    )


@cache
def table_of(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Return the rules measured on a device; of a GPU that was not, none and a warning."""
    if device.type != "cuda":
        return {"rules": [], "standard": []}
    name = device_name(device)
    path = find_table(f"{name}.json")
    if path is None:
        warnings.warn(
            f"no launch table for {name}: kernels are launched by a rule of sizes; `replayssm "
            f"tune` measures one, and {FOLDER} names the folder it is in",
            stacklevel=2,
        )
        return {"rules": [], "standard": []}
    return {"standard": [], **json.loads(path.read_text(encoding="utf-8"))}
