"""Bandwidth that this device reaches on plain streams, measured by kernels like those compared.

``Tensor.copy_`` inside a captured graph becomes a memory-copy node, which is slower than a kernel:
it is no ceiling.
"""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl

from gpu.arms import Ceilings

MEGABYTES = 1024
BUFFERS = 2
# tile in fp32 words and warps; the best of these is the ceiling
SHAPES = ((2048, 4), (4096, 8), (8192, 8))
MODES = {"read": (0, 1), "rewrite": (1, 2), "copy": (2, 2), "write": (3, 1)}


@triton.jit
def stream(source, target, TILE: tl.constexpr, MODE: tl.constexpr):  # noqa: ANN001, ANN201
    """Read, rewrite in place, copy or write one tile; a read stores only what never happens."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if MODE == 3:
        tl.store(target + at, tl.zeros([TILE], tl.float32) + 1.0)
    else:
        x = tl.load(source + at)
        if MODE == 0:
            total = tl.sum(x)
            if total == 12345.678:
                tl.store(target, total)
        elif MODE == 1:
            tl.store(source + at, x * 0.999)
        else:
            tl.store(target + at, x)


def measure(device: torch.device, repeats: int = 9) -> Ceilings:
    """Measure all four streams over buffers that no cache holds, from a captured graph."""
    words = MEGABYTES << 18
    a = [torch.rand(words, device=device) for _ in range(BUFFERS)]
    b = [torch.rand(words, device=device) for _ in range(BUFFERS)]
    best = dict.fromkeys(MODES, 0.0)
    for name, (mode, streams) in MODES.items():
        for tile, warps in SHAPES:
            calls = [(x, y, tile, mode, warps) for x, y in zip(a, b, strict=True)]
            seconds = _time(calls, words // tile, repeats)
            best[name] = max(best[name], streams * 4 * words * BUFFERS / seconds)
    return Ceilings(**best)


def _time(
    calls: list[tuple[torch.Tensor, torch.Tensor, int, int, int]], grid: int, n: int
) -> float:
    def launch() -> None:
        for x, y, tile, mode, warps in calls:
            stream[(grid,)](x, y, tile, mode, num_warps=warps)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    samples = []
    for _ in range(n + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return statistics.median(samples[2:])
