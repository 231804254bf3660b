"""Verify and commit: state replay against a snapshot per entry and against recomputation.

    THP_MEM_ALLOC_ENABLE=1 NUMBA_NUM_THREADS=2 python benchmarks/speculation.py --json results.json

Gated DeltaNet, 16 key and 32 value heads of 128 x 128, batch 16, eight layers, so that the states
(268 MB in fp32) are larger than the nearer caches. Every row stands at another position of its fold
cycle (row i at i modulo the window), so every round folds the same share of the rows and costs what
the average round of a whole cycle costs; the number of rounds is a multiple of the window. The arms
take turns round by round, in rotating order, on equal inputs. Outputs are checked first.

Bytes allocated are those of one round, verify and commit of all layers, in a thread of its own, so
that scratch which later rounds reuse is counted too: torch's from its profiler, numpy's from
tracemalloc. Outputs are written to a buffer of the caller.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from cpu_kernels import environment
from replayssm.baselines import RecomputePool, SnapshotPool
from replayssm.memory import moved_bytes
from replayssm.ops import standard_
from replayssm.ring import BlockPlan, RingSpec
from replayssm.state import StatePool
from replayssm.types import Block, Decay, Format, LayerSpec, ReadDepth, Write

LAYER = LayerSpec(Write.DELTA, Decay.SCALAR, 16, 32, 128, 128)
STATE_BYTES = LAYER.state_elements * 4
ROWS, WINDOW = 16, 16
PLAIN = "plain decode"
KEPT = {4: 3, 8: 5}
REPLAY = (
    (Format.F32, ReadDepth.FULL),
    (Format.S32, ReadDepth.FULL),
    (Format.S32, ReadDepth.HIGH),
    (Format.Q24, ReadDepth.HIGH),
)
# relative error of outputs after a few rounds, high reads included
ALLOWED = {ReadDepth.FULL: 1e-5, ReadDepth.HIGH: 5e-2}


def inputs(tokens: int, seed: int) -> Block:
    """Return a block with the statistics of a trained layer."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(ROWS, tokens, *shape, generator=random)

    unit, keys = torch.nn.functional.normalize, (LAYER.key_heads, LAYER.key_dim)
    gates = -torch.rand(ROWS, tokens, LAYER.value_heads, generator=random) * 0.2
    strength = torch.rand(ROWS, tokens, LAYER.value_heads, generator=random)
    values = normal(LAYER.value_heads, LAYER.value_dim)
    return Block(unit(normal(*keys), dim=-1), unit(normal(*keys), dim=-1), values, gates, strength)


@dataclass
class Arm:
    """One way to verify and commit, with a slot for every row."""

    name: str
    pool: Any
    options: dict[str, ReadDepth]
    tokens: int
    kept: int

    def __post_init__(self) -> None:
        shape = (LAYER.value_heads, LAYER.value_dim, LAYER.key_dim)
        random = torch.Generator().manual_seed(1)
        state = [torch.randn(shape, generator=random)] * self.pool.num_layers
        self.refs = [self.pool.admit_(state, position=row % WINDOW) for row in range(ROWS)]
        self.out = torch.empty(ROWS, self.tokens, LAYER.value_heads, LAYER.value_dim)

    def round(self, block: Block) -> None:
        """Verify a block in every layer and commit the kept entries of every row."""
        ticket = self.pool.begin(self.refs, self.tokens)
        for layer in range(self.pool.num_layers):
            self.pool.step_(ticket, layer, block, out=self.out, **self.options)
        self.pool.commit_(ticket, self.kept)


class PlainDecode:
    """The standard step in place, one token a round, for every row at once."""

    def __init__(self, layers: int) -> None:
        shape = (ROWS, LAYER.value_heads, LAYER.value_dim, LAYER.key_dim)
        # written once, or untouched pages would all be the same page of zeros
        self._states = [torch.ones(shape) for _ in range(layers)]
        zeros = np.zeros(ROWS, np.int64)
        self._plan = BlockPlan(np.arange(ROWS), zeros, zeros, zeros, zeros + 1)
        self.name, self.tokens, self.kept = PLAIN, 1, 1
        self.out = torch.empty(ROWS, 1, LAYER.value_heads, LAYER.value_dim)

    def round(self, block: Block) -> None:
        """Decode one token."""
        for state in self._states:
            standard_(state, LAYER, self._plan, block, out=self.out)


def make_arms(tokens: int, kept: int, layers: int, ring_dtype: torch.dtype) -> list[Arm]:
    """Return every way to verify and commit."""
    specs, arms = [LAYER] * layers, []
    for fmt, depth in REPLAY:
        ring = RingSpec(window=WINDOW, max_block=tokens)
        pool = StatePool(specs, ROWS, state=fmt, ring=ring, ring_dtype=ring_dtype)
        name = f"replay {fmt.value} {depth.value}"
        arms.append(Arm(name, pool, {"depth": depth}, tokens, kept))
    snapshot = SnapshotPool(specs, ROWS, max_block=tokens)
    arms.append(Arm("snapshot", snapshot, {}, tokens, kept))
    arms.append(Arm("recompute", RecomputePool(specs, ROWS, max_block=tokens), {}, tokens, kept))
    return arms


def check(tokens: int, kept: int, ring_dtype: torch.dtype) -> dict[str, float]:
    """Return every arm's largest relative error against snapshots over a whole cycle."""
    arms = make_arms(tokens, kept, 1, ring_dtype)
    errors = {arm.name: 0.0 for arm in arms}
    for turn in range(WINDOW):
        for arm in arms:
            arm.round(inputs(tokens, turn))
        exact = next(arm.out for arm in arms if arm.name == "snapshot")
        for arm in arms:
            error = float((arm.out - exact).norm() / exact.norm())
            errors[arm.name] = max(errors[arm.name], error)
    for arm in arms:
        depth = arm.options.get("depth", ReadDepth.FULL)
        limit = ALLOWED[depth] if ring_dtype is torch.float32 else ALLOWED[ReadDepth.HIGH]
        if not errors[arm.name] < limit:
            raise SystemExit(f"wrong outputs: {arm.name} is off by {errors[arm.name]:.1e}")
    return errors


def allocated(arm: Arm | PlainDecode, block: Block) -> int:
    """Return the most bytes that one round holds beyond what was there before it."""
    found: list[int] = []

    def measure() -> None:
        tracemalloc.start()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            arm.round(block)
        numpy_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        events = record.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        held = peak = 0
        for _, change in sorted(changes):
            held += change
            peak = max(peak, held)
        found.append(peak + numpy_peak)

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return found[0]


def sizes(arm: Arm | PlainDecode) -> tuple[float, float, float]:
    """Return bytes by shapes of one row and layer: moved in a round, rings, pool beyond a state."""
    if isinstance(arm, PlainDecode):
        return 2.0 * STATE_BYTES, 0.0, 0.0
    beyond = arm.pool.nbytes() / (ROWS * arm.pool.num_layers) - STATE_BYTES
    if isinstance(arm.pool, StatePool):
        spec = arm.pool.specs[0]
        moving = moved_bytes(spec, arm.tokens, arm.kept, arm.options["depth"])
        return moving, spec.ring_nbytes(1), beyond
    moving = arm.pool.moved_bytes(arm.tokens, arm.kept) / arm.pool.num_layers
    return moving, 0.0, beyond


def measure(tokens: int, layers: int, cycles: int, ring_dtype: torch.dtype) -> list[dict[str, Any]]:
    """Time every arm in turns; return a record for each."""
    kept = KEPT[tokens]
    errors = check(tokens, kept, ring_dtype)
    arms = [*make_arms(tokens, kept, layers, ring_dtype), PlainDecode(layers)]
    blocks = {n: [inputs(n, seed) for seed in range(3)] for n in (1, tokens)}
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(cycles * WINDOW + 2):
        shift = turn % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            block = blocks[arm.tokens][turn % 3]
            start = time.perf_counter()
            arm.round(block)
            if turn > 1:
                committed = ROWS * arm.kept * layers
                seconds[arm.name].append((time.perf_counter() - start) / committed)
    middle = {name: median(found) for name, found in seconds.items()}
    allocated(arms[-1], blocks[1][0])  # the first call pays for the profiler itself
    records = []
    for arm in arms:
        moving, rings, beyond = sizes(arm)
        extra = allocated(arm, blocks[arm.tokens][0])
        records.append(
            {
                "arm": arm.name, "tokens": tokens, "kept": kept,
                "rows": ROWS, "layers": layers, "window": WINDOW, "ring": str(ring_dtype)[6:],
                "us_per_token": round(middle[arm.name] * 1e6, 2),
                "us_quartiles": [round(q * 1e6, 2) for q in quantiles(seconds[arm.name], n=4)[::2]],
                "rounds": len(seconds[arm.name]),
                "speed_up_over_snapshot": round(middle["snapshot"] / middle[arm.name], 2),
                "speed_up_over_recompute": round(middle["recompute"] / middle[arm.name], 2),
                "speed_up_over_plain_decode": round(middle[PLAIN] / middle[arm.name], 2),
                "mb_moved_a_round": round(moving / 1e6, 3),
                "allocated_states": round(extra / (ROWS * STATE_BYTES), 4),
                "ring_states": round(rings / STATE_BYTES, 4),
                "pool_states_beyond_one": round(beyond / STATE_BYTES, 4),
                "error_to_snapshot": errors.get(arm.name, 0.0),
            }
        )  # fmt: skip
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Print one table: microseconds are those of one committed token in one layer."""
    first = records[0]
    print(f"\nT = {first['tokens']}, {first['kept']} kept, {first['rows']} rows")
    for r in records:
        print(
            f"  {r['arm']:16s} {r['us_per_token']:7.1f} us/token"
            f"  x{r['speed_up_over_snapshot']:.2f} snapshot"
            f"  x{r['speed_up_over_recompute']:.2f} recompute"
            f"  x{r['speed_up_over_plain_decode']:.2f} plain"
            f"  {r['mb_moved_a_round']:6.2f} MB a row"
            f"  allocates {r['allocated_states']:.1%} of a state, rings {r['ring_states']:.1%},"
            f" pool {r['pool_states_beyond_one']:+.2f} states  error {r['error_to_snapshot']:.0e}",
            flush=True,
        )


def main() -> None:
    """Measure and print; optionally write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", action="append", type=int, choices=sorted(KEPT))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=2, help="rounds, in windows")
    parser.add_argument("--ring", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    machine, found = environment(), []
    print(machine)
    for tokens in args.tokens or sorted(KEPT):
        records = measure(tokens, args.layers, args.cycles, getattr(torch, args.ring))
        show(records)
        found += records
    if args.json:
        content = {"environment": machine, "results": found}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
