"""Scratch copies for ``replayssm tune``: states, inputs and plans that nothing else holds.

A measurement runs whole fold cycles over rows at different positions. On a GPU a graph holds them,
over as many state sets as no cache can keep; elsewhere (Triton's interpreter) they run one by one.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from replayssm.formats import FORMATS, column_amax, column_scale, encode
from replayssm.ops.triton.host import step_
from replayssm.ops.triton.others import standard_call
from replayssm.ops.triton.plan import device_plan
from replayssm.ring import BlockPlan, RingSpec
from replayssm.storage import allocate
from replayssm.types import Block, Decay, ReadDepth, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from replayssm.ops.triton.launch import Launch, StandardLaunch
    from replayssm.storage import LayerStore, StorageSpec
    from replayssm.types import LayerSpec

CACHE = 165_000_000  # bytes of state that no cache holds
MOST_SETS = 64
GRAPH_US = 1500.0  # shorter graphs would time their own launch
REPEATS = 7


def kept_of(tokens: int) -> int:
    """Return the entries of a block that a measurement keeps: about seven in ten."""
    return max(1, round(0.7 * tokens))


class Replayed:
    """A layer's step on checkpoint and ring.

    Args:
        spec: Geometry, format and ring.
        rows: B.
        tokens: T.
        depth: Planes that a step reads.
        device: Where it runs.
    """

    def __init__(
        self, spec: StorageSpec, rows: int, tokens: int, depth: ReadDepth, device: torch.device
    ) -> None:
        bytes_read = FORMATS[spec.format].read_bytes[depth] * spec.layer.state_elements * rows
        self._stores = [allocate(spec, rows, device) for _ in range(_sets(bytes_read, device))]
        self._blocks = [
            _block(spec.layer, rows, tokens, device, i) for i in range(len(self._stores))
        ]
        self.out = torch.empty_like(self._blocks[0].v)
        self._state = torch.randn(
            spec.layer.value_heads, spec.layer.value_dim, spec.layer.key_dim,
            generator=torch.Generator(device).manual_seed(1), device=device,
        )  # fmt: skip
        self.reset()
        index, kept = np.arange(rows), kept_of(tokens)
        self._plans = []
        for step in range(spec.ring.window // math.gcd(spec.ring.window, kept)):
            committed = spec.ring.window + index % spec.ring.window + step * kept
            plan = BlockPlan(index, 0 * index, committed - kept, committed, 0 * index + tokens)
            self._plans.append(device_plan(plan, spec.ring, [depth] * rows, tokens, device))

    def reset(self) -> None:
        """Write the same states and empty rings again."""
        for store in self._stores:
            _fill(store, self._state)

    def cycle(self, launch: Launch | None) -> list[Callable[[], None]]:
        """Return the launches of one fold cycle, set by set within a step."""
        return [
            lambda s=store, p=plan, b=block: step_(s, p, b, self.out, launch=launch)  # type: ignore[misc]
            for plan in self._plans
            for store, block in zip(self._stores, self._blocks, strict=True)
        ]


class Rewritten:
    """A layer's standard step; with T > 1 it writes a snapshot after every token.

    Args:
        layer: Geometry.
        dtype: Of the state.
        rows: B.
        tokens: T.
        device: Where it runs.
    """

    def __init__(
        self, layer: LayerSpec, dtype: torch.dtype, rows: int, tokens: int, device: torch.device
    ) -> None:
        self._layer = layer
        shape = (rows * tokens, layer.value_heads, layer.value_dim, layer.key_dim)
        sets = _sets(rows * layer.state_elements * dtype.itemsize, device)
        self._states = [torch.empty(shape, dtype=dtype, device=device) for _ in range(sets)]
        self._blocks = [_block(layer, rows, tokens, device, i) for i in range(sets)]
        self.out = torch.empty_like(self._blocks[0].v)
        self.reset()
        index = np.arange(rows)
        plan = BlockPlan(index * tokens, 0 * index, 0 * index, 0 * index, 0 * index + tokens)
        full = [ReadDepth.FULL] * rows
        self._plan = device_plan(plan, RingSpec(), full, tokens, device)
        self._targets = None
        if tokens > 1:
            self._targets = torch.arange(rows * tokens, device=device).view(rows, tokens)

    def reset(self) -> None:
        """Write the same states again."""
        for state in self._states:
            generator = torch.Generator(state.device).manual_seed(1)
            state[:1].normal_(std=0.1, generator=generator)
            state.copy_(state[:1].clone().expand_as(state))

    def cycle(self, launch: StandardLaunch | None) -> list[Callable[[], None]]:
        """Return one launch a set."""
        return [
            standard_call(
                state, self._layer, self._plan, block, self.out, self._targets, launch=launch
            ).run
            for state, block in zip(self._states, self._blocks, strict=True)
        ]


def outputs(work: Replayed | Rewritten, launch: Launch | StandardLaunch | None) -> Tensor:
    """Return the last outputs of a cycle that starts from the same states whatever ran before."""
    work.reset()
    work.out.fill_(torch.nan)
    for run in work.cycle(launch):  # type: ignore[arg-type]
        run()
    return work.out.float().clone()


def microseconds(calls: Sequence[Callable[[], None]], device: torch.device) -> float:
    """Return the time of one of ``calls``, the median over repeats of all of them."""
    if device.type != "cuda":
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls) * 1e6
    graph = torch.cuda.CUDAGraph()
    once = _graph_us(graph, calls, 1)
    again = max(1, math.ceil(GRAPH_US / max(once, 1.0)))
    if again > 1:
        graph = torch.cuda.CUDAGraph()
        _graph_us(graph, calls, again)
    return statistics.median(_replay_us(graph) for _ in range(REPEATS)) / (len(calls) * again)


def _graph_us(graph: torch.cuda.CUDAGraph, calls: Sequence[Callable[[], None]], n: int) -> float:
    with torch.cuda.graph(graph):
        for _ in range(n):
            for call in calls:
                call()
    _replay_us(graph)
    return _replay_us(graph)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _sets(bytes_read: float, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return max(2, min(MOST_SETS, math.ceil(CACHE / bytes_read)))


def _block(layer: LayerSpec, rows: int, tokens: int, device: torch.device, seed: int) -> Block:
    """Draw a block: unit keys, gates that decay slowly."""
    generator = torch.Generator(device).manual_seed(seed)
    # the interpreter's bf16 products are wrong
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator, device=device)

    keys = (layer.key_heads, layer.key_dim)
    q, k = (normal(*keys) for _ in range(2))
    if layer.write is Write.DELTA:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = normal(layer.value_heads, layer.value_dim)
    gates = (
        (layer.value_heads, layer.key_dim) if layer.decay is Decay.CHANNEL else (layer.value_heads,)
    )
    g, w = -0.05 * normal(*gates).abs(), normal(layer.value_heads).sigmoid()
    return Block(q.to(dtype), k.to(dtype), v.to(dtype), g, w)


def _fill(store: LayerStore, state: Tensor) -> None:
    """Write one state into every slot, and zeros into the rings."""
    columns = column_scale(column_amax(state)) if FORMATS[store.spec.format].scaled else None
    planes = encode(state, store.spec.format, columns)
    for target, plane in (
        (store.high, planes.high), (store.low, planes.low), (store.row_scale, planes.row_scale),
    ):  # fmt: skip
        if target is not None and plane is not None:
            target.copy_(plane.expand_as(target))
    if store.columns is not None and columns is not None:
        store.columns.copy_(columns[:, None].expand_as(store.columns))
    for ring in (store.k, store.v, store.g, store.w):
        ring.zero_()
