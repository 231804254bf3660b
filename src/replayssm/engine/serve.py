"""An OpenAI-compatible server around one engine: for tests, demonstrations and small loads."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from replayssm.engine import openai
from replayssm.engine.host import EngineHost
from replayssm.engine.metrics import CONTENT_TYPE, Metrics
from replayssm.engine.request import Request
from replayssm.errors import CapacityError, ReplayError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from replayssm.engine.engine import Engine
    from replayssm.engine.request import Event

    Encode = Callable[[bytes], list[int]]
    Decode = Callable[[list[int]], str]
    News = asyncio.Queue[list[Event] | ReplayError]

LARGEST_BODY = 1 << 26
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
GONE = ("cancelled", "moved", "failed")


class Server:
    """The handlers, and the engine behind them.

    Args:
        engine: Nobody else may use it from now on.
        model: Name that clients see.
        encode: Text to token ids.
        decode: Token ids to text.
    """

    def __init__(self, engine: Engine, model: str, encode: Encode, decode: Decode) -> None:
        self._engine, self._model = engine, model
        self._encode, self._decode = encode, decode
        self._names = (f"replay-{number}" for number in itertools.count())
        self._news: dict[str, News] = {}
        self._metrics = Metrics(model)
        self._loop = asyncio.get_running_loop()
        # from here on its thread alone touches the engine: in _submit, _cancel and the like
        self._host: EngineHost[Event] = EngineHost(engine, self._deliver)

    def application(self) -> web.Application:
        """Return the application; it stops the engine's thread when it is cleaned up."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_errors])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/health", self._health)
        app.on_cleanup.append(self._close)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError as error:
            return _refusal(400, f"the body is not JSON: {error}")
        asked = openai.read(body, self._encode, is_chat=is_chat)
        name = next(self._names)
        reply = openai.Reply(name, self._model, asked, self._decode)
        steps = self._serve(name, asked)
        try:
            if asked.is_stream:
                return await self._stream(request, steps, reply, asked)
            finish = ""
            async for tokens, reason in steps:
                reply.append(tokens)
                finish = reason or finish
            return web.json_response(reply.whole(finish))
        finally:
            await steps.aclose()

    async def _stream(
        self,
        request: web.Request,
        steps: AsyncIterator[tuple[list[int], str]],
        reply: openai.Reply,
        asked: openai.Asked,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        async for tokens, reason in steps:
            # prepared late, so that a request the engine refuses still gets its status
            if not response.prepared:
                await response.prepare(request)
            await response.write(_event(reply.chunk(tokens, reason or None)))
        if asked.wants_usage:
            await response.write(_event(reply.usage_chunk()))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _serve(self, name: str, asked: openai.Asked) -> AsyncGenerator[tuple[list[int], str]]:
        """Yield a request's tokens as they come, with the reason at its end.

        A caller that stops listening cancels the request.
        """
        news: News = asyncio.Queue()
        self._news[name] = news
        request = Request(
            name,
            asked.prompt,
            asked.max_tokens,
            cohort=asked.cohort,
            sampling=asked.sampling,
            stop_tokens=asked.stop_tokens,
        )
        self._host.do(lambda: self._submit(request))
        is_over = False
        try:
            while not is_over:
                events = await news.get()
                if isinstance(events, ReplayError):
                    is_over = True
                    raise events
                tokens = [event.token for event in events if event.token is not None]
                ends = [event for event in events if event.kind in ("finished", *GONE)]
                is_over = bool(ends)
                if ends and ends[0].kind in GONE:
                    raise UnsupportedError(f"the request {ends[0].kind}: {ends[0].reason}")
                if tokens or ends:
                    yield tokens, ends[0].reason if ends else ""
        finally:
            del self._news[name]
            if not is_over:
                self._host.do(lambda: self._cancel(name))

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
            self._metrics.submitted(request.id, self._engine.clock.now())
        except ReplayError as error:
            self._tell(request.id, error)

    def _cancel(self, name: str) -> None:
        if name in self._engine.live():
            self._engine.cancel(name)

    def _deliver(self, events: Sequence[Event]) -> None:
        self._metrics.record(events)
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for name, own in by_request.items():
            self._tell(name, own)

    def _tell(self, name: str, what: list[Event] | ReplayError) -> None:
        """Hand news over to the event loop, if their request is still listened to there."""

        def put() -> None:
            if name in self._news:
                self._news[name].put_nowait(what)

        self._loop.call_soon_threadsafe(put)

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"id": self._model, "object": "model", "owned_by": "replayssm"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        text: asyncio.Future[str] = self._loop.create_future()

        def render() -> None:
            shown = self._metrics.render(self._engine.stats())
            self._loop.call_soon_threadsafe(text.set_result, shown)

        self._host.do(render)
        return web.Response(body=(await text).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _: web.Request) -> web.Response:
        if self._host.is_alive:
            return web.json_response({"status": "ok", "model": self._model})
        return _refusal(503, f"the engine stopped: {self._host.failure!r}")

    async def _close(self, _: web.Application) -> None:
        await asyncio.to_thread(self._host.close)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    """Answer what is raised on purpose as OpenAI does."""
    try:
        response: web.StreamResponse = await handler(request)
    except CapacityError as error:
        return _refusal(503, str(error))
    except UnsupportedError as error:
        return _refusal(500, str(error))
    except ReplayError as error:
        return _refusal(400, str(error))
    return response


def _refusal(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "code": status}
    return web.json_response({"error": error}, status=status)


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


async def run(
    make_server: Callable[[], Server], host: str, port: int, tell: Callable[[int], None]
) -> None:
    """Serve until the task is cancelled.

    Args:
        make_server: Called inside the event loop.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        tell: Called with the port once requests are taken.
    """
    runner = web.AppRunner(make_server().application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        tell(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
