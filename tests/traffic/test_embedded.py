"""Engines in this process: in virtual time, which is exact, and in a thread."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import Clock, FakeEngine, ask

from replayssm.errors import ContractError
from replayssm.traffic import convert, synth, virtual
from replayssm.traffic.drive import drive
from replayssm.traffic.embedded import EngineTarget, VirtualTarget
from replayssm.traffic.fleet import Fleet
from replayssm.traffic.prompts import Prompts
from replayssm.traffic.record import Status
from replayssm.traffic.run import Settings
from replayssm.traffic.summary import summarise

PROMPTS = Prompts(100, block_size=512)


def in_virtual_time(load, engines, settings=None):
    async def main():
        target = VirtualTarget(engines, ask, engines[0].clock)
        try:
            return await drive(load, target, PROMPTS, settings)
        finally:
            await target.close()

    return virtual.run(main())


def in_a_thread(load, engines, settings=None):
    async def main():
        target = EngineTarget(engines, ask)
        try:
            return await drive(load, target, PROMPTS, settings)
        finally:
            await target.close()

    return asyncio.run(main())


def pair(**options):
    clock = Clock()
    return [FakeEngine(clock=clock, **options) for _ in range(2)]


RUNNERS = pytest.mark.parametrize("run", [in_virtual_time, in_a_thread])


def test_a_step_takes_the_time_that_it_costs():
    load = synth.closed_loop(8, 4, synth.Lengths(4, 10))
    records = in_virtual_time(load, [FakeEngine(cost=0.25)]).records
    assert all(r.itl == pytest.approx([0.25] * 9, abs=1e-5) for r in records)
    assert all(r.ttft == pytest.approx(0.25, abs=1e-5) for r in records)


def test_a_request_that_takes_a_place_joins_the_next_step():
    load = synth.closed_loop(40, 4, synth.Lengths(4, 10, 0.5))
    records = in_virtual_time(load, [FakeEngine(cost=0.25)]).records
    assert all(r.ttft == pytest.approx(0.25, abs=1e-5) for r in records)


def test_twice_the_cost_is_half_the_throughput():
    load = synth.closed_loop(40, 4, synth.Lengths(4, 10))
    found = [
        summarise(in_virtual_time(load, [FakeEngine(cost=cost)]).records) for cost in (0.01, 0.02)
    ]
    ratio = found[0].total.output_throughput / found[1].total.output_throughput
    assert ratio == pytest.approx(2.0, rel=1e-3)


def test_an_idle_engine_wakes_when_a_request_comes():
    load = synth.open_arrivals(5, 0.1, synth.Lengths(4, 2), burstiness=1e9)
    for r in in_virtual_time(load, [FakeEngine(cost=0.5)]).records:
        assert r.ttft == pytest.approx(0.5, abs=1e-5)
        assert r.send_s == pytest.approx(r.scheduled_s, abs=1e-5)


def test_tokens_of_one_step_are_one_chunk():
    load = synth.closed_loop(3, 1, synth.Lengths(4, 9))
    records = in_virtual_time(load, [FakeEngine(per_step=3)]).records
    assert all((r.output_tokens, r.coalesced_tokens) == (9, 6) for r in records)


@RUNNERS
def test_a_storm_of_cancellations_and_moves_loses_and_leaks_nothing(run):
    engines = pair(slots=3, cost=0.001)
    load = convert.interrupt(
        synth.closed_loop(300, 8, synth.Lengths(4, 12, 0.5)), cancel=0.3, move=0.3, seed=1
    )
    records = run(load, engines).records
    assert len(records) == 300
    for r, asked in zip(records, load.requests, strict=True):
        assert r.status in (Status.OK, Status.CANCELLED)
        if r.status is Status.OK:
            assert r.output_tokens == asked.output_tokens
        else:
            assert asked.cancel_after is not None
            assert r.output_tokens >= asked.cancel_after
    # a cancellation that comes with the last token finds the request over
    assert all(not engine.left and not engine.waiting for engine in engines)


def test_moves_reach_the_engines():
    engines = pair(slots=9)
    load = convert.interrupt(synth.closed_loop(50, 8, synth.Lengths(4, 12)), move=1.0)
    run = in_virtual_time(load, engines)
    assert all(r.moved for r in run.records)
    # one that moves with its last token has ended
    exports = sum(line.startswith("export") for engine in engines for line in engine.log)
    assert exports == sum(r.move_after < r.output_tokens for r in load.requests)


def test_a_request_goes_to_the_engine_that_holds_the_fewest():
    engines = pair(slots=100)
    in_virtual_time(synth.closed_loop(10, 10, synth.Lengths(4, 5)), engines)
    assert engines[0].counts.steps == engines[1].counts.steps


def test_a_move_without_room_goes_back_and_is_counted():
    engines = [FakeEngine(slots=2), FakeEngine(slots=1)]
    fleet = Fleet(engines)
    for name in ("a", "b", "c"):
        fleet.submit(name, ask_of(name))
    fleet.step()
    assert set(engines[0].left) == {"a", "c"}
    fleet.move("a")
    assert set(engines[0].left) == {"a", "c"}
    assert fleet.stats()["refused_moves"] == 1
    engines[1].left.clear()
    fleet.move("a")
    assert (set(engines[0].left), set(engines[1].left)) == ({"c"}, {"a"})
    fleet.move("gone")


def ask_of(name, tokens=5):
    from fake_engine import Ask

    return Ask(name, tokens)


@RUNNERS
def test_a_request_that_can_never_fit_fails_alone(run):
    load = synth.closed_loop(4, 2, synth.Lengths(4, 20, 0.9), seed=2)
    longest = sorted(r.output_tokens for r in load.requests)[1]
    records = run(load, [FakeEngine(longest=longest)]).records
    for r in records:
        fits = r.requested_output_tokens <= longest
        assert r.status is (Status.OK if fits else Status.FAILED)
        assert fits or r.error.startswith("refused: max_new_tokens")


@RUNNERS
def test_an_engine_that_breaks_ends_the_run_with_its_error(run):
    engine = FakeEngine()
    engine.breaks_at = "r2"
    with pytest.raises(RuntimeError, match="the engine broke"):
        run(synth.closed_loop(9, 2, synth.Lengths(4, 5)), [engine])


def test_numbers_of_all_engines_are_summed_and_the_rest_left_out():
    engines = pair()
    run = in_virtual_time(synth.closed_loop(10, 10, synth.Lengths(4, 5)), engines)
    steps = float(sum(engine.counts.steps for engine in engines))
    assert run.samples[-1].counters == {
        "refused_moves": 0, "steps": steps, "by_kind.decode": steps, "running": 0,
    }  # fmt: skip


def test_what_has_ended_is_held_by_no_engine():
    engine = FakeEngine()
    fleet = Fleet([engine])
    fleet.submit("a", ask_of("a", tokens=1))
    fleet.step()
    # the engine would not know it
    fleet.cancel("a")
    fleet.move("a")
    assert engine.log == []


def test_no_engines_are_refused():
    with pytest.raises(ContractError, match="at least one"):
        Fleet([])


def test_the_drain_cancels_in_the_engine():
    engine = FakeEngine(cost=0.1)
    load = synth.offline(3, synth.Lengths(4, 500))
    run = in_virtual_time(load, [engine], Settings(drain_s=1.0))
    assert {r.status for r in run.records} == {Status.CUT}
    assert sorted(engine.log) == ["cancel r0", "cancel r1", "cancel r2"]
