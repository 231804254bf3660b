"""``auto`` takes the faster path for every cache, and says which and why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from stepping import assert_same, forward, generate, new_cache  # noqa: E402
from tiny_families import build, prompt  # noqa: E402

import replayssm  # noqa: E402
from replayssm import policy  # noqa: E402
from replayssm.engine.auto import AutoRouter  # noqa: E402
from replayssm.engine.request import STANDARD, Route  # noqa: E402
from replayssm.errors import UnsupportedError  # noqa: E402
from replayssm.policy import Measured  # noqa: E402
from replayssm.types import Format, ReadDepth  # noqa: E402

transformers.logging.set_verbosity_error()


@pytest.fixture
def model():
    return build("Qwen3_5Text")


@pytest.fixture
def measured(monkeypatch, model):
    """Replay is slower under three rows, and faster from three on."""
    from replayssm.models.registry import find_mixers

    layer = find_mixers(model)[0][0].spec
    row = Measured(layer, Format.F32, ReadDepth.FULL, 1, 16, (2, 3), (1.0, 3.0), (2.0, 2.0))
    monkeypatch.setattr(policy, "measured_on", lambda name: (row,))


@pytest.mark.parametrize(("rows", "path"), [(2, "standard"), (3, "replay")])
def test_every_cache_gets_the_faster_path_for_its_rows(model, measured, rows, path):
    plain = generate(model, prompt(rows), tokens=8)
    with replayssm.enable(model, path="auto", state="f32") as handle:
        assert_same(plain, generate(model, prompt(rows), tokens=8))
        assert handle.choice.path == path
        assert "measured on cpu" in handle.choice.why
        assert (handle.choice.gain > 1) == (path == "replay")


def test_tokens_that_may_be_taken_back_ask_for_replay(model, measured):
    with replayssm.enable(model, path="auto", state="f32", keep=2) as handle:
        cache = new_cache(model)
        forward(model, prompt(2), cache)
        assert handle.choice.path == "replay"
        assert handle.choice.gain is None
        cache.crop(-1)


def test_a_cache_on_the_standard_path_refuses_to_take_tokens_back(model, measured):
    with replayssm.enable(model, path="auto", state="f32"):
        cache = new_cache(model)
        forward(model, prompt(2), cache)
        with pytest.raises(UnsupportedError, match="standard path"):
            cache.crop(-1)


def test_assisted_generation_is_served_under_auto(model, measured):
    plain = generate(model, prompt(1), tokens=8)
    with replayssm.enable(model, path="auto", state="f32"):
        drafted = generate(model, prompt(1), tokens=8, prompt_lookup_num_tokens=3)
    assert torch.equal(plain.sequences, drafted.sequences)


@pytest.mark.parametrize(("rows", "path"), [(1, "standard"), (12, "replay")])
def test_a_router_goes_by_the_sequences_that_are_expected(model, measured, rows, path):
    drafting = Route(draft_tokens=2, drafter="ngram")
    asked = {"plain": Route(), "drafts": drafting, "standard": STANDARD}
    with replayssm.enable(model, state="f32") as handle:
        router = AutoRouter(
            lambda request: asked[request.cohort], handle, state="f32", ring=handle.ring, rows=rows
        )
        routes = {name: router(SimpleNamespace(cohort=name)) for name in asked}
    assert routes["plain"].path == path
    assert (routes["drafts"], routes["standard"]) == (drafting, STANDARD)
