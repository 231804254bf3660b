"""Time a step in one pass, or with a read that pulls back, and one with a pull-back, in turns.

    python benchmarks/one_pass.py --json benchmarks/results/one-pass-h200.json

Needs a Hopper GPU. What is stored either way folds as it is told here; a pool never mixes the two.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from gpu import timing
from gpu.cases import CASES, Point
from gpu.check import check
from gpu.launches import TritonReplay
from gpu.ours import DEPTHS, Choice, OurReplay
from gpu.report import environment, save
from replayssm.ops.triton import one_pass, pull_and_read
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.ops.triton.launch import Launch
    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore

PULL_BACK, ONE_PASS = "pull-back", "one pass"


class Way(TritonReplay):
    """The package's step, made to go one way.

    Args:
        name: Which.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def step_(
        self, store: LayerStore, plan: DevicePlan, loaded: Any, out: Tensor,  # noqa: ANN401
        launch: Launch | None,
    ) -> None:  # fmt: skip
        """Launch one layer-step; ``store`` and ``out`` are mutated."""
        with ExitStack() as stack:
            if self._name == PULL_BACK:
                stack.enter_context(patch.object(one_pass, "folds", return_value=False))
                stack.enter_context(patch.object(pull_and_read, "serves", return_value=False))
            super().step_(store, plan, loaded, out, launch)


def measured(point: Point, fmt: Format, depth: ReadDepth, device: torch.device) -> dict[str, Any]:
    """Return both times of a point, once both gave the right outputs."""
    arms = [OurReplay(Way(name), fmt, depth, Choice(name)) for name in (PULL_BACK, ONE_PASS)]
    row: dict[str, Any] = {"case": point.case.name, "state": fmt.value, "depth": depth.value,
                           "tokens": point.tokens, "kept": point.kept, "window": point.window,
                           "batch": point.batch}  # fmt: skip
    for name, arm in zip((PULL_BACK, ONE_PASS), arms, strict=True):
        row[f"{name}, error"] = float(f"{check(arm, point, device).error:.3g}")
    figures = timing.side_by_side(list(arms), point, device)
    for name, arm in zip((PULL_BACK, ONE_PASS), arms, strict=True):
        figure = figures[arm.name]
        row |= {f"{name}, us": figure.us, f"{name}, spread": figure.spread}
    row["ratio"] = round(row[f"{PULL_BACK}, us"] / row[f"{ONE_PASS}, us"], 3)
    return row


def main() -> None:
    """Write the file after every point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--batch", default="256,1,8,16,32,64,128,512")
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--formats", default="bf16,f32,s32")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing is begun")
    args = parser.parse_args()
    begun, device, rows = time.monotonic(), torch.device("cuda"), []
    batches, tokens = ([int(n) for n in x.split(",")] for x in (args.batch, args.tokens))
    formats = [Format(x) for x in args.formats.split(",")]
    for name, batch, count, fmt in product(
        args.case or ["gdn-16-64x128x128"], batches, tokens, formats
    ):
        if time.monotonic() - begun > args.seconds:
            break
        rows.append(measured(Point(CASES[name], batch, count), fmt, DEPTHS[fmt][0], device))
        print(f"{time.monotonic() - begun:4.0f} s", rows[-1], flush=True)
        save(args.json, {"environment": environment(["benchmarks/one_pass.py"]), "results": rows})


if __name__ == "__main__":
    main()
