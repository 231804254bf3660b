import inspect
import json.decoder

import numpy as np
import pytest
from speculative_toys import Markov, RecurrentToy

from replayssm.engine.speculative import (
    AcceptanceTrace,
    AdaptiveLength,
    CostModel,
    DraftModel,
    FixedLength,
    ModelDrafter,
    NgramDrafter,
    ScriptDrafter,
    record_runs,
    simulate,
)
from replayssm.errors import ContractError

LIMIT = 8
COSTS = {
    "cheap": {0: 1.0, 1: 1.03, 4: 1.12, 8: 1.24},
    "mid": {0: 1.0, 1: 1.1, 4: 1.3, 8: 1.6},
    "dear": {0: 1.0, 1: 1.4, 4: 1.8, 8: 2.4},
    "never for one draft": {0: 1.0, 1: 2.2, 8: 2.9},
    "never": {0: 1.0, 1: 3.0, 8: 12.0},
    "steps": {0: 5e-3, 1: 5.1e-3, 2: 5.1e-3, 3: 7e-3, 8: 7.2e-3},
}
PERIODS = [20, 34, 60, 100, 200, 500, 1000, 2000]


def trace_of(right):
    """Return the trace of a drafter whose token t is right where ``right[t]``."""
    runs = np.zeros(len(right), np.int64)
    run = 0
    for i in reversed(range(len(right))):
        run = run + 1 if right[i] else 0
        runs[i] = min(run, LIMIT)
    return AcceptanceTrace(np.full(len(right), LIMIT, np.int64), runs)


def square(period, tokens, high, low, first, rng):
    on = (np.arange(tokens) // (period // 2)) % 2 == first
    return trace_of(rng.random(tokens) < np.where(on, high, low))


def walk(tokens, rng):
    level = np.abs((np.cumsum(rng.normal(0, 0.02, tokens)) + 0.5) % 2 - 1)
    return trace_of(rng.random(tokens) < level)


def losses_by_prefix(trace, cost, **options):
    """Return the loss to plain decode after every round, as a fraction of plain time so far."""
    rule = AdaptiveLength(cost, LIMIT, **options)
    position, time, out = 0, 0.0, []
    while position < len(trace):
        count = min(rule.choose(len(trace) - position - 1), int(trace.offered[position]))
        kept = min(count, int(trace.runs[position]))
        rule.update_(count, kept)
        position += 1 + kept
        time += cost.time(count)
        out.append(time / (cost.plain * position) - 1)
    return out


# ---- never more than 2 % slower than plain decode


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("period", PERIODS)
def test_square_waves_never_lose_two_percent(cost, period):
    rng = np.random.default_rng(period)
    model = CostModel(COSTS[cost])
    for high, low in ((1.0, 0.0), (0.9, 0.05)):
        for first in (0, 1):
            trace = square(period, 2000, high, low, first, rng)
            assert max(losses_by_prefix(trace, model)) <= 0.015 + 1e-12


@pytest.mark.parametrize("cost", COSTS)
def test_steady_and_wandering_acceptance_never_lose_two_percent(cost):
    rng = np.random.default_rng(1)
    model = CostModel(COSTS[cost])
    traces = [trace_of(rng.random(1500) < a) for a in (0, 0.05, 0.2, 0.4, 0.5, 0.6, 0.8, 1)]
    traces += [walk(1500, rng) for _ in range(4)]
    for trace in traces:
        assert max(losses_by_prefix(trace, model)) <= 0.015 + 1e-12


@pytest.mark.parametrize("cost", COSTS)
def test_an_adversary_that_answers_each_choice_can_not_cost_two_percent(cost):
    """Accept until a long draft is chosen, then reject it; lie about every position in turn."""
    model = CostModel(COSTS[cost])
    for trick in range(3):
        rule = AdaptiveLength(model, LIMIT)
        time = tokens = 0.0
        worst = -1.0
        for round_ in range(3000):
            count = rule.choose()
            kept = {0: count if count < 3 else 0, 1: count * (round_ % 7 < 3), 2: count // 2}[trick]
            rule.update_(count, kept)
            time += model.time(count)
            tokens += 1 + kept
            worst = max(worst, time / (tokens * model.plain) - 1)
            assert rule.reserve >= -1e-9
        assert worst <= 0.015 + 1e-12


@pytest.mark.parametrize("cost", ["mid", "dear"])
def test_any_window_loses_at_most_the_cap_and_the_share(cost):
    rng = np.random.default_rng(3)
    model = CostModel(COSTS[cost])
    cap, share = 8.0, 0.015
    for period in (100, 1000):
        trace = square(period, 4000, 1.0, 0.0, 0, rng)
        rule = AdaptiveLength(model, LIMIT, cap=cap, share=share)
        position, slack = 0, [0.0]
        while position < len(trace):
            count = rule.choose(len(trace) - position - 1)
            kept = min(count, int(trace.runs[position]))
            rule.update_(count, kept)
            position += 1 + kept
            plain = (1 + kept) * model.plain
            slack.append(slack[-1] + model.time(count) - plain * (1 + share))
        slack = np.array(slack)
        assert (slack - np.minimum.accumulate(slack)).max() <= cap * model.plain + 1e-9


def recorded():
    """Return traces recorded from real drafters on known sequences."""
    text = list(inspect.getsource(json.decoder).encode())
    yield "ngram on source code", record_runs(NgramDrafter(2, 5), text[:6000], 50, LIMIT)
    verifier = Markov(8, vocab=12)
    rng = np.random.default_rng(0)
    toy = RecurrentToy(verifier.blurred(1, 0.5))
    sampled = verifier.sampled([0, 1], 1500, rng)
    drafter = ModelDrafter(DraftModel(toy.step, toy.rollback))
    yield "model on samples", record_runs(drafter, sampled, 2, LIMIT)
    yield "ngram on samples", record_runs(NgramDrafter(1, 3), sampled, 2, LIMIT)


@pytest.mark.parametrize("cost", COSTS)
def test_recorded_traces_never_lose_two_percent(cost):
    model = CostModel(COSTS[cost])
    for name, trace in recorded():
        assert max(losses_by_prefix(trace, model)) <= 0.015 + 1e-12, name


# ---- and it is worth having


@pytest.mark.parametrize("cost", ["cheap", "mid", "dear"])
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.7, 0.9, 1.0])
def test_steady_acceptance_ends_near_the_better_arm(cost, acceptance):
    model = CostModel(COSTS[cost])
    for seed in range(3):
        trace = trace_of(np.random.default_rng(seed).random(6000) < acceptance)
        best = min(simulate(trace, FixedLength(n), model).time for n in range(LIMIT + 1))
        assert simulate(trace, AdaptiveLength(model, LIMIT), model).time <= 1.05 * best


@pytest.mark.parametrize("cost", ["cheap", "mid", "dear"])
@pytest.mark.parametrize("period", [500, 1000, 2000])
def test_slow_waves_beat_every_fixed_length(cost, period):
    model = CostModel(COSTS[cost])
    trace = square(period, 8000, 0.95, 0.02, 0, np.random.default_rng(period))
    best = min(simulate(trace, FixedLength(n), model).time for n in range(LIMIT + 1))
    assert simulate(trace, AdaptiveLength(model, LIMIT), model).time < 0.95 * best


def test_the_better_arm_is_picked_in_nearly_every_window():
    model = CostModel(COSTS["mid"])
    trace = square(1000, 10_000, 0.95, 0.02, 0, np.random.default_rng(0))
    rule = AdaptiveLength(model, LIMIT)
    position, windows = 0, {}
    while position < len(trace):
        count = rule.choose()
        kept = min(count, int(trace.runs[position]))
        rule.update_(count, kept)
        window = windows.setdefault(position // 50, [0.0, 0])
        window[0] += model.time(count)
        window[1] += 1 + kept
        position += 1 + kept
    right = 0
    for index, (time, tokens) in windows.items():
        speeds = time / (tokens * model.plain)
        right += speeds < 1 if (index // 10) % 2 == 0 else speeds < 1.1
    assert right >= 0.95 * len(windows)


def test_probes_thin_out_while_they_fail():
    model = CostModel(COSTS["cheap"])
    rule = AdaptiveLength(model, LIMIT, share=0.5)
    drafted = []
    for _ in range(2000):
        count = rule.choose()
        drafted.append(count > 0)
        rule.update_(count, 0)
    assert sum(drafted[-1000:]) <= 1000 / 16
    assert sum(drafted[-1000:]) >= 1000 / 18


def test_probing_stops_where_no_length_could_pay():
    rule = AdaptiveLength(CostModel(COSTS["never"]), LIMIT)
    for _ in range(2000):
        assert rule.choose() == 0
        rule.update_(0, 0)


# ---- bookkeeping


def test_the_rule_is_a_function_of_its_updates():
    model = CostModel(COSTS["mid"])
    trace = walk(800, np.random.default_rng(5))
    rules = [AdaptiveLength(model, LIMIT) for _ in range(2)]
    first, second = (simulate(trace, rule, model) for rule in rules)
    assert first == second
    assert rules[0].choose() == rules[0].choose() == rules[1].choose()


def test_limits_and_short_offers_are_honoured():
    model = CostModel(COSTS["cheap"])
    rule = AdaptiveLength(model, LIMIT)
    for _ in range(200):
        rule.update_(LIMIT, LIMIT)
    assert rule.choose() == LIMIT
    assert rule.choose(3) == 3
    assert rule.choose(0) == 0
    rule.update_(2, 1)  # the drafter had only two
    for bad in ((3, 4), (9, 1), (2, -1)):
        with pytest.raises(ContractError, match="accepted"):
            rule.update_(*bad)


def test_slower_rounds_than_the_table_are_earned_back_before_the_next_draft():
    model = CostModel(COSTS["mid"])
    rule = AdaptiveLength(model, LIMIT)
    while (count := rule.choose()) == 0:
        rule.update_(0, 0)
    rule.update_(count, 0, time=model.time(count) + 2.0)
    steps = 0
    while rule.choose() == 0:
        rule.update_(0, 0)
        steps += 1
    assert steps * 0.015 >= 2.0 - 0.015


def test_estimates_follow_positions():
    rule = AdaptiveLength(CostModel(COSTS["mid"]), 3)
    for _ in range(100):
        rule.update_(3, 2)
    rates = rule.acceptance()
    assert rates[0] > 0.95
    assert rates[1] > 0.95
    assert rates[2] < 0.1


def test_the_cost_model_interpolates_and_goes_on_with_the_fitted_slope():
    model = CostModel({0: 1.0, 1: 1.2, 3: 1.6, 5: 2.0})
    assert model.time(0) == model.plain == 1.0
    assert model.time(2) == pytest.approx(1.4)
    assert model.time(9) == pytest.approx(2.8)
    assert CostModel({0: 1.0, 2: 1.5}).time(4) == pytest.approx(2.0)
    bumpy = CostModel({0: 1.0, 1: 1.5, 2: 1.3, 3: 1.1})
    assert [bumpy.time(n) for n in range(5)] == sorted(bumpy.time(n) for n in range(5))
    for bad in (
        {1: 1.0, 2: 1.0},
        {0: 1.0},
        {0: 1.0, -1: 2.0},
        {0: 0.0, 1: 1.0},
        {0: 1.0, 1: np.nan},
    ):
        with pytest.raises(ContractError, match="table"):
            CostModel(bad)


def test_bad_options_are_refused():
    model = CostModel(COSTS["mid"])
    for bad in (
        {"limit": 0},
        {"share": 0.0},
        {"share": 1.0},
        {"memory": 1.0},
        {"patience": 0},
        {"cap": -1.0},
    ):
        with pytest.raises(ContractError):
            AdaptiveLength(model, **{"limit": 4, **bad})


# ---- the simulator itself


def test_simulated_totals_match_a_hand_count():
    trace = AcceptanceTrace(np.array([3, 3, 3, 0, 3, 3]), np.array([2, 1, 0, 0, 1, 0]))
    model = CostModel({0: 1.0, 1: 1.5, 2: 2.0})
    got = simulate(trace, FixedLength(2), model)
    # three tokens in one round; a plain step; one draft, all that is left, accepted
    assert (got.tokens, got.rounds, got.drafted, got.accepted) == (6, 3, 3, 3)
    assert got.time == 2.0 + 1.0 + 1.5
    assert got.plain_time == 6.0
    assert got.loss == pytest.approx(-0.25)
    assert simulate(trace, FixedLength(0), model).loss == 0


def test_recording_a_script_gives_its_schedule():
    sequence = list(range(1, 41))
    trace = record_runs(ScriptDrafter(sequence, [2, 0, 5], 50), sequence, 1, 4)
    assert trace.runs.tolist()[:-4] == [[2, 0, 4][i % 3] for i in range(len(trace) - 4)]
    assert trace.offered.tolist()[-4:] == [4, 3, 2, 1]


def test_a_malformed_trace_is_refused():
    with pytest.raises(ContractError, match="runs"):
        AcceptanceTrace(np.array([1, 1]), np.array([1]))
    with pytest.raises(ContractError, match="runs"):
        AcceptanceTrace(np.array([1, 1]), np.array([1, 2]))
