"""``replayssm tune``: measure launches and paths on this device and write its tables."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import JSON_OPTION, console, print_json

if TYPE_CHECKING:
    from replayssm.ops.triton.tune import Point
    from replayssm.types import LayerSpec

# family, key heads / value heads x value dim x key dim
LAYERS = "mamba2:8/128x64x128,gdn:16/64x128x128,kda:32/32x128x128"
FAMILIES = {
    "mamba2": ("additive", "scalar"),
    "gdn": ("delta", "scalar"),
    "kda": ("delta", "channel"),
}
WHAT = ("launch", "standard", "policy")


def tune(
    out: Annotated[Path, typer.Option(help="Folder that the tables go to.")] = Path(),
    layers: Annotated[
        str, typer.Option(help="family:H/HVxVxK, separated by commas: the layers to measure.")
    ] = LAYERS,
    formats: Annotated[str, typer.Option(help="State formats.")] = "f32,s32,q24,q16,bf16",
    batch: Annotated[str, typer.Option(help="Rows.")] = "1,8,32,64,128,256",
    tokens: Annotated[str, typer.Option(help="Tokens of a block.")] = "1,4",
    window: Annotated[int, typer.Option(min=1, help="Tokens between two folds.")] = 16,
    what: Annotated[
        str, typer.Option(help=f"Of {', '.join(WHAT)}: launches of either step; times of both.")
    ] = ",".join(WHAT),
    passes: Annotated[int, typer.Option(min=1, help="Times that every size is gone through.")] = 2,
    device: Annotated[str, typer.Option(help="Device to measure.")] = "cuda",
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Measure how kernels are best launched here and which path is faster; write two tables.

    Runs on scratch copies only. Point REPLAYSSM_TABLES at the folder to use what was written.
    """
    import torch

    from replayssm.errors import ContractError, UnsupportedError
    from replayssm.evaluate import manifest
    from replayssm.ops.dispatch import unavailable
    from replayssm.policy import device_name, write_table
    from replayssm.types import Impl

    where, wanted = torch.device(device), set(_words("--what", what, WHAT))
    if not out.is_dir():
        raise ContractError("--out", "a folder that exists", str(out))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("tune: no GPU here; a table is measured on the device it is for")
    reason = unavailable(Impl.TRITON, where)
    if reason is not None:
        raise UnsupportedError(f"tune: {reason}")

    from replayssm.ops.triton.tune import Tuning

    points = _points(layers, formats, batch, tokens, window)
    screen, name = console(stderr=True), device_name(where)
    files = [out / f"{name}.json", out / f"{name}.policy.json"]
    tuning = Tuning(where, files[0], screen.print)
    for point in points:
        if "standard" in wanted:
            tuning.tune_standard(point)
        if "launch" in wanted:
            tuning.tune_replay(point, passes)
    if "policy" in wanted:
        environment: dict[str, object] = {"device": name, **manifest.versions()}
        rows = []
        for _, group in groupby(points, lambda p: (p.spec, p.tokens, p.depth)):
            rows.append(tuning.measure(list(group)))
            write_table(files[1], rows, environment)
    written = [str(path) for path in files if path.exists()]
    if as_json:
        print_json({"device": name, "points": len(points), "tables": written})
        return
    for path in written:
        console().print(path)


def _points(layers: str, formats: str, batch: str, tokens: str, window: int) -> list[Point]:
    """Return every point of the command line, rows innermost and ascending."""
    import torch

    from replayssm.ops.triton.tune import Point
    from replayssm.ring import RingSpec
    from replayssm.storage import StorageSpec
    from replayssm.types import Format, ReadDepth

    dtype = torch.bfloat16 if os.environ.get("TRITON_INTERPRET") != "1" else torch.float32
    found = []
    for layer in (_layer(text) for text in layers.split(",")):
        for fmt in (Format(x) for x in formats.split(",")):
            has_planes = fmt not in (Format.F32, Format.BF16)
            depths = (ReadDepth.HIGH, ReadDepth.FULL) if has_planes else (ReadDepth.FULL,)
            for depth in depths:
                for block in sorted(_numbers("--tokens", tokens)):
                    ring = RingSpec(window, max_block=block)
                    spec = StorageSpec(layer, fmt, ring, dtype)
                    sizes = sorted(_numbers("--batch", batch))
                    found += [Point(spec, rows, block, depth) for rows in sizes]
    return found


def _layer(text: str) -> LayerSpec:
    from replayssm.errors import ContractError
    from replayssm.types import Decay, LayerSpec, Write

    found = re.fullmatch(r"(\w+):(\d+)/(\d+)x(\d+)x(\d+)", text)
    if found is None or found[1] not in FAMILIES:
        raise ContractError("--layers", f"{'|'.join(FAMILIES)}:H/HVxVxK", text)
    write, decay = FAMILIES[found[1]]
    heads, value_heads, value_dim, key_dim = (int(x) for x in found.groups()[1:])
    return LayerSpec(Write(write), Decay(decay), heads, value_heads, key_dim, value_dim)


def _numbers(option: str, text: str) -> list[int]:
    from replayssm.errors import ContractError

    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ContractError(option, "positive integers, separated by commas", text)
    return sorted({int(x) for x in text.split(",")})


def _words(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    from replayssm.errors import ContractError

    words = text.split(",")
    if not set(words) <= set(known):
        raise ContractError(option, f"of {', '.join(known)}", text)
    return words
