"""``replayssm bench``: put the load of a trace on a server, and check the client itself."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli import bench_engine, load_output, load_progress, trace
from replayssm.cli import load_options as options
from replayssm.cli.output import ExitCode, make_folder, print_json
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from replayssm.traffic.energy import Energy
    from replayssm.traffic.http import Endpoint, HttpOptions
    from replayssm.traffic.prompts import Prompts
    from replayssm.traffic.run import Run, Settings, Watch
    from replayssm.traffic.trace import Trace

app = typer.Typer(name="bench", help="Load: serve, engine, client.", no_args_is_help=True)
app.command("engine")(bench_engine.engine)

LOCAL = ("127.0.0.1", "localhost", "::1")

BaseUrl = Annotated[str, typer.Option(help="Address of the server.")]
ModelName = Annotated[str, typer.Option(help="Name of the model that is asked for.")]
EndpointName = Annotated[str, typer.Option(help="completions or chat.")]
Vocabulary = Annotated[int, typer.Option(help="Prompt ids are drawn below this.")]
FirstId = Annotated[int, typer.Option(help="Smallest prompt id.")]
AsText = Annotated[bool, typer.Option("--text", help="Prompts as text; chat always has them so.")]
IgnoreEos = Annotated[bool, typer.Option(help="Ask for exactly the lengths of the trace.")]
SendCohort = Annotated[
    bool, typer.Option("--send-cohort", help="Tell the server the cohort of each request.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TimeoutS = Annotated[
    float | None, typer.Option(help="Seconds until a request fails.", show_default="waits")
]
Header = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE of a header, not recorded; once for each.", show_default=False),
]
ExtraBody = Annotated[str, typer.Option(help="JSON object added to every request.")]
ReadyS = Annotated[float, typer.Option(help="Seconds to wait for the server.")]

Rate = Annotated[float, typer.Option(help="Requests a second.")]
Duration = Annotated[float, typer.Option(help="Seconds.")]
IntervalMs = Annotated[float, typer.Option(min=0.0, help="Milliseconds between tokens.")]
LimitMs = Annotated[float, typer.Option(help="Schedule lag that 99 % must keep.")]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")]
Port = Annotated[int, typer.Option(min=0, help="Port; 0 takes a free one.")]


@app.command("serve")
def serve(
    path: trace.TracePath,
    base_url: BaseUrl = "http://127.0.0.1:8000",
    model: ModelName = "default",
    endpoint: EndpointName = "completions",
    goodput: options.Goodput = None,
    max_concurrency: options.MaxConcurrency = None,
    num_warmups: options.Warmups = 4,
    warmup_s: options.WarmupS = 0.0,
    drain_s: options.DrainS = None,
    vocabulary: Vocabulary = 256,
    first_id: FirstId = 0,
    as_text: AsText = False,
    ignore_eos: IgnoreEos = True,
    send_cohort: SendCohort = False,
    temperature: Temperature = 0.0,
    timeout_s: TimeoutS = None,
    header: Header = None,
    extra_body: ExtraBody = "{}",
    metadata: options.Metadata = None,
    label: options.Label = None,
    result_dir: options.ResultDir = Path("replayssm-bench"),
    ready_timeout_s: ReadyS = 60.0,
    seed: trace.Seed = 0,
    skip_bad: trace.SkipBad = False,
    as_json: trace.Json = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Drive an OpenAI-compatible server with a trace and record every request."""
    from replayssm.traffic import slo
    from replayssm.traffic.http import HttpOptions
    from replayssm.traffic.prompts import Prompts
    from replayssm.traffic.result import About
    from replayssm.traffic.run import Settings

    limits, way = slo.parse(goodput or []), _endpoint(endpoint)
    kept = options.pairs("--metadata", metadata)
    server = HttpOptions(
        base_url, model, way, options.pairs("--header", header), _object(extra_body), temperature,
        ignore_eos, timeout_s, send_cohort,
    )  # fmt: skip
    load, _ = trace.read(path, skip_bad=skip_bad, seed=seed)
    use_text = as_text or way == "chat"
    settings = Settings(num_warmups, warmup_s, max_concurrency, drain_s, use_text=use_text)
    prompts = Prompts(vocabulary, block_size=load.block_size, first_id=first_id, seed=seed)
    about = About(
        "openai-chat" if way == "chat" else "openai", model, label,
        _config(server, settings, prompts), kept, options.manifest(seed),
    )  # fmt: skip
    make_folder("--result-dir", result_dir)
    with load_progress.choose(quiet, len(load.requests)) as watch:
        ran, used = asyncio.run(_drive(load, server, prompts, settings, ready_timeout_s, watch))
    load_output.finish(ran, load, limits, used, about, result_dir, as_json=as_json)


@app.command("client")
def client(
    request_rate: Rate = 200.0,
    duration: Duration = 15.0,
    input_len: trace.InputLen = 512,
    output_len: trace.OutputLen = 64,
    interval_ms: IntervalMs = 10.0,
    limit_ms: LimitMs = 20.0,
    seed: trace.Seed = 0,
    as_json: trace.Json = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Measure the client itself against a server that does no work, in a process of its own."""
    from replayssm.traffic.self_check import Load, check

    load = Load(request_rate, duration, input_len, output_len, interval_ms, seed)
    with load_progress.choose(quiet, round(request_rate * duration)) as watch:
        found = check(load, watch)
    code = ExitCode.OK if found.passes(request_rate, limit_ms) else ExitCode.GATE_FAILED
    if found.lag_p99_ms is None:
        code = ExitCode.INCONCLUSIVE
    if as_json:
        print_json({"exit_code": int(code), **asdict(found)})
    else:
        load_output.show_check(found, limit_ms, passed=code is ExitCode.OK)
    raise typer.Exit(int(code))


@app.command("null-server")
def null_server(port: Port = 0, interval_ms: IntervalMs = 0.0, chunk: Chunk = 1) -> None:
    """Serve tokens without doing any work, on the loopback interface; prints the port."""
    from replayssm.traffic.null_server import NullOptions, serve

    try:
        asyncio.run(serve(port, NullOptions(interval_s=interval_ms / 1e3, chunk=chunk)))
    except KeyboardInterrupt:
        raise typer.Exit from None


async def _drive(
    load: Trace,
    options: HttpOptions,
    prompts: Prompts,
    settings: Settings,
    ready_timeout_s: float,
    watch: Watch,
) -> tuple[Run, Energy]:
    from replayssm.traffic.drive import drive
    from replayssm.traffic.energy import EnergyMeter
    from replayssm.traffic.http import HttpTarget

    target = HttpTarget(options)
    try:
        await target.wait_until_ready(ready_timeout_s)
        meter = EnergyMeter()
        run = await drive(load, target, prompts, settings, watch)
        return run, meter.stop()
    finally:
        await target.close()


def _endpoint(name: str) -> Endpoint:
    from replayssm.traffic.http import Endpoint

    if name not in list(Endpoint):
        raise ContractError("--endpoint", f"one of {', '.join(Endpoint)}", name)
    return Endpoint(name)


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ContractError("--extra-body", "a JSON object", text) from error
    if not isinstance(found, dict):
        raise ContractError("--extra-body", "a JSON object", text)
    return found


def _config(options: HttpOptions, settings: Settings, prompts: Prompts) -> dict[str, object]:
    """Return every setting of a run; of headers, which may hold keys, only the names."""
    from urllib.parse import urlsplit

    made = {**asdict(options), "headers": sorted(options.headers)}
    # a result is passed on, and names no host
    made["base_url"] = "local" if urlsplit(options.base_url).hostname in LOCAL else "remote"
    return {**made, **asdict(settings), **prompts.settings}
