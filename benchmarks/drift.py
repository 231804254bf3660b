"""Measure the drift of every state format over 8,192 tokens: the table of docs/precision.md.

python benchmarks/drift.py                 # prints, and writes benchmarks/results/drift.json
python benchmarks/drift.py --tokens 1024   # a quick look
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

import replayssm
from replayssm.ops.dispatch import choose
from replayssm.testing.drift import Drift, measure_drift
from replayssm.testing.factories import make_layer
from replayssm.types import Decay, Impl, Write

RESULT = Path(__file__).parent / "results" / "drift.json"
WINDOW = 16


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(write: Write, rows: list[Drift]) -> str:
    """Return one markdown table."""
    lines = [
        f"| {write} write: format | read | outputs, first 8th | outputs, last 8th | final state "
        "| slope per fold |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.read} | {r.first:.1e} | {r.last:.1e} | {r.state:.1e} "
        f"| {r.slope_per_fold:+.0e} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--key-dim", type=int, default=64)
    parser.add_argument("--value-dim", type=int, default=64)
    parser.add_argument("--impl", type=Impl, default=Impl.AUTO)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    impl, measured = choose(args.impl, torch.device("cpu")), {}
    for write in (Write.DELTA, Write.ADDITIVE):
        layer = make_layer(write, Decay.SCALAR, (1, 1), (args.key_dim, args.value_dim))
        rows = list(measure_drift(layer, args.tokens, window=WINDOW, impl=impl))
        print(table(write, rows), end="\n\n")
        measured[write.value] = [asdict(row) for row in rows]
    record = {
        "command": "python benchmarks/drift.py",
        "tokens": args.tokens,
        "window": WINDOW,
        "key_dim": args.key_dim,
        "value_dim": args.value_dim,
        "impl": impl.value,
        "replayssm": replayssm.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "processor": processor(),
        "drift": measured,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
