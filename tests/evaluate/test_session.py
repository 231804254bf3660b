from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from replayssm.errors import UnsupportedError
from replayssm.evaluate import bottleneck, compatibility
from replayssm.evaluate.arms import DEFAULT
from replayssm.evaluate.plan import Plan
from replayssm.evaluate.session import Session, enabled, one_thread, twin
from replayssm.evaluate.subject import load
from replayssm.evaluate.workload import make_blocks
from replayssm.models.tiny import WINDOW
from replayssm.ops import standard_
from replayssm.ring import BlockPlan
from replayssm.state import StatePool
from replayssm.types import Decay, LayerSpec, Write


def test_one_thread_outlasts_a_kernel_that_could_use_more():
    pytest.importorskip("numba")
    spec = LayerSpec(Write.DELTA, Decay.SCALAR, 2, 4, 64, 64)
    state, zeros = torch.zeros(8, 4, 64, 64), np.zeros(8, np.int64)
    plan = BlockPlan(np.arange(8), zeros, zeros, zeros, zeros + 1)
    before = torch.get_num_threads()
    with one_thread():
        standard_(state, spec, plan, make_blocks(spec, 8, 0, 1)[0])
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.fixture
def rebuilt(monkeypatch):
    """Count the states that are rebuilt from checkpoint and ring."""
    calls, materialise = [], StatePool.materialise

    def counted(pool, *args):
        calls.append(args)
        return materialise(pool, *args)

    monkeypatch.setattr(StatePool, "materialise", counted)
    return calls


def test_the_end_of_the_bottleneck_section_rebuilds_no_state(subject, small_scope, rebuilt):
    plan = Plan("random-gdn", scope=replace(small_scope, decode_batches=(1,), budget_bytes=1))
    assert bottleneck.run(subject, plan, str).profiles
    assert not rebuilt


def test_agreement_rebuilds_every_final_state_once(subject, small_scope, rebuilt):
    plan = Plan("random-gdn", scope=replace(small_scope, prefills=(4,)))
    found = compatibility.run(subject, plan, str).agreements
    assert len(rebuilt) == sum(f.arm != plan.arms[0].name for f in found)


@pytest.mark.parametrize("arm", DEFAULT, ids=lambda arm: arm.name)
def test_a_fork_under_an_arm_goes_on_as_if_its_prompt_had_run_there(subject, arm):
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    prompt, logits = Session(subject.model), []
    prompt.feed(ids[:, :30])
    for is_fork in (True, False):
        model = twin(subject.model)
        with enabled(model, arm, window=4):
            session = prompt.fork(model) if is_fork else Session(model)
            if not is_fork:
                session.feed(ids[:, :30])
            logits.append(torch.cat([session.feed(ids[:, i : i + 1]) for i in range(30, 40)], 1))
    assert torch.equal(*logits)
    assert prompt.position == 30


@pytest.mark.parametrize("name", ["mamba2-tiny", "gdn-tiny", "kda-tiny"])
def test_what_windowed_attention_no_longer_sees_can_be_forgotten(name):
    try:
        model = load(name).model
    except UnsupportedError as error:
        pytest.skip(str(error))
    ids = torch.randint(256, (2, 7 * 16), generator=torch.Generator().manual_seed(0))
    whole, short = Session(model), Session(model)
    for at in range(0, ids.shape[1], 16):
        expected, found = (s.feed(ids[:, at : at + 16]) for s in (whole, short))
        assert torch.equal(found, expected)
        short.forget()
    kept = {layer.keys.shape[2] for layer in short.cache.layers if hasattr(layer, "keys")}
    assert kept == {WINDOW - 1}
