"""CPU kernels: one decode step of one layer, standard against replay, states beyond the cache.

    THP_MEM_ALLOC_ENABLE=1 python benchmarks/cpu_kernels.py --json cpu-kernels.json

The variable makes torch ask for huge pages, for every variant alike: with small ones a plain
rewrite of 268 MB already loses a third of its bandwidth to page walks on some machines.

Every row stands at another position of its fold cycle (row i at i modulo the window), so each step
folds the same share of the rows and a step costs what the average step of a whole cycle costs. The
variants and a bare in-place rewrite of as much memory, the yardstick, take turns step by step, so
that none finds its state in a cache, and a sample during which the process was switched out is
dropped. Outputs are checked against the fp64 reference first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch

from replayssm.ops import cpu, reference
from replayssm.ops.cpu.vector import add, fma, load, splat, store, total, zero
from replayssm.ring import BlockPlan, RingSpec
from replayssm.storage import LayerStore, StorageSpec, allocate
from replayssm.types import Block, Decay, Format, LayerSpec, ReadDepth, Write

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = {
    "mamba2-g8": (LayerSpec(Write.ADDITIVE, Decay.SCALAR, 8, 32, 128, 64), 256),
    "mamba2-g1": (LayerSpec(Write.ADDITIVE, Decay.SCALAR, 1, 32, 128, 64), 256),
    "gdn": (LayerSpec(Write.DELTA, Decay.SCALAR, 16, 32, 128, 128), 128),
    "kda": (LayerSpec(Write.DELTA, Decay.CHANNEL, 32, 32, 128, 128), 128),
}
VARIANTS = (
    (Format.F32, ReadDepth.FULL),
    (Format.S32, ReadDepth.FULL),
    (Format.S32, ReadDepth.HIGH),
    (Format.Q24, ReadDepth.FULL),
    (Format.Q24, ReadDepth.HIGH),
    (Format.Q16, ReadDepth.HIGH),
    (Format.BF16, ReadDepth.FULL),
)
ENOUGH = 5
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@numba.njit(parallel=True, nogil=True)
def _stream(at: int, to: int, n: int, shares: int, mode: int, sums: np.ndarray) -> None:
    # mode 0 reads, 1 rewrites in place, 2 copies; one contiguous part for every share
    for share in numba.prange(shares):
        a, b, c, d = zero(), zero(), zero(), zero()
        one = splat(np.float32(1.0))
        start, stop = n // shares * share, n // shares * (share + 1)
        for i in range(start, stop, 256):
            p = at + i
            if mode == 0:
                a, b = add(load(p), a), add(load(p + 64), b)
                c, d = add(load(p + 128), c), add(load(p + 192), d)
            elif mode == 1:
                for j in range(0, 256, 64):
                    store(p + j, fma(load(p + j), one, one))
            else:
                for j in range(0, 256, 64):
                    store(to + i + j, load(p + j))
        sums[share] = total(add(add(a, b), add(c, d)))


@dataclass
class Samples:
    """Seconds of calls, and of those during which the process was not switched out."""

    every: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)

    def take(self, work: Callable[[], None]) -> None:
        """Time one call."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        start = time.perf_counter()
        work()
        self.every.append(time.perf_counter() - start)
        if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before:
            self.clean.append(self.every[-1])

    @property
    def seconds(self) -> float:
        """The median of the clean calls; of the fastest fifth where fewer than 5 were clean."""
        if len(self.clean) >= ENOUGH:
            return statistics.median(self.clean)
        return statistics.median(sorted(self.every)[: max(len(self.every) // 5, 1)])


def bandwidth(megabytes: int) -> dict[str, float]:
    """Measure GB/s of a read, an in-place rewrite (two streams) and a copy (two streams)."""
    n = megabytes << 20
    # written once, or untouched pages would all be the same page of zeros
    a, b = np.ones(n, np.uint8), np.ones(n, np.uint8)
    shares = numba.get_num_threads()
    sums, found = np.zeros(shares, np.float32), {}
    for mode, name, streams in ((0, "read", 1), (1, "in_place", 2), (2, "copy", 2)):
        arguments = (a.ctypes.data, b.ctypes.data, n, shares, mode, sums)
        _stream(*arguments)
        samples = Samples()
        for _ in range(12):
            samples.take(lambda: _stream(*arguments))  # noqa: B023
        found[name] = round(streams * n / samples.seconds / 1e9, 1)
    return {"megabytes": megabytes, **found}


def inputs(layer: LayerSpec, rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Block:
    """Return one token a row."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, 1, *shape, generator=random)

    h, hv, k, v = layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
    unit = torch.nn.functional.normalize
    gates = -torch.rand(rows, 1, *layer.gate_shape(), generator=random) * 0.2
    strength = torch.rand(rows, 1, hv, generator=random)
    block = Block(
        unit(normal(h, k), dim=-1), unit(normal(h, k), dim=-1), normal(hv, v), gates, strength
    )
    return block.to(dtype)


@dataclass
class Replay:
    """A store whose rows stand at different positions, stepped one token at a time."""

    store: LayerStore
    depth: ReadDepth
    rows: int
    blocks: list[Block]

    def __post_init__(self) -> None:
        window = self.store.spec.ring.window
        self.slots = np.arange(self.rows)
        # admitted long ago: a row whose base is recent has fewer entries than its position says
        self.base = np.zeros(self.rows, np.int64)
        self.folded = window + np.arange(self.rows) % window
        self.committed = self.folded.copy()
        self.depths = [self.depth] * self.rows
        at = self.store.spec.layer
        self.out = torch.empty(self.rows, 1, at.value_heads, at.value_dim)
        self.count = 0

    def plan(self) -> BlockPlan:
        """Return the plan of the next step."""
        ones = np.ones(self.rows, np.int64)
        return BlockPlan(self.slots, self.base, self.folded, self.committed, ones)

    def step(self, verb: Callable[..., None] = cpu.step_, **options: Any) -> None:  # noqa: ANN401
        """Run one step and advance every row."""
        block = self.blocks[self.count % len(self.blocks)]
        verb(self.store, self.plan(), block, self.depths, self.out, **options)
        self.folded, self.committed = self.committed, self.committed + 1
        self.count += 1


@dataclass
class Standard:
    """A plain state, stepped one token at a time."""

    state: torch.Tensor
    write: Write
    rows: int
    blocks: list[Block]

    def __post_init__(self) -> None:
        zeros = np.zeros(self.rows, np.int64)
        self.plan = BlockPlan(np.arange(self.rows), zeros, zeros, zeros, zeros + 1)
        self.out = torch.empty(self.rows, 1, self.state.shape[1], self.state.shape[2])
        self.count = 0

    def step(self) -> None:
        """Run one step."""
        block = self.blocks[self.count % len(self.blocks)]
        cpu.standard_(self.state, self.plan, block, self.write, self.out)
        self.count += 1


@dataclass
class InPlace:
    """The yardstick: a bare rewrite of as much memory, in its turn, so no cache helps it either."""

    memory: torch.Tensor

    def __post_init__(self) -> None:
        self.shares = numba.get_num_threads()
        self.sums = np.zeros(self.shares, np.float32)

    def step(self) -> None:
        """Rewrite once."""
        at = self.memory.data_ptr()
        _stream(at, at, self.memory.nbytes, self.shares, 1, self.sums)


def replay(
    layer: LayerSpec,
    variant: tuple[Format, ReadDepth],
    window: int,
    rows: int,
    blocks: list[Block],
    ring: torch.dtype,
) -> Replay:
    """Return a store filled with a small random state."""
    spec = StorageSpec(layer, variant[0], RingSpec(window), ring)
    store = allocate(spec, rows, torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    shape = (layer.value_heads, layer.value_dim, layer.key_dim)
    for slot in range(min(rows, 4)):
        reference.admit_(store, slot, torch.randn(shape, generator=random))
    for slot in range(4, rows):
        for tensor in store.present().values():
            tensor[slot] = tensor[slot % 4]
    return Replay(store, variant[1], rows, blocks)


def check(layer: LayerSpec, window: int, ring: torch.dtype) -> float:
    """Return the largest relative error of a few rows over a whole cycle against fp64."""
    blocks, worst = [inputs(layer, 2, s) for s in range(3)], 0.0
    for variant in VARIANTS:
        ours = replay(layer, variant, window, 2, blocks, ring)
        copies = {name: x.clone() for name, x in ours.store.present().items()}
        for _ in range(window + 2):
            # same checkpoint for both: the reference reads what our fold wrote
            cpu.fold_(ours.store, ours.plan())
            ours.folded = ours.committed
            oracle = Replay(LayerStore(ours.store.spec, **copies), variant[1], 2, blocks)
            for name, x in ours.store.present().items():
                copies[name].copy_(x)
            oracle.committed, oracle.folded, oracle.count = (
                ours.committed,
                ours.committed,
                ours.count,
            )
            oracle.base = ours.base
            oracle.out = oracle.out.double()
            oracle.step(reference.step_, compute=torch.float64)
            ours.step()
            error = (ours.out - oracle.out).abs().max() / oracle.out.abs().max()
            worst = max(worst, float(error))
    if not worst < 2e-6:
        raise SystemExit(f"wrong outputs: relative error {worst:.1e}")
    return worst


def model_bytes(
    layer: LayerSpec, variant: tuple[Format, ReadDepth] | None, window: int, ring: torch.dtype
) -> float:
    """Return bytes a row moves in an average step: planes, folds and rings."""
    if variant is None:
        return 8.0 * layer.state_elements
    from replayssm.formats import FORMATS

    fmt = FORMATS[variant[0]]
    planes = layer.state_elements * (fmt.read_bytes[variant[1]] + 2 * fmt.stored_bytes / window)
    entry = (layer.key_heads * layer.key_dim + layer.value_heads * layer.value_dim) * ring.itemsize
    entry += 4 * (layer.value_heads + int(np.prod(layer.gate_shape())))
    return planes + entry * ((window + 1) / 2 + 1)


def measure(
    name: str, window: int, ring: torch.dtype, samples: int, rows: int | None, extra: bool
) -> list[dict[str, Any]]:
    """Measure all variants of one layer and window in turns; return a record for each."""
    layer, full_rows = LAYERS[name]
    rows = rows or full_rows
    error = check(layer, window, ring)
    blocks = [inputs(layer, rows, s) for s in range(4)]
    shape = (rows, layer.value_heads, layer.value_dim, layer.key_dim)
    runs: dict[str, tuple[Any, Any]] = {}
    runs["standard fp32"] = (Standard(torch.zeros(shape), layer.write, rows, blocks), None)
    if extra:
        low = torch.zeros(shape, dtype=torch.bfloat16)
        runs["standard bf16"] = (Standard(low, layer.write, rows, blocks), None)
    for variant in VARIANTS if extra else (VARIANTS[0], VARIANTS[2], VARIANTS[4]):
        label = f"{variant[0].value} {variant[1].value}"
        runs[label] = (replay(layer, variant, window, rows, blocks, ring), variant)
    yardstick = InPlace(torch.ones(shape))
    turns = {"in place": yardstick, **{label: run for label, (run, _) in runs.items()}}
    taken = {label: Samples() for label in turns}
    for turn in range(samples + 2):
        for label, run in turns.items():
            (taken[label] if turn > 1 else Samples()).take(run.step)
    in_place = 2 * yardstick.memory.nbytes / taken["in place"].seconds / 1e9
    base = taken["standard fp32"].seconds
    records = []
    for label, (_, variant) in runs.items():
        seconds = taken[label].seconds
        moved = (
            rows
            * model_bytes(layer, variant, window, ring)
            * (0.5 if label == "standard bf16" else 1)
        )
        records.append(
            {
                "layer": name, "rows": rows, "window": window, "ring": FLOATS[ring],
                "variant": label,
                "ms": round(seconds * 1e3, 3),
                "samples": len(taken[label].every),
                "clean": len(taken[label].clean),
                "gb_per_s": round(moved / seconds / 1e9, 1), "mb_moved": round(moved / 1e6, 1),
                "in_place_gb_per_s": round(in_place, 1),
                "share_of_in_place": round(moved / seconds / 1e9 / in_place, 2),
                "ratio_to_standard": round(base / seconds, 2), "max_error": error,
            }
        )  # fmt: skip
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Print one table."""
    first = records[0]
    print(
        f"\n{first['layer']}, {first['rows']} rows, window {first['window']}, "
        f"{first['ring']} ring, error {first['max_error']:.1e}, "
        f"in-place {first['in_place_gb_per_s']} GB/s"
    )
    for r in records:
        print(
            f"  {r['variant']:14s} {r['ms']:8.3f} ms  {r['mb_moved']:7.1f} MB"
            f"  {r['gb_per_s']:6.1f} GB/s"
            f" ({r['share_of_in_place']:4.0%} of in-place)  x{r['ratio_to_standard']:.2f}"
            f"  clean {r['clean']}/{r['samples']}",
            flush=True,
        )


def eager_step(layer: LayerSpec, state: torch.Tensor, block: Block) -> Callable[[], None]:
    """Return one step of the transformers library's own torch code, as a model would call it."""
    if layer.write is Write.ADDITIVE:
        from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update

        dt = block.w[:, 0, :, None].expand(-1, -1, layer.value_dim)
        decay = torch.full((layer.value_heads, 1, 1), -0.1)
        decay = decay.expand(-1, layer.value_dim, layer.key_dim)
        v, k, q = block.v[:, 0], block.k[:, 0], block.q[:, 0]
        return lambda: mamba2_selective_state_update(state, v, dt, decay, k, q)
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        torch_recurrent_gated_delta_rule,
    )

    held = state.transpose(2, 3).contiguous()

    def step() -> None:
        _, new = torch_recurrent_gated_delta_rule(
            block.q,
            block.k,
            block.v,
            g=block.g,
            beta=block.w,
            initial_state=held,
            output_final_state=True,
        )
        held.copy_(new)

    return step


def eager(name: str, samples: int, rows: int = 64) -> dict[str, Any]:
    """Compare with the transformers library's own step at one batch size."""
    layer, block = LAYERS[name][0], inputs(LAYERS[name][0], rows, 0)
    shape = (rows, layer.value_heads, layer.value_dim, layer.key_dim)
    ours = Standard(torch.zeros(shape), layer.write, rows, [block])
    cut = replay(layer, VARIANTS[0], 16, rows, [block], torch.float32)
    high = replay(layer, VARIANTS[4], 16, rows, [block], torch.float32)
    theirs = eager_step(layer, torch.zeros(shape), block)
    runs = {"eager": theirs, "standard": ours.step, "f32 full": cut.step, "q24 high": high.step}
    taken = {label: Samples() for label in runs}
    for turn in range(samples + 2):
        for label, work in runs.items():
            (taken[label] if turn > 1 else Samples()).take(work)
    found = {f"{label} ms": round(t.seconds * 1e3, 3) for label, t in taken.items()}
    base = taken["eager"].seconds
    ratios = {f"x {label}": round(base / t.seconds, 1) for label, t in taken.items()}
    return {"layer": name, "rows": rows, **found, **ratios}


def environment() -> dict[str, str]:
    """Return what the numbers depend on."""
    packages = ("numba", "numpy", "torch", "transformers")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": str(os.cpu_count()),
        "threads": str(numba.get_num_threads()),
        "huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE", "0"),
        "python": platform.python_version(),
        **{p: version(p) for p in packages},
    }


def save(
    path: Path, machine: dict[str, str], sizes: list[Any], found: dict[str, list[Any]]
) -> None:
    """Write results, keeping those of earlier runs that measured something else."""
    old = json.loads(path.read_text()) if path.exists() else {}
    content: dict[str, Any] = {"environment": machine, "bandwidth": sizes}
    for part, keys in (("results", ("layer", "window", "ring")), ("eager", ("layer", "rows"))):
        new = found.get(part, [])
        fresh = {tuple(r[k] for k in keys) for r in new}
        kept = [r for r in old.get(part, []) if tuple(r[k] for k in keys) not in fresh]
        content[part] = kept + new
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Measure and print; optionally write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="results go here, beside those already there")
    parser.add_argument("--quick", action="store_true", help="fewer variants and samples")
    parser.add_argument("--layer", action="append", choices=sorted(LAYERS))
    parser.add_argument("--window", action="append", type=int)
    parser.add_argument("--ring", default="fp32", choices=sorted(FLOATS.values()))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--eager", action="store_true", help="compare with transformers instead")
    args = parser.parse_args()
    machine = environment()
    print(machine)
    sizes = [bandwidth(m) for m in ((256,) if args.quick else (64, 256, 1024))]
    for size in sizes:
        print(size)
    ring = next(d for d, name in FLOATS.items() if name == args.ring)
    found: dict[str, list[Any]] = {"results": [], "eager": []}
    for name in args.layer or LAYERS:
        samples = args.samples or (24 if args.quick else 40)
        if args.eager:
            if LAYERS[name][0].decay is Decay.SCALAR:
                found["eager"].append(eager(name, args.samples or 10))
                print(found["eager"][-1])
            continue
        for window in args.window or ((16,) if args.quick else (8, 16, 32)):
            records = measure(name, window, ring, samples, args.rows, extra=not args.quick)
            show(records)
            found["results"] += records
    if args.json:
        save(args.json, machine, sizes, found)


if __name__ == "__main__":
    main()
