from __future__ import annotations

import json

import pytest

from replayssm.traffic.chunks import StreamReader
from replayssm.traffic.target import SendError


def completion(text="x", finish=None, **rest):
    return {"choices": [{"text": text, "finish_reason": finish, **rest}]}


def chat(delta, finish=None, **rest):
    return {"choices": [{"delta": delta, "finish_reason": finish, **rest}]}


def usage(prompt, output, **rest):
    return {"prompt_tokens": prompt, "completion_tokens": output, **rest}


def read(*chunks):
    reader = StreamReader()
    counts = [reader.read(json.dumps(chunk)) for chunk in chunks]
    return counts, reader.outcome()


def test_a_chunk_with_text_is_one_token_where_nothing_else_is_told():
    counts, outcome = read(completion("a"), completion("bc"), completion("", "stop"))
    assert counts == [1, 1, 0]
    assert (outcome.finish_reason, outcome.output_tokens) == ("stop", None)


def test_the_role_of_a_chat_is_no_token():
    counts, _ = read(chat({"role": "assistant", "content": ""}), chat({"content": "hi"}), chat({}))
    assert counts == [0, 1, 0]


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"index": 0}]}]
)
def test_thoughts_and_calls_are_tokens(delta):
    assert read(chat(delta))[0] == [1]


def test_ids_and_log_probabilities_count_the_tokens_of_a_chunk():
    assert read(completion("abc", token_ids=[1, 2, 3]))[0] == [3]
    assert read(completion("abc", logprobs={"tokens": ["a", "b"]}))[0] == [2]
    assert read(chat({"content": "ab"}, logprobs={"content": [{}, {}]}))[0] == [2]
    # a token whose text is still incomplete has an id and no text
    assert read(completion("", token_ids=[5]))[0] == [1]


def test_usage_in_every_chunk_counts_better_than_text():
    counts, outcome = read(
        completion("a") | {"usage": usage(4, 1)},
        completion("bcd") | {"usage": usage(4, 4)},
        completion("e", "length") | {"usage": usage(4, 5)},
    )
    assert counts == [1, 3, 1]
    assert (outcome.input_tokens, outcome.output_tokens) == (4, 5)


def test_a_total_in_the_last_chunk_is_not_a_burst_of_tokens():
    counts, outcome = read(completion("ab"), completion("cd", "stop") | {"usage": usage(4, 9)})
    assert counts == [1, 1]
    assert outcome.output_tokens == 9
    counts, outcome = read(completion("a", "stop") | {"usage": usage(4, 9)})
    assert counts == [1]


def test_the_usage_chunk_has_no_choices_and_no_tokens():
    counts, outcome = read(
        completion("a"),
        {
            "choices": [],
            "usage": usage(
                4, 1,
                prompt_tokens_details={"cached_tokens": 3},
                completion_tokens_details={
                    "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 5
                },
            ),
        },
    )  # fmt: skip
    assert counts == [1, 0]
    assert (outcome.input_tokens, outcome.cached_tokens) == (4, 3)
    assert (outcome.draft_tokens, outcome.accepted_tokens) == (7, 2)


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        ("{", "protocol", "not JSON"),
        ("[]", "protocol", "no JSON object"),
        ('{"error": {"message": "out of\\nmemory"}}', "stream error", "out of memory"),
        ('{"error": "gone"}', "stream error", "gone"),
    ],
)
def test_errors_in_mid_stream_fail_the_request(event, kind, message):
    reader = StreamReader()
    reader.read(json.dumps(completion("a")))
    with pytest.raises(SendError, match=message) as caught:
        reader.read(event)
    assert caught.value.kind == kind
