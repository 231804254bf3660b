"""The binding of the benchmark to ``replayssm.ops.triton``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpu.ours import Choice, arms_of
from replayssm.ops.triton.call import Fused
from replayssm.ops.triton.host import step_
from replayssm.ops.triton.others import standard_call
from replayssm.ops.triton.plan import DevicePlan, device_plan
from replayssm.ring import BlockPlan, RingSpec
from replayssm.types import Block, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.arms import Arm
    from gpu.cases import Inputs, Point
    from replayssm.ops.triton.launch import Launch
    from replayssm.storage import LayerStore
    from replayssm.types import Format


def fuse(point: Point, inputs: Inputs) -> tuple[Block, Fused]:
    """Hand over raw gates and strengths, and the layer's parameters."""
    block = Block(inputs.q, inputs.k, inputs.v, inputs.a, inputs.b)
    rate = inputs.a_log.exp()
    if point.case.family == "mamba2":
        return block, Fused("dt", rate, inputs.bias, inputs.skip)
    scale = point.case.layer.key_dim**-0.5
    return block, Fused("beta", rate, inputs.bias, norm=True, q_scale=scale)


class TritonReplay:
    """The step of ``ops.triton``, with everything around the recurrence done inside."""

    def choices(self, fmt: Format, depth: ReadDepth) -> list[Choice]:
        """The launch that the size rule or a table chooses."""
        return [Choice()]

    def load(self, point: Point, inputs: Inputs) -> tuple[Block, Fused]:
        """Arrange inputs."""
        return fuse(point, inputs)

    def plan(self, store: LayerStore, rows: BlockPlan, depth: ReadDepth, tokens: int) -> DevicePlan:
        """Copy a step's plan to the device."""
        ring, device = store.spec.ring, store.high.device
        return device_plan(rows, ring, [depth] * rows.rows, tokens, device)

    def step_(
        self, store: LayerStore, plan: DevicePlan, loaded: tuple[Block, Fused], out: Tensor,
        launch: Launch | None,
    ) -> None:  # fmt: skip
        """Launch one layer-step; ``store`` and ``out`` are mutated."""
        block, fused = loaded
        step_(store, plan, block, out, fused, launch)


@dataclass(frozen=True)
class _Loaded:
    layer: LayerSpec
    block: Block
    fused: Fused
    plan: DevicePlan
    targets: Tensor | None


class TritonStandard:
    """The standard step of ``ops.triton``, in place or with a snapshot after every token."""

    def load(self, point: Point, inputs: Inputs) -> _Loaded:
        """Arrange inputs, and the slots of rows: a row's snapshots lie side by side."""
        block, fused = fuse(point, inputs)
        rows, zero = np.arange(point.batch), np.zeros(point.batch, np.int64)
        slots = rows if point.tokens == 1 else rows * point.tokens + point.kept - 1
        plan = BlockPlan(slots, zero, zero, zero, zero + point.tokens)
        full, device = [ReadDepth.FULL] * point.batch, inputs.q.device
        targets = None
        if point.tokens > 1:
            targets = torch.arange(point.batch * point.tokens, device=device)
            targets = targets.view(point.batch, point.tokens)
        on_device = device_plan(plan, RingSpec(), full, point.tokens, device)
        return _Loaded(point.case.layer, block, fused, on_device, targets)

    def step_(self, state: Tensor, loaded: _Loaded, out: Tensor) -> None:
        """Rewrite the state in place."""
        at, x = loaded, loaded.fused
        standard_call(state, at.layer, at.plan, at.block, out, None, x).run()

    def snapshots_(self, states: Tensor, kept: Tensor, loaded: _Loaded, out: Tensor) -> None:
        """Continue from the snapshot that was kept and write one after every token."""
        at, slots = loaded, states.flatten(0, 1)
        standard_call(slots, at.layer, at.plan, at.block, out, at.targets, at.fused).run()


def arms() -> list[Arm]:
    """Return every format and depth of the replay step, and the standard steps."""
    return arms_of(TritonReplay(), TritonStandard())
