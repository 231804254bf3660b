"""An OpenAI-compatible server as a target: completions or chat, streamed."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import aiohttp

from replayssm.errors import ContractError, UnsupportedError
from replayssm.traffic.chunks import StreamReader
from replayssm.traffic.prometheus import parse
from replayssm.traffic.sse import DONE, EventDecoder
from replayssm.traffic.target import Outcome, SendError

if TYPE_CHECKING:
    from replayssm.traffic.target import Call, OnTokens

# prompts of many thousand tokens and bursts of tokens do not wait for a small buffer
READ_BUFFER = 1 << 20
SHOWN = 200


class Endpoint(StrEnum):
    """Which of the two ways to ask for text."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How requests are made.

    Attributes:
        base_url: Address of the server, without ``/v1``.
        model: Name of the model that is asked for.
        endpoint: Completions or chat.
        headers: Sent with every request.
        extra_body: Fields added to every request.
        temperature: 0 is greedy.
        ignore_eos: Ask for exactly as many tokens as the trace says (vLLM's extension).
        timeout_s: Seconds until a request fails; None waits.
        send_cohort: Tell the server the cohort of each request.
    """

    base_url: str
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, object] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float | None = None
    send_cohort: bool = False

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ContractError("base_url", "http://... or https://...", self.base_url)

    @property
    def root(self) -> str:
        """The address without a slash or ``/v1`` at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def url(self) -> str:
        """Where requests go."""
        path = "chat/completions" if self.endpoint is Endpoint.CHAT else "completions"
        return f"{self.root}/v1/{path}"


class HttpTarget:
    """Sends calls to a server. Use it inside one event loop and close it there.

    Args:
        options: How requests are made.
    """

    can_move = False

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._bodies: dict[str, bytes] = {}
        self._has_metrics = True
        self._now = asyncio.get_running_loop().time
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=options.timeout_s),
            headers={"Content-Type": "application/json", **options.headers},
            read_bufsize=READ_BUFFER,
        )

    def prepare(self, call: Call) -> None:
        """Encode the body of a request."""
        self._bodies[call.request_id] = self._encode(call)

    async def send(self, call: Call, on_tokens: OnTokens) -> Outcome:
        """Send a request and read its stream; a cancelled task closes the connection."""
        body = self._bodies.pop(call.request_id, None) or self._encode(call)
        try:
            async with self._session.post(self._options.url, data=body) as response:
                if response.status != 200:
                    told = " ".join((await response.text()).split())
                    raise SendError(f"http {response.status}", told[:SHOWN])
                on_tokens(0, self._now())
                return await self._read(response, on_tokens)
        except TimeoutError as error:
            raise SendError("timeout", f"{self._options.timeout_s:g} s") from error
        except aiohttp.ClientPayloadError as error:
            raise SendError("truncated", "the stream broke off") from error
        except aiohttp.ServerDisconnectedError as error:
            raise SendError("disconnected", "the server closed the connection") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _failed(error) from error

    async def _read(self, response: aiohttp.ClientResponse, on_tokens: OnTokens) -> Outcome:
        decoder, reader = EventDecoder(), StreamReader()
        async for received in response.content.iter_any():
            at, count = self._now(), 0
            try:
                events = decoder.feed(received)
            except UnicodeDecodeError as error:
                raise SendError("protocol", "the stream is not UTF-8") from error
            for event in events:
                if event == DONE:
                    on_tokens(count, at)
                    return reader.outcome()
                count += reader.read(event)
            if count:
                on_tokens(count, at)
        if not reader.is_finished:
            raise SendError("truncated", "the stream ended before the reply did")
        return reader.outcome()

    def move(self, request_id: str) -> None:
        """A server offers no way to move a sequence.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(f"{request_id}: an HTTP target cannot move sequences between pools")

    async def counters(self) -> dict[str, float]:
        """Return what ``/metrics`` says, labels summed; nothing where it is not served."""
        if not self._has_metrics:
            return {}
        try:
            async with self._session.get(f"{self._options.root}/metrics") as response:
                self._has_metrics = response.status == 200
                return parse(await response.text()) if self._has_metrics else {}
        except (aiohttp.ClientError, OSError):
            self._has_metrics = False
            return {}

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server answers.

        Raises:
            UnsupportedError: It did not within ``seconds``.
        """
        end = self._now() + seconds
        while True:
            try:
                async with self._session.get(f"{self._options.root}/v1/models") as response:
                    if response.status < 500:
                        return
                    told = f"HTTP {response.status}"
            except (aiohttp.ClientError, OSError) as error:
                told = str(error)
            if self._now() > end:
                raise UnsupportedError(f"{self._options.root}: not ready in {seconds:g} s ({told})")
            await asyncio.sleep(0.2)

    def _encode(self, call: Call) -> bytes:
        options = self._options
        fields: dict[str, object] = {
            "model": options.model,
            "max_tokens": call.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if options.endpoint is Endpoint.COMPLETIONS:
            fields["prompt"] = call.text if call.prompt_ids is None else call.prompt_ids
        elif call.text is None:
            raise ContractError("endpoint", "completions, for prompts of token ids", "chat")
        else:
            fields["messages"] = [{"role": "user", "content": call.text}]
        if options.ignore_eos:
            fields["ignore_eos"] = True
        if options.send_cohort:
            fields["cohort"] = call.cohort
        return json.dumps(fields | options.extra_body).encode()


def _failed(error: Exception) -> SendError:
    number = getattr(error, "errno", None)
    if number in (errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE):
        return SendError("client ports", f"no ports or files left on this side ({error})")
    kind = "connect" if isinstance(error, aiohttp.ClientConnectorError) else "connection"
    return SendError(kind, " ".join(str(error).split())[:SHOWN])
