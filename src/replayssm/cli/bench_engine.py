"""``replayssm bench engine``: the load of a trace on the embedded engine, in this process."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli import engines as served
from replayssm.cli import load_options as options
from replayssm.cli import load_output, load_progress, trace
from replayssm.cli.output import MODEL_HELP, make_folder, quiet_transformers, use_threads
from replayssm.types import ReadDepth

if TYPE_CHECKING:
    from replayssm.engine.engine import Engine
    from replayssm.engine.request import Request
    from replayssm.evaluate.subject import Subject
    from replayssm.traffic.energy import Energy
    from replayssm.traffic.run import Run, Settings, Watch
    from replayssm.traffic.target import Call
    from replayssm.traffic.trace import Trace

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Engines = Annotated[int, typer.Option(min=1, help="Engines; with two, sequences can move.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads.", show_default="all cores")]


def engine(
    path: trace.TracePath,
    model: Model = "gdn-tiny",
    routing: served.RoutingFile = None,
    way: served.StatePath = "replay",
    state: served.State = None,
    read: served.Read = ReadDepth.FULL,
    drafter: served.Drafter = None,
    draft_tokens: served.DraftTokens = 4,
    slots: served.Slots = 16,
    context: served.Context = 2048,
    engines: Engines = 1,
    threads: Threads = None,
    goodput: options.Goodput = None,
    max_concurrency: options.MaxConcurrency = None,
    num_warmups: options.Warmups = 4,
    warmup_s: options.WarmupS = 0.0,
    drain_s: options.DrainS = None,
    metadata: options.Metadata = None,
    label: options.Label = None,
    result_dir: options.ResultDir = Path("replayssm-bench"),
    seed: trace.Seed = 0,
    skip_bad: trace.SkipBad = False,
    as_json: trace.Json = False,
    quiet: options.QuietFlag = False,
) -> None:
    """Drive the embedded engine with a trace, in this process, and record every request."""
    use_threads(threads)
    from replayssm.traffic import slo
    from replayssm.traffic.result import About
    from replayssm.traffic.run import Settings

    limits, kept = slo.parse(goodput or []), options.pairs("--metadata", metadata)
    load, _ = trace.read(path, skip_bad=skip_bad, seed=seed)
    settings = Settings(num_warmups, warmup_s, max_concurrency, drain_s)
    make_folder("--result-dir", result_dir)
    quiet_transformers()
    service = served.Service(routing, way, read, drafter, draft_tokens, state, slots, context)
    subject = _subject(model)
    config = {
        **asdict(service), "routing": routing and routing.name, "engines": engines,
        **asdict(settings),
    }  # fmt: skip
    about = About("replayssm", subject.name, label, config, kept, options.manifest(seed))
    with (
        load_progress.choose(quiet, len(load.requests)) as watch,
        served.engines(subject, service, engines) as made,
    ):
        ran, used = asyncio.run(_drive(load, made, subject, settings, seed, watch))
    load_output.finish(ran, load, limits, used, about, result_dir, as_json=as_json)


async def _drive(
    load: Trace,
    engines: list[Engine],
    subject: Subject,
    settings: Settings,
    seed: int,
    watch: Watch,
) -> tuple[Run, Energy]:
    from replayssm.engine.request import Request
    from replayssm.traffic.drive import drive
    from replayssm.traffic.embedded import EngineTarget
    from replayssm.traffic.energy import EnergyMeter
    from replayssm.traffic.prompts import Prompts

    def request(call: Call) -> Request:
        ids = subject.encode((call.text or "").encode()) if call.prompt_ids is None else ()
        prompt = tuple(ids) if call.prompt_ids is None else call.prompt_ids
        return Request(call.request_id, prompt, call.max_tokens, cohort=call.cohort)

    vocabulary = int(subject.model.config.vocab_size)
    prompts = Prompts(vocabulary, block_size=load.block_size, seed=seed)
    target = EngineTarget(engines, request)
    try:
        meter = EnergyMeter()
        run = await drive(load, target, prompts, settings, watch)
        return run, meter.stop()
    finally:
        await target.close()


def _subject(model: str) -> Subject:
    from replayssm.evaluate.subject import load

    return load(model)
