"""``replayssm serve``: an OpenAI-compatible server around the embedded engine."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Annotated

import typer

from replayssm.cli import engines as options
from replayssm.cli.output import MODEL_HELP, console, print_json, quiet_transformers, use_threads
from replayssm.types import ReadDepth


def serve(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "gdn-tiny",
    routing: options.RoutingFile = None,
    state: options.State = None,
    read: options.Read = ReadDepth.FULL,
    drafter: options.Drafter = None,
    draft_tokens: options.DraftTokens = 4,
    slots: options.Slots = 16,
    context: options.Context = 2048,
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
    from replayssm.engine.serve import Server, run
    from replayssm.evaluate.subject import load

    service = options.Service(routing, "replay", read, drafter, draft_tokens, state, slots, context)
    subject = load(model)

    def tell(taken: int) -> None:
        url = f"http://{host}:{taken}/v1"
        if as_json:
            print_json({"url": url, "model": subject.name})
        else:
            console().print(f"{subject.name} at {url}; Ctrl-C stops")

    with options.engines(subject, service, shadow_share=shadow_share) as (engine,):

        def make() -> Server:
            return Server(engine, subject.name, subject.encode, subject.decode)

        with suppress(KeyboardInterrupt):
            asyncio.run(run(make, host, port, tell))
