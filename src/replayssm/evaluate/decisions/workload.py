"""Jobs out of a trace: by cohort for the paired runs, all of them for the whole replay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError
from replayssm.evaluate.decisions.serving import Job
from replayssm.traffic import formats
from replayssm.traffic.prompts import Prompts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.tables import Cohort
    from replayssm.evaluate.subject import Subject
    from replayssm.traffic.trace import Trace

OTHER = "other"


class Workload:
    """The jobs of a plan.

    Args:
        plan: Cohorts, window and speed of the trace.
        jobs: Every request of the trace in order of arrival, its cohort assigned.
        text: Token ids that prompts of the speed-up surface are cut from.

    Raises:
        ContractError: A cohort has no request.
    """

    def __init__(self, plan: RolloutPlan, jobs: Sequence[Job], text: Sequence[int]) -> None:
        self._plan, self._jobs, self._text = plan, list(jobs), list(text)
        self._by_cohort = {
            c.name: [job for job in self._jobs if job.cohort == c.name] for c in plan.cohorts
        }
        for name, mine in self._by_cohort.items():
            if not mine:
                raise ContractError(f"cohort {name}", "a request of it in the trace", "none")

    @property
    def outside(self) -> int:
        """Requests that belong to no cohort; they are replayed on the default route."""
        return sum(job.cohort == OTHER for job in self._jobs)

    def cohort(self, cohort: Cohort, number: int) -> list[Job]:
        """Return the jobs of a cohort in one round: other requests each round, drawn by seed."""
        mine = self._by_cohort[cohort.name]
        # numpy takes no negative seeds, and warm-ups have negative numbers
        rng = np.random.default_rng([self._plan.seed, number + (1 << 20)])
        start = int(rng.integers(len(mine)))
        chosen = [mine[(start + i) % len(mine)] for i in range(cohort.requests)]
        return [
            replace(job, id=f"{cohort.name}-{number}-{i}", at=at)
            for i, (job, at) in enumerate(zip(chosen, self._times(chosen, cohort), strict=True))
        ]

    def graded(self, cohort: Cohort) -> list[Job]:
        """Return the first ``graded`` distinct requests of a cohort, due at once."""
        distinct = {job.prompt: job for job in self._by_cohort[cohort.name]}
        chosen = list(distinct.values())[: cohort.graded]
        return [replace(job, id=f"graded-{i}", at=0.0) for i, job in enumerate(chosen)]

    def whole(self, number: int) -> list[Job]:
        """Return the whole trace, the same in every round."""
        return [replace(job, id=f"{number}-{i}") for i, job in enumerate(self._jobs)]

    def surface(self, number: int, count: int, prompt: int, output: int) -> list[Job]:
        """Return ``count`` jobs of equal lengths, cut from the held-out text."""
        rng = np.random.default_rng([self._plan.seed, number + (1 << 20), count, prompt])
        starts = rng.integers(max(1, len(self._text) - prompt), size=count)
        return [
            Job(f"s{number}-{i}", 0.0, tuple(self._text[s : s + prompt]), output, "surface")
            for i, s in enumerate(starts.tolist())
        ]

    def _times(self, jobs: Sequence[Job], cohort: Cohort) -> list[float]:
        if cohort.arrival != "scheduled":
            return [0.0] * len(jobs)
        at, last, times = 0.0, jobs[0].at, []
        for job in jobs:
            # past the end of the trace it starts over, without a pause
            at, last = at + max(0.0, job.at - last), job.at
            times.append(at)
        return times


def read_workload(plan: RolloutPlan, folder: Path, subject: Subject) -> Workload:
    """Read a plan's trace.

    Args:
        plan: Names the trace.
        folder: What the trace's path is relative to.
        subject: Encodes and decodes prompts.

    Raises:
        ContractError: The trace is missing or malformed, a request is too long, or a cohort has
            none.
    """
    trace, _ = formats.load(folder / plan.traffic.trace)
    prompts = Prompts(
        int(subject.model.config.get_text_config().vocab_size),
        block_size=trace.block_size,
        seed=plan.seed,
    )
    return Workload(plan, jobs_of(plan, trace, subject, prompts), subject.encode(subject.text))


def assign(plan: RolloutPlan, name: str, prompt: int, output: int) -> str:
    """Return the cohort of a request: the one it names, else the first whose ranges hold it."""
    known = {c.name for c in plan.cohorts}
    if name in known:
        return name
    return next((c.name for c in plan.cohorts if c.holds(prompt, output)), OTHER)


def jobs_of(plan: RolloutPlan, trace: Trace, subject: Subject, prompts: Prompts) -> list[Job]:
    """Return a trace's requests as jobs.

    Args:
        plan: Window and speed of the trace.
        trace: Requests in order of arrival.
        subject: Encodes texts, and decodes prompts that have none, for graders.
        prompts: Makes out prompts that the trace gives by length only.

    Raises:
        ContractError: A request is longer than the plan's context.
    """
    found = []
    for i, request in enumerate(trace.requests):
        at = request.at / plan.traffic.speedup
        if plan.traffic.seconds is not None and at > plan.traffic.seconds:
            break
        if request.text is not None:
            ids = subject.encode(request.text.encode())
        else:
            ids = prompts.ids(i, request)
        length = len(ids) + request.output_tokens
        if length > plan.hardware.context:
            raise ContractError(
                f"request {i}", f"at most hardware.context ({plan.hardware.context}) tokens", length
            )
        text = subject.decode(ids) if request.text is None else request.text
        cohort = assign(plan, request.cohort, len(ids), request.output_tokens)
        found.append(Job(f"r{i}", at, tuple(ids), request.output_tokens, cohort, text, i))
    return found
