from __future__ import annotations

import math
import random

import numpy as np
import pytest
from records import record, steady_load

from replayssm.errors import ContractError
from replayssm.traffic import course
from replayssm.traffic.record import Status
from replayssm.traffic.run import Sample
from replayssm.traffic.steady import most_running
from replayssm.traffic.use import METRICS, known


@pytest.fixture
def records():
    rng = random.Random(3)
    made = [record(-1, warmup=True, scheduled_s=-9.0, times=(-8.0,))]
    for i in range(300):
        due = rng.uniform(0, 40)
        send = due + rng.expovariate(20)
        status = rng.choice(list(Status))
        times = sorted(send + rng.expovariate(1) for _ in range(rng.randint(1, 5)))
        times = () if status is Status.FAILED else tuple(times)
        end = times[-1] if times else send + 0.5
        released = rng.choice((due, send))
        made.append(record(i, scheduled_s=due, released_s=released, send_s=send, times=times,
                           end_s=end, status=status))  # fmt: skip
    return made


def test_bins_hold_every_request_and_token_once(records):
    found = course.load(records)
    kept = records[1:]
    assert len(found.edges_s) == len(found.running) + 1 <= course.BINS + 2
    assert np.diff(found.edges_s) == pytest.approx(found.width_s)
    for values, count in (
        (found.scheduled, len(kept)),
        (found.completed, sum(r.status is Status.OK for r in kept)),
        (found.failed, sum(r.status is Status.FAILED for r in kept)),
        (found.tokens, sum(len(r.token_times_s) for r in kept)),
    ):
        assert values.sum() * found.width_s == pytest.approx(count)


def test_a_bin_tells_the_most_in_flight_and_the_longest_lag_in_it(records):
    found, kept = course.load(records), records[1:]
    assert found.running.max() == most_running(kept)
    for i, (start, end) in enumerate(zip(found.edges_s, found.edges_s[1:], strict=False)):
        # the number in flight changes at sends only upwards
        instants = [start, *(r.send_s for r in kept if start <= r.send_s < end)]
        running = [sum(r.send_s <= t < r.end_s for r in kept) for t in instants]
        assert found.running[i] == max(running)
        due = [r for r in kept if start <= r.scheduled_s < end]
        longest = max((r.lag for r in due), default=math.nan) * 1e3
        assert found.lag_ms[i] == pytest.approx(longest, nan_ok=True)
        own = max((r.client_lag for r in due), default=math.nan) * 1e3
        assert found.client_lag_ms[i] == pytest.approx(own, nan_ok=True)


@pytest.mark.parametrize("rate", [1e-3, 0.7, 1e4])
def test_bins_are_few_whatever_the_span(rate):
    found = course.load(steady_load(50, rate=rate, ttft=0.0, tpot=0.0))
    # no finer than two requests a bin
    assert 1 <= len(found.running) <= 25 + 1
    assert found.scheduled.sum() * found.width_s == pytest.approx(50)


def test_a_run_of_one_instant_is_one_bin():
    found = course.load([record(times=(0.0,), end_s=0.0)])
    assert len(found.running) == 1


def test_warm_ups_alone_have_no_course():
    with pytest.raises(ContractError, match="no warm-up"):
        course.load([record(warmup=True)])


def counts(i, **more):
    """Counters of an engine: five steps a second, one decode forward in five with a flush."""
    return {
        "steps": 5.0 * i, "step_seconds": 0.1 * i, "forwards.decode": 10.0 * i,
        "decode_seconds": 0.06 * i, "flushing_forwards": 2.0 * i, "flushing_seconds": 0.02 * i,
        "used_bytes": 1000.0 * (i % 3), "allocated_bytes": 9000.0, "running": float(i % 4),
        "waiting": 0.0, **more,
    }  # fmt: skip


def sample(i, counters):
    return Sample(float(i), 0, 0, 0, 0, None, counters)


@pytest.mark.parametrize("n", [2, 50, 1000])
def test_means_are_over_what_was_counted_in_a_span(n):
    found = course.target([sample(i, counts(i)) for i in range(n)])
    assert len(found.edges_s) == len(found.step_ms) + 1 <= course.SPANS + 1
    assert (found.edges_s[0], found.edges_s[-1]) == (0, n - 1)
    assert found.step_ms == pytest.approx(20.0)
    assert found.plain_ms == pytest.approx(5.0)
    assert found.flushing_ms == pytest.approx(10.0)
    assert found.used_bytes.max() == (1000.0 if n == 2 else 2000.0)
    assert found.running.max() == (1.0 if n == 2 else 3.0)


def test_a_span_without_a_flush_has_no_time_of_one():
    idle = counts(1, **{"forwards.decode": 14.0, "decode_seconds": 0.1})
    found = course.target([sample(i, c) for i, c in enumerate((counts(0), counts(1), idle))])
    assert found.flushing_ms == pytest.approx([10.0, math.nan], nan_ok=True)
    assert found.plain_ms == pytest.approx([5.0, 10.0])


def test_a_server_tells_the_same_under_its_own_names():
    engine = [sample(i, counts(i)) for i in range(9)]
    server = [
        sample(i, {METRICS[name]: value for name, value in counts(i).items()}) for i in range(9)
    ]
    assert [known(s.counters) for s in server] == [known(s.counters) for s in engine]
    mine, other = course.target(engine), course.target(server)
    for name in course.Target.__slots__:
        assert getattr(mine, name) == pytest.approx(getattr(other, name), nan_ok=True)


def test_a_target_that_tells_nothing_has_no_course():
    assert course.target([]) is None
    assert course.target([sample(i, {"other": 1.0}) for i in range(5)]) is None
    told = [sample(i, {METRICS["preemptions"]: 1.0}) for i in range(5)]
    assert course.target(told) is None
