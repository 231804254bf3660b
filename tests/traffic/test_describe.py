from __future__ import annotations

import pytest

from replayssm.traffic import convert, synth
from replayssm.traffic.describe import describe
from replayssm.traffic.formats import load
from replayssm.traffic.trace import Provenance, Trace, TraceRequest


def made(requests):
    return Trace(tuple(requests), Provenance("made", None, "made", len(requests)), block_size=4)


def test_lengths_rate_and_cohorts():
    found = describe(
        made([TraceRequest(float(i), i + 1, 10, cohort="ab"[i % 2]) for i in range(101)])
    )
    assert (found.requests, found.span_s, found.rate, found.gap_cv) == (101, 100.0, 1.0, 0.0)
    assert (found.prompt.minimum, found.prompt.p50, found.prompt.maximum) == (1, 51, 101)
    assert found.prompt.total == 101 * 51
    assert found.cohorts == {"a": 51, "b": 50}


def test_poisson_gaps_have_a_cv_of_one():
    trace = synth.open_arrivals(20_000, 7.0, synth.Lengths())
    assert describe(trace).gap_cv == pytest.approx(1.0, abs=0.02)


def test_shared_blocks_are_those_seen_earlier():
    requests = [
        TraceRequest(0.0, 8, 1, prefix_blocks=blocks) for blocks in ((0, 1), (0, 2), (0, 1))
    ]
    assert describe(made(requests)).shared_blocks == pytest.approx(3 / 6)
    assert describe(synth.offline(2, synth.Lengths())).shared_blocks is None


def test_a_grid_is_found_and_told_and_jitter_removes_it():
    grid = made([TraceRequest(3.0 * (i // 10), i + 1, i + 1) for i in range(1000)])
    (warning,) = describe(grid).warnings
    assert "grid of 3 s, up to 10 at one instant" in warning
    assert describe(convert.jitter(grid, 3.0, seed=0)).warnings == ()


def test_few_requests_and_no_arrivals_are_told():
    warnings = describe(synth.offline(10, synth.Lengths())).warnings
    assert any("due at once" in w for w in warnings)
    assert any("a p99 needs 1,000" in w for w in warnings)
    closed = describe(synth.closed_loop(1000, 4, synth.Lengths()))
    assert closed.warnings == ()
    assert (closed.rate, closed.concurrency) == (None, 4)


def test_the_real_mooncake_trace_sits_on_a_grid(traces):
    found = describe(load(traces / "mooncake_conversation.jsonl")[0])
    assert any("grid of 3 s, up to 28 at one instant" in w for w in found.warnings)
    azure = describe(load(traces / "azure_llm_2023_code.csv")[0])
    assert azure.warnings == ()
    assert azure.gap_cv == pytest.approx(13, abs=0.5)
