"""Decision 3, concurrency and length: how much faster, where it breaks even, and batch 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.evaluate.decisions.experiment import conduct
from replayssm.evaluate.decisions.finding import Decision
from replayssm.evaluate.decisions.ratio import ratio_finding
from replayssm.evaluate.decisions.tables import Cohort, Slo
from replayssm.evaluate.stats import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replayssm.evaluate.decisions.experiment import Experiment
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.serving import Job, Server

QUESTION = "How much faster is it for this traffic, and from which batch on?"


@dataclass(frozen=True, slots=True)
class SurfaceCell:
    """One variant at one batch and prompt length.

    Attributes:
        variant: Name.
        batch: Sequences decoded together.
        prompt: Prompt tokens.
        ratio: Tokens per second against the baseline.
    """

    variant: str
    batch: int
    prompt: int
    ratio: Estimate


def surface(
    plan: RolloutPlan,
    servers: Mapping[str, Server],
    jobs: Callable[[int, int, int, int], Sequence[Job]],
    tick: Callable[[str], None],
) -> tuple[SurfaceCell, ...]:
    """Measure the grid over batch and prompt length, all variants interleaved.

    Args:
        plan: The grid.
        servers: One per variant; the first is the baseline.
        jobs: Makes the jobs of ``(round, count, prompt, output)``.
        tick: Called after every cell.
    """
    cells = []
    design = plan.design.model_copy(
        update={"pairs": plan.design.surface_pairs, "max_pairs": plan.design.surface_pairs}
    )
    for prompt in plan.surface.prompts:
        for batch in plan.surface.batches:
            cohort = _cell(batch, prompt, plan.surface.output)
            (found,) = conduct(
                [cohort],
                servers,
                lambda r, b=batch, p=prompt: jobs(r, b, p, plan.surface.output),  # type: ignore[misc]
                design,
                metric="throughput",
                prices=dict.fromkeys(servers, 1.0),
                in_flight=batch,
            )
            cells += [
                SurfaceCell(name, batch, prompt, found.compare(name, "throughput").ratio)
                for name in list(servers)[1:]
            ]
            tick(f"batch {batch}, prompt {prompt}")
    return tuple(cells)


def break_even(cells: Sequence[SurfaceCell], variant: str, prompt: int) -> int | None:
    """Return the least batch from which a variant is faster for good; None when there is none."""
    row = [c for c in cells if c.variant == variant and c.prompt == prompt]
    least = None
    for cell in sorted(row, key=lambda c: -c.batch):
        if cell.ratio.low <= 1:
            break
        least = cell.batch
    return least


def decide(plan: RolloutPlan, experiments: Mapping[str, Experiment]) -> Decision:
    """Hold every variant's speed-up under each cohort's own load against the margin."""
    findings = [
        ratio_finding(plan, c, experiments[c.name], v.name, "concurrency", required=True)
        for c in plan.cohorts
        for v in plan.candidates
    ]
    return Decision("concurrency", QUESTION, "pairs", tuple(findings))


def _cell(batch: int, prompt: int, output: int) -> Cohort:
    return Cohort(
        name="surface",
        mode="batch",
        arrival="offline",
        prompt_tokens=(prompt, prompt),
        output_tokens=(output, output),
        requests=batch,
        slo=Slo(),
    )
