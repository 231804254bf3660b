"""The HTTP target against a small server on the loopback interface that misbehaves on request."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from replayssm.errors import ContractError, UnsupportedError
from replayssm.traffic import synth
from replayssm.traffic.drive import drive
from replayssm.traffic.http import Endpoint, HttpOptions, HttpTarget
from replayssm.traffic.null_server import NullOptions, application
from replayssm.traffic.prometheus import parse
from replayssm.traffic.prompts import Prompts
from replayssm.traffic.record import Status
from replayssm.traffic.run import Settings
from replayssm.traffic.target import Call, SendError

IDS = Call("r0", (1, 2, 3), None, 4, "default")
TEXT = Call("r0", None, "one two three", 4, "default")


def token(text="x", finish=None, **rest):
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish, **rest}]})}\n\n"


class Server:
    """Answers every request with the parts it was given, each written on its own."""

    def __init__(self, *parts, status=200, app=None):
        self.parts, self.status, self.asked, self.hung_up = parts, status, [], asyncio.Event()
        self.app = app or web.Application()
        if app is None:
            self.app.router.add_post("/v1/completions", self.answer)
            self.app.router.add_post("/v1/chat/completions", self.answer)

    async def answer(self, request):
        self.asked.append((request.path, await request.json(), dict(request.headers)))
        if self.status != 200:
            return web.Response(status=self.status, text="\n".join(self.parts))
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            for part in self.parts:
                if part is asyncio.Event:
                    await asyncio.Event().wait()
                elif part is ConnectionError:
                    request.transport.abort()
                    return reply
                else:
                    await reply.write(part if isinstance(part, bytes) else part.encode())
                    await asyncio.sleep(0)
            await reply.write_eof()
        except (ConnectionResetError, asyncio.CancelledError):
            self.hung_up.set()
        return reply

    async def __aenter__(self):
        self.runner = web.AppRunner(self.app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


async def ask(server, call=IDS, **options):
    """Return the outcome of one call and the counts that came."""
    counts = []
    target = HttpTarget(HttpOptions(server.url, "m", **options))
    try:
        target.prepare(call)
        return await target.send(call, lambda count, at: counts.append(count)), counts
    finally:
        await target.close()


def send(*parts, status=200, call=IDS, **options):
    async def main():
        async with Server(*parts, status=status) as server:
            return (*await ask(server, call, **options), server)

    return asyncio.run(main())


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'


def test_tokens_are_counted_and_the_reply_ends_with_done():
    outcome, counts, _ = send(token(), token(finish="length"), USAGE, "data: [DONE]\n\n", token())
    assert (sum(counts), counts[0]) == (2, 0)
    assert (outcome.finish_reason, outcome.input_tokens, outcome.output_tokens) == ("length", 3, 2)


def test_any_cut_of_the_bytes_gives_the_same_tokens():
    stream = "".join(
        (": ping\n\n", token("é"), token("漢"), token("x", "stop"), "data: [DONE]\n\n")
    )
    pieces = [bytes([b]) for b in stream.encode()]
    outcome, counts, _ = send(*pieces)
    assert sum(counts) == 3
    assert outcome.finish_reason == "stop"


def test_a_finish_without_done_is_an_end():
    assert send(token(), token(finish="stop"))[0].finish_reason == "stop"


FAULTS = {
    "status": (("no", "room"), {"status": 503}, "http 503: no room"),
    "mid-stream": ((token(), 'data: {"error": {"message": "oom"}}\n\n'), {}, "stream error: oom"),
    "short": ((token(),), {}, "truncated: the stream ended"),
    "broken off": ((token(), ConnectionError), {}, "truncated: the stream broke off"),
    "no json": (("data: <html>\n\n",), {}, "protocol: an event is not JSON"),
    "no text": ((b"data: \xff\n\n",), {}, "protocol: the stream is not UTF-8"),
    "slow": ((token(), asyncio.Event), {"timeout_s": 0.2}, "timeout: 0.2 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_request_and_says_which(fault):
    parts, options, told = FAULTS[fault]
    with pytest.raises(SendError) as caught:
        send(*parts, **options)
    assert str(caught.value).startswith(told)
    assert caught.value.kind == told.partition(":")[0]


def test_no_server_is_a_failed_connection():
    async def main():
        async with Server() as server:
            pass
        return await ask(server)

    with pytest.raises(SendError) as caught:
        asyncio.run(main())
    assert caught.value.kind == "connect"


def test_a_cancelled_call_closes_the_connection():
    async def main():
        async with Server(token(), asyncio.Event) as server:
            target = HttpTarget(HttpOptions(server.url, "m"))
            came = asyncio.Event()
            sending = asyncio.ensure_future(target.send(IDS, lambda n, at: n and came.set()))
            await came.wait()
            sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled()
            await asyncio.wait_for(server.hung_up.wait(), 5)
            await target.close()

    asyncio.run(main())


def test_completions_send_ids_and_what_was_asked_for():
    options = {"headers": {"X-Key": "k"}, "extra_body": {"top_k": 5}, "send_cohort": True}
    *_, server = send(token(finish="stop"), **options)
    ((path, body, headers),) = server.asked
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([1, 2, 3], 4, "m")
    assert (body["temperature"], body["ignore_eos"], body["top_k"]) == (0.0, True, 5)
    assert body["stream"] is body["stream_options"]["include_usage"] is True
    assert headers["X-Key"] == "k"
    assert body["cohort"] == "default"


def test_chat_sends_a_message_and_no_ids():
    *_, server = send(token(finish="stop"), call=TEXT, endpoint=Endpoint.CHAT, ignore_eos=False)
    ((path, body, _),) = server.asked
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "one two three"}]
    assert not {"ignore_eos", "cohort"} & set(body)
    with pytest.raises(ContractError, match="completions"):
        send(token(finish="stop"), endpoint=Endpoint.CHAT)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(tail):
    assert HttpOptions(f"http://host:1{tail}", "m").url == "http://host:1/v1/completions"


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(ContractError, match="base_url"):
        HttpOptions("host:1", "m")


def test_a_server_cannot_move_sequences():
    async def main():
        target = HttpTarget(HttpOptions("http://host", "m"))
        try:
            assert not target.can_move
            with pytest.raises(UnsupportedError):
                target.move("r0")
        finally:
            await target.close()

    asyncio.run(main())


def test_metrics_are_read_where_they_are_served_and_not_asked_for_again_where_not():
    async def metrics(_):
        return web.Response(text='# TYPE a counter\na{x="1"} 2\na{x="2"} 3\nb_bucket{le="1"} 9\n')

    async def main(app):
        async with Server(app=app) as server:
            target = HttpTarget(HttpOptions(server.url, "m"))
            found = [await target.counters() for _ in range(2)]
            await target.close()
            return found

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    assert asyncio.run(main(app)) == [{"a": 5.0}] * 2
    assert asyncio.run(main(web.Application())) == [{}, {}]


def test_prometheus_text_is_read_by_name():
    text = 'a_total{m="x{y}"} 1 1700000000\nb 2.5\nc{l="q"} NaN\nbad\nd x\nd 4\n'
    found = parse(text)
    assert (found["a_total"], found["b"]) == (1.0, 2.5)
    assert found["d"] == 4.0
    assert set(found) == {"a_total", "b", "c", "d"}


def test_readiness_is_waited_for_and_given_up():
    async def main():
        async with Server(app=application()) as server:
            target = HttpTarget(HttpOptions(server.url, "m"))
            await target.wait_until_ready(5)
            await target.close()
        target = HttpTarget(HttpOptions(server.url, "m"))
        try:
            with pytest.raises(UnsupportedError, match="not ready"):
                await target.wait_until_ready(0)
        finally:
            await target.close()

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("chunk", [1, 3])
def test_the_null_server_gives_every_request_its_tokens(endpoint, chunk):
    async def main():
        async with Server(app=application(NullOptions(chunk=chunk))) as server:
            target = HttpTarget(HttpOptions(server.url, "m", endpoint))
            load = synth.closed_loop(30, 5, synth.Lengths(6, 9, 0.5))
            settings = Settings(use_text=endpoint is Endpoint.CHAT, num_warmups=1)
            try:
                return load, await drive(load, target, Prompts(50, block_size=512), settings)
            finally:
                await target.close()

    load, run = asyncio.run(main())
    records = [r for r in run.records if not r.warmup]
    assert {r.status for r in records} == {Status.OK}
    assert [r.output_tokens for r in records] == [r.output_tokens for r in load.requests]
    assert all(len(r.token_times_s) == r.output_tokens for r in records)
    assert all(r.uncounted_tokens == 0 for r in records)
    if endpoint is Endpoint.COMPLETIONS:
        assert [r.input_tokens for r in records] == [r.prompt_tokens for r in load.requests]
