"""``replayssm plan-memory``: how many sequences fit, per state format."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import (
    JSON_OPTION,
    MODEL_HELP,
    console,
    print_json,
    print_table,
    quiet_transformers,
)
from replayssm.types import Format

if TYPE_CHECKING:
    from replayssm.types import LayerSpec


class RingDtype(StrEnum):
    """dtype of ring keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def plan_memory(
    model: Annotated[str, typer.Option(help=f"{MODEL_HELP} No weights are loaded.")] = "gdn-tiny",
    gib: Annotated[float, typer.Option(help="Memory for recurrent states, GiB.")] = 1.0,
    window: Annotated[int, typer.Option(min=1, help="Tokens between two folds.")] = 16,
    keep: Annotated[int, typer.Option(min=0, help="Newest entries that are never folded.")] = 0,
    max_block: Annotated[
        int, typer.Option(min=1, help="Longest block: one token and its drafts.")
    ] = 1,
    ring_dtype: Annotated[
        RingDtype, typer.Option(help="dtype of ring keys and values.")
    ] = RingDtype.FLOAT32,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Say how many sequences fit in a memory budget, rings and scales included.

    Counts recurrent states only: weights, attention caches and activations come on top.
    """
    import torch

    from replayssm.evaluate.subject import public_name
    from replayssm.evaluate.window import describe
    from replayssm.memory import plan_memory as plan
    from replayssm.ring import RingSpec

    quiet_transformers()
    specs = _specs(model)
    ring = RingSpec(window=window, keep=keep, max_block=max_block)
    dtype = getattr(torch, ring_dtype.value)
    plans = {f: plan(specs, gib, state=f, ring=ring, ring_dtype=dtype) for f in Format}
    geometries = [f"{specs.count(s)} layers: {describe(s)}" for s in dict.fromkeys(specs)]
    if as_json:
        print_json(
            {
                "model": public_name(model),
                "gib": gib,
                "window": window,
                "layers": geometries,
                "formats": {f.value: asdict(p) for f, p in plans.items()},
            }
        )
        return
    first = plans[Format.F32]
    rows = [
        ("standard f32", f"{first.standard_bytes:,}", "0", f"{first.standard_slots:,}", "1.00x")
    ]
    rows += [
        (
            f"replay {f.value}",
            f"{p.slot_bytes:,}",
            f"{p.ring_bytes:,}",
            f"{p.slots:,}",
            f"{first.standard_bytes / p.slot_bytes:.2f}x",
        )
        for f, p in plans.items()
    ]
    out = console()
    out.print(f"{public_name(model)}, {gib:g} GiB for recurrent states, window {window}")
    for line in geometries:
        out.print(line, style="dim")
    print_table(("state", "bytes a sequence", "of it rings", "sequences", "vs standard"), rows)


def _specs(model: str) -> tuple[LayerSpec, ...]:
    """Return the geometry of a model's recurrent layers from its configuration alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from replayssm.errors import ContractError, UnsupportedError
    from replayssm.evaluate.subject import check_exists
    from replayssm.models import tiny
    from replayssm.models.registry import find_mixers

    if model not in tiny.NAMES:
        check_exists(model)
    try:
        where = tiny.weights_path(model) if model in tiny.NAMES else model
        config = AutoConfig.from_pretrained(where)
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"{model}: its weights are not part of this installation; name another with --model"
        ) from error
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ContractError("--model", "a bundled name, path or hub id", first) from error
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    specs = tuple(mixer.spec for mixer in find_mixers(built)[0])
    if not specs:
        raise UnsupportedError(f"{model}: no recurrent layer of a supported kind")
    return specs
