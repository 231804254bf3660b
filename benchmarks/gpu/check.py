"""Check an arm's outputs against the fp64 recurrence before it is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpu.cases import draw, recurrence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu.arms import Arm
    from gpu.cases import Point

ROWS = 3


class Wrong(Exception):
    """Outputs are not those of the recurrence."""


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        error: Norm of the difference over the norm, outputs of all steps.
        steps: Steps that ran.
    """

    error: float
    steps: int


def check(arm: Arm, point: Point, device: torch.device) -> Checked:
    """Run from an empty history over two whole cycles with fresh inputs at every step.

    Rows stand at different positions. Outputs are NaN before the kernel writes them, those that
    the kernel's own function allocates too: memory of the same size is filled and freed before it.

    Raises:
        Wrong: An output differs by more than the arm's tolerance, or was not written.
    """
    point = point.at(ROWS)
    steps, at = 2 * arm.period(point) + 2, point.case.layer
    states = arm.prepare(point, device, None, steps)
    shape = (ROWS, at.value_heads, at.value_dim, at.key_dim)
    want = torch.zeros(shape, dtype=torch.float64, device=device)
    difference, norm = 0.0, 0.0
    # the interpreter's bf16 products are wrong
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for step in range(steps):
        inputs = draw(point, device, 1000 + step, dtype)
        states.load(inputs)
        poison = torch.full_like(inputs.v, torch.nan)
        del poison
        got = states.launch(step).double()
        outputs, want = recurrence(point, want, inputs)
        if got.shape != outputs.shape:
            raise Wrong(f"outputs of shape {tuple(got.shape)}, not {tuple(outputs.shape)}")
        difference += (got - outputs).square().sum().item()
        norm += outputs.square().sum().item()
    error = (difference / norm) ** 0.5
    if not error <= arm.tolerance:
        raise Wrong(f"relative error {error:.2e} of outputs, allowed {arm.tolerance:.0e}")
    return Checked(error, steps)


def compile_for_batches(
    arm: Arm, point: Point, batches: Iterable[int], device: torch.device
) -> None:
    """Launch one cycle at every batch: launches depend on it, and what Triton makes of rows."""
    for rows in batches:
        here = point.at(rows)
        steps = arm.period(here)
        states = arm.prepare(here, device, None, steps)
        states.load(draw(here, device, seed=1))
        for step in range(steps):
            states.launch(step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
