"""Measure what each arm does to the bundled models' distributions: the table of docs/precision.md.

python benchmarks/bundled_precision.py

Prints, and writes results/bundled-precision.json beside this file. Section 4 of
``replayssm evaluate`` on four held-out texts of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from cpu_kernels import environment
from replayssm.evaluate import arms, precision
from replayssm.evaluate.plan import Plan, Scope
from replayssm.evaluate.subject import load

RESULT = Path(__file__).parent / "results" / "bundled-precision.json"
MODELS = ("mamba2-tiny", "gdn-tiny", "kda-tiny")
SCOPE = replace(Scope(), buckets=(512,), text_rows=4, probes=((512, 1),))


def measure(model: str) -> list[dict[str, object]]:
    """Return mean KL (nats) and the relative change of bits per byte of every arm but the first."""
    found = precision.run(load(model), Plan(model, arms=arms.DEFAULT, scope=SCOPE), lambda _: None)
    rows: list[dict[str, object]] = []
    for arm in found.arms[1:]:
        bucket = arm.buckets[0]
        if bucket.mean_kl is None or bucket.increase is None:
            raise RuntimeError(f"{arm.arm} was not compared")
        kl, bits = bucket.mean_kl.value, bucket.increase.value
        print(f"{model:12} {arm.arm:14} mean KL {kl:.1e}   bits per byte {100 * bits:+.2f} %")
        row = {"model": model, "arm": arm.arm, "mean_kl": kl, "bits_per_byte_change": bits}
        rows.append({**row, "tokens": bucket.tokens})
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    results = [row for model in MODELS for row in measure(model)]
    record = {"environment": environment(), "window": SCOPE.window, "results": results}
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
