from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import record

from replayssm.errors import ContractError
from replayssm.traffic.record import Status, TokenClock

chunks = st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), max_size=20)


@given(chunks)
def test_a_clock_has_a_time_for_every_token_in_order(parts):
    clock = TokenClock()
    at = 100.0
    for count, gap in parts:
        at += gap
        clock.add(count, at)
    total = sum(count for count, _ in parts)
    assert len(clock.times) == total
    assert clock.times == sorted(clock.times)
    assert clock.coalesced == sum(count - 1 for count, _ in parts if count)
    if total:
        last = max(i for i, (count, _) in enumerate(parts) if count)
        assert clock.times[-1] == pytest.approx(100.0 + sum(gap for _, gap in parts[: last + 1]))


def test_a_chunk_shares_out_its_gap_and_the_first_has_none():
    clock = TokenClock()
    clock.add(3, 1.0)
    clock.add(4, 3.0)
    clock.add(0, 9.0)
    assert clock.times == [1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert clock.coalesced == 5


def test_a_time_before_the_last_token_does_not_turn_the_clock_back():
    clock = TokenClock()
    clock.add(1, 2.0)
    clock.add(2, 1.0)
    assert clock.times == [2.0, 2.0, 2.0]


def test_latencies_are_what_their_definitions_say():
    r = record(scheduled_s=1.0, released_s=1.5, send_s=2.0, times=(2.5, 2.75, 3.5))
    assert (r.ttft, r.ttft_scheduled) == (0.5, 1.5)
    assert (r.e2el, r.e2el_scheduled) == (1.5, 2.5)
    assert r.tpot == (r.e2el - r.ttft) / 2
    assert r.itl == (0.25, 0.75)
    assert (r.lag, r.client_lag) == (1.0, 0.5)


def test_a_reply_of_one_token_has_no_time_per_token_and_none_has_no_time():
    one = record(times=(0.5,))
    assert (one.tpot, one.itl, one.e2el) == (None, (), one.ttft)
    none = record(times=(), status=Status.FAILED)
    assert (none.ttft, none.tpot, none.e2el, none.e2el_scheduled) == (None,) * 4


def test_tpot_counts_tokens_that_the_stream_did_not_show():
    assert record(times=(0.0, 1.0), output_tokens=5).tpot == 0.25


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduled_s": 3.0},
        {"released_s": -1.0},
        {"send_s": float("nan")},
        {"end_s": 0.5},
        {"token_times_s": (1.0, 0.5)},
        {"first_token_s": 0.7},
        {"last_token_s": None},
    ],
)
def test_times_out_of_order_are_refused(wrong):
    good = record(send_s=0.25, times=(0.5, 1.0))
    with pytest.raises(ContractError, match="record r0"):
        replace(good, **wrong)
