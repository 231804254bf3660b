from __future__ import annotations

import pytest

from replayssm.errors import ContractError
from replayssm.traffic.prompts import Prompts
from replayssm.traffic.trace import TraceRequest


@pytest.fixture
def prompts():
    return Prompts(50, block_size=4, first_id=3, seed=7)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 9])
def test_prompts_have_the_length_and_the_ids_that_were_asked_for(prompts, tokens):
    blocks = tuple(range(-(-tokens // 4)))
    for request in (
        TraceRequest(0.0, tokens, 1),
        TraceRequest(0.0, tokens, 1, prefix_blocks=blocks),
    ):
        ids = prompts.ids(0, request)
        assert len(ids) == tokens
        assert all(type(i) is int and 3 <= i < 50 for i in ids)
        assert len(prompts.text(0, request).split()) == tokens


def test_equal_blocks_are_equal_tokens_and_others_are_not(prompts):
    a = prompts.ids(0, TraceRequest(0.0, 8, 1, prefix_blocks=(1, 2)))
    b = prompts.ids(1, TraceRequest(0.0, 7, 1, prefix_blocks=(1, 3)))
    assert a[:4] == b[:4]
    assert a[4:7] != b[4:]


def test_prompts_without_blocks_share_nothing(prompts):
    plain = TraceRequest(0.0, 40, 1)
    assert prompts.ids(0, plain) == prompts.ids(0, plain) != prompts.ids(1, plain)


def test_another_seed_gives_other_prompts_and_every_process_the_same():
    request = TraceRequest(0.0, 6, 1, prefix_blocks=(5, 6))
    first = Prompts(1000, block_size=4, seed=0).ids(0, request)
    # a golden value: Python's own hash differs from process to process
    assert first == [189, 320, 196, 755, 425, 203]
    assert Prompts(1000, block_size=4, seed=1).ids(0, request) != first


def test_given_ids_and_texts_are_kept(prompts):
    assert prompts.ids(0, TraceRequest(0.0, 2, 1, prompt_ids=(9, 8))) == [9, 8]
    assert prompts.text(0, TraceRequest(0.0, 2, 1, text="as it is")) == "as it is"


def test_an_empty_range_of_ids_is_refused():
    with pytest.raises(ContractError, match="first_id"):
        Prompts(3, block_size=4, first_id=3)
