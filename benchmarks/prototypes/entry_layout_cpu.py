"""Entry layout, CPU prototype: a raw-only ring with pull-back against a ring with stored u.

One layer-step of Gated DeltaNet decode (T = 1, window 16) in numba on two threads. Whole fold
cycles, rows at different positions, samples of the variants interleaved, states beyond the cache.

    NUMBA_NUM_THREADS=2 python benchmarks/prototypes/entry_layout_cpu.py --out entry-layout-cpu.json

``chain`` and ``solve`` are the two forms of the pull-back over the raw ring (k, v, g, w); ``u``
keeps (k, u, g). ``f32`` reads an fp32 checkpoint; ``q24`` reads an int8 plane with row scales and
folds both planes. Ring vectors are bf16 (as uint16). Accuracy: ``entry_layout_accuracy.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import time
from pathlib import Path

import numba as nb
import numpy as np
from entry_layout_cpu_kernels import CHAIN, SOLVE, STORED, K, V, W, layer_step

MODES = {"chain": CHAIN, "solve": SOLVE, "u": STORED}


class Layer:
    """Arrays of one layer in one format."""

    def __init__(self, B: int, H: int, HV: int, full: bool, seed: int, empty: bool) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.full, shape, none = full, (B, HV, V, K), (B, HV, 1, 1)
        self.state = np.empty(shape if full else none, np.float32)
        if full:
            self.hi, self.lo = np.zeros(none, np.int8), np.zeros(none, np.uint16)
            self.sc = np.ones((B, HV, V), np.float32)
            self.state[:] = 0 if empty else rng.standard_normal(shape[1:], np.float32) * 0.1
        else:
            self.hi, self.lo = np.zeros(shape, np.int8), np.full(shape, 32768, np.uint16)
            self.sc = np.full((B, HV, V), 0 if empty else 1e-3, np.float32)
            if not empty:
                self.hi[:] = rng.integers(-127, 128, shape[1:], np.int8)
        self.kr, self.vr = np.zeros((B, H, W, K), np.uint16), np.zeros((B, HV, W, V), np.uint16)
        self.gr, self.wr = np.zeros((B, HV, W), np.float32), np.zeros((B, HV, W), np.float32)
        self.y = np.empty((B, HV, V), np.float32)
        self.draw()

    def draw(self) -> None:
        """Fresh inputs of one token, vectors exact in bf16."""
        (B, H), HV = self.kr.shape[:2], self.vr.shape[1]

        def bf16(x: np.ndarray) -> np.ndarray:
            return ((x.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint32) << 16

        def unit(scale: float) -> np.ndarray:
            x = self.rng.standard_normal((B, H, K))
            return bf16(x / np.linalg.norm(x, axis=-1, keepdims=True) * scale).view(np.float32)

        self.q, self.k = unit(K**-0.5), unit(1.0)
        self.v = (bf16(self.rng.standard_normal((B, HV, V))) >> 16).astype(np.uint16)
        self.g = (-0.05 * self.rng.random((B, HV))).astype(np.float32)
        self.w = self.rng.random((B, HV)).astype(np.float32)

    def run(self, step: int, mode: int) -> None:
        """One layer-step."""
        layer_step(step, self.state, self.hi, self.lo, self.sc, self.full, self.kr, self.vr,
                   self.gr, self.wr, self.q, self.k, self.v, self.g, self.w, self.y,
                   mode)  # fmt: skip


def check(full: bool, mode: int, steps: int = 40) -> float:
    """Relative output error against fp64 over folds of every row."""
    layer = Layer(3, 2, 4, full, seed=1, empty=True)
    state, num, den = np.zeros((3, 4, V, K)), 0.0, 0.0
    for step in range(steps):
        layer.draw()
        layer.y.fill(np.nan)
        layer.run(step, mode)
        k, q = (np.repeat(a.astype(np.float64), 2, 1) for a in (layer.k, layer.q))
        v = (layer.v.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        state *= np.exp(layer.g.astype(np.float64))[..., None, None]
        u = layer.w[..., None] * (v - np.einsum("bhvk,bhk->bhv", state, k))
        state += u[..., None] * k[:, :, None]
        want = np.einsum("bhvk,bhk->bhv", state, q)
        num += ((layer.y - want) ** 2).sum()
        den += (want**2).sum()
    return float(math.sqrt(num / den))


def measure(B: int, HV: int, full: bool, seconds: float) -> dict:
    """Milliseconds per layer-step, median over undisturbed cycles, variants interleaved."""
    sets = max(1, -(-(1 << 30) // (B * HV * V * K * (4 if full else 1))))
    layers = [Layer(B, 16, HV, full, seed=i, empty=False) for i in range(min(sets, 6))]
    dropped, end, turn = 0, time.perf_counter() + seconds, 0
    samples: dict[str, list[list[float]]] = {m: [[] for _ in range(W)] for m in MODES}
    while time.perf_counter() < end or turn < 2 * W:
        step, order = turn % W, list(MODES)[turn // W % 3 :] + list(MODES)[: turn // W % 3]
        for mode in order:
            for layer in layers:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
                start = time.perf_counter()
                layer.run(step, MODES[mode])
                took = (time.perf_counter() - start) * 1e3
                if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before and turn >= W:
                    samples[mode][step].append(took)
                else:
                    dropped += 1
        turn += 1
    ms = {m: [statistics.median(s) if s else math.nan for s in samples[m]] for m in MODES}
    kept = sum(len(s) for steps in samples.values() for s in steps)
    return {
        "threads": nb.get_num_threads(),
        "batch": B,
        "value_heads": HV,
        "format": "f32" if full else "q24 high",
        "sets": len(layers),
        "dropped": dropped,
        "kept": kept,
        "ms": {m: round(statistics.fmean(v), 4) for m, v in ms.items()},
        "ms_by_step": {m: [round(x, 3) for x in v] for m, v in ms.items()},
    }


def main() -> None:
    """Check, then time; write one JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", default="", help="kind of machine, for the record")
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", type=int, nargs=2, action="append", help="batch, value heads")
    args = parser.parse_args()
    nb.set_num_threads(args.threads)
    old = json.loads(args.out.read_text()) if args.out.exists() else {"timing": []}
    out = {**old, "machine": args.cpu, "commit": args.commit, "numba": nb.__version__,
           "numpy": np.__version__, "python": platform.python_version(), "window": W}  # fmt: skip
    out["checks"] = {f"{f} {m}": check(f == "f32", MODES[m]) for f in ("f32", "q24") for m in MODES}
    print(out["checks"], flush=True)
    for batch, heads in args.case or [(64, 64)]:
        for full in (True, False):
            row = measure(batch, heads, full, args.seconds)
            out["timing"].append(row)
            print(row, flush=True)
    args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
