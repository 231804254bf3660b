"""CPU kernels: the bytes of a step without its arithmetic, and the arithmetic without its bytes.

    THP_MEM_ALLOC_ENABLE=1 NUMBA_NUM_THREADS=2 python benchmarks/cpu_floor.py --json cpu-floor.json

Beside the standard and the replay step of ``cpu_kernels.py`` two more arms take their turns:

* bytes: a kernel that touches what a step touches, head by head in the step's order on as many
  threads, and computes nothing. It loads every line of the live entries, of the planes that are
  read, of the scales and of the inputs, stores into those of the outputs and of new entries, and
  rewrites both planes where a fold is due. Of several ways to fetch planes the fastest counts.
* arithmetic: the step itself on one thread, all rows at one slot that fits the second cache of a
  core, scaled to the heads and threads of the measured step. Rows stand at different positions.

A step takes at least the larger of the two, and their sum where nothing overlaps. With a goal of
T milliseconds, ``bytes + arithmetic - T`` has to be hidden: more than the smaller of the two is out
of reach for any schedule of this arithmetic and these bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch

from cpu_kernels import (
    LAYERS,
    InPlace,
    Replay,
    Samples,
    Standard,
    check,
    environment,
    inputs,
    replay,
)
from replayssm.ops.cpu import layout
from replayssm.ops.cpu.common import width
from replayssm.ops.cpu.layout import BlockAt, Geometry, HeadAt, PlanesAt, RingsAt
from replayssm.ops.cpu.step import BASE, COMMITTED, FOLDED, SLOT, folded_to, head_at
from replayssm.ops.cpu.vector import (
    device,
    get,
    largest,
    largest_bits,
    load,
    prefetch,
    put,
    single,
    splat,
    store,
    zero,
)
from replayssm.ring import BlockPlan
from replayssm.types import Format, LayerSpec, ReadDepth, Write

if TYPE_CHECKING:
    from replayssm.ops.cpu.vector import Vec

LINE = 64
ZERO = single(0.0)
# bytes between the lines of a plane that are loaded and those that are fetched; 0 fetches none
DISTANCES = (0, 1024, 2048)
CASES = ((Format.F32, ReadDepth.FULL), (Format.Q24, ReadDepth.HIGH))
# the ratio to the standard step that a variant is asked for, by the kind of write
GOALS = {
    ("f32 full", Write.ADDITIVE): 0.95,
    ("f32 full", Write.DELTA): 0.95,
    ("q24 high", Write.ADDITIVE): 1.8,
    ("q24 high", Write.DELTA): 1.5,
}
HEADS_IN_CACHE = 4


@device
def touch(at: int, nbytes: int, a: Vec) -> Vec:
    """Load every line of consecutive bytes, at least one line."""
    for i in range(0, nbytes, LINE):
        a = largest(load(at + min(i, nbytes - LINE)), a)
    return a


@device
def rewrite(at: int, nbytes: int, a: Vec) -> Vec:
    """Load every line of consecutive bytes and store zeros into it."""
    for i in range(0, nbytes, LINE):
        p = at + min(i, nbytes - LINE)
        a = largest(load(p), a)
        store(p, zero())
    return a


@device
def touch_plane(at: int, nbytes: int, ahead: int, a: Vec) -> Vec:
    """Load every line of a plane, and fetch what is ``ahead`` bytes further on."""
    b = zero()
    for i in range(0, nbytes, 4 * LINE):
        if ahead:
            for j in range(0, 4 * LINE, LINE):
                prefetch(at + i + j + ahead)
        a, b = largest(load(at + i), a), largest(load(at + i + LINE), b)
        a, b = largest(load(at + i + 2 * LINE), a), largest(load(at + i + 3 * LINE), b)
    return largest(a, b)


@device
def touch_ring(at: int, entry: int, length: int, first: int, n: int, nbytes: int, a: Vec) -> Vec:
    """Load n entries from ring index ``first`` on, wrapping, and store into the one after them."""
    index = first
    for _ in range(n):
        a = touch(at + index * entry, nbytes, a)
        index = 0 if index + 1 == length else index + 1
    return rewrite(at + index * entry, nbytes, a)


@device
def touch_scalars(at: int, length: int, new: int, a: Vec) -> Vec:
    """Touch a ring of one fp32 number an entry: load its lines, store into the entry ``new``."""
    for i in range(0, 4 * length, LINE):
        a = largest(splat(get(at + i)), a)
    put(at + 4 * new, ZERO)
    return a


@device
def touch_head(at: Geometry, here: HeadAt, first: int, n: int, a: Vec) -> Vec:
    """Touch v, g and w of one head's n entries from ring index ``first`` on."""
    size, new = at.ring_len, (first + n) % at.ring_len
    a = touch_ring(here.v, here.v_entry, size, first, n, width(here.kind) * at.value_dim, a)
    if at.per_channel:
        a = touch_ring(here.g, here.g_entry, size, first, n, 4 * at.key_dim, a)
    else:
        a = touch_scalars(here.g, size, new, a)
    return touch_scalars(here.w, size, new, a)


@device
def touch_planes(at: Geometry, here: HeadAt, due: int, is_full: int, ahead: int, a: Vec) -> Vec:
    """Store into both planes where a fold is due; load those that are read, and the scales."""
    high, low = at.value_dim * here.high_row, at.value_dim * here.low_row
    if due:
        a = rewrite(here.high, high, a)
        if low:
            a = rewrite(here.low, low, a)
    if at.is_scaled:
        a = touch(here.columns, 2 * at.key_dim, touch(here.scale, 4 * at.value_dim, a))
    a = touch_plane(here.high, high, ahead, a)
    return touch_plane(here.low, low, ahead, a) if is_full and low else a


@device
def touch_block(at: Geometry, blk: BlockAt, row: int, head: int, is_first: int, a: Vec) -> Vec:
    """Load a head's inputs, and its key head's with the first of it; store into its outputs."""
    if is_first:
        key_head = head // (at.value_heads // at.key_heads)
        a = touch(blk.k + row * blk.k_row + key_head * blk.k_head, 4 * at.key_dim, a)
        a = touch(blk.q + row * blk.q_row + key_head * blk.q_head, 4 * at.key_dim, a)
    a = touch(blk.v + row * blk.v_row + head * blk.v_head, 4 * at.value_dim, a)
    if at.per_channel:
        a = touch(blk.g + row * blk.g_row + head * blk.g_head, 4 * at.key_dim, a)
    return rewrite(blk.out + row * blk.out_row + head * blk.out_head, 4 * at.value_dim, a)


@numba.njit(nogil=True, error_model="numpy", parallel=True)
def touch_step(
    at: Geometry,
    planes: PlanesAt,
    rings: RingsAt,
    blk: BlockAt,
    counts: np.ndarray,
    is_full: int,
    ahead: int,
    tops: np.ndarray,
) -> None:
    """Touch what a step of one token touches; shares and their order are those of the step."""
    shares, per_key = len(tops), at.value_heads // at.key_heads
    for share in numba.prange(shares):
        a = zero()
        for row in range(counts.shape[1]):
            part, slot, base = (share + row) % shares, counts[SLOT, row], counts[BASE, row]
            start = folded_to(at, base, counts[FOLDED, row])
            due = int(folded_to(at, base, counts[COMMITTED, row]) > start)
            first, n = start % at.ring_len, counts[COMMITTED, row] - start
            head, stop = at.value_heads * part // shares, at.value_heads * (part + 1) // shares
            for h in range(head, stop):
                is_first = int(h == head or h % per_key == 0)
                if is_first:
                    k = rings.k + slot * rings.k_slot + h // per_key * rings.k_head
                    size = width(rings.kind) * at.key_dim
                    a = touch_ring(k, rings.k_entry, at.ring_len, first, n, size, a)
                here = head_at(planes, rings, slot, h)
                a = touch_block(at, blk, row, h, is_first, a)
                a = touch_head(at, here, first, n, a)
                a = touch_planes(at, here, due, is_full, ahead, a)
        tops[share] = largest_bits(a)


@dataclass
class Bytes:
    """The bytes of a replay step: a store of its own that is stepped but never computed with."""

    run: Replay
    ahead: int

    def __post_init__(self) -> None:
        store, self.tops = self.run.store, np.zeros(numba.get_num_threads(), np.uint32)
        at = layout.geometry_of(store.spec)
        self.tensors = (at, layout.planes_at(store), layout.rings_at(store))
        self.blocks = [layout.block_at(block, self.run.out)[0] for block in self.run.blocks]

    def step(self) -> None:
        """Touch the bytes of one step and advance every row."""
        run = self.run
        plan, block = run.plan(), self.blocks[run.count % len(self.blocks)]
        fields = (plan.slots, plan.base, plan.folded, plan.committed)
        counts, is_full = np.array(fields, np.int64), int(run.depth is ReadDepth.FULL)
        touch_step(*self.tensors, block, counts, is_full, self.ahead, self.tops)
        run.folded, run.committed = run.committed, run.committed + 1
        run.count += 1


def in_cache(name: str, variant: tuple[Format, ReadDepth] | None, window: int) -> float:
    """Return milliseconds of the step's arithmetic: a few heads, all rows at one slot, one thread.

    Rows overwrite each other's numbers, which costs what it costs with numbers that mean something.
    """
    layer, rows = LAYERS[name]
    heads = max(HEADS_IN_CACHE, layer.value_heads // layer.key_heads)
    heads = min(heads, 2 * HEADS_IN_CACHE)
    keys = max(1, heads * layer.key_heads // layer.value_heads)
    small = LayerSpec(layer.write, layer.decay, keys, heads, layer.key_dim, layer.value_dim)
    blocks = [inputs(small, rows, seed) for seed in range(2)]
    one_slot, threads = np.zeros(rows, np.int64), numba.get_num_threads()
    if variant is None:
        state = torch.zeros(1, heads, layer.value_dim, layer.key_dim)
        standard = Standard(state, layer.write, rows, blocks)
        standard.plan = BlockPlan(one_slot, one_slot, one_slot, one_slot, one_slot + 1)
        step = standard.step
    else:
        run = replay(small, variant, window, 1, blocks, torch.bfloat16)
        run.rows = rows
        run.__post_init__()
        run.slots = one_slot
        step = run.step
    numba.set_num_threads(1)
    samples = Samples()
    for _ in range(2):
        step()
    for _ in range(window):
        samples.take(step)
    numba.set_num_threads(threads)
    return samples.seconds * 1e3 * layer.value_heads / heads / threads


def measure(name: str, window: int, samples: int) -> list[dict[str, Any]]:
    """Measure one layer and window with all arms in turns; return a record for each variant."""
    layer, rows = LAYERS[name]
    ring = torch.bfloat16
    check(layer, window, ring)
    blocks = [inputs(layer, rows, seed) for seed in range(4)]
    state = torch.zeros(rows, layer.value_heads, layer.value_dim, layer.key_dim)
    arms: dict[str, Any] = {"in place": InPlace(torch.ones(state.shape))}
    arms["standard"] = Standard(state, layer.write, rows, blocks)
    labels = {f"{fmt.value} {depth.value}": (fmt, depth) for fmt, depth in CASES}
    for label, variant in labels.items():
        arms[label] = replay(layer, variant, window, rows, blocks, ring)
    for ahead in DISTANCES:
        for label, variant in labels.items():
            run = replay(layer, variant, window, rows, blocks, ring)
            arms[f"{label} bytes, {ahead} ahead"] = Bytes(run, ahead)
    taken = {label: Samples() for label in arms}
    for turn in range(samples + 2):
        for label, arm in arms.items():
            (taken[label] if turn > 1 else Samples()).take(arm.step)
    ms = {label: t.seconds * 1e3 for label, t in taken.items()}
    clean = {label: len(t.clean) for label, t in taken.items()}
    return [
        record(name, window, label, ms, clean, in_cache(name, variant, window))
        for label, variant in labels.items()
    ]


def record(
    name: str, window: int, label: str, ms: dict[str, float], clean: dict[str, int], alone: float
) -> dict[str, Any]:
    """Return what one variant's arms took and what that says about its goal."""
    layer, standard, step = LAYERS[name][0], ms["standard"], ms[label]
    ways = {ahead: ms[f"{label} bytes, {ahead} ahead"] for ahead in DISTANCES}
    least, goal = min(ways.values()), GOALS[label, layer.write]
    wanted, smaller = standard / goal, min(least, alone)
    return {
        "layer": name, "rows": LAYERS[name][1], "window": window, "ring": "bf16",
        "variant": label,
        "in_place_ms": round(ms["in place"], 3),
        "standard_ms": round(standard, 3),
        "ms": round(step, 3),
        "clean": clean[label],
        "bytes_ms": {str(ahead): round(t, 3) for ahead, t in ways.items()},
        "arithmetic_ms": round(alone, 3),
        "goal_ms": round(wanted, 3),
        "ratio": round(standard / step, 2),
        "goal_ratio": goal,
        "bytes_ratio": round(standard / least, 2),
        "hidden": round((least + alone - step) / smaller, 2),
        "hidden_wanted": round((least + alone - wanted) / smaller, 2),
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print one record."""
    bytes_ms = ", ".join(f"{t:.2f} ({ahead})" for ahead, t in found["bytes_ms"].items())
    print(
        f"{found['layer']}, window {found['window']}, {found['variant']}: "
        f"{found['ms']:.2f} ms, x{found['ratio']:.2f} of {found['standard_ms']:.2f}; "
        f"bytes {bytes_ms}, x{found['bytes_ratio']:.2f}; arithmetic {found['arithmetic_ms']:.2f}; "
        f"goal x{found['goal_ratio']:.2f} is {found['goal_ms']:.2f} ms; "
        f"hidden {found['hidden']:.0%}, wanted {found['hidden_wanted']:.0%}",
        flush=True,
    )


def save(path: Path, records: list[dict[str, Any]]) -> None:
    """Write results, keeping those of earlier runs that measured something else."""
    keys = ("layer", "window", "variant")
    fresh = {tuple(r[k] for k in keys) for r in records}
    old = json.loads(path.read_text())["results"] if path.exists() else []
    kept = [r for r in old if tuple(r[k] for k in keys) not in fresh]
    content = {"environment": environment(), "results": kept + records}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Measure and print; optionally write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="results go here, beside those already there")
    parser.add_argument("--layer", action="append", choices=sorted(LAYERS))
    parser.add_argument("--window", action="append", type=int)
    parser.add_argument("--samples", type=int, default=24)
    args = parser.parse_args()
    records = []
    for name in args.layer or LAYERS:
        for window in args.window or (32,):
            found = measure(name, window, args.samples)
            for one in found:
                show(one)
            records += found
    if args.json:
        save(args.json, records)


if __name__ == "__main__":
    main()
