"""Layer-level decode with synthetic inputs: what the window section checks and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.ops import standard_
from replayssm.ring import BlockPlan, RingSpec
from replayssm.state import StatePool
from replayssm.types import Block, Decay, Format, Impl, LayerSpec, Write

if TYPE_CHECKING:
    from replayssm.evaluate.arms import Arm
    from replayssm.slots import SlotRef

INPUTS = 16
PROMPT = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """One cell's geometry.

    Attributes:
        spec: Geometry of every layer.
        layers: Layers stepped one after the other; copies make the state larger than a cache.
        batch: B.
        window: Window of the replay arms.
    """

    spec: LayerSpec
    layers: int
    batch: int
    window: int

    @property
    def state_bytes(self) -> int:
        """Bytes of all states in fp32."""
        return self.spec.state_elements * self.layers * self.batch * 4


def make_blocks(spec: LayerSpec, batch: int, seed: int, count: int = INPUTS) -> list[Block]:
    """Return one-token inputs with the statistics of a trained layer.

    Unit keys for the delta rule, decays with memories from ten to ten thousand tokens.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    memory = torch.logspace(1, 4, spec.value_heads)
    blocks = []
    for _ in range(count):
        q = normal(batch, 1, spec.key_heads, spec.key_dim)
        k = normal(batch, 1, spec.key_heads, spec.key_dim)
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        v = normal(batch, 1, spec.value_heads, spec.value_dim)
        g = -(1 / memory).expand(batch, 1, -1) * torch.rand(
            batch, 1, spec.value_heads, generator=rng
        ).mul(1.5).add(0.25)
        if spec.decay is Decay.CHANNEL:
            g = g.unsqueeze(-1).expand(-1, -1, -1, spec.key_dim)
        w = torch.rand(batch, 1, spec.value_heads, generator=rng)
        if spec.write is Write.ADDITIVE:
            w = w * 0.1
        blocks.append(Block(q, k, v, g.contiguous(), w))
    return blocks


class Runner:
    """One arm of a cell: its states, and a method that decodes one token per row.

    Rows of a replay arm stand at different positions, spread over the window, so that folds fall
    on every step as they do in serving. ``start`` is a ``[B, HV, V, K]`` fp32 state for every
    layer, None the zero state.
    """

    def __init__(
        self, arm: Arm, shape: Shape, blocks: list[Block], start: Tensor | None = None
    ) -> None:
        self.arm, self.shape, self.blocks = arm, shape, blocks
        self.steps = self.folds = 0
        batch, spec = shape.batch, shape.spec
        self._pool: StatePool | None = None
        self._refs: list[SlotRef] = []
        self._states: list[Tensor] = []
        self._out = torch.empty(batch, 1, spec.value_heads, spec.value_dim)
        if arm.is_replay:
            ring = RingSpec(window=shape.window)
            self._pool = StatePool([spec] * shape.layers, batch, state=arm.state, ring=ring)
            self._refs = [
                self._pool.admit_(
                    None if start is None else [start[row]] * shape.layers,
                    position=row * shape.window // batch,
                )
                for row in range(batch)
            ]
        else:
            dtype = torch.bfloat16 if arm.state is Format.BF16 else torch.float32
            size = (batch, spec.value_heads, spec.value_dim, spec.key_dim)
            first = torch.zeros(size) if start is None else start
            self._states = [first.to(dtype, copy=True) for _ in range(shape.layers)]
            zeros = np.zeros(batch, np.int64)
            ones = np.ones(batch, np.int64)
            self._plan = BlockPlan(np.arange(batch, dtype=np.int64), zeros, zeros, zeros, ones)

    @property
    def impl(self) -> Impl | None:
        """What the pool's ``auto`` chose; None on the standard path."""
        return None if self._pool is None else self._pool.impl

    def step(self) -> Tensor:
        """Decode one token for every row through all layers; return the last layer's output."""
        block = self.blocks[self.steps % len(self.blocks)]
        self.steps += 1
        if self._pool is None:
            for state in self._states:
                standard_(state, self.shape.spec, self._plan, block, out=self._out)
            return self._out
        ticket = self._pool.begin(self._refs)
        for layer in range(self.shape.layers):
            self._pool.step_(ticket, layer, block, depth=self.arm.read, out=self._out)
        self.folds += self._due(ticket.plan)
        self._pool.commit_(ticket, 1)
        return self._out

    def state(self) -> Tensor:
        """Return the first layer's state of a standard arm."""
        return self._states[0]

    def cycle(self) -> None:
        """Decode one whole window: every row folds exactly once."""
        for _ in range(self.shape.window):
            self.step()

    def _due(self, plan: BlockPlan) -> int:
        window = self.shape.window
        old = np.maximum(plan.folded // window * window, plan.base)
        new = np.maximum(plan.committed // window * window, plan.base)
        return int((new > old).sum())


def output_error(arm: Arm, shape: Shape, blocks: list[Block], reference: Arm, steps: int) -> float:
    """Return the relative error (Frobenius) of an arm's outputs against the reference arm's.

    Both start from the state that a prompt of ``PROMPT`` tokens leaves, as in serving, and see the
    same inputs for ``steps`` tokens.
    """
    one = Shape(shape.spec, 1, shape.batch, shape.window)
    prompt = Runner(reference, one, make_blocks(shape.spec, shape.batch, 1, PROMPT))
    for _ in range(PROMPT):
        prompt.step()
    mine = Runner(arm, one, blocks, prompt.state())
    theirs = Runner(reference, one, blocks, prompt.state())
    error = norm = 0.0
    for _ in range(steps):
        expected = theirs.step().double()
        error += float((mine.step().double() - expected).square().sum())
        norm += float(expected.square().sum())
    return float((error / norm) ** 0.5)
