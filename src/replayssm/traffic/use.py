"""What a run used, out of the target's own counts: memory, batch, flushes, drafts, evictions.

An engine in this process tells them as they are named there; a server under its metrics' names.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replayssm.traffic.run import Sample

METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    "output_tokens": "vllm:generation_tokens_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "used_bytes": "replayssm:used_bytes",
    "allocated_bytes": "replayssm:allocated_bytes",
    "steps": "replayssm:steps_total",
    "step_seconds": "replayssm:step_seconds_total",
    "flushes": "replayssm:flushes_total",
    "forwards.decode": "replayssm:decode_forwards_total",
    "decode_rows": "replayssm:decode_rows_total",
    "decode_seconds": "replayssm:decode_seconds_total",
    "flushing_forwards": "replayssm:flushing_forwards_total",
    "flushing_seconds": "replayssm:flushing_seconds_total",
}
BY_COHORT = "acceptance."


@dataclass(frozen=True, slots=True)
class Use:
    """What a target counted from the first sample to the last; None where it does not say.

    Attributes:
        memory_per_sequence: Bytes in use over sequences that hold them, mean of the samples.
        effective_batch: Rows of a decode forward, mean.
        flushes: Folds.
        flushes_per_token: The same over output tokens.
        flushing_share: Decode forwards with a fold, of all of them.
        plain_ms: Mean decode forward without a fold.
        flushing_ms: Mean decode forward with one.
        acceptance_rate: Accepted over drafted tokens.
        evictions: Sequences that lost their slot for want of memory.
    """

    memory_per_sequence: float | None
    effective_batch: float | None
    flushes: int | None
    flushes_per_token: float | None
    flushing_share: float | None
    plain_ms: float | None
    flushing_ms: float | None
    acceptance_rate: float | None
    evictions: int | None


def used(samples: Sequence[Sample]) -> Use | None:
    """Return what a run used; None where its target tells nothing of it."""
    told = [known(sample.counters) for sample in samples]
    told = [counts for counts in told if counts]
    if len(told) < 2:
        return None
    # what has never happened is not counted yet, drafts of a cohort for one
    spent = {name: value - told[0].get(name, 0) for name, value in told[-1].items()}
    forwards, flushing = spent.get("forwards.decode"), spent.get("flushing_forwards")
    seconds, held = spent.get("decode_seconds"), spent.get("flushing_seconds")
    memory = [
        share
        for counts in told
        if (share := _ratio(counts.get("used_bytes"), counts.get("running"))) is not None
    ]
    with_fold = _ratio(held, flushing)
    without = _ratio(_less(seconds, held), _less(forwards, flushing))
    found = Use(
        memory_per_sequence=sum(memory) / len(memory) if memory else None,
        effective_batch=_ratio(spent.get("decode_rows"), forwards),
        flushes=_whole(spent.get("flushes")),
        flushes_per_token=_ratio(spent.get("flushes"), spent.get("output_tokens")),
        flushing_share=_ratio(flushing, forwards),
        plain_ms=None if without is None else without * 1e3,
        flushing_ms=None if with_fold is None else with_fold * 1e3,
        acceptance_rate=_ratio(spent.get("accepted"), spent.get("drafted")),
        evictions=_whole(spent.get("preemptions")),
    )
    return None if all(value is None for value in astuple(found)) else found


def known(counters: Mapping[str, float]) -> dict[str, float]:
    """Return the counts that we know, by the engine's names."""
    found = {}
    for name, metric in METRICS.items():
        value = counters.get(name, counters.get(metric))
        if value is not None:
            found[name] = value
    for name, value in counters.items():
        count = name.rpartition(".")[2]
        if name.startswith(BY_COHORT) and count in ("drafted", "accepted"):
            found[count] = found.get(count, 0) + value
    return found


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
