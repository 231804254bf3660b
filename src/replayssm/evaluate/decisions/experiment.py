"""The paired design: every variant serves the same jobs in every round, the order rotating.

A pilot of fixed size gives the spread of the log ratios; the number of rounds follows from the
spread alone, so that no result can stop or prolong its own experiment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.errors import ReplayError
from replayssm.evaluate.decisions.paired import (
    Comparison,
    careful_spread,
    compare,
    log_ratios,
    pairs_for_effect,
)
from replayssm.evaluate.decisions.serving import BETTER, Job, Run, Server, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replayssm.evaluate.decisions.tables import Cohort, Design


class LostError(ReplayError, RuntimeError):
    """A run lost requests or cut them short; no number of it means anything."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One variant in one round.

    Attributes:
        variant: Name.
        round: Number of the round, from 0.
        metrics: Every metric.
        counters: The engine's counters over the run.
    """

    variant: str
    round: int
    metrics: dict[str, float]
    counters: dict[str, float]


@dataclass(frozen=True, slots=True)
class Experiment:
    """All rounds of one cohort.

    Attributes:
        cohort: Name.
        baseline: Name of the variant that the others are compared with.
        samples: Every run, in the order measured.
        pilot: Rounds of the pilot.
        wanted: Rounds that the pilot's spread asked for.
        confidence: Level of the intervals.
    """

    cohort: str
    baseline: str
    samples: tuple[Sample, ...]
    pilot: int
    wanted: int
    confidence: float

    @property
    def rounds(self) -> int:
        """Rounds run."""
        return 1 + max(s.round for s in self.samples)

    def values(self, variant: str, metric: str) -> list[float]:
        """Return one metric of one variant, one number a round; NaN where it was not measured."""
        mine = (s.metrics for s in self.samples if s.variant == variant)
        return [metrics.get(metric, math.nan) for metrics in mine]

    def compare(
        self, variant: str, metric: str, *, against: str | None = None, seed: int = 0
    ) -> Comparison:
        """Return a variant against another one, the baseline unless told."""
        theirs = self.values(against or self.baseline, metric)
        logs = log_ratios(theirs, self.values(variant, metric), better=BETTER[metric])
        return compare(logs, confidence=self.confidence, seed=seed)


def conduct(
    cohorts: Sequence[Cohort],
    servers: Mapping[str, Server],
    jobs: Callable[[int], Sequence[Job]],
    design: Design,
    *,
    metric: str,
    prices: Mapping[str, float],
    in_flight: int | None,
    keep: Callable[[str, int, Run], None] | None = None,
    tick: Callable[[str], None] | None = None,
) -> tuple[Experiment, ...]:
    """Run the pilot, then as many rounds more as its spread asks for.

    Args:
        cohorts: Whose jobs they are; each gets an experiment of its own out of the same runs.
        servers: One per variant; the first is the baseline.
        jobs: Makes the jobs of a round; negative rounds are warm-ups.
        design: Sizes.
        metric: The primary metric; its widest spread decides how many rounds there are.
        prices: Price of an hour per variant.
        in_flight: Most requests in flight; None sends each when it is due.
        keep: Told about every timed run, which is then dropped.
        tick: Called after every timed round.
    """
    names = list(servers)
    samples: dict[str, list[Sample]] = {c.name: [] for c in cohorts}
    for warmup in range(design.warmups):
        for name in names:
            serve(servers[name], jobs(-1 - warmup), in_flight)
    wanted, number = design.pairs, 0
    while number < min(design.max_pairs, max(design.pairs, wanted)):
        work, shift = jobs(number), number % len(names)
        for name in names[shift:] + names[:shift]:
            run = serve(servers[name], work, in_flight)
            for cohort in cohorts:
                metrics = measure(run, cohort.name, cohort.slo, prices[name])
                samples[cohort.name].append(Sample(name, number, metrics, run.counters))
            if keep is not None:
                keep(name, number, run)
        number += 1
        if tick is not None:
            tick(f"round {number}")
        if number == design.pairs:
            wanted = max(rounds_wanted(names, s, metric, design) for s in samples.values())
    return tuple(
        Experiment(
            c.name, names[0], tuple(samples[c.name]), design.pairs, wanted, design.confidence
        )
        for c in cohorts
    )


def places(cohort: Cohort, jobs: int) -> int | None:
    """Return the requests of a cohort that are in flight at most; None by schedule."""
    return {"closed": cohort.concurrency, "offline": jobs, "scheduled": None}[cohort.arrival]


def serve(server: Server, jobs: Sequence[Job], in_flight: int | None) -> Run:
    """Serve jobs and see that all came back whole.

    Raises:
        LostError: A request was lost, or came back with a wrong number of tokens.
    """
    run = server.run(jobs, in_flight)
    asked = {job.id: job.output_tokens for job in jobs}
    short = sum(len(s.tokens) != asked[s.id] for s in run.served)
    if run.lost or short:
        raise LostError(
            f"{run.lost} of {len(jobs)} requests were lost and {short} came back with another "
            "number of tokens than asked for"
        )
    return run


def rounds_wanted(
    names: Sequence[str], samples: Sequence[Sample], metric: str, design: Design
) -> int:
    """Return the rounds that the widest spread among the candidates asks for."""
    spreads = []
    for name in names[1:]:
        theirs, mine = (
            [s.metrics[metric] for s in samples if s.variant == n] for n in (names[0], name)
        )
        spreads.append(careful_spread(log_ratios(theirs, mine, better=BETTER[metric])))
    widest = max(spreads, default=0.0)
    return pairs_for_effect(widest, design.effect, confidence=design.confidence, power=design.power)
