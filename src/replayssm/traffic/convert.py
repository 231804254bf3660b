"""Conversions of a trace: window, speed, caps, arrivals, jitter, and interruptions laid over it.

Each returns a new trace and notes what it did in the provenance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError
from replayssm.traffic.arrivals import gaps

if TYPE_CHECKING:
    from replayssm.traffic.trace import Trace, TraceRequest


def window(trace: Trace, start: float = 0.0, duration: float | None = None) -> Trace:
    """Keep arrivals in ``[start, start + duration)`` seconds; the window starts at 0."""
    if start < 0:
        raise ContractError("start", "0 or more seconds", start)
    if duration is not None and not duration > 0:
        raise ContractError("duration", "more than 0 seconds", duration)
    end = np.inf if duration is None else start + duration
    kept = [replace(r, at=r.at - start) for r in trace.requests if start <= r.at < end]
    until = "the end" if duration is None else f"{end:g} s"
    return _some(trace, kept, f"window from {start:g} s to {until}: {len(kept)} requests")


def speed_up(trace: Trace, factor: float) -> Trace:
    """Make arrivals ``factor`` times as fast: 2 halves every gap."""
    if not 0 < factor < np.inf:
        raise ContractError("speedup", "more than 0", factor)
    return trace.converted(
        (replace(r, at=r.at / factor) for r in trace.requests), f"{factor:g} times as fast"
    )


def cap_lengths(trace: Trace, max_input: int | None = None, max_output: int | None = None) -> Trace:
    """Cut prompts and outputs that are longer than a limit; a prompt keeps its beginning."""
    for name, limit in (("max_input", max_input), ("max_output", max_output)):
        if limit is not None and limit < 1:
            raise ContractError(name, "at least 1 token", limit)
    longest = max_input or max(r.prompt_tokens for r in trace.requests)
    most = max_output or max(r.output_tokens for r in trace.requests)
    cut = [_capped(r, longest, most, trace.block_size) for r in trace.requests]
    done = []
    if max_input is not None:
        done.append(
            f"{sum(r.prompt_tokens > longest for r in trace.requests)} prompts at {longest}"
        )
    if max_output is not None:
        done.append(f"{sum(r.output_tokens > most for r in trace.requests)} outputs at {most}")
    return trace.converted(cut, f"capped {' and '.join(done)}")


def _capped(request: TraceRequest, longest: int, most: int, block: int) -> TraceRequest:
    if request.text is not None and request.prompt_tokens > longest:
        expected = "prompts given by length or ids; a text cannot be cut at a token"
        raise ContractError("max_input", expected, f"a text of {request.prompt_tokens} tokens")
    tokens = min(request.prompt_tokens, longest)
    ids, blocks = request.prompt_ids, request.prefix_blocks
    return replace(
        request,
        prompt_tokens=tokens,
        output_tokens=min(request.output_tokens, most),
        prompt_ids=None if ids is None else ids[:tokens],
        prefix_blocks=None if blocks is None else blocks[: -(-tokens // block)],
    )


def first(trace: Trace, count: int) -> Trace:
    """Keep the first ``count`` requests."""
    if count < 1:
        raise ContractError("count", "at least 1 request", count)
    kept = trace.requests[:count]
    return trace.converted(kept, f"first {len(kept)} of {len(trace.requests)} requests")


def jitter(trace: Trace, width: float, seed: int) -> Trace:
    """Delay each arrival by a time drawn from ``[0, width)`` seconds, to break up a grid."""
    if not 0 < width < np.inf:
        raise ContractError("jitter", "more than 0 seconds", width)
    delays = np.random.default_rng(seed).uniform(0, width, len(trace.requests))
    moved = [
        replace(r, at=r.at + float(delay)) for r, delay in zip(trace.requests, delays, strict=True)
    ]
    return trace.converted(moved, f"uniform jitter of {width:g} s, seed {seed}")


def arrive(trace: Trace, rate: float, burstiness: float, seed: int) -> Trace:
    """Give the requests new arrivals, in their order.

    Args:
        trace: The trace; its own arrivals are dropped.
        rate: Requests per second.
        burstiness: Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier.
        seed: Seed of the gaps.
    """
    at = np.cumsum(gaps(len(trace.requests), rate, burstiness, seed))
    moved = [replace(r, at=float(t)) for r, t in zip(trace.requests, at, strict=True)]
    step = f"new arrivals: {rate:g} a second, burstiness {burstiness:g}, seed {seed}"
    return replace(trace.converted(moved, step), concurrency=None)


def interrupt(trace: Trace, *, cancel: float = 0.0, move: float = 0.0, seed: int = 0) -> Trace:
    """Lay cancellations and moves over a trace; those that it has are replaced.

    Args:
        trace: The trace.
        cancel: Share of requests whose client hangs up: before the first token, or after a number
            of tokens drawn evenly.
        move: Share of requests that move to another pool in mid-decode, drawn on their own.
        seed: Seed of both.
    """
    for name, share in (("cancel", cancel), ("move", move)):
        if not 0 <= share <= 1:
            raise ContractError(name, "a share from 0 to 1", share)
    rng = np.random.default_rng(seed)
    chosen = rng.random((len(trace.requests), 2))
    when = rng.random((len(trace.requests), 2))
    laid = [
        replace(
            request,
            cancel_after=int(w[0] * request.output_tokens) if c[0] < cancel else None,
            # a sequence that has no token yet, or all of them, has nowhere to move from
            move_after=1 + int(w[1] * (request.output_tokens - 1))
            if c[1] < move and request.output_tokens > 1
            else None,
        )
        for request, c, w in zip(trace.requests, chosen, when, strict=True)
    ]
    cancels = sum(r.cancel_after is not None for r in laid)
    moves = sum(r.move_after is not None for r in laid)
    return trace.converted(laid, f"{cancels} cancellations and {moves} moves, seed {seed}")


def _some(trace: Trace, kept: list[TraceRequest], step: str) -> Trace:
    if not kept:
        raise ContractError("window", f"one with arrivals (0 to {trace.span:g} s has)", step)
    return trace.converted(kept, step)
