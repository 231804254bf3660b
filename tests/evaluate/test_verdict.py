from __future__ import annotations

from dataclasses import replace

import pytest

from replayssm.evaluate.checks import Status, under
from replayssm.evaluate.plan import FULL_SCOPE, Scope
from replayssm.evaluate.verdict import Verdict, faster, judge


def judged(made):
    return judge(made.plan, *made.sections())


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [(0.1, 0.9, Status.PASS), (0.9, 1.1, Status.OPEN), (1.1, 1.3, Status.FAIL)],
)
def test_a_margin_is_compared_with_the_worse_end(low, high, status, estimate):
    assert under(estimate((low + high) / 2, low, high), 1.0) is status


@pytest.mark.parametrize(
    ("value", "low", "high", "status"),
    [
        (1.20, 1.10, 1.30, Status.PASS),
        (1.20, 0.99, 1.45, Status.OPEN),
        (1.02, 1.01, 1.03, Status.FAIL),
        (1.04, 1.01, 1.07, Status.OPEN),
        (0.80, 0.70, 0.90, Status.FAIL),
    ],
)
def test_faster_needs_the_margin_and_an_interval_above_one(value, low, high, status, estimate):
    assert faster(estimate(value, low, high), 1.05) is status


def test_good_numbers_are_enabled(made):
    found = judged(made)
    assert found.verdict is Verdict.ENABLE
    assert {a.verdict for a in found.arms if a.verdict} == {Verdict.ENABLE}


def test_slow_arms_are_refused_in_plain_words(made, estimate):
    slow = estimate(0.9, 0.88, 0.92)
    made.speedup = {
        arm.name: dict.fromkeys(made.plan.scope.batches, slow) for arm in made.plan.arms
    }
    found = judged(made)
    assert found.verdict is Verdict.REFUSE
    assert found.headline.startswith("Do not enable")
    assert "0.90x" in found.headline
    assert [r.arm for r in found.routes] == ["standard f32"]
    assert found.routes[0].reason == (
        "no candidate was shown to be at least 1.05x faster within the precision margins"
    )
    assert all("too slow" in s.reason for s in found.settings)


def test_a_fast_arm_that_breaks_a_margin_is_refused(made, estimate):
    made.kl["q16 high"] = estimate(0.01, 0.009, 0.011)
    found = judged(made)
    assert found.arm("q16 high").verdict is Verdict.REFUSE
    assert "mean KL (0.01, margin 0.002)" in found.arm("q16 high").reason
    assert found.arm("s32 full").verdict is Verdict.ENABLE


def test_an_interval_across_a_margin_is_inconclusive(made, estimate):
    for arm in made.plan.candidates:
        made.kl[arm.name] = estimate(0.002, 0.001, 0.003)
    found = judged(made)
    assert found.verdict is Verdict.OPEN
    assert {s.verdict for s in found.settings} == {Verdict.OPEN}


@pytest.mark.parametrize(
    ("scope", "advice"), [(Scope(), "with --full"), (FULL_SCOPE, "on a machine at rest")]
)
def test_a_full_run_that_cannot_decide_does_not_ask_for_itself(made, estimate, scope, advice):
    wide = type(made)(replace(made.plan, scope=scope))
    wide.kl = {arm.name: estimate(0.002, 0.001, 0.003) for arm in wide.plan.arms}
    assert f"run again {advice}." in judged(wide).headline


def test_only_an_open_setting_is_named_where_the_run_is_open(made, estimate):
    """A refused arm may have the best speed-up; it is not what to look at next."""
    made.kl["q16 high"] = estimate(0.01, 0.009, 0.011)
    for arm in ("s32 full", "q24 high"):
        made.speedup[arm] = dict.fromkeys(made.plan.scope.batches, estimate(1.06, 0.99, 1.13))
    found = judged(made)
    assert found.verdict is Verdict.OPEN
    assert "The best candidate is s32 full at batch 1: state update 1.06x" in found.headline
    assert "speed is undecided" in found.arm("s32 full").reason


def test_a_slower_setting_is_not_called_the_best(made, estimate):
    for arm in made.plan.candidates:
        made.speedup[arm.name] = dict.fromkeys(made.plan.scope.batches, estimate(0.45, 0.2, 0.8))
    made.speedup["q24 high"][4] = estimate(0.9, 0.1, 1.7)
    found = judged(made)
    assert found.verdict is Verdict.OPEN
    assert "No candidate was faster; the closest is q24 high at batch 4" in found.headline


def test_a_route_names_the_standard_arm_to_beat(made, estimate):
    made.today = {arm.name: estimate(0.9, 0.85, 0.95) for arm in made.plan.arms}
    assert [r.arm for r in judged(made).routes] == ["standard bf16"]


def test_recall_that_nobody_has_cannot_be_shown_to_be_kept(made):
    made.recall = 0.01
    assert judged(made).verdict is Verdict.OPEN


def test_the_rival_is_the_fastest_standard_arm_that_keeps_the_margins(made, estimate):
    made.today = {arm.name: estimate(0.9, 0.85, 0.95) for arm in made.plan.arms}
    found = judged(made)
    assert found.verdict is Verdict.REFUSE
    assert {s.against for s in found.settings} == {"standard bf16"}
    made.kl["standard bf16"] = estimate(0.01, 0.009, 0.011)
    found = judged(made)
    assert found.verdict is Verdict.ENABLE
    assert {s.against for s in found.settings} == {"standard f32"}


def test_a_slower_whole_step_is_refused(made, estimate):
    made.whole = estimate(0.9, 0.85, 0.95)
    assert judged(made).verdict is Verdict.REFUSE


def test_wrong_fp32_results_are_refused(made):
    made.logit_error = 0.5
    assert judged(made).arm("s32 full").verdict is Verdict.REFUSE


def test_routes_cover_every_batch_once_with_the_standard_path_as_fallback(made, estimate):
    slow = estimate(0.9, 0.88, 0.92)
    for arm in made.plan.candidates:
        made.speedup[arm.name] = {b: estimate(1.3, 1.2, 1.4) if b >= 16 else slow
                                  for b in made.plan.scope.batches}  # fmt: skip
    routes = judged(made).routes
    assert routes[0].arm == "standard f32"
    assert (routes[0].first, routes[0].last) == (1, 15)
    assert (routes[1].first, routes[1].last) == (16, None)
