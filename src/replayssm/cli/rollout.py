"""``replayssm evaluate --plan``: six decisions per cohort, and the routing they earn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.cli.output import (
    ExitCode,
    console,
    print_json,
    print_table,
    quiet_transformers,
    use_threads,
)

if TYPE_CHECKING:
    from pathlib import Path

    from replayssm.evaluate.checks import Status
    from replayssm.evaluate.decisions.plan import RolloutPlan
    from replayssm.evaluate.decisions.result import Rollout
    from replayssm.evaluate.manifest import Manifest
    from replayssm.evaluate.subject import Subject

MEANING = {
    ExitCode.OK: "some cohort earned a change",
    ExitCode.GATE_FAILED: "no cohort earned a change",
    ExitCode.INCONCLUSIVE: "no cohort earned a change, and some could not be decided",
}


def evaluate_plan(path: Path, out: Path, *, as_json: bool, quiet: bool) -> ExitCode:
    """Evaluate a plan, write everything into a folder that exists, and say how it went."""
    from replayssm.evaluate.decisions.gate import overall
    from replayssm.evaluate.decisions.plan import read_plan

    plan = read_plan(path)
    use_threads(plan.hardware.threads)
    result = _run(plan, path.parent, out, quiet=quiet)
    code = code_of_status(overall(result.verdicts))
    if as_json:
        print_json(_summary(result, out, code))
    else:
        _print(result, out, code)
    return code


def code_of_status(status: Status) -> ExitCode:
    """Return the exit code of a verdict."""
    from replayssm.evaluate.checks import Status

    codes = {
        Status.PASS: ExitCode.OK,
        Status.FAIL: ExitCode.GATE_FAILED,
        Status.OPEN: ExitCode.INCONCLUSIVE,
    }
    return codes[status]


def _run(plan: RolloutPlan, folder: Path, out: Path, *, quiet: bool) -> Rollout:
    from replayssm.cli import progress
    from replayssm.evaluate.decisions import result as results
    from replayssm.evaluate.decisions.embedded import Embedded
    from replayssm.evaluate.decisions.graders import find
    from replayssm.evaluate.decisions.routing import write_routing
    from replayssm.evaluate.decisions.run import PARTS, Rollouts
    from replayssm.evaluate.decisions.workload import read_workload
    from replayssm.evaluate.report import write_rollout
    from replayssm.evaluate.subject import load
    from replayssm.traffic.files import write_records

    quiet_transformers()
    find(plan.decisions.precision.graders)
    subject = load(plan.model)
    workload = read_workload(plan, folder, subject)
    stamp = results.stamp(plan, _manifest(plan, subject), out)
    with progress.choose(quiet, weights=PARTS) as show, Embedded(subject, plan) as backend:
        rollouts = Rollouts(subject, stamp, backend, workload, show)
        result = rollouts.run()
    results.write(result, out)
    for routing, records in rollouts.records.items():
        own = out / "requests" / routing
        own.mkdir(parents=True, exist_ok=True)
        write_records(records, own)
    write_routing(result.routing, out)
    write_rollout(result, out)
    return result


def _manifest(plan: RolloutPlan, subject: Subject) -> Manifest:
    from replayssm.evaluate.manifest import collect
    from replayssm.ops.dispatch import choose
    from replayssm.types import Impl

    device = subject.model.device
    choices = {"impl": choose(Impl.AUTO, device).value, "device": str(device)}
    return collect(seed=plan.seed, choices=choices)


def _print(result: Rollout, folder: Path, code: ExitCode) -> None:
    from replayssm.evaluate.report import rollout_tables, words

    out = console()
    out.print()
    out.print(f"{result.plan.name} on {result.plan.model}", style="bold")
    table = rollout_tables.cohorts(result)
    print_table(table.columns, list(table.rows))
    out.print()
    rows = [
        (d.name, *(_status(result, d.name, v.cohort, v.considered) for v in result.verdicts))
        for d in result.decisions
    ]
    print_table(("decision", *(v.cohort for v in result.verdicts)), rows)
    out.print()
    for warning in result.warnings:
        out.print(f"Note: {warning}", style="dim")
    spans = ", ".join(f"{name} {words.duration(s)}" for name, s in result.seconds.items())
    out.print(f"Time: {spans}", style="dim")
    out.print(f"Report: {folder / 'report.html'}")
    out.print(f"Routing: {folder / 'routing.json'}")
    out.print(f"Exit code {int(code)}: {MEANING[code]}.", style="dim")


def _status(result: Rollout, decision: str, cohort: str, variant: str) -> str:
    found = result.decision(decision).about(cohort, variant)
    if found is None:
        return "not reached"
    return found.status.value if found.required else f"{found.status.value} (not needed)"


def _summary(result: Rollout, folder: Path, code: ExitCode) -> dict[str, object]:
    return {
        "schema_version": 1,
        "exit_code": int(code),
        "plan": result.plan.name,
        "plan_digest": result.stamp.plan_digest,
        "cohorts": [
            {
                "cohort": v.cohort,
                "status": v.status.value,
                "variant": v.variant,
                "considered": v.considered,
                "decisions": {name: s.value for name, s in v.decisions.items()},
                "reason": v.reason,
                "more": v.more,
            }
            for v in result.verdicts
        ],
        "seconds": round(result.seconds["in all"], 1),
        "report": str(folder / "report.html"),
        "routing": str(folder / "routing.json"),
        "result": str(folder / "result.json"),
    }
