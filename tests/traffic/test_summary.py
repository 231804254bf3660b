from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import record, steady_load

from replayssm.errors import ContractError
from replayssm.traffic.record import Status
from replayssm.traffic.slo import Slo, attain, parse
from replayssm.traffic.steady import most_running, steady_window
from replayssm.traffic.summary import TAIL_MINIMUM, distribution, summarise


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentiles_are_those_of_numpy_in_milliseconds(seconds):
    found = distribution(seconds)
    assert found.p50 == pytest.approx(np.percentile(seconds, 50) * 1e3)
    assert found.p95 == pytest.approx(np.percentile(seconds, 95) * 1e3)
    assert found.n == len(seconds)


def test_there_is_no_p99_from_fewer_than_a_thousand_requests():
    assert distribution([0.1] * (TAIL_MINIMUM - 1)).p99 is None
    assert distribution([0.1] * TAIL_MINIMUM).p99 == pytest.approx(100.0)
    # many tokens of few requests are few requests
    assert distribution([0.1] * 5000, requests=999).p99 is None
    assert distribution([]).p50 is None


def test_throughput_is_over_the_span_from_first_send_to_last_token():
    records = steady_load(11, rate=2.0, ttft=0.5, tpot=0.25, tokens=3)
    found = summarise(records)
    assert found.span_s == pytest.approx(5.0 + 1.0)
    assert found.total.request_throughput == pytest.approx(11 / 6)
    assert found.total.output_throughput == pytest.approx(33 / 6)
    assert found.total.total_throughput == pytest.approx((33 + 88) / 6)
    assert found.schedule.offered_rate == pytest.approx(2.0)
    assert found.schedule.sent_rate == pytest.approx(2.0)


def test_warm_ups_are_counted_and_left_out():
    records = [record(-1, warmup=True, scheduled_s=-9.0, times=(-1.0,)), *steady_load(3)]
    found = summarise(records)
    assert (found.warmups, found.total.requests["ok"]) == (1, 3)
    assert found == type(found)(**{**_fields(summarise(records[1:])), "warmups": 1})
    with pytest.raises(ContractError, match="no warm-up"):
        summarise(records[:1])


def _fields(found):
    return {name: getattr(found, name) for name in found.__slots__}


def test_failures_stay_out_of_latencies_and_are_counted_by_kind():
    records = steady_load(4)
    slow = record(9, times=(50.0,), status=Status.FAILED, error="timeout: 60 s")
    found = summarise([*records, slow, record(10, status=Status.FAILED, times=())])
    assert found.total.latencies["ttft"].maximum == pytest.approx(100.0)
    assert found.total.failures == {"timeout": 1, "http 500": 1}
    assert any("2 of 6 requests failed" in w for w in found.warnings)


def test_cohorts_are_summarised_apart_over_the_same_span():
    records = [*steady_load(4, cohort="a"), *steady_load(2, ttft=0.4, cohort="b")]
    found = summarise(records)
    assert list(found.cohorts) == ["a", "b"]
    assert found.cohorts["b"].latencies["ttft"].p50 == pytest.approx(400.0)
    total = sum(group.request_throughput for group in found.cohorts.values())
    assert total == pytest.approx(found.total.request_throughput)


def test_a_late_client_degrades_the_run_and_a_full_server_does_not():
    waiting = [record(i, scheduled_s=0.0, released_s=5.0, times=(6.0,)) for i in range(100)]
    found = summarise(waiting).schedule
    assert (found.degraded, found.late_share) == (False, 0.0)
    assert found.lag.p50 == pytest.approx(5000.0)
    late = [record(i, send_s=0.051, times=(6.0,)) for i in range(2)]
    found = summarise([*waiting[:98], *late])
    assert found.schedule.degraded
    assert found.schedule.late_share == pytest.approx(0.02)
    assert any("degraded" in w for w in found.warnings)


def test_attainment_counts_failures_as_misses_and_leaves_interruptions_out():
    records = [
        record(0, times=(0.1, 0.2)),
        record(1, times=(0.9, 1.0)),
        record(2, status=Status.FAILED, times=()),
        record(3, status=Status.CANCELLED, times=(0.1,)),
        record(4, status=Status.CUT, times=()),
    ]
    found = attain(records, parse(["ttft:500", "e2el:2000"]), span_s=2.0)
    assert (found.judged, found.met) == (3, 1)
    assert found.share == pytest.approx(1 / 3)
    assert found.by_metric == {"ttft": pytest.approx(1 / 3), "e2el": pytest.approx(2 / 3)}
    assert (found.goodput, found.good_tokens) == (0.5, 1.0)
    assert attain(records, (), 2.0).met == 2


def test_limits_from_the_schedule_see_the_wait():
    waited = record(0, scheduled_s=0.0, released_s=2.0, times=(2.1, 2.2))
    assert Slo("ttft", 500).is_met(waited)
    assert not Slo("ttft_scheduled", 500).is_met(waited)
    assert not Slo("e2el_scheduled", 500).is_met(waited)


def test_one_token_keeps_any_limit_on_the_time_per_token():
    assert Slo("tpot", 0.001).is_met(record(0, times=(0.5,)))
    assert not Slo("tpot", 0.001).is_met(record(0, times=(0.5, 0.6)))


@pytest.mark.parametrize(
    "words", [["ttft"], ["ttft:x"], ["itl:5"], ["ttft:0"], ["ttft:1", "ttft:2"]]
)
def test_words_that_are_no_limits_are_refused(words):
    with pytest.raises(ContractError, match="goodput"):
        parse(words)


def test_mismatches_of_length_are_counted_and_told():
    records = [
        record(0, input_tokens=8, requested_output_tokens=5),
        record(1, input_tokens=9, cached_tokens=4, draft_tokens=6, accepted_tokens=2),
        record(2, uncounted_tokens=3, output_tokens=5),
    ]
    tokens = summarise(records).total.tokens
    assert (tokens.input, tokens.input_mismatches, tokens.output_mismatches) == (25, 1, 2)
    assert (tokens.uncounted, tokens.cached) == (3, 4)
    assert (tokens.drafted, tokens.accepted) == (6, 2)
    assert len(summarise(records).warnings) == 4


def test_an_end_frees_its_place_before_a_send_at_the_same_instant_takes_it():
    back_to_back = [record(i, scheduled_s=float(i), times=(i + 1.0,)) for i in range(5)]
    assert most_running(back_to_back) == 1
    assert most_running([record(i, times=(1.0,)) for i in range(5)]) == 5


def test_the_steady_window_leaves_ramp_and_drain_out():
    # one request at 0, ten from 1 to 9, one to 10
    records = [
        record(0, times=(1.0, 10.0)),
        *(record(i, scheduled_s=1.0, times=(9.0,)) for i in range(1, 10)),
    ]
    found = steady_window(records)
    assert (found.plateau, found.start_s, found.end_s) == (10, 1.0, 9.0)
    assert found.request_throughput == pytest.approx(9 / 8)
    assert found.output_throughput == pytest.approx(10 / 8)


def test_an_idle_run_has_no_steady_window():
    assert (
        steady_window([record(0, times=(1.0,)), record(1, scheduled_s=90.0, times=(91.0,))]) is None
    )
