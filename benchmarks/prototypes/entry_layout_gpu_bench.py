"""Driver of the GPU entry-layout prototype: check against fp64, then time whole fold cycles.

python benchmarks/prototypes/entry_layout_gpu_bench.py --out entry-layout-h200.json
TRITON_INTERPRET=1 python benchmarks/prototypes/entry_layout_gpu_bench.py --check-only --tiny
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import entry_layout_gpu as kern
import entry_layout_gpu_fold as folds
import torch
import triton

W, R = 16, 18
FORMATS = {"f32": 0, "q24": 1}
LAYOUTS = {"raw": 0, "u": 1}


@dataclass(frozen=True)
class Shape:
    """Batch, key heads, value heads, value dim, key dim."""

    B: int
    H: int
    HV: int
    V: int
    K: int


class Fold(NamedTuple):
    """Tile, warps, grid; how: serial, one pass, two passes, two kernels; chunk; register cap."""

    bv: int
    warps: int
    grid: int
    how: int
    chunk: int = 64
    cap: int | None = None


class Config(NamedTuple):
    """Launch choices of one variant."""

    prep: tuple[str, int]
    step: tuple[int, int]
    fold: Fold
    parallel: bool


class Layer:
    """State, ring, scratch and inputs of one layer in one layout and format."""

    def __init__(self, shape: Shape, layout: str, fmt: str, device: str, seed: int = 0) -> None:
        gen = torch.Generator(device=device).manual_seed(seed)
        b, h, hv, v, k = shape.B, shape.H, shape.HV, shape.V, shape.K

        def new(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.shape, self.layout, self.fmt, self.gen, self.device = shape, layout, fmt, gen, device
        self.hi = new(b, hv, v, k, dtype=torch.float32 if fmt == "f32" else torch.int8)
        low = (b, hv, v, k) if fmt == "q24" else (1,)
        self.lo = (new(*low, dtype=torch.int32) + 32768).to(torch.uint16)
        self.scale = new(b, hv, v)
        self.kr, self.vr = new(b, h, R, k, dtype=torch.bfloat16), new(b, hv, R, v).bfloat16()
        self.gr, self.wr = new(b, hv, R), new(b, hv, R)
        self.x, self.c = new(b, hv, k), new(b, hv, W)
        self.a, self.e = new(b, hv, W), new(b, hv, 2)
        self.dig, self.xs = new(b, hv, k, dtype=torch.int32), new(b, hv, 2)
        self.t = new(b // W + 1, hv, W, W) + torch.eye(W, device=device)
        self.u, self.gram = new(b // W + 1, hv, v, W), new(b, hv, W + 1, W)
        self.y = new(b, hv, v, dtype=torch.bfloat16)
        self.draw()

    def draw(self) -> None:
        """Fresh inputs of one token: unit keys and queries, slow decay, strong writes."""
        s, opt = self.shape, {"generator": self.gen, "device": self.device}
        unit = torch.nn.functional.normalize
        self.q = (unit(torch.randn(s.B, s.H, s.K, **opt), dim=-1) * s.K**-0.5).bfloat16()
        self.k = unit(torch.randn(s.B, s.H, s.K, **opt), dim=-1).bfloat16()
        self.v = torch.randn(s.B, s.HV, s.V, **opt).bfloat16()
        self.g = -0.05 * torch.rand(s.B, s.HV, **opt)
        self.w = torch.rand(s.B, s.HV, **opt)

    def run_prep(self, step: int, how: str, warps: int) -> None:
        """Append the key side and form the weights; how: chain or gram1, 2, 4 (raw), direct (u)."""
        s, f = self.shape, FORMATS[self.fmt]
        grid, args = (s.B, s.H), (s.H, s.HV // s.H, s.K, W, R, f)
        out = (self.dig, self.xs, step)
        if how == "direct":
            kern.prep_u[grid](self.q, self.k, self.g, self.kr, self.gr, self.a, self.c, self.e,
                              *out, *args, num_warps=warps)  # fmt: skip
            return
        ring = (self.q, self.k, self.g, self.w, self.kr, self.gr, self.wr, self.x, self.c)
        if how == "chain":
            kern.prep_raw[grid](*ring, *out, *args, num_warps=warps)
            return
        each = int(how.removeprefix("gram"))
        kern.prep_gram[(s.B, s.HV // each)](*ring, self.dig, self.xs, self.gram, step, s.HV,
                                            s.HV // s.H, each, s.K, W, R, f, not kern.INTERPRET,
                                            num_warps=warps)  # fmt: skip

    def run_step(self, step: int, bv: int, warps: int) -> None:
        """Read the checkpoint and the ring of the rows that do not fold."""
        s, f = self.shape, FORMATS[self.fmt]
        hi = self.hi if f == 0 else self.hi.view(torch.int32)
        grid = (s.V // bv, s.HV, s.B)
        asm = not kern.INTERPRET
        if self.layout == "raw":
            kern.step_raw[grid](hi, self.scale, self.x, self.dig, self.xs, self.c, self.v, self.vr,
                                self.y, step, s.HV, s.V, s.K, W, R, bv, f, asm,
                                num_warps=warps)  # fmt: skip
        else:
            kern.step_u[grid](hi, self.scale, self.k, self.q, self.dig, self.xs, self.a, self.c,
                              self.e, self.v, self.w, self.vr, self.y, step, s.HV, s.V, s.K, W, R,
                              s.HV // s.H, bv, f, asm, num_warps=warps)  # fmt: skip

    def run_inverse(self, step: int) -> None:
        """(I + A)^-1 of the rows that fold in this step."""
        s = self.shape
        if rows := len(range(step % W, s.B, W)):
            folds.fold_inverse[(rows, s.HV)](self.kr, self.gr, self.wr, self.t, step, rows, s.H,
                                            s.HV // s.H, s.K, W, R, not kern.INTERPRET,
                                            num_warps=1)  # fmt: skip

    def run_fold(self, step: int, c: Fold) -> None:
        """Fold the rows whose ring is full and run their step."""
        s, f, asm = self.shape, FORMATS[self.fmt], not kern.INTERPRET
        rows = len(range(step % W, s.B, W))
        if rows == 0:
            return
        total, group = rows * s.HV * (s.V // c.bv), s.HV // s.H
        planes, ring = (self.hi, self.lo, self.scale), (self.kr, self.vr, self.gr, self.wr)
        if c.how == 3:
            folds.fold_solve[(total,)](*planes, *ring, self.t, self.u, step, total, s.HV, s.V, s.K,
                                      W, R, group, c.bv, f, c.chunk, asm, num_warps=1)  # fmt: skip
        folds.fold[(min(c.grid, total),)](
            *planes, self.q, self.k, self.v, self.g, self.w, *ring, self.t, self.u, self.y, step,
            total, s.HV, s.V, s.K, W, R, group, c.bv, LAYOUTS[self.layout], c.how, f, c.chunk, asm,
            num_warps=c.warps, maxnreg=c.cap,
        )  # fmt: skip

    def run(self, step: int, c: Config, side: torch.cuda.Stream | None = None) -> None:
        """One whole layer-step; with a side stream the fold is a parallel branch.

        The inverse that a fold needs is formed at the end of the step before it.
        """
        main = torch.cuda.current_stream() if side is not None else None
        inverse = self.layout == "raw" and c.fold.how > 0
        if main is not None and c.parallel:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self.run_fold(step, c.fold)
            self.run_prep(step, *c.prep)
            if inverse:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    self.run_inverse(step + 1)
            self.run_step(step, *c.step)
            main.wait_stream(side)
        else:
            self.run_fold(step, c.fold)
            self.run_prep(step, *c.prep)
            self.run_step(step, *c.step)
            if inverse:
                self.run_inverse(step + 1)

    def decoded(self, ring_from: int, step: int) -> torch.Tensor:
        """The fp64 state that checkpoint and ring stand for after `step`."""
        code = self.hi.double()
        if self.fmt == "q24":
            code = (code * 65536 + self.lo.int().double() - 32768) / 65536
            code = code * self.scale.double()[..., None]
        group = self.shape.HV // self.shape.H
        for row in range(self.shape.B):
            committed = step + W - row % W
            for p in range(max(committed // W * W, ring_from + W - row % W), committed + 1):
                k = self.kr[row, :, p % R].double().repeat_interleave(group, 0)
                u = self.vr[row, :, p % R].double()
                state = code[row] * self.gr[row, :, p % R].double().exp()[:, None, None]
                if self.layout == "raw":
                    u = u - (state * k[:, None]).sum(-1)
                    u = u * self.wr[row, :, p % R].double()[:, None]
                code[row] = state + u[..., None] * k[:, None]
        return code


def check(shape: Shape, layout: str, fmt: str, cfg: Config, device: str, steps: int) -> dict:
    """Run from an empty state over folds of every row; relative errors against fp64."""
    layer = Layer(shape, layout, fmt, device, seed=1)
    group = shape.HV // shape.H
    state = torch.zeros(shape.B, shape.HV, shape.V, shape.K, dtype=torch.float64, device=device)
    num = den = 0.0
    for step in range(steps):
        layer.draw()
        layer.y.fill_(float("nan"))
        layer.run(step, cfg)
        q, k = (t.double().repeat_interleave(group, 1)[:, :, None] for t in (layer.q, layer.k))
        state *= layer.g.double().exp()[..., None, None]
        u = layer.w.double()[..., None] * (layer.v.double() - (state * k).sum(-1))
        state += u[..., None] * k
        want = (state * q).sum(-1)
        num += (layer.y.double() - want).square().sum().item()
        den += want.square().sum().item()
    got = layer.decoded(0, steps - 1)
    return {
        "output": (num / den) ** 0.5,
        "state": ((got - state).norm() / state.norm()).item(),
        "layout": layout,
        "format": fmt,
        "prep": cfg.prep[0],
        "fold": cfg.fold.how,
        "steps": steps,
    }


class Timed:
    """A CUDA graph of whole fold cycles over several state sets."""

    def __init__(self, layers: list[Layer], call, steps: int = W) -> None:
        self.steps = steps * len(layers)
        side = torch.cuda.Stream()
        for step in range(W if layers[0].shape.B < W else 2):
            call(layers[0], step, None)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for step in range(steps):
                for layer in layers:
                    call(layer, step, side)

    def sample(self) -> float:
        """Microseconds per layer-step of one graph launch."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.steps


def medians(timed: dict[str, Timed], repeats: int) -> dict[str, float]:
    """Interleaved samples, one of each variant in turn; the median of each."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for i in range(repeats + 2):
        for name, t in timed.items():
            sample = t.sample()
            if i >= 2:
                times[name].append(sample)
    return {name: round(statistics.median(v), 2) for name, v in times.items()}


def sets_for(shape: Shape, fmt: str) -> int:
    """State sets whose planes read by a step exceed 165 MB."""
    read = shape.B * shape.HV * shape.V * shape.K * (4 if fmt == "f32" else 1)
    return max(1, -(-165_000_000 // read))


def fill(layers: list[Layer]) -> None:
    """Non-zero states and rings, so that timing runs on real-looking data."""
    for layer in layers:
        if layer.fmt == "f32":
            layer.hi.normal_(std=0.1)
        else:
            layer.hi.random_(-127, 128)
            layer.scale.fill_(1e-3)
        for ring in (layer.kr, layer.vr):
            ring.normal_(std=0.08)
        layer.gr.fill_(-0.02)
        layer.wr.fill_(0.5)


STEPS = {"f32": [(64, 2), (32, 1), (64, 1)], "q24": [(64, 1), (128, 1)]}
PREPS = {"raw": [("chain", 1), ("gram1", 1), ("gram2", 1), ("gram4", 1)], "u": [("direct", 1)]}
FOLDS = {
    "raw": [Fold(16, 1, 1056, 0), Fold(16, 1, 1056, 1), Fold(16, 1, 1056, 2, 32),
            Fold(16, 1, 1056, 3, 32)],
    "u": [Fold(16, 1, 1056, 0), Fold(16, 1, 1056, 1), Fold(32, 1, 1056, 1),
          Fold(16, 1, 2112, 1, 64, 128)],
}  # fmt: skip


def tune(shape: Shape, fmt: str, out: dict) -> dict[str, list[Config]]:
    """Time the parts alone at the large batch and keep the best shapes for each layout."""
    best: dict[str, list[Config]] = {}
    for layout in LAYOUTS:
        layers = [Layer(shape, layout, fmt, "cuda", seed=i) for i in range(sets_for(shape, fmt))]
        fill(layers)
        parts = {}
        for c in PREPS[layout]:
            parts[f"prep {c}"] = Timed(layers, lambda la, s, _, c=c: la.run_prep(s, *c), 4)
        for c in STEPS[fmt]:
            parts[f"step {c}"] = Timed(layers, lambda la, s, _, c=c: la.run_step(s, *c), 4)
        for c in FOLDS[layout]:
            parts[f"fold {c}"] = Timed(layers, lambda la, s, _, c=c: la.run_fold(s, c), 4)
        parts["inverse"] = Timed(layers, lambda la, s, _: la.run_inverse(s), 4)
        result = medians(parts, 5)
        out[f"{fmt} {layout} parts B={shape.B}"] = result
        print(fmt, layout, result, flush=True)
        prep = min(PREPS[layout], key=lambda c: result[f"prep {c}"])
        steps = sorted(STEPS[fmt], key=lambda c: result[f"step {c}"])[:2]
        chosen = sorted(FOLDS[layout], key=lambda c: result[f"fold {c}"])[:3]
        best[layout] = [Config(prep, s, f._replace(grid=grid), True) for s in steps for f in chosen
                        for grid in sorted({264, 528, 1056, f.grid})]  # fmt: skip
    return best


def whole(shape: Shape, fmt: str, best: dict[str, list[Config]], out: dict) -> None:
    """Time whole layer-steps, both layouts interleaved, several configurations each."""
    timed, keep = {}, []
    for layout, configs in best.items():
        layers = [Layer(shape, layout, fmt, "cuda", seed=i) for i in range(sets_for(shape, fmt))]
        fill(layers)
        keep.append(layers)
        for c in configs:
            timed[f"{layout} {c}"] = Timed(layers, lambda la, s, side, c=c: la.run(s, c, side))
    result = medians(timed, 9)
    low = {n: min((t, k) for k, t in result.items() if k.startswith(n + " ")) for n in LAYOUTS}
    out[f"{fmt} whole B={shape.B}"] = {"best": low, "all": result}
    print(fmt, f"B={shape.B}", "raw/u", round(low["raw"][0] / low["u"][0], 3), low, flush=True)
    for layout in best:  # smaller batches: the nearest configurations, and smaller step tiles
        order = sorted(best[layout], key=lambda c: result[f"{layout} {c}"])[:5]
        small = [order[0]._replace(step=(16, 1)), order[0]._replace(step=(32, 1))]
        wide = [order[0]._replace(prep=c) for c in PREPS[layout][1:]]
        best[layout] = list(dict.fromkeys(order + small + wide))


def main() -> None:
    """Check, then time; write one JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="shapes for the interpreter")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    start = time.time()
    device = "cpu" if args.tiny else "cuda"
    shape = Shape(3, 1, 2, 32, 32) if args.tiny else Shape(19, 16, 64, 128, 128)
    out: dict = {"commit": args.commit, "triton": triton.__version__, "torch": torch.__version__,
                 "python": platform.python_version(), "window": W, "checks": []}  # fmt: skip
    variants = [("raw", "chain", 0), ("raw", "gram1", 1), ("raw", "gram2", 2),
                ("raw", "gram2", 3), ("u", "direct", 0), ("u", "direct", 1)]  # fmt: skip
    for fmt in FORMATS:
        for layout, prep, how in variants:
            tile, steps = (16, 20) if args.tiny else (64, 34)
            cfg = Config((prep, 1), (tile, 1), Fold(16, 1, 64, how, 32), False)
            out["checks"].append(check(shape, layout, fmt, cfg, device, steps))
            print(out["checks"][-1], flush=True)
    if args.check_only:
        return
    out["device"] = torch.cuda.get_device_name()
    print("checked", round(time.time() - start, 1), flush=True)
    with torch.no_grad():
        for fmt in FORMATS:
            best = tune(Shape(256, 16, 64, 128, 128), fmt, out)
            print("tuned", fmt, round(time.time() - start, 1), flush=True)
            for batch in (256, 64, 8):
                whole(Shape(batch, 16, 64, 128, 128), fmt, best, out)
                print("seconds", round(time.time() - start, 1), flush=True)
                args.out.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
