"""Driver of the one pass for Mamba-2: check it against fp64, time it beside the shipped step.

PYTHONPATH=src:benchmarks python benchmarks/prototypes/one_pass_mamba/run.py --json mamba.json

Needs a Hopper GPU. Steps of one token at few rows are left to the shipped kernels.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import launches

from gpu import timing
from gpu.cases import CASES, Point
from gpu.check import check
from gpu.launches import TritonReplay
from gpu.ours import DEPTHS, Choice, OurReplay
from gpu.report import environment, save
from replayssm.ops.triton.host import _run_all
from replayssm.types import Format


class OnePass(TritonReplay):
    """The prototype in the place of the shipped step."""

    def step_(self, store, plan, loaded, out, launch):
        block, fused = loaded
        if not launches.serves(store.spec) or not launches.reads(
            plan, block, out, fused, store.spec
        ):
            raise ValueError(f"the prototype does not serve {store.spec}")
        _run_all(launches.step_calls(store, plan, block, out, fused), out.device)


def measured(point, fmt, device):
    """Return both times of a point, once both gave the right outputs."""
    depth = DEPTHS[fmt][0]
    arms = [OurReplay(TritonReplay(), fmt, depth, Choice("shipped")),
            OurReplay(OnePass(), fmt, depth, Choice("one pass"))]  # fmt: skip
    row = {"case": point.case.name, "state": fmt.value, "tokens": point.tokens,
           "batch": point.batch}  # fmt: skip
    try:
        for arm in arms:
            row[f"{arm.choice.label}, error"] = float(f"{check(arm, point, device).error:.3g}")
        figures = timing.side_by_side(list(arms), point, device)
        row |= {f"{arm.choice.label}, us": figures[arm.name].us for arm in arms}
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def main():
    """Write the file after every point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--batch", default="256,8,32")
    args = parser.parse_args()
    device, rows = torch.device("cuda"), []
    batches = [int(n) for n in args.batch.split(",")]
    for batch, tokens, fmt in product(batches, (4, 1, 8), ("q24", "bf16", "q16")):
        point = Point(CASES["mamba2-128x64x128"], batch, tokens)
        rows.append(measured(point, Format(fmt), device))
        print(rows[-1], flush=True)
        save(args.json, {"environment": environment([__file__]), "results": rows})


if __name__ == "__main__":
    main()
