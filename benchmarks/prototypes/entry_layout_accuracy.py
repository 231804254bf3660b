"""Entry layout, accuracy over a long run: raw ring with pull-back against a ring with stored u.

    python benchmarks/prototypes/entry_layout_accuracy.py --out entry-layout-cpu.json

Gated delta rule in fp32 with bf16 inputs and slow decay, window 16, against an fp64 recurrence.
Reads: ``full`` (fp32 checkpoint) or ``high`` (int8 plane with row scales of a 24-bit checkpoint).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

W = 16


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bf16, keep fp32."""
    return x.bfloat16().float()


def planes(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Full and high reads of a q24 checkpoint with row scales."""
    scale = state.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    code = torch.round(state.double() / scale.double() * 65536).clamp(-127 * 65536, 127 * 65536)
    high = torch.floor((code + 32768) / 65536)
    return (code / 65536 * scale).float(), (high * scale).float()


def mv(s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Matrix times vector, per head."""
    return (s @ x[..., None])[..., 0]


class Replay:
    """One layout: checkpoint, ring, step and fold in fp32 (or fp64 for the identity check)."""

    def __init__(self, layout: str, read: str, ring: torch.dtype, shape: tuple[int, int, int],
                 dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        self.layout, self.depth, self.ring_dtype, self.dtype = layout, read, ring, dtype
        self.full = torch.zeros(shape, dtype=dtype)
        self.high = self.full
        self.ring: list[tuple[torch.Tensor, ...]] = []

    def fold(self) -> None:
        """Move the ring into the checkpoint: serial from raw inputs, or decayed sum of stored u."""
        for k, v, d, w in self.ring:
            self.full = self.full * d
            u = v if self.layout == "u" else w * (v - mv(self.full, k))
            self.full = self.full + u[..., None] * k[:, None]
        self.ring = []
        self.high = self.full
        if self.depth == "high":
            self.full, self.high = planes(self.full)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The checkpoint at the read depth, plus the stored entries (u layout)."""
        total = torch.ones_like(self.full[:, :1, :1])
        out = torch.zeros(self.full.shape[:2], dtype=self.dtype)
        for k, u, d, _ in reversed(self.ring):
            out = out + u * (total[..., 0] * (k * x).sum(-1, keepdim=True))
            total = total * d
        return total[..., 0] * mv(self.high, x) + out

    def step(self, q, k, v, d, w) -> torch.Tensor:
        """Output of one token; fold first when the ring is full."""
        if len(self.ring) == W:
            self.fold()
        if self.layout == "u":
            u = w * (v - d[..., 0] * self.read(k))
            y = d[..., 0] * self.read(q) + u * (k * q).sum(-1, keepdim=True)
            self.ring.append((k, u.to(self.ring_dtype).to(self.dtype), d, w))
            return y
        self.ring.append((k, v, d, w))
        x, y = q, torch.zeros_like(v)
        for kj, vj, dj, wj in reversed(self.ring):
            c = wj * (kj * x).sum(-1, keepdim=True)
            y = y + c * vj
            x = dj[..., 0] * (x - c * kj)
        return y + mv(self.high, x)

    def state(self) -> torch.Tensor:
        """The state that checkpoint and ring stand for, in fp64."""
        out = self.full.double()
        for k, v, d, w in self.ring:
            out = out * d.double()
            u = v.double() if self.layout == "u" else w * (v.double() - mv(out, k.double()))
            out = out + u[..., None] * k.double()[:, None]
        return out


def simulate(tokens: int, heads: int, dim: int, decay: float, seed: int) -> list[dict]:
    """Relative errors of outputs (first and last thousand tokens) and of the final state."""
    gen = torch.Generator().manual_seed(seed)
    shape = (heads, dim, dim)
    bf, f32 = torch.bfloat16, torch.float32
    runs = {
        "raw, full": Replay("raw", "full", bf, shape),
        "raw, high": Replay("raw", "high", bf, shape),
        "u bf16, full": Replay("u", "full", bf, shape),
        "u bf16, high": Replay("u", "high", bf, shape),
        "u fp32, full": Replay("u", "full", f32, shape),
        "u fp32, high": Replay("u", "high", f32, shape),
        "raw, fp64": Replay("raw", "full", bf, shape, torch.float64),
    }
    exact = torch.zeros(shape, dtype=torch.float64)
    span = min(1000, tokens // 2)
    error = {n: torch.zeros(2, dtype=torch.float64) for n in runs}
    size = torch.zeros(2, dtype=torch.float64)
    unit = torch.nn.functional.normalize
    for t in range(tokens):
        q = bf16(unit(torch.randn(heads, dim, generator=gen), dim=-1) * dim**-0.5)
        k = bf16(unit(torch.randn(heads, dim, generator=gen), dim=-1))
        v = bf16(torch.randn(heads, dim, generator=gen))
        d = torch.exp(-decay * torch.rand(heads, 1, 1, generator=gen))
        w = torch.rand(heads, 1, generator=gen)
        exact = exact * d.double()
        u = w.double() * (v.double() - mv(exact, k.double()))
        exact = exact + u[..., None] * k.double()[:, None]
        want = mv(exact, q.double())
        part = 0 if t < span else 1 if t >= tokens - span else None
        if part is not None:
            size[part] += want.square().sum()
        for name, run in runs.items():
            y = run.step(*(a.to(run.dtype) for a in (q, k, v, d, w)))
            if part is not None:
                error[name][part] += (y.double() - want).square().sum()
    return [{"layout": n, "output_first": (error[n][0] / size[0]).sqrt().item(),
             "output_last": (error[n][1] / size[1]).sqrt().item(),
             "state": ((r.state() - exact).norm() / exact.norm()).item()}
            for n, r in runs.items()]  # fmt: skip


def main() -> None:
    """Run and store under the key ``accuracy``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setup = {"tokens": args.tokens, "heads": 4, "dim": 64, "decay": 0.004, "seed": 0}
    rows = simulate(*setup.values())
    for row in rows:
        print(row, flush=True)
    out = json.loads(args.out.read_text()) if args.out.exists() else {}
    out["accuracy"] = {**setup, "torch": torch.__version__, "rows": rows}
    args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
