"""The binding of the benchmark to ``replayssm.ops.triton``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.ops.triton.host import Fused, step_
from replayssm.ops.triton.plan import DevicePlan, device_plan

from gpu.ours import Choice, Replay, Standard
from replayssm.types import Block

if TYPE_CHECKING:
    from replayssm.ops.triton.launch import Launch
    from torch import Tensor

    from gpu.cases import Inputs, Point
    from replayssm.ring import BlockPlan
    from replayssm.storage import LayerStore
    from replayssm.types import Format, ReadDepth


class TritonReplay:
    """The step of ``ops.triton``, with everything around the recurrence done inside."""

    def choices(self, fmt: Format, depth: ReadDepth) -> list[Choice]:
        """The launch that the size rule or a table chooses."""
        return [Choice()]

    def load(self, point: Point, inputs: Inputs) -> tuple[Block, Fused]:
        """Hand over raw gates and strengths, and the layer's parameters."""
        block = Block(inputs.q, inputs.k, inputs.v, inputs.a, inputs.b)
        rate = inputs.a_log.exp()
        if point.case.family == "mamba2":
            return block, Fused("dt", rate, inputs.bias, inputs.skip)
        scale = point.case.layer.key_dim**-0.5
        return block, Fused("beta", rate, inputs.bias, norm=True, q_scale=scale)

    def plan(self, store: LayerStore, rows: BlockPlan, depth: ReadDepth, tokens: int) -> DevicePlan:
        """Copy a step's plan to the device."""
        return device_plan(rows, [depth] * rows.rows, tokens, store.high.device)

    def step_(
        self, store: LayerStore, plan: DevicePlan, loaded: tuple[Block, Fused], out: Tensor,
        launch: Launch | None,
    ) -> None:  # fmt: skip
        """Launch one layer-step; ``store`` and ``out`` are mutated."""
        block, fused = loaded
        step_(store, plan, block, out, fused, launch)


REPLAY: Replay | None = TritonReplay()
STANDARD: Standard | None = None
