"""The server speaks OpenAI's protocol, whole and streamed, and lets go of clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient, TestServer
from serving import PROMPTS, TEXTS, engine, plain

from replayssm.engine.serve import Server
from replayssm.models import tiny

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

GREEDY = {"temperature": 0, "max_tokens": 12}


def session(model: Any, check: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """Run ``check`` with a client of a server around an engine of its own."""

    async def run() -> Any:
        with engine(model, **options) as served:
            server = Server(served, "gdn-tiny", list, tiny.decode)
            async with TestClient(TestServer(server.application())) as client:
                return await check(client)

    return asyncio.run(run())


async def post(client: Any, path: str, **body: Any) -> tuple[int, Any]:
    async with client.post(f"/v1/{path}", json=body) as response:
        return response.status, await response.json()


async def stream(client: Any, path: str, **body: Any) -> list[Any]:
    async with client.post(f"/v1/{path}", json={**body, "stream": True}) as response:
        text = await response.text()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_completion_is_what_generate_emits(model: Any) -> None:
    async def check(client: Any) -> Any:
        by_text = await post(client, "completions", prompt=TEXTS[0], **GREEDY)
        by_ids = await post(client, "completions", prompt=list(PROMPTS[0]), **GREEDY)
        return by_text, by_ids

    expected = plain("gdn-tiny")[0][:12]
    for status, body in session(model, check):
        choice = body["choices"][0]
        assert status == 200
        assert (choice["token_ids"], choice["finish_reason"]) == (expected, "length")
        assert choice["text"] == tiny.decode(expected)
        assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_stream_adds_up_to_the_whole_reply(model: Any, path: str) -> None:
    is_chat = path.startswith("chat")
    asked = {"messages": [{"role": "user", "content": "x = 1"}]} if is_chat else {"prompt": "x ="}

    async def check(client: Any) -> Any:
        options = {"stream_options": {"include_usage": True}}
        whole = await post(client, path, **asked, **GREEDY)
        return whole[1], await stream(client, path, **asked, **GREEDY, **options)

    whole, chunks = session(model, check)
    *parts, last = chunks
    key = "delta" if is_chat else "text"
    pieces = [part["choices"][0][key] for part in parts]
    text = "".join(piece["content"] if is_chat else piece for piece in pieces)
    choice = whole["choices"][0]
    assert text == (choice["message"]["content"] if is_chat else choice["text"])
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": [1, "x"]},
        {"prompt": "x", "n": 2},
        {"prompt": "x", "best_of": 3},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "max_tokens": 10_000},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": [999]},
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_wrong_requests_are_refused_with_a_message(model: Any, body: Any, is_stream: bool) -> None:
    async def check(client: Any) -> Any:
        return await post(client, "completions", **{**body, "stream": is_stream})

    status, answer = session(model, check)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_client_that_leaves_cancels_its_request(model: Any) -> None:
    async def check(client: Any) -> Any:
        body = {"prompt": "x", "max_tokens": 200, "temperature": 0, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readany()
        for _ in range(2000):
            async with client.get("/metrics") as response:
                text = await response.text()
            if 'cancelled_total{model_name="gdn-tiny"} 1' in text:
                return text
        return text

    text = session(model, check)
    assert 'replayssm:cancelled_total{model_name="gdn-tiny"} 1' in text
    assert 'vllm:num_requests_running{model_name="gdn-tiny"} 0' in text


def test_health_and_models_answer(model: Any) -> None:
    async def check(client: Any) -> Any:
        async with client.get("/health") as health, client.get("/v1/models") as models:
            return health.status, await health.json(), await models.json()

    status, health, models = session(model, check)
    assert (status, health["status"]) == (200, "ok")
    assert [entry["id"] for entry in models["data"]] == ["gdn-tiny"]


def test_concurrent_requests_share_a_batch(model: Any) -> None:
    async def check(client: Any) -> Any:
        asked = [post(client, "completions", prompt=list(p), **GREEDY) for p in PROMPTS]
        return await asyncio.gather(*asked)

    found = [body["choices"][0]["token_ids"] for _, body in session(model, check)]
    assert found == [own[:12] for own in plain("gdn-tiny")]
