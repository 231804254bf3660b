from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from replayssm.errors import ContractError
from replayssm.traffic import convert, synth
from replayssm.traffic.arrivals import along, gaps
from replayssm.traffic.trace import Provenance, Trace, TraceRequest


def make(*rows, block_size=4, **rest):
    requests = tuple(TraceRequest(*row, **rest) for row in rows)
    return Trace(requests, Provenance("made", None, "made", len(rows)), block_size)


@pytest.fixture
def trace():
    return make((0.0, 5, 3), (1.0, 9, 20), (2.5, 2, 1))


def test_a_window_starts_at_zero_and_excludes_its_end(trace):
    cut = convert.window(trace, 1.0, 1.5)
    assert [(r.at, r.prompt_tokens) for r in cut.requests] == [(0.0, 9)]
    assert [r.at for r in convert.window(trace, 1.0).requests] == [0.0, 1.5]
    with pytest.raises(ContractError, match="with arrivals"):
        convert.window(trace, 1.1, 0.2)


def test_a_speed_up_of_two_halves_every_gap(trace):
    assert [r.at for r in convert.speed_up(trace, 2).requests] == [0.0, 0.5, 1.25]


def test_caps_cut_lengths_blocks_and_ids_together():
    trace = make((0.0, 9, 20), prefix_blocks=(1, 2, 3), prompt_ids=tuple(range(9)))
    (cut,) = convert.cap_lengths(trace, 5, 6).requests
    assert (cut.prompt_tokens, cut.output_tokens) == (5, 6)
    assert cut.prefix_blocks == (1, 2)
    assert cut.prompt_ids == (0, 1, 2, 3, 4)


def test_a_text_cannot_be_cut_at_a_token():
    trace = make((0.0, 9, 20), text="some text")
    assert convert.cap_lengths(trace, None, 3).requests[0].output_tokens == 3
    with pytest.raises(ContractError, match="a text cannot be cut"):
        convert.cap_lengths(trace, 3)


def test_jitter_breaks_up_a_grid_and_keeps_the_order_of_time():
    trace = make(*[(3.0 * (i // 20), 5, 5) for i in range(200)])
    moved = convert.jitter(trace, 3.0, seed=1)
    at = [r.at for r in moved.requests]
    assert len(set(at)) == 200
    assert at == sorted(at)
    assert max(at) < 30.0
    assert moved == convert.jitter(trace, 3.0, seed=1) != convert.jitter(trace, 3.0, seed=2)


def test_new_arrivals_end_a_closed_loop_and_keep_the_requests():
    closed = synth.closed_loop(100, 8, synth.Lengths(10, 20, 0.5))
    opened = convert.arrive(closed, 10.0, 1.0, seed=0)
    assert opened.concurrency is None
    assert opened.span == pytest.approx(9.9)
    assert [r.prompt_tokens for r in opened.requests] == [r.prompt_tokens for r in closed.requests]


def test_interruptions_have_the_share_that_was_asked_for():
    trace = synth.offline(4000, synth.Lengths(10, 20))
    laid = convert.interrupt(trace, cancel=0.2, move=0.1, seed=3).requests
    cancels = [r.cancel_after for r in laid if r.cancel_after is not None]
    moves = [r.move_after for r in laid if r.move_after is not None]
    assert len(cancels) == pytest.approx(800, abs=100)
    assert len(moves) == pytest.approx(400, abs=80)
    assert set(cancels) == set(range(20))
    assert set(moves) == set(range(1, 20))
    # drawn apart: a tenth of the cancelled are moved too
    both = sum(r.cancel_after is not None and r.move_after is not None for r in laid)
    assert both == pytest.approx(80, abs=40)


def test_nothing_moves_that_has_one_token_only():
    laid = convert.interrupt(synth.offline(50, synth.Lengths(4, 1)), cancel=1.0, move=1.0)
    assert {(r.cancel_after, r.move_after) for r in laid.requests} == {(0, None)}


def test_every_step_is_noted_and_the_source_is_kept(trace):
    done = convert.interrupt(convert.speed_up(convert.first(trace, 2), 3), cancel=0.5)
    assert done.provenance.source == "made"
    assert [step.split()[0] for step in done.provenance.conversions] == ["first", "3", "1"]


@pytest.mark.parametrize(
    "bad",
    [
        lambda t: convert.window(t, -1),
        lambda t: convert.window(t, 0, 0),
        lambda t: convert.speed_up(t, 0),
        lambda t: convert.speed_up(t, float("nan")),
        lambda t: convert.cap_lengths(t, 0),
        lambda t: convert.jitter(t, -1, 0),
        lambda t: convert.first(t, 0),
        lambda t: convert.arrive(t, 0, 1, 0),
        lambda t: convert.arrive(t, 1, 0, 0),
        lambda t: convert.interrupt(t, cancel=1.5),
    ],
)
def test_impossible_conversions_are_refused(trace, bad):
    with pytest.raises(ContractError):
        bad(trace)


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 10.0])
def test_gaps_have_the_rate_exactly_and_the_burstiness_roughly(burstiness):
    drawn = gaps(20_001, 5.0, burstiness, seed=0)
    assert drawn[0] == 0
    assert drawn.sum() == pytest.approx(4000.0)
    assert drawn[1:].std() / drawn[1:].mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_is_everything_at_once():
    assert not gaps(5, float("inf"), 1.0, seed=0).any()


def test_instants_follow_the_profile():
    at = along(np.array([1.0, 3.0, 0.0, 1.0]), 10_000, 8.0, seed=0)
    assert (np.diff(at) >= 0).all()
    counts = np.histogram(at, bins=4, range=(0, 8))[0] / 2000
    assert counts == pytest.approx([1.0, 3.0, 0.0, 1.0], abs=0.1)


def test_a_day_has_its_peak_at_noon_and_sessions_at_night():
    lengths = synth.Lengths(10, 100, 0.5)
    spec = synth.DayNight(90.0, 2000, sessions=3, turns=5, long_share=0.1, lengths=lengths)
    trace = synth.day_night(spec, seed=1)
    cohorts = Counter(r.cohort for r in trace.requests)
    assert cohorts["night"] == 15
    assert cohorts["long"] == pytest.approx(200, abs=50)
    day = [r.at for r in trace.requests if r.cohort != "night"]
    assert min(day) >= 0
    assert max(day) < 60.0
    noon = sum(20 <= t < 40 for t in day)
    assert noon > 3 * (len(day) - noon) / 2
    for session in ("night-0", "night-1", "night-2"):
        turns = [r for r in trace.requests if r.session == session]
        assert len(turns) == 5
        assert all(60.0 <= r.at < 90.0 for r in turns)
        lengths = [r.prompt_tokens for r in turns]
        assert lengths == sorted(lengths)
        # every prompt holds the turns before it, replies included
        assert all(
            b.prompt_tokens > a.prompt_tokens + a.output_tokens
            for a, b in itertools.pairwise(turns)
        )


def test_long_histories_are_longer():
    trace = synth.day_night(synth.DayNight(day=500, long_factor=8))
    longest = {c: max(r.prompt_tokens for r in trace.requests if r.cohort == c)
               for c in ("day", "long")}  # fmt: skip
    shortest = min(r.prompt_tokens for r in trace.requests if r.cohort == "long")
    assert longest["day"] < shortest


@pytest.mark.parametrize(
    "made",
    [
        lambda s: synth.open_arrivals(50, 5.0, synth.Lengths(9, 9, 0.9), seed=s),
        lambda s: synth.closed_loop(50, 3, synth.Lengths(9, 9, 0.9), seed=s),
        lambda s: synth.offline(50, synth.Lengths(9, 9, 0.9), seed=s),
        lambda s: synth.day_night(synth.DayNight(day=50), seed=s),
    ],
)
def test_a_seed_makes_the_same_trace_again(made):
    assert made(1) == made(1)
    assert made(1).requests != made(2).requests


def test_lengths_stay_within_their_spread_and_above_nothing():
    trace = synth.offline(2000, synth.Lengths(100, 10, 0.2))
    assert {min(r.prompt_tokens for r in trace.requests)} <= set(range(80, 84))
    assert max(r.prompt_tokens for r in trace.requests) <= 120
    assert min(r.output_tokens for r in synth.offline(200, synth.Lengths(1, 1, 1.0)).requests) == 1


@pytest.mark.parametrize(
    "bad",
    [
        lambda: synth.Lengths(0, 1),
        lambda: synth.Lengths(1, 1, 1.5),
        lambda: synth.DayNight(span=0),
        lambda: synth.DayNight(turns=0),
        lambda: synth.open_arrivals(0, 1.0, synth.Lengths()),
        lambda: synth.closed_loop(1, 0, synth.Lengths()),
        lambda: TraceRequest(-1.0, 1, 1),
        lambda: TraceRequest(0.0, 0, 1),
        lambda: TraceRequest(0.0, 2, 1, prompt_ids=(1,)),
        lambda: TraceRequest(0.0, 2, 1, cancel_after=-1),
        lambda: make((1.0, 1, 1), (0.5, 1, 1)),
        lambda: make((1.0, 9, 1), prefix_blocks=(1, 2)),
    ],
)
def test_impossible_traces_are_refused(bad):
    with pytest.raises(ContractError):
        bad()
