"""The embedded engine: its overhead, its step times, and a storm that must lose nothing.

    python benchmarks/engine.py overhead --json benchmarks/results/engine.json
    python benchmarks/engine.py tails --json benchmarks/results/engine.json
    python benchmarks/engine.py storm --requests 10000 --json benchmarks/results/engine.json

*overhead*: a step of the engine at batch 64 against the forward inside it, and against a bare loop
of the same enabled model on a plain transformers cache. *tails*: step times over whole fold cycles,
with whole slots folded at once and with rolling folds. *storm*: see ``replayssm.engine.storm``.
"""

from __future__ import annotations

from replayssm.cli.output import quiet_transformers, use_threads  # before torch: how threads wait

# isort: split
import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import replayssm
from replayssm.engine.engine import Engine
from replayssm.engine.request import Limits, Request, Route
from replayssm.engine.storm import Storm, StormPlan
from replayssm.models import tiny
from replayssm.ring import RingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

MODELS = tiny.NAMES[:3]
PROMPT = 48
STORM_PROMPTS = 48


def prompts(rows: int, tokens: int = PROMPT) -> list[tuple[int, ...]]:
    """Return pieces of the held-out text."""
    text = tiny.heldout_text()
    return [tuple(text[1000 * row : 1000 * row + tokens]) for row in range(rows)]


def full_engine(
    model: nn.Module, rows: int, route: Route, new: int, stagger: int = 0, **options: object
) -> Engine:
    """Return an engine with every prompt read."""
    limits = Limits(slots=rows, context=512, prefill_chunk=1 << 16)
    engine = Engine(model, limits, **options)  # type: ignore[arg-type]
    for row, prompt in enumerate(prompts(rows, PROMPT + stagger)):
        own = prompt[: PROMPT + (row % (stagger + 1))]
        engine.submit(Request(str(row), own, new, route=route))
    engine.step()
    return engine


def bare_steps(model: nn.Module, path: str, rows: int, steps: int) -> Iterator[float]:
    """Yield the times of plain forwards of an enabled model."""
    from transformers import DynamicCache

    with replayssm.enable(model, path=path, self_test=False), torch.no_grad():
        cache = DynamicCache(config=model.config.get_text_config())
        ids = torch.tensor(prompts(rows))
        for step in range(steps + 1):
            start = time.perf_counter()
            logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            if step:
                yield time.perf_counter() - start


def overhead(name: str, path: str, rows: int, steps: int, rounds: int) -> dict[str, Any]:
    """Return medians over steps of all rounds, engine and bare loop in turn."""
    model = tiny.load(name)
    whole: list[float] = []
    inside: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        with full_engine(model, rows, Route(path), steps + 8) as engine:
            for step in range(steps + 3):
                before = engine.stats().forward_seconds
                start = time.perf_counter()
                engine.step()
                took = time.perf_counter() - start
                if step >= 3:
                    whole.append(took)
                    inside.append(engine.stats().forward_seconds - before)
        bare += list(bare_steps(model, path, rows, steps + 3))[3:]
    pairs = zip(whole, inside, strict=True)
    share = statistics.median(a / b - 1 for a, b in pairs)
    step_ms, bare_ms = (1e3 * statistics.median(times) for times in (whole, bare))
    return {
        "rows": rows,
        "steps": steps * rounds,
        "step_ms": round(step_ms, 3),
        "forward_ms": round(1e3 * statistics.median(inside), 3),
        "overhead_of_forward": round(share, 4),
        "bare_forward_ms": round(bare_ms, 3),
        "step_over_bare": round(step_ms / bare_ms, 3),
    }


def tails(name: str, impl: str, tiles: int, rows: int, steps: int, stagger: int) -> dict[str, Any]:
    """Return quantiles of the step time over whole fold cycles."""
    model, ring = tiny.load(name), RingSpec(window=16, tiles=tiles)
    times = []
    with full_engine(
        model, rows, Route(), steps + 8, stagger=stagger, ring=ring, impl=impl
    ) as engine:
        for step in range(steps + 3):
            start = time.perf_counter()
            engine.step()
            if step >= 3:
                times.append(time.perf_counter() - start)
    p50, p99 = np.percentile(times, (50, 99))
    return {
        "impl": impl,
        "tiles": tiles,
        "rows": rows,
        "steps": steps,
        "positions": "staggered" if stagger else "aligned",
        "p50_ms": round(1e3 * p50, 3),
        "p99_ms": round(1e3 * p99, 3),
        "p99_over_p50": round(p99 / p50, 3),
    }


def storm(name: str, requests: int, seed: int) -> dict[str, Any]:
    """Return what a storm left, and how long it took."""
    sizes = np.random.default_rng(seed).integers(1, 32, STORM_PROMPTS)
    texts = prompts(STORM_PROMPTS, 32)
    chosen = [text[: int(size)] for text, size in zip(texts, sizes, strict=True)]
    plan = StormPlan(requests=requests, seed=seed)
    start, told = time.perf_counter(), 0

    def progress(ended: int) -> None:
        nonlocal told
        if ended >= told + 500:
            told = ended
            print(f"{name} {ended} ended, {time.perf_counter() - start:.0f} s", file=sys.stderr)

    result = Storm(tiny.load(name), chosen, plan).run(progress)
    seconds = round(time.perf_counter() - start, 1)
    return {"plan": asdict(plan), **asdict(result), "is_clean": result.is_clean, "seconds": seconds}


def environment() -> dict[str, str]:
    """Return what the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{package: version(package) for package in ("numba", "torch", "transformers")},
    }


def save(path: Path, section: str, key: str, record: dict[str, Any]) -> None:
    """Put one record beside those that are there."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content["environment"] = environment()
    content.setdefault(section, {})[key] = record
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Measure and print; optionally write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "tails", "storm"))
    parser.add_argument("--model", choices=tiny.NAMES, action="append")
    parser.add_argument("--path", choices=("replay", "standard"), action="append")
    parser.add_argument("--impl", choices=("reference", "cpu"), action="append")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="results go here, beside those of other runs")
    args = parser.parse_args()
    use_threads(args.threads)
    quiet_transformers()

    def tell(key: str, record: dict[str, Any]) -> None:
        print(key, json.dumps(record), flush=True)
        if args.json:
            save(args.json, args.what, key, record)

    for name in args.model or MODELS:
        if args.what == "overhead":
            for path in args.path or ("replay", "standard"):
                found = overhead(name, path, args.rows or 64, args.steps, args.rounds)
                tell(f"{name} {path}", found)
        elif args.what == "storm":
            tell(name, storm(name, args.requests, args.seed))
        else:
            # the compiled path folds whole slots only and refuses tiles
            kinds = (("reference", 1), ("reference", 4), ("cpu", 1))
            for impl, tiles in [kind for kind in kinds if kind[0] in (args.impl or kind)]:
                for stagger in (0, 15):
                    rows = args.rows or (4 if impl == "reference" else 64)
                    found = tails(name, impl, tiles, rows, args.steps, stagger)
                    tell(f"{name} {impl} tiles={tiles} {found['positions']}", found)


if __name__ == "__main__":
    main()
