"""Tables of a rollout evaluation: one definition for the report and for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.evaluate.decisions.concurrency import break_even
from replayssm.evaluate.report import manifest as stamps
from replayssm.evaluate.report.tables import Table
from replayssm.evaluate.report.words import (
    NONE,
    limit,
    number,
    number_range,
    percent_range,
    ratio_range,
    size,
)

if TYPE_CHECKING:
    from replayssm.evaluate.decisions.experiment import Experiment
    from replayssm.evaluate.decisions.finding import Decision, Finding
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.result import Rollout
    from replayssm.evaluate.decisions.routing import RouteRow

RATIOS = (
    "throughput",
    "goodput",
    "goodput_per_dollar",
    "goodput_per_watt",
    "ttft",
    "tpot",
    "e2el",
    "memory_per_sequence",
)


def cohorts(result: Rollout) -> Table:
    """The gate's word on every cohort."""
    rows = []
    for v in result.verdicts:
        row = next(r for r in result.routing.cohorts if r.cohort == v.cohort)
        rows.append((v.cohort, v.status.value, route_words(row.route), v.reason))
    return Table(("cohort", "change", "route", "why"), tuple(rows))


def routes(result: Rollout) -> Table:
    """``routing.json`` as a table."""
    rows = tuple(
        (
            row.cohort,
            route_words(row.route),
            NONE if row.guard is None else f"{row.guard.tolerance:g} nats",
            ", then ".join(route_words(r) for r in row.fallback) or NONE,
        )
        for row in result.routing.cohorts
    )
    pool = result.routing.pool
    made = "" if pool is None else f"Pool: state {pool.state.value}, window {pool.window}. "
    notes = f"{made}Guard: largest |delta logprob| of a served token in sampled requests."
    return Table(("cohort", "route", "guard", "fallback"), rows, notes)


def route_words(route: RouteRow) -> str:
    """Return a route in words."""
    if route.path == "standard":
        return "standard"
    drafts = f", {route.draft_tokens} drafts ({route.drafter})" if route.drafter else ""
    return f"replay, {route.depth.value} reads{drafts}"


def decision(found: Decision) -> Table:
    """Every finding of a decision."""
    rows = []
    for f in found.findings:
        more = "decided" if f.more == 0 else NONE if f.more is None else f"{f.more} {found.unit}"
        rows.append(
            (
                f.cohort,
                f.variant,
                f.status.value,
                "yes" if f.required else "no",
                _value(f),
                limit(f.margin),
                more,
                f.reason,
            )
        )
    columns = (
        "cohort",
        "variant",
        "status",
        "required",
        found_metric(found),
        "margin",
        "more",
        "why",
    )
    notes = f"More: {found.unit} that would decide, were the number as measured, besides those run."
    return Table(columns, tuple(rows), notes)


def found_metric(found: Decision) -> str:
    """Return the primary metric of a decision in words."""
    names = {f.metric for f in found.findings}
    return " / ".join(sorted(names)).replace("_", " ") or "number"


def _value(f: Finding) -> str:
    e = f.estimate
    if e is None:
        return NONE
    told = number_range(e, 3)
    if f.bootstrap is not None:
        low, high = f.bootstrap
        told += f"; bootstrap {number(low)} to {number(high)}"
    return f"{told}, n = {e.n}"


def checks(result: Rollout) -> Table:
    """Every other number that had to hold."""
    rows = [
        (d.name, f.cohort, f.variant, c.name, c.status.value, limit(c.margin), c.note)
        for d in result.decisions
        for f in d.findings
        for c in f.checks
    ]
    columns = ("decision", "cohort", "variant", "check", "status", "limit", "note")
    return Table(columns, tuple(rows))


def matrix(result: Rollout) -> Table:
    """Engine x version x model x mode."""
    rows = []
    for m in result.maturity.modes:
        t = m.tokens
        rows.append(
            (
                m.engine,
                m.model,
                m.variant,
                "yes" if m.promises else "no",
                NONE if m.logit_error is None else number(m.logit_error, 2),
                f"{t.same} of {t.compared}",
                f"{t.ties} ties, {t.faults} faults" if m.promises else NONE,
            )
        )
    columns = (
        "engine",
        "model",
        "mode",
        "promises fp32 results",
        "largest logit error",
        "same tokens as the baseline",
        "differences",
    )
    notes = (
        "Logit error: over the logits' standard deviation, step by step against transformers. A "
        "difference of tokens is a tie when, teacher-forced, the logits agree within the margin "
        "and the best two tokens are nearer than that; else a fault."
    )
    return Table(columns, tuple(rows), notes)


def layers(result: Rollout) -> Table:
    """Recurrent layers."""
    rows = tuple(
        (line.kind, str(len(line.layers)), "yes" if line.qualifies else "no", line.note)
        for line in result.maturity.layers
    )
    return Table(("layer", "number", "qualifies", "geometry, or why not"), rows)


def pins(result: Rollout) -> Table:
    """Pinned versions."""
    rows = tuple(
        (name, wanted, got, "pass" if wanted == got else "fail")
        for name, (wanted, got) in result.maturity.pins.items()
    )
    return Table(("package", "pinned", "installed", "status"), rows)


def ratios(result: Rollout) -> Table:
    """Every metric of every variant under its cohort's own load."""
    rows = []
    for experiment in result.experiments:
        for variant in result.plan.candidates:
            found = [ratio_of(experiment, variant.name, metric) for metric in RATIOS]
            rows.append((experiment.cohort, variant.name, str(experiment.rounds), *found))
    columns = ("cohort", "variant", "pairs", *(m.replace("_", " ") for m in RATIOS))
    notes = (
        "Ratio to the baseline, turned so that above 1 is better, with its t interval. Fixed cost "
        "of the change included in goodput per dollar. No goodput per watt without energy counters."
    )
    return Table(columns, tuple(rows), notes)


def ratio_of(experiment: Experiment, variant: str, metric: str) -> str:
    """Return a variant's ratio to the baseline with its interval, where there is one."""
    values = experiment.values(variant, metric)
    if any(not v > 0 for v in values):
        return NONE
    return ratio_range(experiment.compare(variant, metric).ratio)


def surface(result: Rollout) -> Table:
    """The speed-up surface with break-even and batch 1."""
    batches = sorted({c.batch for c in result.surface})
    rows = []
    for variant in dict.fromkeys(c.variant for c in result.surface):
        for prompt in sorted({c.prompt for c in result.surface}):
            row = {
                c.batch: c.ratio
                for c in result.surface
                if (c.variant, c.prompt) == (variant, prompt)
            }
            at = break_even(result.surface, variant, prompt)
            rows.append(
                (
                    variant,
                    str(prompt),
                    *(ratio_range(row.get(b)) for b in batches),
                    "none" if at is None else f"batch {at}",
                )
            )
    columns = ("variant", "prompt", *(f"batch {b}" for b in batches), "break-even")
    notes = (
        "Tokens per second against the baseline. Break-even: the least batch from which the whole "
        "interval lies above 1."
    )
    return Table(columns, tuple(rows), notes)


def acceptances(result: Rollout) -> Table:
    """What drafts did."""
    rows = tuple(
        (
            a.cohort,
            a.variant,
            percent_range(a.rate, 0),
            NONE if a.length is None else f"{a.length:.2f}",
            str(sum(a.histogram)),
            size(a.snapshot_bytes),
            f"{a.preemptions} (baseline {a.baseline_preemptions})",
        )
        for a in result.acceptances
    )
    columns = (
        "cohort",
        "variant",
        "accepted",
        "kept per verify",
        "verifies",
        "snapshots avoided",
        "evictions",
    )
    return Table(columns, rows)


def buckets(result: Rollout) -> Table:
    """Distributions by length."""
    rows = [
        (
            q.cohort,
            q.variant,
            b.source,
            str(b.stop),
            str(b.requests),
            number_range(b.mean_kl),
            number_range(b.p99_logprob),
        )
        for q in result.qualities
        for b in q.buckets
    ]
    columns = ("cohort", "variant", "source", "to tokens", "requests", "mean KL", "p99 |dlogprob|")
    return Table(columns, tuple(rows), "No 99th percentile under 1,000 tokens.")


def scores(result: Rollout) -> Table:
    """Graders: one row a cohort and rule, one column a variant."""
    names = [v.name for v in result.plan.candidates]
    found = {(q.cohort, s.grader, q.variant): s for q in result.qualities for s in q.scores}
    rows = []
    for cohort, grader in dict.fromkeys((c, g) for c, g, _ in found):
        mine = [found[cohort, grader, name] for name in names]
        if not mine[0].graded:
            continue
        cells = [f"{s.variant}, drop {percent_range(s.drop, 0)}" for s in mine]
        rows.append((cohort, grader, str(mine[0].graded), str(mine[0].baseline), *cells))
    notes = (
        "Replies that pass. Drop: share of replies lost, in pairs (Tango's interval). Rules that "
        "apply to no reply of a cohort are left out."
    )
    return Table(("cohort", "grader", "graded", "baseline", *names), tuple(rows), notes)


def scores_by_length(result: Rollout) -> Table:
    """Graders by length of prompt and reply."""
    rows = [
        (q.cohort, q.variant, s.grader, str(x.stop), str(x.graded), str(x.baseline), str(x.variant))
        for q in result.qualities
        for s in q.scores
        for x in s.lengths
    ]
    columns = ("cohort", "variant", "grader", "to tokens", "graded", "baseline", "variant")
    return Table(columns, tuple(rows))


def planned_cohorts(plan: RolloutPlan) -> Table:
    """The cohorts of the plan."""
    rows = tuple(
        (
            c.name,
            c.mode,
            c.arrival + (f", {c.concurrency} in flight" if c.arrival == "closed" else ""),
            f"{c.prompt_tokens[0]} to {c.prompt_tokens[1]}",
            f"{c.output_tokens[0]} to {c.output_tokens[1]}",
            ", ".join(
                f"{name.removesuffix('_ms').upper()} {value:g} ms"
                for name, value in c.slo.model_dump().items()
                if value is not None
            )
            or NONE,
        )
        for c in plan.cohorts
    )
    return Table(("cohort", "mode", "arrival", "prompt tokens", "output tokens", "SLO"), rows)


def planned_variants(plan: RolloutPlan) -> Table:
    """The variants of the plan."""
    rows = tuple(
        (
            v.name,
            v.path,
            v.state.value,
            str(v.window) if v.is_replay else NONE,
            v.read.value,
            f"{v.draft_tokens} by {v.drafter}" if v.drafter else NONE,
        )
        for v in plan.variants
    )
    return Table(("variant", "path", "state", "window", "reads", "drafts"), rows)


def manifest(result: Rollout) -> Table:
    """What ran where."""
    m, stamp = result.stamp.manifest, result.stamp
    rows = [
        *stamps.command(m),
        ("plan", f"{result.plan.name}, sha256 {stamp.plan_digest}, run {stamp.attempt}"),
        ("model", f"{result.plan.model}, {result.parameters / 1e6:.1f} M parameters"),
        *stamps.machine(m),
        ("memory limit of every variant", f"{result.plan.hardware.memory_mib:g} MiB"),
        *stamps.software(m),
        ("time", ", ".join(f"{name} {s:.0f} s" for name, s in result.seconds.items())),
    ]
    return Table(("what", "value"), tuple(rows))
