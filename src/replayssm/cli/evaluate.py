"""``replayssm evaluate``: should state replay be on, for which traffic, at which precision?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import (
    JSON_OPTION,
    MODEL_HELP,
    ExitCode,
    console,
    make_folder,
    print_json,
    print_table,
    quiet_transformers,
    use_threads,
)
from replayssm.cli.rollout import evaluate_plan
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from replayssm.evaluate.plan import Plan
    from replayssm.evaluate.result import Result

ALL_MODELS = ("mamba2-tiny", "gdn-tiny", "kda-tiny")
DEFAULT_MODEL = "gdn-tiny"
MEANING = {
    ExitCode.OK: "some setting keeps every margin",
    ExitCode.GATE_FAILED: "no setting keeps every margin",
    ExitCode.INCONCLUSIVE: "no setting passes and some cannot be decided",
}


def evaluate(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP, show_default=DEFAULT_MODEL)] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All bundled models, formats, windows and lengths.")
    ] = False,
    margins: Annotated[
        Path | None, typer.Option(help="TOML file with a table \\[margins]; read before the run.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and result.json.")] = Path(
        "replayssm-report"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of texts, probes and inputs.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads.", show_default="all cores")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", help="TOML file with cohorts, variants, SLOs, prices and margins."),
    ] = None,
) -> None:
    """Evaluate state replay on a model and this machine, and write a report.

    Compares standard and replay arms in five sections: compatibility, bottleneck, window and batch,
    precision, speculation. Margins are fixed and hashed before the run.

    With --plan: six decisions for each cohort of a service's traffic, and a routing.json that the
    engine loads.
    """
    if plan_file is not None:
        _only_plan(
            model=model, full=full or None, margins=margins, seed=seed or None, threads=threads
        )
        make_folder("--out", out)
        raise typer.Exit(int(evaluate_plan(plan_file, out, as_json=as_json, quiet=quiet)))
    use_threads(threads)
    chosen = ALL_MODELS if full and model is None else (model or DEFAULT_MODEL,)
    plans = [_plan(name, full, margins, seed) for name in chosen]
    make_folder("--out", out)
    results = {}
    for i, (name, plan) in enumerate(zip(chosen, plans, strict=True), start=1):
        folder, label = out, ""
        if len(chosen) > 1:
            folder, label = out / plan.model, f"{plan.model} ({i} of {len(chosen)}), "
        results[plan.model] = _run(name, plan, folder, label, quiet=quiet)
        if not as_json:
            _print(results[plan.model], folder)
    raise typer.Exit(int(_finish(results, out, as_json=as_json)))


def _finish(results: dict[str, Result], out: Path, *, as_json: bool) -> ExitCode:
    """Write the overview of several models, say how it went and return the exit code."""
    if len(results) > 1:
        from replayssm.evaluate.report import write_overview

        write_overview(list(results.values()), out)
    code = _code(list(results.values()))
    if as_json:
        print_json(_summary(results, out, code))
    else:
        told = f"Exit code {int(code)}, for plain decode: {MEANING[code]}."
        if code is not ExitCode.OK:
            told += " Speculation is judged apart and may still pay."
        console().print(told, style="dim")
    return code


def _only_plan(**others: object) -> None:
    given = [f"--{name}" for name, value in others.items() if value is not None]
    if given:
        raise ContractError(
            given[0], "not to be given with --plan, which says it", "both", "change the plan"
        )


def _plan(model: str, full: bool, margins: Path | None, seed: int) -> Plan:
    from replayssm.evaluate import arms
    from replayssm.evaluate.plan import FULL_SCOPE, Margins, Plan, Scope, read_margins
    from replayssm.evaluate.subject import public_name

    return Plan(
        model=public_name(model),
        arms=arms.FULL if full else arms.DEFAULT,
        margins=Margins() if margins is None else read_margins(margins),
        scope=FULL_SCOPE if full else Scope(),
        seed=seed,
    )


def _run(name: str, plan: Plan, folder: Path, label: str, *, quiet: bool) -> Result:
    from replayssm.cli import progress
    from replayssm.evaluate import result as results
    from replayssm.evaluate.ahead import compiled_ahead
    from replayssm.evaluate.report import write
    from replayssm.evaluate.run import evaluate as run
    from replayssm.evaluate.subject import load

    quiet_transformers()
    subject = load(name)
    with progress.choose(quiet, label) as show, compiled_ahead(subject, plan) as ready:
        found = run(subject, plan, show, ready)
    folder.mkdir(parents=True, exist_ok=True)
    results.write(found, folder)
    write(found, folder)
    return found


def _print(result: Result, folder: Path) -> None:
    from replayssm.evaluate.report import advice, tables, words

    out = console()
    tone = {"good": "green", "bad": "red", "open": "yellow"}
    out.print()
    out.print(result.plan.model, style="bold")
    for line in advice.headlines(result):
        color = tone.get(tables.tone(line.verdict.value), "")
        out.print(f"{line.subject}: {line.verdict.value}", style=f"bold {color}")
        out.print(line.text)
    out.print()
    summary, routes = tables.summary(result), tables.routes(result)
    print_table(summary.columns, list(summary.rows))
    out.print()
    print_table(routes.columns, list(routes.rows))
    out.print()
    for warning in result.warnings:
        out.print(f"Note: {warning}", style="dim")
    spans = ", ".join(
        f"{name} {words.duration(s)}" for name, s in tables.section_seconds(result).items()
    )
    out.print(f"Time: {spans}", style="dim")
    out.print(f"Report: {folder / 'report.html'}")


def _code(results: list[Result]) -> ExitCode:
    from replayssm.evaluate.verdict import Verdict

    verdicts = {r.judgement.verdict for r in results}
    if Verdict.ENABLE in verdicts:
        return ExitCode.OK
    return ExitCode.INCONCLUSIVE if Verdict.OPEN in verdicts else ExitCode.GATE_FAILED


def _summary(results: dict[str, Result], out: Path, code: ExitCode) -> dict[str, object]:
    models = []
    for name, r in results.items():
        folder = out / name if len(results) > 1 else out
        models.append(
            {
                "model": name,
                "verdict": r.judgement.verdict.value,
                "headline": r.judgement.headline,
                "plan_digest": r.plan_digest,
                "arms": {
                    a.arm: {"precision": a.quality.value, "verdict": a.verdict and a.verdict.value}
                    for a in r.judgement.arms
                },
                "routes": [
                    {"first": t.first, "last": t.last, "serve_with": t.arm}
                    for t in r.judgement.routes
                ],
                "speculation": {
                    "verdict": r.speculation.verdict.value,
                    "advice": r.speculation.advice,
                },
                "seconds": round(r.seconds, 1),
                "report": str(folder / "report.html"),
                "result": str(folder / "result.json"),
            }
        )
    return {"schema_version": 1, "exit_code": int(code), "models": models}
