"""Driving a trace, in virtual time: exact, and without waiting."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from replayssm.errors import ContractError, UnsupportedError
from replayssm.traffic import convert, synth, virtual
from replayssm.traffic.drive import drive
from replayssm.traffic.prompts import Prompts
from replayssm.traffic.record import Status
from replayssm.traffic.run import Settings
from replayssm.traffic.sending import Sending
from replayssm.traffic.summary import summarise
from replayssm.traffic.target import Call, Outcome, SendError
from replayssm.traffic.trace import Provenance, Trace, TraceRequest

PROMPTS = Prompts(100, block_size=512)


class Steady:
    """Accepts at once; a token every ``gap`` seconds, ``chunk`` at a time."""

    def __init__(self, gap=0.1, *, chunk=1, can_move=False):
        self.gap, self.chunk, self.can_move = gap, chunk, can_move
        self.prepared, self.moved, self.aborted = [], [], []
        self.running = self.most = 0
        self.fails = {}

    def prepare(self, call):
        self.prepared.append(call.request_id)

    async def send(self, call, on_tokens):
        self.running += 1
        self.most = max(self.most, self.running)
        now = asyncio.get_running_loop().time
        try:
            on_tokens(0, now())
            left = call.max_tokens
            while left:
                await asyncio.sleep(self.gap)
                if call.request_id in self.fails:
                    raise self.fails[call.request_id]
                count = min(left, self.chunk)
                left -= count
                on_tokens(count, now())
            return Outcome("length", output_tokens=call.max_tokens)
        except asyncio.CancelledError:
            self.aborted.append(call.request_id)
            raise
        finally:
            self.running -= 1

    def move(self, request_id):
        self.moved.append(request_id)

    async def counters(self):
        return {"running": float(self.running)}

    async def close(self):
        pass


def trace(*requests, concurrency=None):
    origin = Provenance("made", None, "made", len(requests))
    return Trace(tuple(requests), origin, concurrency=concurrency)


def go(load, target=None, settings=None, watch=None):
    return virtual.run(drive(load, target or Steady(), PROMPTS, settings, watch))


def test_requests_are_sent_when_the_trace_says_whether_or_not_others_are_done():
    run = go(trace(*(TraceRequest(0.05 * i, 4, 10) for i in range(20))))
    for i, r in enumerate(run.records):
        assert r.index == i
        assert r.scheduled_s == pytest.approx(0.05 * i)
        assert r.send_s == pytest.approx(r.scheduled_s, abs=1e-6)
        assert r.token_times_s == pytest.approx([r.send_s + 0.1 * (j + 1) for j in range(10)])
        assert (r.status, r.end_s) == (Status.OK, r.last_token_s)


def test_virtual_time_makes_a_run_repeat_exactly():
    load = convert.interrupt(synth.open_arrivals(200, 30.0, synth.Lengths(5, 9, 0.5)), cancel=0.2)
    assert go(load).records == go(load).records


def test_a_cap_on_concurrency_makes_requests_wait_and_the_wait_counts_from_the_schedule():
    target = Steady()
    load = trace(*(TraceRequest(0.0, 4, 10) for _ in range(6)))
    run = go(load, target, Settings(max_concurrency=2))
    assert target.most == 2
    assert [r.released_s for r in run.records] == pytest.approx([0, 0, 1, 1, 2, 2])
    assert [r.ttft_scheduled for r in run.records] == pytest.approx([0.1, 0.1, 1.1, 1.1, 2.1, 2.1])
    assert [r.ttft for r in run.records] == pytest.approx([0.1] * 6)
    assert all(r.client_lag < 1e-6 for r in run.records)
    assert not summarise(run.records).schedule.degraded


def test_a_closed_loop_is_due_when_a_place_is_free():
    target = Steady()
    load = synth.closed_loop(9, 3, synth.Lengths(4, 10, 0.0))
    run = go(load, target)
    assert target.most == 3
    assert [r.scheduled_s for r in run.records] == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert max(r.lag for r in run.records) < 1e-6


def test_a_turn_waits_for_the_turn_before_it_and_others_do_not():
    load = trace(
        TraceRequest(0.0, 4, 10, session="s"),
        TraceRequest(0.1, 4, 10, session="s"),
        TraceRequest(0.2, 4, 1, session="t"),
        TraceRequest(5.0, 4, 1, session="s"),
    )
    first, second, other, third = go(load).records
    assert second.send_s == pytest.approx(first.end_s)
    assert second.released_s == pytest.approx(first.end_s)
    assert other.send_s == pytest.approx(0.2)
    assert third.send_s == pytest.approx(5.0)
    assert [r.turn for r in (first, second, other, third)] == [0, 1, 0, 2]


def test_a_waiting_turn_holds_no_place():
    load = trace(
        TraceRequest(0.0, 4, 10, session="s"),
        TraceRequest(0.0, 4, 10, session="s"),
        TraceRequest(0.0, 4, 2),
    )
    run = go(load, settings=Settings(max_concurrency=2))
    assert run.records[2].send_s == pytest.approx(0.0)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_cancellation_hangs_up_after_its_tokens(after):
    target = Steady()
    (r,) = go(trace(TraceRequest(0.0, 4, 10, cancel_after=after)), target).records
    assert (r.status, len(r.token_times_s), r.output_tokens) == (Status.CANCELLED, after, after)
    assert target.aborted == ["r0"]
    assert r.requested_output_tokens == 10


def test_a_cancellation_after_the_end_never_comes():
    (r,) = go(trace(TraceRequest(0.0, 4, 3, cancel_after=5))).records
    assert r.status is Status.OK


def test_a_move_comes_once_after_its_tokens():
    target = Steady(chunk=2, can_move=True)
    (r,) = go(trace(TraceRequest(0.0, 4, 10, move_after=3)), target).records
    assert target.moved == ["r0"]
    assert (r.moved, r.status, r.output_tokens) == (True, Status.OK, 10)
    assert r.coalesced_tokens == 5


def test_moves_are_refused_before_anything_is_sent_where_they_cannot_be():
    target = Steady()
    with pytest.raises(UnsupportedError, match="cannot"):
        go(trace(TraceRequest(0.0, 4, 10), TraceRequest(1.0, 4, 10, move_after=3)), target)
    assert not target.prepared


def test_a_failure_is_one_record_and_the_run_goes_on():
    target = Steady()
    target.fails["r1"] = SendError("http 500", "no")
    run = go(trace(*(TraceRequest(0.0, 4, 2) for _ in range(3))), target)
    assert [r.status for r in run.records] == [Status.OK, Status.FAILED, Status.OK]
    assert run.records[1].error == "http 500: no"


def test_an_error_of_the_program_ends_the_run_as_itself():
    target = Steady()
    target.fails["r1"] = ZeroDivisionError("bug")
    with pytest.raises(ZeroDivisionError, match="bug"):
        go(trace(*(TraceRequest(float(i), 4, 30) for i in range(3))), target)
    assert "r0" in target.aborted


def test_an_empty_reply_is_a_failure():
    class Empty(Steady):
        async def send(self, call, on_tokens):
            return Outcome("stop", output_tokens=0)

    (r,) = go(trace(TraceRequest(0.0, 4, 2)), Empty()).records
    assert (r.status, r.error) == (Status.FAILED, "empty: the reply has no token")


def test_tokens_that_only_the_target_counted_are_told_apart():
    class Terse(Steady):
        async def send(self, call, on_tokens):
            return replace(await super().send(call, on_tokens), output_tokens=9)

    (r,) = go(trace(TraceRequest(0.0, 4, 2)), Terse()).records
    assert (r.output_tokens, len(r.token_times_s), r.uncounted_tokens) == (9, 2, 7)


def test_the_rest_is_cut_after_the_drain_and_waiting_turns_are_not_sent():
    target = Steady()
    load = trace(
        TraceRequest(0.0, 4, 3),
        TraceRequest(0.0, 4, 100, session="s"),
        TraceRequest(1.0, 4, 100, session="s"),
    )
    run = go(load, target, Settings(drain_s=1.0))
    assert [r.status for r in run.records] == [Status.OK, Status.CUT, Status.CUT]
    assert run.records[1].output_tokens == pytest.approx(20, abs=1)
    assert run.records[2].output_tokens == 0
    assert target.aborted == ["r1"]
    assert summarise(run.records).total.slo.judged == 1


def test_warm_ups_come_first_one_by_one_without_interruptions():
    target = Steady()
    load = trace(TraceRequest(0.0, 4, 5, cancel_after=1), TraceRequest(3.0, 4, 5))
    run = go(load, target, Settings(num_warmups=3, warmup_s=1.0))
    warm = [r for r in run.records if r.warmup]
    assert [r.index for r in warm] == [-1, -2, -3, 0]
    assert [r.status for r in warm[:3]] == [Status.OK] * 3
    assert all(b.send_s >= a.end_s for a, b in itertools.pairwise(warm))
    assert all(r.end_s < 0 for r in warm[:3])
    assert [r.index for r in run.records if not r.warmup] == [1]


def test_a_warm_up_has_a_prompt_that_the_trace_does_not_have():
    seen = {}

    class Looking(Steady):
        def prepare(self, call):
            seen[call.request_id] = call.prompt_ids

    go(trace(TraceRequest(0.0, 40, 1)), Looking(), Settings(num_warmups=1))
    assert len(seen["w0"]) == len(seen["r0"])
    assert seen["w0"] != seen["r0"]


def test_calls_are_made_out_before_they_are_due_but_not_all_at_once():
    ahead = []

    class Looking(Steady):
        async def send(self, call, on_tokens):
            ahead.append(len(self.prepared) - int(call.request_id[1:]))
            return await super().send(call, on_tokens)

    go(trace(*(TraceRequest(0.1 * i, 4, 1) for i in range(200))), Looking())
    assert all(1 < n <= 40 for n in ahead[:-1])


def test_a_prompt_is_let_go_of_once_it_was_sent():
    async def main():
        call = Call("r0", (1, 2), "text", 3, "default")
        sending = Sending(TraceRequest(0.0, 2, 3), call, 0, 0, False, 0.0, 0.0)
        await sending.run(Steady())
        return sending.call

    after = virtual.run(main())
    assert (after.prompt_ids, after.text, after.request_id) == (None, None, "r0")


def test_prompts_go_as_text_where_that_is_asked_for():
    calls = []

    class Looking(Steady):
        def prepare(self, call):
            calls.append(call)

    go(trace(TraceRequest(0.0, 4, 1), TraceRequest(0.0, 2, 1, text="as is")), Looking())
    go(trace(TraceRequest(0.0, 4, 1)), Looking(), Settings(use_text=True))
    assert [(c.prompt_ids is None, c.text is None) for c in calls] == [
        (False, True), (True, False), (True, False),
    ]  # fmt: skip
    assert calls[1].text == "as is"


def test_samples_add_up_at_the_end():
    seen = []

    class Watch:
        def update(self, sample):
            seen.append(sample)

    target = Steady()
    target.fails["r3"] = SendError("http 500", "no")
    run = go(trace(*(TraceRequest(0.5 * i, 4, 5) for i in range(8))), target, watch=Watch())
    assert seen == list(run.samples)
    last = run.samples[-1]
    assert (last.sent, last.running, last.failed, last.tokens) == (8, 0, 1, 35)
    assert last.ttft_ms == pytest.approx(100.0)
    tokens = [s.tokens for s in run.samples]
    assert tokens == sorted(tokens)
    assert all(s.counters.keys() == {"running"} for s in run.samples)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_warmups": -1},
        {"max_concurrency": 0},
        {"drain_s": -1.0},
        {"sample_s": 0},
        {"warmup_s": -1},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ContractError, match=next(iter(wrong))):
        Settings(**wrong)


def test_an_empty_trace_is_refused():
    with pytest.raises(ContractError, match="at least one request"):
        go(trace())
