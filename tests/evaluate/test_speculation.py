"""The speculation section: lossless loops, honest counts, and a verdict that follows from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from replayssm.engine.speculative import NgramDrafter, recompute_path
from replayssm.evaluate import drafting, speculation, verifying
from replayssm.evaluate.arms import STANDARD
from replayssm.evaluate.plan import Plan
from replayssm.evaluate.report.speculation import torture as torture_table
from replayssm.evaluate.session import enabled
from replayssm.evaluate.stats import ratio_of_sums
from replayssm.evaluate.subject import held_out
from replayssm.evaluate.verdict import Verdict
from replayssm.testing.factories import make_layer
from replayssm.types import Decay, Write

PROMPT, TOKENS = 48, 60


@pytest.fixture(scope="module")
def prompt(subject):
    return held_out(subject, 1, PROMPT, 0).ids[0].tolist()


@pytest.fixture(scope="module")
def plain(subject, prompt):
    with enabled(subject.model, STANDARD, window=4):
        return drafting.decode(subject.model, prompt, TOKENS)


def loop(subject, prompt, name, limit):
    arm = speculation.speculating_arm(Plan("any"))
    with drafting.drafting(name, limit, 4) as make, enabled(subject.model, arm, window=4) as handle:
        return drafting.speculate(handle, prompt, TOKENS, make(), limit)


@pytest.mark.parametrize("name", [drafting.LOOKUP, drafting.TREE, drafting.MODEL])
@pytest.mark.parametrize("limit", [1, 5])
def test_drafts_leave_the_tokens_of_plain_decode(subject, prompt, plain, name, limit):
    found = loop(subject, prompt, name, limit)
    assert found.emitted == plain.emitted
    assert sum(1 + kept for _, kept in found.rounds) == len(found.emitted) - 1


def test_acceptance_is_that_of_an_independent_plain_decode(subject, prompt, plain):
    """Class 102: a verifier that drifts towards its drafter accepts more than plain decode does."""
    limit, context, rest = 5, [*prompt, plain.emitted[0]], plain.emitted[1:]
    found, drafter = loop(subject, prompt, drafting.LOOKUP, limit), NgramDrafter()
    for drafted, accepted in found.rounds:
        draft = drafter.propose(context, min(limit, len(rest) - 1))
        assert (len(draft), len(recompute_path(draft, rest))) == (drafted, accepted)
        context, rest = context + rest[: 1 + accepted], rest[1 + accepted :]
    assert not rest


def test_time_is_split_by_tokens():
    """By hand: forwards that emit 1, 3 and 4 tokens, in stretches of two."""
    made = drafting.Loop([0] * 9, [(3, 0), (3, 2), (3, 3)], [1.0, 4.0, 6.0])
    assert made.spans(8, 2).tolist() == [2.0, 2.0, 1.0, 1.0]
    assert made.spans(8, 8).sum() == made.marks[-1]


def test_every_drafter_length_and_way_has_numbers(result):
    found = result.speculation
    assert {(d.drafter, d.drafts) for d in found.drafted} == {
        (name, n) for name in (drafting.LOOKUP, drafting.TREE, drafting.MODEL) for n in (1, 3)
    }
    for d in found.drafted:
        assert d.equal == d.sequences == 2
        assert len(d.counts) == d.drafts + 2
        assert d.counts[0] == 0  # the pending token is always kept
        if d.kept is not None:
            kept = np.arange(len(d.counts)) @ np.array(d.counts) / sum(d.counts)
            assert d.kept.value == pytest.approx(kept)
            assert d.rate.low <= d.rate.value <= d.rate.high
    names = {arm.name for arm in result.plan.candidates}
    assert {v.way for v in found.verified} == {*names, verifying.SNAPSHOT, verifying.RECOMPUTE}


def test_bytes_of_the_ways_follow_from_shapes(result):
    found = result.speculation
    for v in found.verified:
        if v.way == verifying.SNAPSHOT:
            assert v.slot_bytes == (v.drafts + 2) * found.state_bytes
            assert v.moved_bytes == (v.drafts + 2) * found.state_bytes
        elif v.way == verifying.RECOMPUTE:
            assert v.slot_bytes == 2 * found.state_bytes
            assert 2 * found.state_bytes <= v.moved_bytes <= 4 * found.state_bytes
        assert v.error < 2e-2


def test_rollbacks_were_tortured_at_every_phase(result):
    found = result.speculation.torture
    assert (found.rounds, found.failure, found.worst_state) == (60, None, 0)
    assert found.phases == result.plan.scope.window
    assert ("outcome", "no trace left") in torture_table(result).rows


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9, 1.0])
def test_break_even_rate_keeps_what_it_has_to(drafts, chance):
    kept = sum(chance**i for i in range(drafts + 1))
    assert speculation.break_even_rate(kept, drafts) == pytest.approx(chance, abs=1e-9)
    assert speculation.break_even_rate(drafts + 1.1, drafts) is None
    assert speculation.break_even_rate(0.9, drafts) == 0


def test_schedules_draw_what_was_kept():
    kept = verifying.schedule([0, 3, 0, 1], batch=50, rounds=40, seed=0)
    assert set(kept.flat) == {1, 3}
    assert np.mean(kept == 1) == pytest.approx(0.75, abs=0.05)


def test_a_ratio_of_sums_carries_an_interval_over_units():
    found = ratio_of_sums([2, 4, 6], [1, 2, 3], seed=0)
    assert (found.value, found.low, found.high, found.n) == (2, 2, 2, 3)
    spread = ratio_of_sums([1, 5, 1, 5], [1, 1, 1, 1], seed=0)
    assert spread.low < spread.value == 3 < spread.high
    assert ratio_of_sums([1], [1], seed=0) is None
    assert ratio_of_sums([0, 0], [0, 0], seed=0) is None


VERDICTS = {
    "faster": ({"speedup": (1.5, 1.2, 1.8)}, Verdict.ENABLE, "Speculate with prompt lookup"),
    "slower": ({"speedup": (0.8, 0.7, 0.9)}, Verdict.REFUSE, "Do not speculate at batch 1"),
    "unclear": ({"speedup": (1.1, 0.9, 1.3)}, Verdict.OPEN, "cannot decide"),
    "other tokens": ({"equal": 1}, Verdict.OPEN, "1 of 2 sequences differ from plain decode"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_follows_from_the_best_loop(result, estimate, case):
    changes, verdict, words = VERDICTS[case]
    first = result.speculation.drafted[0]
    made = replace(first, speedup=estimate(1.5, 1.2, 1.8))
    if "speedup" in changes:
        changes = {"speedup": estimate(*changes["speedup"])}
    made = replace(made, **changes)
    got, advice = speculation.judge([made], result.speculation.torture, 1.05)
    assert got is verdict
    assert words in advice


def test_a_rollback_that_leaves_a_trace_is_reported_and_refused(result, monkeypatch):
    def broken(*_args, **_kwargs):
        raise AssertionError("round 7, layer 0: the state is off by 0.1")

    monkeypatch.setattr(speculation, "check_rollback", broken)
    layer = make_layer(Write.DELTA, Decay.SCALAR)
    found = speculation._torture(result.plan.candidates[0], layer, result.plan)
    assert found.failure == "round 7, layer 0: the state is off by 0.1"
    verdict, advice = speculation.judge(result.speculation.drafted, found, 1.05)
    assert verdict is Verdict.REFUSE
    assert "left a trace" in advice
