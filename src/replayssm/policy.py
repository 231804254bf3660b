"""Which path serves a batch: the standard step, or checkpoint and ring. Measured where it can be.

State replay saves bytes, and bytes are what a step waits for only when the batch is large: at one
sequence on a GPU its extra launch costs more than it saves. So ``auto`` looks a batch up in a table
of times that were measured on this device (``replayssm tune`` writes one) and takes the faster
path; a device without a table is judged by sizes, and the answer says so.

A path is chosen for rows that are about to be allocated, not for a step: changing it later rewrites
every state of the batch. Blocks of drafts ask for replay wherever the standard path would have to
write a snapshot after every token.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from replayssm.errors import ContractError
from replayssm.types import Decay, Format, LayerSpec, ReadDepth, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.storage import StorageSpec

SHIPPED = Path(__file__).parent / "ops" / "triton" / "tables"
FOLDER = "REPLAYSSM_TABLES"
"""Environment variable: a folder of tables that come before the shipped ones."""
FORMAT, VERSION = "replayssm-policy", 1
SMALL = 16 << 20
"""State elements of a batch and layer under which a GPU is not busy with bytes."""
FAR = 4
"""Times the largest measured batch, beyond which its times say nothing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and why.

    Attributes:
        path: ``replay`` or ``standard``.
        gain: Time of the standard step over that of the replay step; None where only sizes spoke.
        why: One sentence.
    """

    path: str
    gain: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one layer, format and block length over batches; a row of a policy table.

    Attributes:
        layer: Geometry, without a convolution.
        format: State format of the checkpoint.
        depth: Planes that a step reads.
        tokens: T.
        window: Tokens between two folds.
        batches: Ascending.
        standard_us: Of the standard step (T > 1: with snapshots), microseconds at each batch.
        replay_us: Of the replay step.
    """

    layer: LayerSpec
    format: Format
    depth: ReadDepth
    tokens: int
    window: int
    batches: tuple[int, ...]
    standard_us: tuple[float, ...]
    replay_us: tuple[float, ...]

    def at(self, rows: float) -> tuple[float, float]:
        """Return both times at a batch: straight lines between logarithms.

        Under the smallest batch times are those of the smallest; over the largest they grow with
        the batch.
        """
        x = math.log(max(rows, self.batches[0]))
        return _between(self.batches, self.standard_us, x), _between(
            self.batches, self.replay_us, x
        )


def choose_path(
    specs: Sequence[StorageSpec],
    rows: int,
    *,
    depth: ReadDepth,
    device: torch.device,
    tokens: int = 1,
) -> Choice:
    """Return the faster path for a batch.

    Args:
        specs: Geometry, format and ring of every layer.
        rows: B.
        depth: Planes that steps read on the replay path.
        device: Where they run.
        tokens: T of a step.
    """
    name = device_name(device)
    table = measured_on(name)
    found = [_nearest(table, spec, depth, tokens) for spec in specs]
    standard = replay = 0.0
    for spec, row in zip(specs, found, strict=True):
        # a layer of another width is busy as long as a batch of as many state elements
        same = 0.0 if row is None else rows * spec.layer.state_elements / row.layer.state_elements
        if row is None or same > FAR * row.batches[-1]:
            return _by_size(specs, rows, depth, tokens, device, name)
        times = row.at(same)
        standard, replay = standard + times[0], replay + times[1]
    gain = standard / replay
    path = "replay" if gain > 1 else "standard"
    why = f"measured on {name}: standard {standard:.0f} us, replay {replay:.0f} us a step"
    return Choice(path, gain, why)


def device_name(device: torch.device) -> str:
    """Return a device's name as its tables spell it."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


def find_table(file: str) -> Path | None:
    """Return where a table is, in the folder that ``REPLAYSSM_TABLES`` names or among the shipped.

    Raises:
        ContractError: The variable names no folder.
    """
    named = os.environ.get(FOLDER)
    if named and not Path(named).is_dir():
        raise ContractError(FOLDER, "a folder", named)
    folders = [Path(named)] if named else []
    places = (folder / file for folder in (*folders, SHIPPED))
    return next((path for path in places if path.is_file()), None)


@cache
def measured_on(name: str) -> tuple[Measured, ...]:
    """Return the policy table of a device, empty where there is none."""
    path = find_table(f"{name}.policy.json")
    return () if path is None else read_table(path)


def read_table(path: Path) -> tuple[Measured, ...]:
    """Read a policy table.

    Raises:
        ContractError: It is none.
    """
    fields = json.loads(path.read_text(encoding="utf-8"))
    if (fields.get("format"), fields.get("version")) != (FORMAT, VERSION):
        got = (fields.get("format"), fields.get("version"))
        raise ContractError(path.name, f"{FORMAT} version {VERSION}", got)
    return tuple(_read_row(row) for row in fields["rows"])


def write_table(path: Path, rows: Sequence[Measured], environment: dict[str, Any]) -> None:
    """Write a policy table that :func:`read_table` reads, one row a line."""
    lines = ",\n".join(f"  {json.dumps(_as_row(row))}" for row in rows)
    head = json.dumps({"format": FORMAT, "version": VERSION, "environment": environment})
    path.write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _nearest(
    table: Sequence[Measured], spec: StorageSpec, depth: ReadDepth, tokens: int
) -> Measured | None:
    """Return the row of the same family, format and depth that is nearest in everything else."""
    at = spec.layer
    fits = [
        row
        for row in table
        if (row.layer.write, row.layer.decay, row.format) == (at.write, at.decay, spec.format)
        and (row.depth is depth or spec.format in (Format.F32, Format.BF16))
        and (row.tokens > 1) == (tokens > 1)
    ]

    def distance(row: Measured) -> tuple[float, ...]:
        return (
            abs(math.log(row.tokens / tokens)),
            abs(math.log(row.window / spec.ring.window)),
            abs(math.log(row.layer.state_elements / at.state_elements)),
        )

    return min(fits, key=distance, default=None)


def _by_size(
    specs: Sequence[StorageSpec],
    rows: int,
    depth: ReadDepth,
    tokens: int,
    device: torch.device,
    name: str,
) -> Choice:
    """Judge by what every device has in common; conservative, for it promises no loss."""
    reason = f"nothing like it was measured on {name} (replayssm tune does)"
    if tokens > 1:
        return Choice("replay", None, f"{reason}; a standard verify writes T states")
    if device.type == "cpu":
        # full reads do not pay on a CPU, those of a byte or two an element do
        pays = depth is ReadDepth.HIGH and all(
            spec.format in (Format.Q24, Format.Q16)
            or (spec.format is Format.S32 and spec.layer.decay is Decay.SCALAR)
            for spec in specs
        )
        return Choice("replay" if pays else "standard", None, f"{reason}; by bytes read on a CPU")
    least = rows * min(spec.layer.state_elements for spec in specs)
    path = "replay" if least >= SMALL else "standard"
    return Choice(path, None, f"{reason}; {least:,} state elements, replay from {SMALL:,}")


def _between(batches: Sequence[int], times: Sequence[float], x: float) -> float:
    logs = [math.log(b) for b in batches]
    if x >= logs[-1]:
        return times[-1] * math.exp(x - logs[-1])
    i = max(n for n, log in enumerate(logs) if log <= x)
    part = (x - logs[i]) / (logs[i + 1] - logs[i])
    return math.exp(math.log(times[i]) * (1 - part) + math.log(times[i + 1]) * part)


def _read_row(row: dict[str, Any]) -> Measured:
    heads, value_heads, value_dim, key_dim = row["shape"]
    layer = LayerSpec(
        Write(row["write"]), Decay(row["decay"]), heads, value_heads, key_dim, value_dim
    )
    return Measured(
        layer, Format(row["format"]), ReadDepth(row["depth"]), row["tokens"], row["window"],
        tuple(row["batches"]), tuple(row["standard_us"]), tuple(row["replay_us"]),
    )  # fmt: skip


def _as_row(row: Measured) -> dict[str, Any]:
    at = row.layer
    return {
        "write": at.write.value, "decay": at.decay.value,
        "shape": [at.key_heads, at.value_heads, at.value_dim, at.key_dim],
        "format": row.format.value, "depth": row.depth.value, "tokens": row.tokens,
        "window": row.window, "batches": list(row.batches), "standard_us": list(row.standard_us),
        "replay_us": list(row.replay_us),
    }  # fmt: skip
