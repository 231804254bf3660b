"""How the kernels of a layer are launched: block sizes, warps and grids, by device.

``tables/<device>.json`` is a list of rules, the first that matches decides; a device without a
table takes a rule of sizes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from replayssm.formats import FORMATS
from replayssm.ops.triton.call import power_of_two
from replayssm.storage import StorageSpec
from replayssm.types import Decay, Write

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Launch:
    """Block sizes of one layer's kernels.

    Attributes:
        chunk: Value rows of one program of the step and read kernels; one that folds takes a tile
            of a scaled format whole.
        read_rows: Value rows that it reads at a time.
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
    early_read: bool = False
    whole: bool = False


def is_parallel(spec: StorageSpec) -> bool:
    """Whether the layer's pull-back needs no order: additive writes with scalar decays."""
    return spec.layer.write is Write.ADDITIVE and spec.layer.decay is Decay.SCALAR


def choose_launch(spec: StorageSpec, rows: int, tokens: int, device: torch.device) -> Launch:
    """Return how a layer is launched on ``device`` for a block of ``rows`` rows."""
    per_tile = spec.layer.value_dim // spec.ring.tiles
    for rule in _table(device):
        if _matches(rule["when"], spec, rows, tokens):
            sizes = dict(rule["launch"])
            # a rule is measured at whole blocks: a smaller tile takes smaller ones
            for name in ("chunk", "read_rows", "fold_rows", "fold_chunk"):
                if name in sizes:
                    sizes[name] = min(sizes[name], power_of_two(per_tile))
            return Launch(**sizes)
    return default_launch(spec, rows)


def default_launch(spec: StorageSpec, rows: int) -> Launch:
    """Return the size rule for a device without a launch table."""
    per_tile = spec.layer.value_dim // spec.ring.tiles
    whole = power_of_two(per_tile)
    if FORMATS[spec.format].scaled:
        return Launch(per_tile, min(whole, 64), min(whole, 16))
    read = min(whole, 16)
    return Launch(min(per_tile, 64), read, min(read, 16))


def _matches(when: dict[str, Any], spec: StorageSpec, rows: int, tokens: int) -> bool:
    """Whether a rule's conditions hold: lists of values, and least numbers of rows and tokens."""
    return (
        rows >= when.get("rows", 1)
        and tokens >= when.get("tokens", 1)
        and spec.format.value in when.get("formats", [spec.format.value])
        and spec.layer.write.value in when.get("writes", [spec.layer.write.value])
        and spec.layer.decay.value in when.get("decays", [spec.layer.decay.value])
    )


@cache
def _table(device: torch.device) -> list[dict[str, Any]]:
    """Return the rules measured on a device, none for one that was not."""
    if device.type != "cuda":
        return []
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    path = TABLES / f"{name}.json"
    return json.loads(path.read_text())["rules"] if path.exists() else []
