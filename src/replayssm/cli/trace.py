"""``replayssm trace``: look at traffic traces, convert them, make them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import JSON_OPTION, console, print_json, print_table
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.traffic.trace import Trace

app = typer.Typer(name="trace", help="Traffic traces: info, convert, synth.", no_args_is_help=True)

FORMATS = "azure, burstgpt, mooncake, sharegpt, replayssm"
PROFILES = "poisson, gamma, closed, offline, day-night"

TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file.")]
OutPath = Annotated[Path, typer.Argument(metavar="OUT", help="File to write, in our own JSONL.")]
Format = Annotated[
    str | None, typer.Option("--format", help=f"One of {FORMATS}.", show_default="by the file")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave malformed rows out and count them.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Counts the tokens of sharegpt's texts: 'bytes', or path or hub id of a tokenizer.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
Json = Annotated[bool, JSON_OPTION]

Start = Annotated[float, typer.Option(help="First second that is kept.")]
Duration = Annotated[float | None, typer.Option(help="Seconds kept.", show_default="to the end")]
Speedup = Annotated[float, typer.Option(help="2 is twice as fast: half the gaps.")]
First = Annotated[int | None, typer.Option(help="Keep the first so many.", show_default="all")]
MaxInput = Annotated[int | None, typer.Option(help="Cut longer prompts.", show_default="no")]
MaxOutput = Annotated[int | None, typer.Option(help="Cut longer outputs.", show_default="no")]
Jitter = Annotated[float, typer.Option(help="Delay arrivals by up to so many seconds, evenly.")]
NewRate = Annotated[
    float | None, typer.Option(help="New arrivals, so many a second.", show_default="no")
]
Burstiness = Annotated[
    float, typer.Option(help="Shape of gamma gaps: 1 is Poisson, less is burstier.")
]
Cancel = Annotated[float, typer.Option(help="Share of requests to hang up on.")]
Move = Annotated[float, typer.Option(help="Share to move to another pool in mid-decode.")]

ProfileName = Annotated[str, typer.Option(help=f"One of {PROFILES}.")]
Count = Annotated[int, typer.Option(help="Requests; of day-night, those by day.")]
Rate = Annotated[float, typer.Option(help="Requests a second; poisson, gamma.")]
Concurrency = Annotated[int, typer.Option(help="Requests in flight; closed.")]
Span = Annotated[float, typer.Option(help="Seconds from morning to morning; day-night.")]
Sessions = Annotated[int, typer.Option(help="Interactive sessions; day-night.")]
Turns = Annotated[int, typer.Option(help="Turns of each; day-night.")]
LongShare = Annotated[float, typer.Option(help="Share of long histories; day-night.")]
LongFactor = Annotated[int, typer.Option(help="How many times longer they are; day-night.")]
InputLen = Annotated[int, typer.Option(help="Tokens of a prompt.")]
OutputLen = Annotated[int, typer.Option(help="Tokens of an output.")]
RangeRatio = Annotated[float, typer.Option(help="Lengths vary evenly by this share, up and down.")]


@app.command("info")
def info(
    trace: TracePath,
    fmt: Format = None,
    skip_bad: SkipBad = False,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> None:
    """Say what a trace looks like: span, rate, burstiness, lengths, and what to beware of."""
    found, bad = read(trace, fmt, skip_bad=skip_bad, tokenizer=tokenizer)
    _show(found, bad, as_json=as_json)


@app.command("convert")
def convert(
    trace: TracePath,
    out: OutPath,
    fmt: Format = None,
    start: Start = 0.0,
    duration: Duration = None,
    speedup: Speedup = 1.0,
    num_prompts: First = None,
    max_input_len: MaxInput = None,
    max_output_len: MaxOutput = None,
    jitter: Jitter = 0.0,
    request_rate: NewRate = None,
    burstiness: Burstiness = 1.0,
    cancel: Cancel = 0.0,
    move: Move = 0.0,
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> None:
    """Convert a trace to our own JSONL; the header keeps where it came from and what was done.

    In this order: window, first requests, caps, new arrivals, speed-up, jitter, cancellations and
    moves.
    """
    from replayssm.traffic import convert as steps

    found, bad = read(trace, fmt, skip_bad=skip_bad, tokenizer=tokenizer, seed=seed)
    if start or duration is not None:
        found = steps.window(found, start, duration)
    if num_prompts is not None:
        found = steps.first(found, num_prompts)
    if max_input_len is not None or max_output_len is not None:
        found = steps.cap_lengths(found, max_input_len, max_output_len)
    if request_rate is not None:
        found = steps.arrive(found, request_rate, burstiness, seed)
    if speedup != 1:
        found = steps.speed_up(found, speedup)
    if jitter:
        found = steps.jitter(found, jitter, seed)
    if cancel or move:
        found = steps.interrupt(found, cancel=cancel, move=move, seed=seed)
    _write(found, out)
    _show(found, bad, as_json=as_json)


@app.command("synth")
def synth(
    out: OutPath,
    profile: ProfileName = "poisson",
    num_prompts: Count = 1000,
    request_rate: Rate = 10.0,
    burstiness: Burstiness = 0.25,
    max_concurrency: Concurrency = 16,
    duration: Span = 600.0,
    sessions: Sessions = 4,
    turns: Turns = 6,
    long_share: LongShare = 0.05,
    long_factor: LongFactor = 8,
    input_len: InputLen = 512,
    output_len: OutputLen = 128,
    random_range_ratio: RangeRatio = 0.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Make a trace: Poisson or gamma arrivals, a closed loop, a batch, or a day and a night."""
    from replayssm.traffic import synth as make

    lengths = make.Lengths(input_len, output_len, random_range_ratio)
    if profile == make.Profile.DAY_NIGHT:
        day = make.DayNight(
            duration, num_prompts, long_share, long_factor, sessions, turns, lengths
        )
        found = make.day_night(day, seed=seed)
    elif profile == make.Profile.CLOSED:
        found = make.closed_loop(num_prompts, max_concurrency, lengths, seed=seed)
    elif profile == make.Profile.OFFLINE:
        found = make.offline(num_prompts, lengths, seed=seed)
    elif profile in (make.Profile.POISSON, make.Profile.GAMMA):
        shape = burstiness if profile == make.Profile.GAMMA else 1.0
        found = make.open_arrivals(num_prompts, request_rate, lengths, burstiness=shape, seed=seed)
    else:
        raise ContractError("--profile", f"one of {PROFILES}", profile)
    _write(found, out)
    _show(found, [], as_json=as_json)


def read(
    path: Path,
    fmt: str | None = None,
    *,
    skip_bad: bool = False,
    tokenizer: str | None = None,
    seed: int = 0,
) -> tuple[Trace, list[str]]:
    """Read a trace; return it with the first few malformed rows that were left out.

    Raises:
        ContractError: The file or an option is wrong.
    """
    from replayssm.traffic.formats import TraceFormat, load

    if fmt is not None and fmt not in list(TraceFormat):
        raise ContractError("--format", f"one of {FORMATS}", fmt)
    chosen = None if fmt is None else TraceFormat(fmt)
    counter = None if tokenizer is None else _counter(tokenizer)
    return load(path, chosen, skip_bad=skip_bad, count_tokens=counter, seed=seed)


def _counter(tokenizer: str) -> Callable[[str], int]:
    if tokenizer == "bytes":
        return lambda text: len(text.encode())
    from transformers import AutoTokenizer

    from replayssm.cli.output import quiet_transformers

    quiet_transformers()
    try:
        found = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ContractError("--tokenizer", "bytes, a path or a hub id", first) from error
    return lambda text: len(found(text, add_special_tokens=False)["input_ids"])


def _write(trace: Trace, out: Path) -> None:
    from replayssm.traffic.formats import canonical

    try:
        canonical.write(trace, out)
    except OSError as error:
        expected = "a file that can be written"
        raise ContractError("OUT", expected, f"{out.name} ({error.strerror})") from error


def _show(trace: Trace, bad: list[str], *, as_json: bool) -> None:
    from replayssm.traffic.describe import describe

    found, origin = describe(trace), trace.provenance
    if as_json:
        print_json({**asdict(found), "provenance": asdict(origin), "bad_examples": bad})
        return
    out = console()
    out.print(f"{origin.source}: {origin.format}, {found.requests:,} requests")
    for step in origin.conversions:
        out.print(f"  {step}", style="dim")
    out.print()
    arrivals = "all at once" if found.rate is None else f"{found.rate:.2f} a second"
    burst = "" if found.gap_cv is None else f", gap CV {found.gap_cv:.1f} (Poisson 1)"
    if found.concurrency is not None:
        arrivals, burst = f"closed loop, {found.concurrency} in flight", ""
    out.print(f"arrivals  {arrivals}{burst}, peak {found.peak_rate} in a second")
    out.print(f"span      {found.span_s:,.1f} s")
    out.print(f"cohorts   {', '.join(f'{n} {c:,}' for n, c in found.cohorts.items())}")
    if found.sessions:
        out.print(f"sessions  {found.sessions:,}")
    if found.shared_blocks is not None:
        out.print(f"prefixes  {found.shared_blocks:.0%} of the blocks came before")
    if found.cancellations or found.moves:
        out.print(f"laid over {found.cancellations:,} cancellations, {found.moves:,} moves")
    out.print()
    rows = [
        (name, *(f"{v:,}" for v in (s.minimum, s.p50, s.p90, s.p99, s.maximum, s.total)))
        for name, s in (("prompt", found.prompt), ("output", found.output))
    ]
    print_table(("tokens", "least", "p50", "p90", "p99", "most", "all"), rows)
    notes = [*found.warnings]
    notes += [f"{count:,} rows left out: {why}" for why, count in origin.dropped.items()]
    if origin.bad_rows:
        notes.append(f"{origin.bad_rows:,} malformed rows left out")
    if notes:
        out.print()
    for note in (*notes, *bad):
        out.print(f"Note: {note}", style="dim")
