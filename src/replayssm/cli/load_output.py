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
    from replayssm.traffic.summary import Distribution, Group, Summary
    from replayssm.traffic.trace import Trace
    from replayssm.traffic.use import Use

NAMES = {
    "ttft": "TTFT",
    "ttft_scheduled": "TTFT from schedule",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "e2el_scheduled": "E2EL from schedule",
}


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
    from replayssm.traffic import result
    from replayssm.traffic.summary import summarise

    summary = summarise(run.records, limits, run.samples)
    document = result.document(run, summary, load, energy, about)
    result.write(folder, run, document)
    code = ExitCode.OK
    if not summary.total.requests["ok"]:
        code = ExitCode.FAILURE
    elif summary.schedule.degraded:
        code = ExitCode.INCONCLUSIVE
    if as_json:
        flat = {k: v for k, v in document.items() if not isinstance(v, dict)}
        print_json({"exit_code": int(code), **flat, "result": str(folder / result.RESULT)})
    else:
        show(summary, energy, folder)
    raise typer.Exit(int(code))


def show(summary: Summary, energy: Energy, folder: Path) -> None:
    """Print what a run amounts to."""
    total, schedule, out = summary.total, summary.schedule, console()
    failed = sum(total.failures.values())
    style = "bold red" if failed else "bold"
    out.print(f"{total.requests['ok']:,} ok, {failed:,} failed, "
              f"{total.requests['cancelled']:,} cancelled, {total.requests['cut']:,} cut "
              f"in {summary.span_s:.1f} s", style=style)  # fmt: skip
    for kind, count in total.failures.items():
        out.print(f"  {count:,} x {kind}", style="red")
    out.print()
    rows = [_row(NAMES[name], found) for name, found in total.latencies.items()]
    rows += [
        _row("schedule lag", schedule.lag),
        _row("of it the client's", schedule.client_lag),
    ]
    print_table(("ms", "mean", "p50", "p95", "p99", "most", "n"), rows)
    out.print()
    groups = {"all": total, **(summary.cohorts if len(summary.cohorts) > 1 else {})}
    columns = (
        "cohort",
        "ok",
        "requests/s",
        "tokens/s",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "goodput/s",
        "in SLO",
    )
    print_table(columns, [_cohort(name, group) for name, group in groups.items()])
    out.print()
    rates = (schedule.offered_rate, schedule.sent_rate, schedule.completed_rate)
    shown = ", ".join(f"{name} {_number(rate)}" for name, rate in
                      zip(("offered", "sent", "completed"), rates, strict=True))  # fmt: skip
    out.print(f"requests a second: {shown}; at most {summary.most_running} in flight")
    if summary.limits:
        kept = ", ".join(
            f"{slo.metric} {slo.limit_ms:g} ms: {_share(total.slo.by_metric[slo.metric])}"
            for slo in summary.limits
        )
        out.print(f"limits kept: {kept}; all: {_share(total.slo.share)} of {total.slo.judged:,}")
    if summary.use is not None:
        out.print(_use(summary.use))
    if energy.joules is None:
        out.print(f"energy: not measured ({energy.why_not})", style="dim")
    else:
        out.print(f"energy: {energy.joules:,.0f} J by {energy.source}, {energy.devices} devices")
    for warning in summary.warnings:
        out.print(f"Note: {warning}", style="dim")
    out.print(f"Results: {folder}")


def show_check(check: Check, limit_ms: float, *, passed: bool) -> None:
    """Print what the client kept up."""
    rows = [
        ("requests", f"{check.ok:,} ok of {check.requests:,}"),
        ("sent", f"{check.sent_rate:.1f} requests/s, {check.tokens_per_s:,.0f} tokens/s"),
        (
            "schedule lag",
            f"p50 {check.lag_p50_ms:.1f} ms, p99 {_number(check.lag_p99_ms)} ms, "
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


def _row(name: str, found: Distribution) -> tuple[str, ...]:
    values = (found.mean, found.p50, found.p95, found.p99, found.maximum)
    return (name, *(_number(value) for value in values), f"{found.n:,}")


def _cohort(name: str, group: Group) -> tuple[str, ...]:
    return (
        name,
        f"{group.requests['ok']:,}",
        f"{group.request_throughput:.2f}",
        f"{group.output_throughput:,.0f}",
        _number(group.latencies["ttft"].p50),
        _number(group.latencies["tpot"].p50),
        f"{group.slo.goodput:.2f}",
        _share(group.slo.share),
    )


def _use(use: Use) -> str:
    """Return what a run used, in one line of what the target told."""
    words = []
    if use.memory_per_sequence is not None:
        words.append(f"{use.memory_per_sequence / (1 << 20):.2f} MiB a sequence")
    if use.effective_batch is not None:
        words.append(f"{use.effective_batch:.1f} rows a decode forward")
    if use.flushes is not None and use.flushing_share is not None:
        cost = f"{_number(use.flushing_ms)} ms, {_number(use.plain_ms)} ms without"
        words.append(f"{use.flushes:,} flushes in {use.flushing_share:.0%} of them ({cost})")
    if use.acceptance_rate is not None:
        words.append(f"{use.acceptance_rate:.0%} of the drafts accepted")
    if use.evictions is not None:
        words.append(f"{use.evictions:,} evictions")
    return f"used: {', '.join(words)}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "—" if value is None else f"{value:.1%}"
