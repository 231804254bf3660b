"""A server that does no work, to measure the client against: tokens at once or at a fixed pace.

    python -m replayssm.traffic.null_server --port 0

prints its port on the first line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

LARGEST_BODY = 1 << 26
TOKEN = "x "
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


@dataclass(frozen=True, slots=True)
class NullOptions:
    """How the server answers.

    Attributes:
        first_s: Seconds until the first token.
        interval_s: Seconds between chunks.
        chunk: Tokens of a chunk.
    """

    first_s: float = 0.0
    interval_s: float = 0.0
    chunk: int = 1


def application(options: NullOptions = NullOptions()) -> web.Application:
    """Return the server's application."""

    async def completions(request: web.Request) -> web.StreamResponse:
        return await _reply(request, options, is_chat=False)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await _reply(request, options, is_chat=True)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "null", "object": "model"}]})

    app = web.Application(client_max_size=LARGEST_BODY)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    return app


async def _reply(
    request: web.Request, options: NullOptions, *, is_chat: bool
) -> web.StreamResponse:
    asked = await request.json()
    reply = web.StreamResponse(headers=HEADERS)
    # a client may hang up, as traces with cancellations make it do
    with suppress(ConnectionResetError):
        await reply.prepare(request)
        await _stream(reply, asked, options, is_chat=is_chat)
    return reply


async def _stream(
    reply: web.StreamResponse, asked: dict[str, Any], options: NullOptions, *, is_chat: bool
) -> None:
    total = int(asked.get("max_tokens", 16))
    if options.first_s:
        await asyncio.sleep(options.first_s)
    done = 0
    while done < total:
        if done and options.interval_s:
            await asyncio.sleep(options.interval_s)
        count = min(options.chunk, total - done)
        done += count
        await reply.write(_event(count, "length" if done == total else None, is_chat=is_chat))
    usage = {"prompt_tokens": _prompt_tokens(asked), "completion_tokens": total}
    last = json.dumps({"choices": [], "usage": usage})
    await reply.write(f"data: {last}\n\ndata: [DONE]\n\n".encode())
    await reply.write_eof()


def _event(count: int, finish: str | None, *, is_chat: bool) -> bytes:
    body: dict[str, object] = {"delta": {"content": TOKEN * count}} if is_chat else {}
    choice = {
        "index": 0,
        **(body or {"text": TOKEN * count}),
        "token_ids": [0] * count,
        "finish_reason": finish,
    }
    return f"data: {json.dumps({'id': 'null', 'choices': [choice]})}\n\n".encode()


def _prompt_tokens(asked: dict[str, object]) -> int:
    prompt = asked.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    return len(str(prompt or asked.get("messages") or "").split())


async def serve(port: int, options: NullOptions) -> None:
    """Serve on the loopback interface until the task is cancelled; print the port."""
    runner = web.AppRunner(application(options), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        sys.stdout.write(f"{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """Run the server from the command line."""
    parser = argparse.ArgumentParser(description="A server that does no work.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--first-s", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument("--interval-s", type=float, default=0.0, help="seconds between chunks")
    parser.add_argument("--chunk", type=int, default=1, help="tokens of a chunk")
    given = parser.parse_args()
    asyncio.run(serve(given.port, NullOptions(given.first_s, given.interval_s, given.chunk)))


if __name__ == "__main__":
    main()
