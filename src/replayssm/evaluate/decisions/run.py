"""One evaluation of a plan, from stamp to routing."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from replayssm.errors import UnsupportedError
from replayssm.evaluate.decisions import (
    bottleneck,
    concurrency,
    gate,
    maturity,
    outcome,
    precision,
    quality,
    speculation,
)
from replayssm.evaluate.decisions.experiment import Experiment, conduct, places, serve
from replayssm.evaluate.decisions.result import SCHEMA_VERSION, Rollout, Stamp
from replayssm.evaluate.run import Progress, Silent
from replayssm.models.registry import find_mixers
from replayssm.traffic.energy import EnergyMeter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from replayssm.evaluate.compatibility import Agreement
    from replayssm.evaluate.decisions.finding import Decision
    from replayssm.evaluate.decisions.outcome import Operations, Outcome
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.quality import Quality
    from replayssm.evaluate.decisions.serving import Job, Run, Server
    from replayssm.evaluate.decisions.tables import Cohort, Variant
    from replayssm.evaluate.decisions.workload import Workload
    from replayssm.evaluate.subject import Subject
    from replayssm.traffic.record import Record

# names of the parts, and the share of a run's time that each usually takes
PARTS = {
    "compatibility": 0.1,
    "bottleneck": 0.1,
    "cohorts": 0.3,
    "surface": 0.15,
    "precision": 0.15,
    "whole traffic": 0.2,
}


class Backend(Protocol):
    """Makes servers, all with the plan's memory limit."""

    def server(self, variant: Variant) -> Server:
        """Return a server that gives every request to one variant."""
        ...

    def routed(self, routes: Mapping[str, Variant]) -> Server:
        """Return a server that routes by cohort."""
        ...

    def operations(self, server: Server, canary: Job, *, drill: bool) -> Operations:
        """Rehearse the fallback on a routed server, look for leaks and run the canary again."""
        ...


def check_energy(plan: RolloutPlan) -> None:
    """Refuse a plan that goes by energy where none can be read.

    Raises:
        UnsupportedError: As said.
    """
    targets = plan.decisions
    metrics = {x.metric for x in (targets.concurrency, targets.speculation, targets.outcome)}
    why_not = EnergyMeter().stop().why_not
    if "goodput_per_watt" in metrics and why_not is not None:
        raise UnsupportedError(f"goodput_per_watt on this machine: {why_not}")


class Rollouts:
    """Evaluates one plan.

    Args:
        subject: Model and text.
        stamp: The plan, fixed.
        backend: Makes servers.
        workload: Makes jobs.
        progress: Where to report.

    Attributes:
        records: One record per request of the whole replay, by routing, filled by :meth:`run`.
    """

    def __init__(
        self,
        subject: Subject,
        stamp: Stamp,
        backend: Backend,
        workload: Workload,
        progress: Progress | None = None,
    ) -> None:
        self._subject, self._stamp, self._plan = subject, stamp, stamp.plan
        self._backend, self._workload = backend, workload
        self._show = progress or Silent()
        self._seconds: dict[str, float] = {}
        self._servers = {v.name: backend.server(v) for v in stamp.plan.variants}
        self._histograms: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._tokens: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {}
        self.records: dict[str, list[Record]] = {}

    def run(self) -> Rollout:
        """Run every part and judge.

        Raises:
            UnsupportedError: A decision goes by energy, and there are no counters here.
        """
        plan, begun = self._plan, time.perf_counter()
        check_energy(plan)
        with self._part("compatibility", len(plan.candidates)):
            layers, agreements = maturity.numerics(self._subject, plan, self._show.tick)
        with self._part("bottleneck", len(plan.cohorts)):
            profiles = bottleneck.profile(self._subject, plan, self._show.tick)
        with self._part("cohorts", len(plan.cohorts) * plan.design.pairs):
            experiments = {c.name: self._cohort(c) for c in plan.cohorts}
            modes = tuple(self._mode(v, agreements) for v in plan.candidates)
            mature = maturity.Maturity(layers, agreements, modes, maturity.pinned(plan))
        with self._part("surface", len(plan.surface.batches) * len(plan.surface.prompts)):
            cells = concurrency.surface(
                plan, self._plain_servers(), self._workload.surface, self._show.tick
            )
        with self._part("precision", len(plan.cohorts) * len(plan.candidates)):
            qualities = tuple(q for c in plan.cohorts for q in self._quality(c))
        acceptances = self._acceptances(experiments)
        decisions: list[Decision] = [
            bottleneck.decide(plan, profiles),
            maturity.decide(plan, mature),
            concurrency.decide(plan, experiments),
            speculation.decide(plan, experiments, acceptances),
            precision.decide(plan, qualities),
        ]
        routed = gate.provisional(plan, decisions)
        whole = None
        if any(v.is_replay for v in routed.values()):
            with self._part("whole traffic", plan.design.pairs):
                whole = self._outcome(routed)
            decisions.append(outcome.decide(plan, routed, whole))
        else:
            decisions.append(outcome.skipped(plan))
        verdicts = gate.judge(plan, decisions, routed)
        self._seconds["in all"] = time.perf_counter() - begun
        return Rollout(
            schema_version=SCHEMA_VERSION,
            stamp=self._stamp,
            parameters=self._subject.parameters,
            verdicts=verdicts,
            decisions=tuple(decisions),
            profiles=profiles,
            maturity=mature,
            experiments=tuple(experiments.values()),
            surface=cells,
            acceptances=acceptances,
            qualities=qualities,
            outcome=whole,
            routing=gate.routing(
                plan, verdicts, self._stamp.plan_digest, self._stamp.manifest.created
            ),
            seconds=self._seconds,
            warnings=self._warnings(experiments.values()),
        )

    def _cohort(self, cohort: Cohort) -> Experiment:
        def keep(variant: str, number: int, run: Run) -> None:
            known = self._histograms[cohort.name, variant]
            known += [0] * (len(run.histogram) - len(known))
            for n, count in enumerate(run.histogram):
                known[n] += count
            if number == 0:
                of_cohort = self._tokens.setdefault(cohort.name, {})
                of_cohort[variant] = {s.id: s.tokens for s in run.served}

        (found,) = conduct(
            [cohort],
            self._servers,
            lambda number: self._workload.cohort(cohort, number),
            self._plan.design,
            metric=self._plan.decisions.concurrency.metric,
            prices=self._prices(),
            in_flight=places(cohort, cohort.requests),
            keep=keep,
            tick=lambda what: self._show.tick(f"{cohort.name}, {what}"),
        )
        return found

    def _mode(self, variant: Variant, agreements: Sequence[Agreement]) -> maturity.Mode:
        plan, tokens = self._plan, maturity.Tally()
        for cohort in plan.cohorts:
            served = self._tokens[cohort.name]
            tokens += maturity.tally(
                self._subject,
                variant,
                self._workload.cohort(cohort, 0),
                served[variant.name],
                served[plan.baseline.name],
                plan.margin("compatibility", cohort),
            )
        return maturity.mode(plan, variant, agreements, tokens)

    def _plain_servers(self) -> dict[str, Server]:
        """The variants without drafts: drafts depend on the text, a surface on lengths."""
        plan = self._plan
        names = [plan.baseline.name, *(v.name for v in plan.candidates if v.drafter is None)]
        return {name: self._servers[name] for name in names}

    def _acceptances(
        self, experiments: Mapping[str, Experiment]
    ) -> tuple[speculation.Acceptance, ...]:
        specs = [mixer.spec for mixer in find_mixers(self._subject.model)[0]]
        state_bytes = 4 * sum(spec.state_elements for spec in specs)
        return tuple(
            speculation.summarise(
                self._plan,
                experiments[c.name],
                v,
                self._histograms[c.name, v.name],
                state_bytes,
            )
            for c in self._plan.cohorts
            for v in self._plan.candidates
            if v.drafter is not None
        )

    def _quality(self, cohort: Cohort) -> Iterator[Quality]:
        plan, subject = self._plan, self._subject
        target, jobs = plan.decisions.precision, self._workload.graded(cohort)
        replies = {
            name: {s.id: s.tokens for s in serve(server, jobs, plan.hardware.max_batch).served}
            for name, server in self._servers.items()
        }
        spoken = {
            name: {i: subject.decode(list(tokens)) for i, tokens in mine.items()}
            for name, mine in replies.items()
        }
        base = plan.baseline.name
        rows = [(job.prompt, replies[base][job.id]) for job in jobs]
        length = cohort.prompt_tokens[1]
        hard = [
            (ids[: length // 4], ids[length // 4 :])
            for ids in quality.adversarial(subject, length, target.adversarial, plan.seed)
        ]
        stops = tuple(s for s in target.buckets if s < length + cohort.output_tokens[1])
        stops = (*stops, length + cohort.output_tokens[1])
        # drafts change no distribution
        same = {v.name: (v.pool, v.read) for v in plan.candidates}
        distinct = list({same[v.name]: v for v in plan.candidates}.values())
        served, tough = (
            {same[name]: moved for name, moved in found.items()}
            for found in (
                quality.drifts(subject.model, r, plan.baseline, distinct) for r in (rows, hard)
            )
        )
        level, seed = plan.design.confidence, plan.seed
        for variant in plan.candidates:
            mine, adverse = served[same[variant.name]], tough[same[variant.name]]
            yield quality.Quality(
                cohort=cohort.name,
                variant=variant.name,
                buckets=quality.buckets(mine, stops, "replies", level, seed)
                + quality.buckets(adverse, stops, "adversarial", level, seed),
                p99_logprob=quality.tail([*mine, *adverse], level, seed),
                scores=quality.grade(
                    target.graders, jobs, spoken[variant.name], spoken[base], stops
                ),
            )
            self._show.tick(f"{cohort.name}, {variant.name}")

    def _outcome(self, routed: Mapping[str, Variant]) -> Outcome:
        plan, base = self._plan, self._plan.baseline.name
        servers = {base: self._servers[base], outcome.ROUTED: self._backend.routed(routed)}
        runs: dict[str, list[Run]] = {name: [] for name in servers}
        canary = self._workload.cohort(plan.cohorts[0], -1)[0]
        experiments = conduct(
            plan.cohorts,
            servers,
            self._workload.whole,
            plan.design,
            metric=plan.decisions.outcome.metric,
            prices={
                base: plan.cost.per_hour(changed=False),
                outcome.ROUTED: plan.cost.per_hour(changed=True),
            },
            in_flight=None,
            keep=lambda name, _, run: runs[name].append(run),
            tick=self._show.tick,
        )
        self.records = {
            name: [s.record for run in found for s in run.served] for name, found in runs.items()
        }
        costs = [outcome.flush_cost(name, found[-1].steps) for name, found in runs.items()]
        return outcome.Outcome(
            experiments=experiments,
            latencies=tuple(
                outcome.latencies(c.name, name, found)
                for c in plan.cohorts
                for name, found in runs.items()
            ),
            timelines=tuple(outcome.timeline(n, found[-1].steps) for n, found in runs.items()),
            flush_costs=tuple(c for c in costs if c is not None),
            operations=self._backend.operations(
                servers[outcome.ROUTED], canary, drill=plan.decisions.outcome.drill
            ),
            energy=outcome.energy_source(runs[outcome.ROUTED]),
        )

    def _prices(self) -> dict[str, float]:
        return {v.name: self._plan.cost.per_hour(changed=v.is_replay) for v in self._plan.variants}

    @contextmanager
    def _part(self, name: str, steps: int) -> Iterator[None]:
        self._show.start(name, steps)
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start
        self._show.finish(name, self._seconds[name])

    def _warnings(self, experiments: Iterable[Experiment]) -> tuple[str, ...]:
        found = []
        if self._stamp.attempt > 1:
            found.append(
                f"This plan has been run {self._stamp.attempt} times in this folder. Among many "
                "runs some pass by chance; the first one counts most."
            )
        found += [
            f"Cohort {e.cohort}: the pilot's spread asks for {e.wanted} pairs to see "
            f"{self._plan.design.effect:.0%}; {e.rounds} were run (design.max_pairs). Effects of "
            "that size may go unseen."
            for e in experiments
            if e.wanted > e.rounds
        ]
        if self._workload.outside:
            found.append(
                f"{self._workload.outside} requests of the trace belong to no cohort; they were "
                "served on the standard path."
            )
        return tuple(found)
