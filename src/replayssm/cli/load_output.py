"""Tables of a load run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from replayssm.cli.output import ExitCode, console, print_json, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from replayssm.traffic.energy import Energy
    from replayssm.traffic.result import About
    from replayssm.traffic.run import Run
    from replayssm.traffic.self_check import Check
    from replayssm.traffic.slo import Slo
    from replayssm.traffic.summary import Summary
    from replayssm.traffic.trace import Trace
    from replayssm.traffic.use import Use


def finish(
    run: Run,
    load: Trace,
    limits: tuple[Slo, ...],
    energy: Energy,
    about: About,
    folder: Path,
    *,
    as_json: bool,
) -> None:
    """Summarise a run, write its files, print it, and end the command with its exit code."""
    from replayssm.evaluate import load_run
    from replayssm.evaluate.report import write_load
    from replayssm.traffic import result
    from replayssm.traffic.summary import summarise

    summary = summarise(run.records, limits, run.samples)
    document = result.document(run, summary, load, energy, about)
    result.write(folder, run, document)
    written = load_run.parse(result.dump(document), run.records, run.samples)
    report = write_load(written, folder)
    code = ExitCode.OK
    if not summary.total.requests["ok"]:
        code = ExitCode.FAILURE
    elif summary.schedule.degraded:
        code = ExitCode.INCONCLUSIVE
    if as_json:
        flat = {k: v for k, v in document.items() if not isinstance(v, dict)}
        files = {"result": str(folder / result.RESULT), "report": str(report)}
        print_json({"exit_code": int(code), **flat, **files})
    else:
        show(summary, energy)
        console().print(f"Results: {folder}")
        console().print(f"Report: {report}")
    raise typer.Exit(int(code))


def show(summary: Summary, energy: Energy) -> None:
    """Print what a run amounts to."""
    from replayssm.evaluate.report import load_tables as tables

    total, schedule, out = summary.total, summary.schedule, console()
    failed = sum(total.failures.values())
    style = "bold red" if failed else "bold"
    out.print(f"{total.requests['ok']:,} ok, {failed:,} failed, "
              f"{total.requests['cancelled']:,} cancelled, {total.requests['cut']:,} cut "
              f"in {summary.span_s:.1f} s", style=style)  # fmt: skip
    for kind, count in total.failures.items():
        out.print(f"  {count:,} x {kind}", style="red")
    for table in (tables.latencies(summary), tables.cohorts(summary)):
        out.print()
        print_table(table.columns, table.rows)
    out.print()
    rates = (schedule.offered_rate, schedule.sent_rate, schedule.completed_rate)
    shown = ", ".join(f"{name} {tables.tenths(rate)}" for name, rate in
                      zip(("offered", "sent", "completed"), rates, strict=True))  # fmt: skip
    out.print(f"requests a second: {shown}; at most {summary.most_running} in flight")
    if summary.limits:
        kept = ", ".join(
            f"{slo.metric} {slo.limit_ms:g} ms: {tables.share(total.slo.by_metric[slo.metric])}"
            for slo in summary.limits
        )
        everything = f"{tables.share(total.slo.share)} of {total.slo.judged:,}"
        out.print(f"limits kept: {kept}; all: {everything}")
    if summary.use is not None:
        out.print(_use(summary.use))
    if energy.joules is None:
        out.print(f"energy: not measured ({energy.why_not})", style="dim")
    else:
        out.print(f"energy: {energy.joules:,.0f} J by {energy.source}, {energy.devices} devices")
    for warning in summary.warnings:
        out.print(f"Note: {warning}", style="dim")


def show_check(check: Check, limit_ms: float, *, passed: bool) -> None:
    """Print what the client kept up."""
    from replayssm.evaluate.report.load_tables import tenths

    rows = [
        ("requests", f"{check.ok:,} ok of {check.requests:,}"),
        ("sent", f"{check.sent_rate:.1f} requests/s, {check.tokens_per_s:,.0f} tokens/s"),
        (
            "schedule lag",
            f"p50 {check.lag_p50_ms:.1f} ms, p99 {tenths(check.lag_p99_ms)} ms, "
            f"most {check.lag_max_ms:.1f} ms",
        ),
        ("TTFT p50", f"{check.ttft_p50_ms:.1f} ms"),
        ("ITL p50", f"{check.itl_excess_ms:+.2f} ms against the server's"),
    ]
    print_table(("client", ""), rows)
    if check.lag_p99_ms is None:
        told = f"undecided: a p99 needs 1,000 requests, not {check.requests}"
    else:
        told = f"{'pass' if passed else 'fail'}: the limit is a p99 of {limit_ms:g} ms"
    console().print(told, style="bold green" if passed else "bold red")


def _use(use: Use) -> str:
    """Return what a run used, in one line of what the target told."""
    from replayssm.evaluate.report.load_tables import tenths
    from replayssm.evaluate.report.words import mib, percent

    words = []
    if use.memory_per_sequence is not None:
        words.append(f"{mib(use.memory_per_sequence)} a sequence")
    if use.effective_batch is not None:
        words.append(f"{use.effective_batch:.1f} rows a decode forward")
    if use.flushes is not None and use.flushing_share is not None:
        cost = f"{tenths(use.flushing_ms)} ms, {tenths(use.plain_ms)} ms without"
        words.append(
            f"{use.flushes:,} flushes in {percent(use.flushing_share, 0)} of them ({cost})"
        )
    if use.acceptance_rate is not None:
        words.append(f"{percent(use.acceptance_rate, 0)} of the drafts accepted")
    if use.evictions is not None:
        words.append(f"{use.evictions:,} evictions")
    return f"used: {', '.join(words)}"
