from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from replayssm.engine.engine import Engine
from replayssm.engine.request import Limits, Request, Route
from replayssm.errors import UnsupportedError
from replayssm.evaluate.drafting import engine_drafters
from replayssm.evaluate.subject import load
from replayssm.models import tiny

PROMPTS = ("def is_valid(x):\n    return x", "import os\nimport sys\n")
NEW = 24


@pytest.fixture(scope="module")
def subject():
    try:
        return load("gdn-tiny")
    except UnsupportedError as error:
        pytest.skip(str(error))


def served(subject, route):
    limits = Limits(slots=2, context=64)
    with (
        engine_drafters(subject, [route]) as drafters,
        Engine(subject.model, limits, drafters=drafters) as engine,
    ):
        for number, text in enumerate(PROMPTS):
            engine.submit(Request(str(number), tuple(tiny.encode(text)), NEW, route=route))
        tokens = {"0": [], "1": []}
        while not engine.is_idle:
            for event in engine.step():
                if event.kind == "token":
                    tokens[event.request_id].append(event.token)
            if engine.stats().steps == 4:
                engine.preempt("0")  # its drafter reads the tokens again
        return tokens, engine.stats()


def test_an_engine_drafts_with_the_bundled_model_and_emits_the_same_tokens(subject):
    plain, _ = served(subject, Route())
    drafted, stats = served(subject, Route(draft_tokens=3, drafter="model"))
    assert drafted == plain
    assert stats.accepted > NEW / 4


def test_the_draft_model_is_loaded_only_where_a_route_asks_for_it(subject):
    with engine_drafters(subject, [Route(), Route(draft_tokens=4, drafter="ngram")]) as made:
        assert made == {}


def test_a_model_with_a_tokenizer_of_its_own_has_no_draft_model(subject):
    foreign = replace(subject, encode=lambda data: list(data))
    with (
        pytest.raises(UnsupportedError, match="drafter 'model' for gdn-tiny: draft-tiny drafts"),
        engine_drafters(foreign, [Route(draft_tokens=3, drafter="model")]),
    ):
        pass
