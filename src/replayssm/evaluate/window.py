"""Section 3, window and batch: standard against replay at layer level, interleaved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.evaluate.manifest import physical_memory
from replayssm.evaluate.stats import Estimate, paired_ratio
from replayssm.evaluate.timing import Samples, interleave
from replayssm.evaluate.workload import Runner, Shape, make_blocks, output_error
from replayssm.memory import GIB, plan_memory
from replayssm.ring import RingSpec
from replayssm.types import Format, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.plan import Plan

MAX_LAYERS = 32
MAX_EQUAL_MEMORY_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Timing:
    """One arm in one cell.

    Attributes:
        arm: Name.
        batch: Rows; differs between arms only under the equal memory limit.
        step_ms: Median time of one layer's step, whole fold cycles averaged in.
        tokens_per_s: Rows per second through one layer.
        speedup: Against ``standard f32``, per row; None for that arm itself.
        versus_today: Against ``standard bf16``, per row; None where that arm is absent.
        error: Relative output error, checked before timing.
        valid: Whether the error is within what the format promises; nothing is timed otherwise.
        folds_per_row_step: Folds counted while timing; must be 1 / window on the replay path.
        switches: Involuntary context switches over all samples.
        slot_bytes: Bytes of one sequence in one layer, rings included.
    """

    arm: str
    batch: int
    step_ms: float | None
    tokens_per_s: float | None
    speedup: Estimate | None
    versus_today: Estimate | None
    error: float
    valid: bool
    folds_per_row_step: float
    switches: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Cell:
    """All arms at one batch and window.

    Attributes:
        batch: B, or None under the equal memory limit.
        window: Window of the replay arms.
        layers: Layers stepped per token.
        state_bytes: Working set of the fp32 states.
        timings: One per arm.
    """

    batch: int | None
    window: int
    layers: int
    state_bytes: int
    timings: tuple[Timing, ...]

    def timing(self, arm: str) -> Timing:
        """Return one arm's timing."""
        return next(t for t in self.timings if t.arm == arm)


@dataclass(frozen=True, slots=True)
class WindowResult:
    """Outcome of the section.

    Attributes:
        spec: Geometry in words.
        cells: Grid over batch and window.
        equal_memory: Every arm at the largest batch that fits ``budget_bytes``.
        budget_bytes: That limit.
        break_even: Per candidate, the least batch from which the whole interval of its speed-up
            lies above 1 at this and all larger batches of the grid; None when there is none.
        seconds: Time the section took.
    """

    spec: str
    cells: tuple[Cell, ...]
    equal_memory: Cell
    budget_bytes: int
    break_even: dict[str, int | None]
    seconds: float = 0.0

    def row(self, window: int) -> tuple[Cell, ...]:
        """Return the cells of one window by ascending batch."""
        found = (c for c in self.cells if c.window == window and c.batch is not None)
        return tuple(sorted(found, key=lambda c: c.batch or 0))


def tolerance(arm: Arm) -> float:
    """Return the largest relative output error that an arm's format explains, with room of 3."""
    if arm.read is ReadDepth.HIGH:
        return 5e-3 if arm.state is Format.S32 else 2e-2
    return {Format.BF16: 2e-2, Format.Q16: 2e-4}.get(arm.state, 3e-6)


def run(
    spec: LayerSpec, model_layers: int, plan: Plan, tick: Callable[[str], None]
) -> WindowResult:
    """Measure the grid, then the equal memory cell.

    Args:
        spec: Geometry of the model's recurrent layers.
        model_layers: How many of them the model has.
        plan: Sizes and arms.
        tick: Called after each cell with its name.
    """
    scope, cells = plan.scope, []
    # all arms are alive at once; leave most of the memory to the rest of the machine
    room = physical_memory() // (4 * len(plan.arms)) or scope.working_set
    for batch, window in grid(plan):
        layers = layer_copies(spec, batch, model_layers, min(scope.working_set, room))
        shapes = {arm.name: Shape(spec, layers, batch, window) for arm in plan.arms}
        cells.append(_measure(plan, shapes, batch, window))
        tick(f"batch {batch}, window {window}")
    equal = _equal_memory(spec, model_layers, plan)
    tick("equal memory limit")
    row = [c for c in cells if c.window == scope.window]
    return WindowResult(
        spec=describe(spec),
        cells=tuple(cells),
        equal_memory=equal,
        budget_bytes=scope.budget_bytes,
        break_even={arm.name: break_even(row, arm.name) for arm in plan.candidates},
    )


def grid(plan: Plan) -> list[tuple[int, int]]:
    """Return the (batch, window) cells: every batch at the plan's window, then other windows.

    A full grid when the scope has more than four batches, else the other windows at the largest
    batch only, where a window matters most.
    """
    scope = plan.scope
    cells = [(batch, scope.window) for batch in scope.batches]
    others = [w for w in scope.windows if w != scope.window]
    at = scope.batches if len(scope.batches) > 4 else scope.batches[-1:]
    return cells + [(batch, window) for window in others for batch in at]


def break_even(cells: list[Cell], arm: str) -> int | None:
    """Return the least batch from which an arm is faster than the standard fp32 step for good."""
    least = None
    for cell in sorted(cells, key=lambda c: c.batch or 0, reverse=True):
        speedup = cell.timing(arm).speedup
        if speedup is None or speedup.low <= 1:
            break
        least = cell.batch
    return least


def describe(spec: LayerSpec) -> str:
    """Return a layer's geometry in words."""
    return (
        f"{spec.write} write, {spec.decay} decay, {spec.value_heads} value heads of "
        f"{spec.value_dim} x {spec.key_dim}, {spec.key_heads} key heads"
    )


def layer_copies(spec: LayerSpec, batch: int, model_layers: int, target: int) -> int:
    """Return how many layers a cell steps so that its fp32 states take ``target`` bytes."""
    wanted = -(-target // (spec.state_elements * batch * 4))
    return max(model_layers, min(MAX_LAYERS, wanted))


def _equal_memory(spec: LayerSpec, model_layers: int, plan: Plan) -> Cell:
    scope, layers = plan.scope, [spec] * model_layers
    ring, gib = RingSpec(window=scope.window), scope.budget_bytes / GIB
    shapes = {}
    for arm in plan.arms:
        planned = plan_memory(layers, gib, state=arm.state, ring=ring)
        batch = planned.slots
        if not arm.is_replay:
            itemsize = 2 if arm.state is Format.BF16 else 4
            batch = scope.budget_bytes // (planned.standard_bytes // 4 * itemsize)
        batch = max(1, min(batch, MAX_EQUAL_MEMORY_BATCH))
        shapes[arm.name] = Shape(spec, model_layers, batch, scope.window)
    return _measure(plan, shapes, None, scope.window)


def _measure(plan: Plan, shapes: dict[str, Shape], batch: int | None, window: int) -> Cell:
    reference, errors, runners = plan.arms[0], {}, {}
    for arm in plan.arms:
        shape = shapes[arm.name]
        small, steps = Shape(shape.spec, 1, min(shape.batch, 4), window), 2 * window + 3
        # no input twice: a few repeated keys would make a state that no model has
        blocks = make_blocks(shape.spec, small.batch, plan.seed, steps)
        errors[arm.name] = output_error(arm, small, blocks, reference, steps)
        if errors[arm.name] <= tolerance(arm):
            inputs = make_blocks(shape.spec, shape.batch, plan.seed)
            runners[arm.name] = Runner(arm, shape, inputs)
    for runner in runners.values():
        runner.cycle()
        runner.steps = runner.folds = 0
    samples = interleave(
        {name: runner.cycle for name, runner in runners.items()},
        rounds=plan.scope.rounds,
        limit_s=plan.scope.cell_seconds,
    )
    timings = [
        _timing(arm, shapes[arm.name], samples, runners.get(arm.name), errors[arm.name], shapes)
        for arm in plan.arms
    ]
    first = shapes[reference.name]
    return Cell(batch, window, first.layers, first.state_bytes, tuple(timings))


def _timing(
    arm: Arm,
    shape: Shape,
    samples: dict[str, Samples],
    runner: Runner | None,
    error: float,
    shapes: dict[str, Shape],
) -> Timing:
    planned = plan_memory([shape.spec], 1.0, state=arm.state, ring=RingSpec(window=shape.window))
    slot = planned.slot_bytes
    if not arm.is_replay:
        slot = shape.spec.state_elements * (2 if arm.state is Format.BF16 else 4)
    if runner is None:
        return Timing(arm.name, shape.batch, None, None, None, None, error, False, 0.0, 0, slot)
    mine = samples[arm.name]
    step = mine.median / (shape.window * shape.layers)

    def against(name: str) -> Estimate | None:
        if name == arm.name or name not in samples:
            return None
        scale = shape.batch / shapes[name].batch
        return paired_ratio([s * scale for s in samples[name].seconds], mine.seconds)

    return Timing(
        arm=arm.name,
        batch=shape.batch,
        step_ms=step * 1e3,
        tokens_per_s=shape.batch / step,
        speedup=against("standard f32"),
        versus_today=against("standard bf16"),
        error=error,
        valid=True,
        folds_per_row_step=runner.folds / (runner.steps * shape.batch),
        switches=sum(mine.switches),
        slot_bytes=slot,
    )
