"""Small parts: clocks, the nucleus, routing files, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayssm.engine.clock import MonotonicClock, VirtualClock, Work
from replayssm.engine.metrics import Metrics
from replayssm.engine.request import Event, Limits, Request, Route, Sampling
from replayssm.engine.routing import Routing
from replayssm.engine.sequence import nucleus
from replayssm.engine.speculative import AcceptanceStats, Draft
from replayssm.engine.speculative.acceptance import Accepted
from replayssm.engine.stats import EngineStats
from replayssm.errors import ContractError

WORK = Work("decode", 2, 2, 1, 0, 3, ("a", "b"))


def test_virtual_time_moves_by_the_cost_of_work_alone() -> None:
    clock = VirtualClock(lambda work: 0.5 * work.rows)
    assert clock.now() == 0.0
    clock.spend(WORK)
    clock.advance(2.0)
    assert clock.now() == 3.0
    with pytest.raises(ContractError):
        clock.advance(-1.0)


def test_monotonic_time_does_not_go_back() -> None:
    clock = MonotonicClock()
    before = clock.now()
    clock.spend(WORK)
    assert clock.now() >= before


def test_nucleus_is_the_smallest_set_with_enough_mass() -> None:
    law = np.array([[0.1, 0.5, 0.3, 0.1], [0.25, 0.25, 0.25, 0.25]])
    kept = nucleus(law, 0.7)
    assert np.allclose(kept[0], [0, 0.625, 0.375, 0])
    assert np.allclose(kept[1], law[1])  # ties stay together
    assert np.allclose(nucleus(law, 1e-9)[0], [0, 1, 0, 0])
    assert nucleus(law, 1.0) is law


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sampling(temperature=-1),
        lambda: Sampling(top_p=0),
        lambda: Sampling(seed=-1),
        lambda: Request("a", (), 1),
        lambda: Request("a", (1,), 0),
        lambda: Limits(),
        lambda: Limits(slots=1, memory_bytes=1),
        lambda: Limits(slots=0),
        lambda: Limits(slots=1, quantum=0),
    ],
)
def test_values_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ContractError):
        make()


ROUTING = {
    "format": "replayssm-routing",
    "version": 1,
    "plan": "0" * 64,
    "model": "gdn-tiny",
    "created": "2026-01-01T00:00:00Z",
    "pool": {"state": "q24", "window": 32},
    "default": {"path": "standard", "depth": "full", "drafter": None, "draft_tokens": 0},
    "cohorts": [
        {
            "cohort": "day",
            "match": {"prompt_tokens": [1, 100], "output_tokens": [1, 50]},
            "route": {"path": "replay", "depth": "high", "drafter": "ngram", "draft_tokens": 3},
            "guard": {"tolerance": 0.2},
            "fallback": [],
            "verdict": "pass",
            "reason": "",
        }
    ],
}


def load(folder: Path, fields: Any) -> Routing:
    path = folder / "routing.json"
    path.write_text(json.dumps(fields))
    return Routing.load(path)


def test_routing_goes_by_name_then_by_lengths(tmp_path: Path) -> None:
    routing = load(tmp_path, ROUTING)
    day = Route("replay", "high", 3, "ngram")
    assert routing(Request("a", (1,) * 500, 500, cohort="day")) == day
    assert routing(Request("a", (1,) * 100, 50)) == day
    assert routing(Request("a", (1,) * 101, 50)) == Route("standard")
    assert routing.tolerances["day"].delta_logprob == 0.2
    assert (routing.state, routing.ring.window, routing.ring.max_block) == ("q24", 32, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "other"},
        {"cohorts": [{"cohort": "x"}]},
        {"default": {"path": "sideways"}},
        {"pool": {"state": "q99", "window": 1}},
        {"cohorts": 3},
    ],
)
def test_files_of_another_shape_are_refused(tmp_path: Path, change: Any) -> None:
    with pytest.raises(ContractError):
        load(tmp_path, {**ROUTING, **change})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="exists"):
        Routing.load(tmp_path / "none.json")


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_have_the_names_and_the_sums_they_should() -> None:
    stats = EngineStats(flushes=5, finished={"stop": 2}, fallbacks={"day": 1}, running=3)
    stats.acceptance["day"] = AcceptanceStats()
    stats.acceptance["day"].record_(Draft.chain([1, 2]), Accepted((0,), 9))
    metrics = Metrics('tiny "q"')
    metrics.submitted("a", 1.0)
    metrics.record([Event("a", "token", 1, 1.5), Event("a", "token", 2, 1.5)])
    metrics.record([Event("a", "token", 3, 1.75), Event("a", "finished", None, 1.75, "length")])
    found = samples(metrics.render(stats))
    model = r'model_name="tiny \"q\""'
    expected = {
        f"replayssm:flushes_total{{{model}}}": 5,
        f"vllm:num_requests_running{{{model}}}": 3,
        f'vllm:request_success_total{{{model},finished_reason="stop"}}': 2,
        f'replayssm:fallbacks_total{{{model},cohort="day"}}': 1,
        f"vllm:spec_decode_num_drafts_total{{{model}}}": 1,
        f"vllm:spec_decode_num_draft_tokens_total{{{model}}}": 2,
        f"vllm:spec_decode_num_accepted_tokens_total{{{model}}}": 1,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{model},position="0"}}': 1,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{model},position="1"}}': 0,
        f"vllm:time_to_first_token_seconds_sum{{{model}}}": 0.5,
        f"vllm:inter_token_latency_seconds_sum{{{model}}}": 0.25,
        f"vllm:inter_token_latency_seconds_count{{{model}}}": 1,
        f"vllm:e2e_request_latency_seconds_sum{{{model}}}": 0.75,
        f'vllm:e2e_request_latency_seconds_bucket{{{model},le="0.5"}}': 0,
        f'vllm:e2e_request_latency_seconds_bucket{{{model},le="+Inf"}}': 1,
    }
    assert {name: found[name] for name in expected} == expected


def test_every_metric_is_described_once() -> None:
    lines = Metrics("m").render(EngineStats()).splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0]
            assert any(name.startswith(known) for known in types)
