"""The client against a server that does no work: what it adds to a measurement."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import UnsupportedError
from replayssm.traffic import synth
from replayssm.traffic.drive import drive
from replayssm.traffic.http import HttpOptions, HttpTarget
from replayssm.traffic.prompts import Prompts
from replayssm.traffic.record import Status
from replayssm.traffic.run import Settings
from replayssm.traffic.summary import TAIL_MINIMUM, summarise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replayssm.traffic.run import Run, Watch
    from replayssm.traffic.trace import Trace

VOCABULARY = 32_000
WARMUPS = 5
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the client has to keep up.

    Attributes:
        rate: Requests a second, Poisson.
        seconds: Length of the run.
        prompt: Tokens of a prompt.
        output: Tokens of every reply.
        interval_ms: Milliseconds between tokens.
        seed: Seed of the arrivals.
    """

    rate: float = 200.0
    seconds: float = 15.0
    prompt: int = 512
    output: int = 64
    interval_ms: float = 10.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """What the client kept up.

    Attributes:
        requests: Requests sent; a p99 needs 1,000.
        ok: Requests that succeeded with as many tokens as asked for.
        sent_rate: Requests a second that were sent.
        tokens_per_s: Tokens a second that came.
        lag_p50_ms: Median schedule lag.
        lag_p99_ms: 99th percentile; None from fewer than 1,000 requests.
        lag_max_ms: Largest.
        ttft_p50_ms: Median TTFT, all of it overhead of the client and of the null server.
        itl_excess_ms: By how much the median gap between tokens is above the server's interval.
    """

    requests: int
    ok: int
    sent_rate: float
    tokens_per_s: float
    lag_p50_ms: float
    lag_p99_ms: float | None
    lag_max_ms: float
    ttft_p50_ms: float
    itl_excess_ms: float

    def passes(self, rate: float, limit_ms: float) -> bool:
        """Whether every request succeeded, at 99 % of the rate or more, with little lag."""
        is_complete = self.ok == self.requests and self.sent_rate >= 0.99 * rate
        return is_complete and self.lag_p99_ms is not None and self.lag_p99_ms < limit_ms


def check(load: Load, watch: Watch | None = None) -> Check:
    """Start a null server in a process of its own, put the load on it, and return what came.

    Raises:
        UnsupportedError: The server did not start.
    """
    count = max(1, round(load.rate * load.seconds))
    lengths = synth.Lengths(load.prompt, load.output)
    trace = synth.open_arrivals(count, load.rate, lengths, seed=load.seed)
    with null_server(load.interval_ms) as address:
        run = asyncio.run(_drive(address, trace, watch))
    return _judge(run, load)


@contextmanager
def null_server(interval_ms: float = 0.0) -> Iterator[str]:
    """Run a null server in another process and yield its address."""
    module = "replayssm.traffic.null_server"
    command = [sys.executable, "-m", module, "--interval-s", str(interval_ms / 1e3)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = server.stdout.readline().strip() if server.stdout else ""
            if not port.isdecimal():
                raise UnsupportedError("the null server did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(STOP_S)


async def _drive(address: str, trace: Trace, watch: Watch | None) -> Run:
    target = HttpTarget(HttpOptions(address, "null"))
    try:
        prompts = Prompts(VOCABULARY, block_size=trace.block_size)
        return await drive(trace, target, prompts, Settings(num_warmups=WARMUPS), watch)
    finally:
        await target.close()


def _judge(run: Run, load: Load) -> Check:
    summary = summarise(run.records)
    kept = [r for r in run.records if not r.warmup]
    lags = np.array([r.lag for r in kept]) * 1e3
    latencies = summary.total.latencies
    gap = latencies["itl"].p50
    return Check(
        requests=len(kept),
        ok=sum(r.status is Status.OK and r.output_tokens == load.output for r in kept),
        sent_rate=summary.schedule.sent_rate or 0.0,
        tokens_per_s=summary.total.output_throughput,
        lag_p50_ms=float(np.median(lags)),
        lag_p99_ms=float(np.quantile(lags, 0.99)) if len(kept) >= TAIL_MINIMUM else None,
        lag_max_ms=float(lags.max()),
        ttft_p50_ms=latencies["ttft"].p50 or 0.0,
        itl_excess_ms=(gap or 0.0) - load.interval_ms,
    )
