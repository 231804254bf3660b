from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from replayssm.engine.clock import VirtualClock
from replayssm.errors import ContractError, UnsupportedError
from replayssm.evaluate.decisions import outcome
from replayssm.evaluate.decisions import run as decisions_run
from replayssm.evaluate.decisions.embedded import Embedded
from replayssm.evaluate.decisions.experiment import LostError, conduct, places, serve
from replayssm.evaluate.decisions.plan import parse_plan
from replayssm.evaluate.decisions.serving import Job, Run, make_served, measure
from replayssm.evaluate.decisions.tables import Slo
from replayssm.traffic.energy import Energy

STEP = 0.01


def jobs(count, *, gap=0.0, cohort="pool", output=4):
    return [Job(f"j{i}", i * gap, (1, 2), output, cohort) for i in range(count)]


def served(name, scheduled, times, cohort="c"):
    job = Job(name, scheduled, (1, 2), len(times), cohort)
    return make_served(job, scheduled, scheduled, times, range(len(times)))


def flat(variants, prefills):
    return STEP


def speak(request):
    return list(range(request.output_tokens))


def plain(fake, cost=flat, noise=0.0, seed=0):
    variant = SimpleNamespace(draft_tokens=0, is_replay=False, name="x")
    return fake(cost, speak, noise=noise, made=seed).server(variant)


def test_a_request_that_waits_for_its_schedule_is_not_early(fake):
    run = plain(fake).run(jobs(3, gap=1.0))
    assert [s.record.scheduled_s for s in run.served] == [0.0, 1.0, 2.0]
    assert [s.record.ttft_scheduled for s in run.served] == pytest.approx([STEP] * 3)
    assert run.span_s == pytest.approx(2 + 4 * STEP)


def test_a_closed_loop_keeps_its_places_filled(fake):
    run = plain(fake).run(jobs(6), in_flight=2)
    assert max(step.live for step in run.steps) <= 2
    assert run.span_s == pytest.approx(3 * 4 * STEP)
    # the next request is due when a place gets free, not when the run began
    assert sorted(s.record.scheduled_s for s in run.served) == pytest.approx(
        [0, 0, 0.04, 0.04, 0.08, 0.08]
    )


def test_metrics_follow_their_definitions():
    slow = served("a", 1.0, (1.5, 1.6, 1.8))
    fast = served("b", 1.0, (1.1, 1.15, 1.2))
    found = measure(Run((slow, fast), 0, 2.0), "c", Slo(ttft_ms=200), per_hour=2.0)
    assert found["throughput"] == pytest.approx(6 / 0.8)
    assert found["ttft"] == pytest.approx(0.3)
    assert found["tpot"] == pytest.approx(0.1)
    assert found["e2el"] == pytest.approx(0.5)
    assert found["attainment"] == 0.5
    assert found["goodput_per_dollar"] == pytest.approx(1 / 0.8 * 3600 / 2)
    with pytest.raises(ContractError, match="cohort d"):
        measure(Run((slow,), 0, 2.0), "d", Slo(), 1.0)


def test_goodput_per_watt_is_good_requests_per_joule_and_missing_without_counters():
    slow, fast = served("a", 1.0, (1.5, 1.6)), served("b", 1.0, (1.1, 1.15))
    limit = Slo(ttft_ms=200)
    read = Run((slow, fast), 0, 2.0, energy=Energy(40.0, "rapl", 1, None))
    assert measure(read, "c", limit, 1.0)["goodput_per_watt"] == pytest.approx(1 / 40)
    for unread in (None, Energy(None, None, 0, "no counters")):
        found = measure(Run((slow, fast), 0, 2.0, energy=unread), "c", limit, 1.0)
        assert "goodput_per_watt" not in found
    assert outcome.energy_source([read]) == "rapl counters of 1 devices, idle power not subtracted"
    silent = Run((slow,), 0, 2.0, energy=Energy(None, None, 0, "no counters"))
    assert outcome.energy_source([silent]) == "not measured (no counters)"


def test_a_plan_that_goes_by_energy_is_refused_where_there_is_none(table, monkeypatch):
    table["decisions"]["outcome"]["metric"] = "goodput_per_watt"
    blind = SimpleNamespace(stop=lambda: Energy(None, None, 0, "no counters"))
    monkeypatch.setattr(decisions_run, "EnergyMeter", lambda: blind)
    with pytest.raises(UnsupportedError, match="goodput_per_watt on this machine: no counters"):
        decisions_run.check_energy(parse_plan(table))
    table["decisions"]["outcome"]["metric"] = "goodput"
    decisions_run.check_energy(parse_plan(table))


def test_limits_count_from_the_schedule():
    late = make_served(Job("a", 0.0, (1,), 2, "c"), 0.0, 0.9, (1.0, 1.1), (1, 2))
    assert late.meets(Slo(tpot_ms=100.1))
    assert not late.meets(Slo(ttft_ms=999.0))
    assert late.meets(Slo(ttft_ms=1000.1, e2el_ms=1100.1))


def test_a_cohort_that_never_meets_its_slo_still_has_a_ratio():
    run = Run((served("a", 0.0, (1.0, 2.0)),), 0, 2.0)
    assert measure(run, "c", Slo(ttft_ms=1), 1.0)["goodput"] == pytest.approx(0.25)


def test_acceptance_is_counted_by_entries_kept(fake):
    variant = SimpleNamespace(draft_tokens=2, is_replay=True, name="d")
    server = fake(flat, speak, noise=0.0).server(variant)
    first = server.run(jobs(1, output=6))
    # one token from the prompt, then blocks of two, the last one cut to what was asked for
    assert first.histogram == (0, 1, 2)
    assert first.counters["drafted"] == 6
    assert server.run(jobs(1, output=6)).histogram == first.histogram


def test_lost_and_short_requests_void_a_run():
    short = served("j0", 0.0, (1.0,), "pool")
    for run in (Run((), 1, 1.0), Run((short,), 0, 1.0)):
        server = SimpleNamespace(run=lambda jobs, in_flight, run=run: run)
        with pytest.raises(LostError):
            serve(server, jobs(1), None)


def test_every_variant_serves_the_same_jobs_in_turn(plan):
    order, seen = [], {}

    def server(name):
        def run(work, in_flight):
            order.append(name)
            seen.setdefault(tuple(j.id for j in work), []).append(name)
            times = (0.5 + 0.01 * len(order),)
            return Run(tuple(served(j.id, 0.0, times, "pool") for j in work), 0, 1.0)

        return SimpleNamespace(run=run)

    (found,) = conduct(
        [plan.cohort("pool")],
        {name: server(name) for name in "abc"},
        lambda r: [Job(f"r{r}", 0.0, (1,), 1, "pool")],
        plan.design,
        metric="throughput",
        prices=dict.fromkeys("abc", 1.0),
        in_flight=1,
    )
    assert order[:9] == list("abcabcbca")
    assert all(sorted(names) == list("abc") for names in seen.values())
    assert found.rounds == plan.design.pairs


@pytest.mark.slow
def test_the_number_of_rounds_follows_the_spread_and_not_the_mean(plan, fake):
    design = plan.design.model_copy(update={"max_pairs": 400})

    def rounds(factor, noise):
        servers = {
            "a": plain(fake, noise=noise),
            "b": plain(fake, lambda v, p: STEP * factor, noise, seed=1),
        }
        (found,) = conduct(
            [plan.cohort("pool")], servers, lambda r: jobs(4), design, metric="throughput",
            prices={"a": 1.0, "b": 1.0}, in_flight=4,
        )  # fmt: skip
        return found.rounds

    assert rounds(1.0, 0.01) == rounds(2.0, 0.01) == design.pairs
    assert rounds(1.0, 0.2) == rounds(2.0, 0.2) > 2 * design.pairs


@pytest.mark.slow
def test_a_planted_slowdown_of_5_percent_is_caught(plan, fake):
    def compared(factor):
        servers = {
            "a": plain(fake, noise=0.05),
            "b": plain(fake, lambda v, p: STEP * factor, 0.05, seed=1),
        }
        (found,) = conduct(
            [plan.cohort("pool")], servers, lambda r: jobs(8), plan.design, metric="throughput",
            prices={"a": 1.0, "b": 1.0}, in_flight=8,
        )  # fmt: skip
        return found.compare("b", "throughput")

    slower = compared(1.05)
    assert slower.ratio.high < 1
    assert slower.ratio.value == pytest.approx(1 / 1.05, rel=0.03)
    assert not compared(1.0).differs


def test_a_planted_slowdown_is_caught_in_the_engine_itself_in_virtual_time(subject, plan):
    """Real forwards and scheduling; a forward costs what a function says, with 5 % of noise."""
    noise = np.random.default_rng(0)

    def compared(factor):
        def clock(slower):
            def cost(work):
                return slower * (1e-3 + 1e-4 * work.rows) * np.exp(0.05 * noise.standard_normal())

            return lambda: VirtualClock(cost)

        baseline = plan.baseline
        with (
            Embedded(subject, plan, clock(1.0)) as plain,
            Embedded(subject, plan, clock(factor)) as slower,
        ):
            servers = {"a": plain.server(baseline), "b": slower.server(baseline)}
            (found,) = conduct(
                [plan.cohort("pool")], servers, lambda r: jobs(8, output=16), plan.design,
                metric="throughput", prices={"a": 1.0, "b": 1.0}, in_flight=8,
            )  # fmt: skip
        return found.compare("b", "throughput")

    slow = compared(1.05)
    assert slow.ratio.high < 1
    assert slow.ratio.value == pytest.approx(1 / 1.05, rel=0.03)
    assert not compared(1.0).differs


def test_arrival_classes_differ_by_their_places(plan):
    closed = plan.cohort("pool")
    assert places(closed, 9) == 8
    assert places(closed.model_copy(update={"arrival": "offline"}), 9) == 9
    assert places(closed.model_copy(update={"arrival": "scheduled"}), 9) is None
