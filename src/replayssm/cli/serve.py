"""``replayssm serve``: an OpenAI-compatible server around the embedded engine."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import MODEL_HELP, console, print_json, quiet_transformers, use_threads
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from replayssm.engine.engine import Engine
    from replayssm.engine.routing import Routing
    from replayssm.evaluate.subject import Subject


def serve(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "gdn-tiny",
    routing: Annotated[
        Path | None, typer.Option(help="routing.json of an evaluation: how cohorts are served.")
    ] = None,
    state: Annotated[
        Format | None,
        typer.Option(help="State format of the replay path.", show_default="the routing's, or s32"),
    ] = None,
    read: Annotated[
        ReadDepth, typer.Option(help="Planes that a step reads, without a routing.")
    ] = ReadDepth.FULL,
    slots: Annotated[int, typer.Option(min=1, help="Sequences in memory at once.")] = 16,
    context: Annotated[int, typer.Option(min=2, help="Most tokens of one sequence.")] = 2048,
    shadow_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of the requests that get a shadow.")
    ] = 0.05,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads.", show_default="all cores")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where it listens as one JSON object.")
    ] = False,
) -> None:
    """Serve completions and chat over HTTP, with /metrics and /health."""
    use_threads(threads)
    quiet_transformers()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    from replayssm.engine.routing import Routing
    from replayssm.engine.serve import Server, run
    from replayssm.evaluate.subject import load

    rules = None if routing is None else Routing.load(routing)
    subject = load(model)

    def tell(taken: int) -> None:
        url = f"http://{host}:{taken}/v1"
        if as_json:
            print_json({"url": url, "model": subject.name})
        else:
            console().print(f"{subject.name} at {url}; Ctrl-C stops")

    with _engine(subject, rules, state, read, slots, context, shadow_share) as engine:

        def make() -> Server:
            return Server(engine, subject.name, subject.encode, subject.decode)

        with suppress(KeyboardInterrupt):
            asyncio.run(run(make, host, port, tell))


def _engine(
    subject: Subject,
    rules: Routing | None,
    state: Format | None,
    read: ReadDepth,
    slots: int,
    context: int,
    shadow_share: float,
) -> Engine:
    from replayssm.engine.engine import MAX_DRAFTS, Engine
    from replayssm.engine.guard import Guard
    from replayssm.engine.request import Limits, Route
    from replayssm.ring import RingSpec

    fixed = Route(depth=read)
    found = Format.S32 if rules is None or rules.state is None else rules.state
    return Engine(
        subject.model,
        Limits(slots=slots, context=context),
        state=found if state is None else state,
        ring=RingSpec(max_block=MAX_DRAFTS + 1) if rules is None else rules.ring,
        router=(lambda _: fixed) if rules is None else rules,
        guard=Guard(shadow_share, by_cohort=None if rules is None else rules.tolerances),
    )
