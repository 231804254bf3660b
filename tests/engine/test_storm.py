"""A small storm; ``benchmarks/engine.py`` runs the large one."""

from __future__ import annotations

from typing import Any

import pytest
from serving import PROMPTS, load

from replayssm.engine.storm import Storm, StormPlan, is_near_tie


@pytest.mark.long
@pytest.mark.parametrize("name", ["gdn-tiny", "mamba2-tiny", "kda-tiny"])
def test_nothing_is_lost_leaked_or_wrong(name: str) -> None:
    plan = StormPlan(requests=300, slots=6, arrivals=2.0, swap=0.5, move=0.5, new_tokens=16)
    result = Storm(load(name), PROMPTS, plan).run()
    assert result.is_clean, result
    assert min(result.swaps, result.moves, result.cancelled, result.rollbacks) > 10
    assert result.finished + result.cancelled == 300


def test_small_storm(model: Any) -> None:
    plan = StormPlan(requests=40, slots=3, arrivals=2.0, new_tokens=8)
    result = Storm(model, PROMPTS[:2], plan, impl="reference").run()
    assert result.is_clean, result
    assert result.compared > 10


def test_wrong_token_is_no_near_tie(model: Any) -> None:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert is_near_tie(model, PROMPTS[0], (), best)
    assert not is_near_tie(model, PROMPTS[0], (), worst)
