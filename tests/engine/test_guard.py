"""A cohort that breaks its promise goes to full reads, then to the standard path, with evidence."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
from serving import HIGH, PROMPTS, ask, drive, engine, plain, tokens

from replayssm.engine.clock import VirtualClock, Work
from replayssm.engine.guard import Guard, Tolerance
from replayssm.engine.request import STANDARD, Request, Route
from replayssm.errors import ContractError

LOOSE = Tolerance(delta_logprob=5.0)


def test_levels_go_down_one_by_one_and_stay() -> None:
    guard = Guard(share=0.0, tolerance=Tolerance(delta_logprob=0.1))
    for route, to in ((HIGH, "full"), (Route(), "standard")):
        assert guard.apply(HIGH, "a") == route
        trip = guard.check_gaps("a", "r", route, [0.05, 0.2], at=1.0)
        assert trip is not None
        assert (trip.to, trip.measured, trip.allowed) == (to, 0.2, 0.1)
    assert guard.apply(HIGH, "a") == STANDARD
    assert guard.apply(HIGH, "b") == HIGH
    assert guard.check_gaps("a", "r", STANDARD, [9.0], at=2.0) is None
    guard.reset("a")
    assert guard.apply(HIGH, "a") == HIGH
    assert len(guard.trips) == 2


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_gap_that_is_no_number_trips(gap: float) -> None:
    assert Guard().check_gaps("a", "r", Route(), [0.0, gap], at=0.0) is not None


def test_gap_within_the_tolerance_does_not_trip() -> None:
    guard = Guard(tolerance=LOOSE, by_cohort={"strict": Tolerance(delta_logprob=0.1)})
    assert guard.check_gaps("a", "r", Route(), [1.0], at=0.0) is None
    assert guard.check_gaps("strict", "r", Route(), [1.0], at=0.0) is not None


def test_pace_is_a_mean_over_a_full_window() -> None:
    guard = Guard(tolerance=Tolerance(itl=0.01, itl_tokens=4))
    paces = [0.05, 0.0, 0.0, 0.0]  # one slow token in four is 12.5 ms a token
    trips = [guard.check_pace("a", "r", HIGH, pace, at=0.0) for pace in paces]
    assert [trip is not None for trip in trips] == [False, False, False, True]


def test_trip_is_logged_with_its_evidence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "replayssm.guard"):
        Guard().check_gaps("night", "r7", HIGH, [2.0], at=3.5)
    told = json.loads(caplog.messages[0])
    assert told == {
        "cohort": "night", "to": "full", "reason": "tolerance", "request_id": "r7",
        "measured": 2.0, "allowed": 0.5, "at": 3.5,
    }  # fmt: skip


def test_share_of_requests_is_a_function_of_their_ids() -> None:
    names = [f"r{i}" for i in range(4000)]
    sampled = [name for name in names if Guard(0.1, seed=1).samples(name)]
    assert 300 < len(sampled) < 500
    assert sampled == [name for name in names if Guard(0.1, seed=1).samples(name)]
    assert sampled != [name for name in names if Guard(0.1, seed=2).samples(name)]
    assert not any(Guard(0.0).samples(name) for name in names)
    assert all(Guard(1.0).samples(name) for name in names)


@pytest.mark.parametrize("route", [Route(), Route(draft_tokens=4, drafter="ngram")])
def test_shadow_follows_what_was_served(model: Any, route: Route) -> None:
    """With full reads it agrees to rounding, drafts or not, and changes no token."""
    guard = Guard(share=1.0, tolerance=Tolerance(delta_logprob=1e-3))
    with engine(model, guard=guard) as served:
        served.submit(ask("a", PROMPTS[2], 24, route))
        events = drive(served)
        stats = served.stats()
    assert tokens(events)["a"] == plain("gdn-tiny")[2]
    assert not guard.trips
    assert (stats.shadows, stats.shadows_dropped) == (1, 0)
    assert stats.forwards["shadow"] > 2


def test_low_reads_beyond_the_tolerance_take_the_cohort_to_full_reads(model: Any) -> None:
    guard = Guard(share=1.0, tolerance=Tolerance(delta_logprob=1e-4))
    with engine(model, guard=guard, state="q24") as served:
        served.submit(Request("a", PROMPTS[0], 24, cohort="x", route=HIGH))
        drive(served)
        served.submit(Request("b", PROMPTS[1], 24, cohort="x", route=HIGH))
        served.step()
        assert served.stats().fallbacks["x"] >= 1
        drive(served)
    assert guard.trips[0].to == "full"
    assert guard.trips[0].cohort == "x"


def test_latency_carries_the_state_over_and_keeps_the_tokens(model: Any) -> None:
    slow = Tolerance(itl=0.01, itl_tokens=4)

    def cost(work: Work) -> float:
        return 0.02 if work.replay_rows else 0.001

    with engine(model, guard=Guard(tolerance=slow), clock=VirtualClock(cost)) as served:
        served.submit(ask("a", PROMPTS[0], 24, HIGH))
        events = drive(served)
        assert [trip.to for trip in served.guard.trips] == ["full", "standard"]
        assert served.stats().restarts == 0
    assert tokens(events)["a"] == plain("gdn-tiny")[0]


def test_values_that_are_not_finite_are_never_served(model: Any) -> None:
    """A prompt whose state is poisoned on every path fails, and says why."""
    embedding = model.get_input_embeddings().weight
    kept = embedding.data[7].clone()
    with engine(model) as served:
        served.submit(Request("bad", (1, 2, 7), 8))
        served.submit(ask("good", PROMPTS[0], 8))
        embedding.data[7] = math.nan
        try:
            events = drive(served)
        finally:
            embedding.data[7] = kept
    last = [event for event in events if event.request_id == "bad"][-1]
    assert last.kind == "failed"
    assert "finite" in last.reason
    assert tokens(events) == {"good": plain("gdn-tiny")[0][:8]}


def test_what_a_slot_held_before_is_invisible(model: Any) -> None:
    """Free slots full of NaN: planes, rings, windows, keys and values."""
    with engine(model, slots=3) as served:
        for route in (Route(), STANDARD):
            served.submit(ask("a", PROMPTS[0], 2, route))
            drive(served)
        pools = served.pools
        assert pools.replay is not None
        assert pools.standard is not None
        held = [x for layer in pools.model.kv._layers for x in layer]
        held += [x for store in pools.replay.stores for x in (store.high, store.v, store.conv)]
        held += [*pools.standard._states, *pools.standard._windows]
        for tensor in held:
            tensor.fill_(math.nan)
        for i, route in enumerate((Route(), STANDARD, Route(draft_tokens=4, drafter="ngram"))):
            served.submit(ask(str(i), PROMPTS[i], 24, route))
        found = tokens(drive(served))
    assert found == {str(i): plain("gdn-tiny")[i] for i in range(3)}


def test_forward_that_keeps_failing_fails_its_requests_alone(model: Any) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("boom")

    with engine(model) as served:
        served.submit(ask("a", PROMPTS[0], 8))
        hook = model.lm_head.register_forward_pre_hook(crash)
        try:
            events = drive(served)
        finally:
            hook.remove()
        served.submit(ask("b", PROMPTS[0], 8))
        after = drive(served)
    assert (events[-1].kind, "boom" in events[-1].reason) == ("failed", True)
    assert tokens(after)["b"] == plain("gdn-tiny")[0][:8]


def test_arguments_out_of_range_are_refused() -> None:
    for wrong in ({"delta_logprob": 0}, {"itl": 0.0}, {"itl_tokens": 0}):
        with pytest.raises(ContractError):
            Tolerance(**wrong)
    with pytest.raises(ContractError):
        Guard(share=1.5)
