from __future__ import annotations

from dataclasses import asdict

import pytest

from replayssm.engine.metrics import Metrics
from replayssm.engine.speculative import AcceptanceStats
from replayssm.engine.stats import EngineStats
from replayssm.traffic.fleet import Fleet
from replayssm.traffic.prometheus import parse
from replayssm.traffic.run import Sample
from replayssm.traffic.use import METRICS, used


def stats(scale):
    """An engine's counts: all but the gauges grow with ``scale``."""
    drafts = AcceptanceStats(verifies=5 * scale, drafted=20 * scale, accepted=5 * scale)
    return EngineStats(
        forwards={"decode": 10 * scale, "prefill": 3},
        output_tokens=200 * scale,
        preemptions=2 * scale,
        flushes=8 * scale,
        decode_rows=40 * scale,
        decode_seconds=0.1 * scale,
        flushing_forwards=4 * scale,
        flushing_seconds=0.07 * scale,
        acceptance={"a": drafts, "b": drafts},
        running=4,
        used_bytes=4000,
    )


class Engine:
    """As much of an engine as a fleet asks for its numbers."""

    def __init__(self, found):
        self.stats = lambda: found


def of_engine(found):
    return Fleet([Engine(found)]).stats()


def of_server(found):
    return parse(Metrics("tiny").render(found))


@pytest.mark.parametrize("told", [of_engine, of_server])
def test_use_is_what_was_counted_between_the_first_and_the_last_sample(told):
    counts = (told(stats(1)), told(stats(2)), told(stats(3)))
    found = used([Sample(float(i), 0, 0, 0, 0, None, c) for i, c in enumerate(counts)])
    assert asdict(found) == pytest.approx(
        {
            "memory_per_sequence": 1000.0,
            "effective_batch": 4.0,
            "flushes": 16,
            "flushes_per_token": 0.04,
            "flushing_share": 0.4,
            "plain_ms": 5.0,
            "flushing_ms": 17.5,
            "acceptance_rate": 0.25,
            "evictions": 4,
        }
    )


def test_what_is_not_told_is_not_made_up():
    assert used([]) is None
    silent = [Sample(float(i), 0, 0, 0, 0, None, {"steps": float(i)}) for i in range(3)]
    assert used(silent) is None
    busy = [Sample(float(i), 0, 0, 0, 0, None, {METRICS["running"]: 3.0}) for i in range(3)]
    assert used(busy) is None
    foreign = [
        Sample(float(i), 0, 0, 0, 0, None, {METRICS["preemptions"]: 3.0 * i}) for i in range(3)
    ]
    found = used(foreign)
    assert (found.evictions, found.flushes, found.plain_ms) == (6, None, None)


def test_what_has_not_happened_before_the_first_sample_counts_from_zero():
    counts = (of_engine(EngineStats()), of_engine(stats(1)))
    found = used([Sample(float(i), 0, 0, 0, 0, None, c) for i, c in enumerate(counts)])
    assert (found.acceptance_rate, found.effective_batch, found.flushes) == (0.25, 4.0, 8)


def test_a_run_without_flushes_has_no_cost_of_one():
    idle = [Sample(float(i), 0, 0, 0, 0, None, of_engine(EngineStats())) for i in range(2)]
    found = used(idle)
    assert (found.flushes, found.flushing_ms, found.memory_per_sequence) == (0, None, None)
