from __future__ import annotations

import pytest
import torch

from replayssm.evaluate import precision
from replayssm.evaluate.plan import Plan


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_arms_side_by_side_score_as_one_after_the_other(subject, small_scope, result):
    ticks = []
    found = precision.run(subject, Plan("random-gdn", scope=small_scope), ticks.append)
    assert len(ticks) == precision.count_steps(subject, result.plan)
    for mine, alone in zip(found.arms, result.precision.arms, strict=True):
        assert (mine.arm, mine.recall) == (alone.arm, alone.recall)
        for a, b in zip(mine.buckets, alone.buckets, strict=True):
            assert a.bits_per_byte.value == pytest.approx(b.bits_per_byte.value, rel=1e-6)
            if a.mean_kl is not None:
                assert a.mean_kl.value == pytest.approx(b.mean_kl.value, rel=1e-3, abs=1e-9)


@pytest.mark.usefixtures("two_threads")
def test_a_reference_that_fails_ends_the_run(subject, small_scope, monkeypatch):
    plan, decode = Plan("random-gdn", scope=small_scope), precision._decode_group

    def failing(model, group, scope, known):
        if group.texts and known is None:
            raise RuntimeError("planted")
        return decode(model, group, scope, known)

    monkeypatch.setattr(precision, "_decode_group", failing)
    with pytest.raises(RuntimeError, match="planted"):
        precision.run(subject, plan, lambda _: None)
