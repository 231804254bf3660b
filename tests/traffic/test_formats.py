from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm.errors import ContractError
from replayssm.traffic.formats import TraceFormat, canonical, detect, load
from replayssm.traffic.trace import BLOCK_SIZE, Provenance, Trace, TraceRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:01+00:00,10,2
2024-05-10 00:00:00.250000+00:00,20,3
"""
NEW = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT = f"""{NEW}
5,,1,ChatGPT,472,18,490,Conversation log
45,s7,1,GPT-4,10,0,10,API log
118.5,s7,1,GPT-4,1087,230,1317,API log
"""
BURSTGPT_OLD = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 2999, "input_length": 512, "output_length": 7, "hash_ids": [0]}
"""
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "one two"}, {"value": "three"}]},
    {"id": "b", "conversations": [{"value": "alone"}]},
    {"id": "c", "conversations": [{"value": "four"}, {"value": "five six seven"}]},
]


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def file(tmp_path):
    def write(content: str, name: str = "trace"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


def shape(trace):
    return [(r.at, r.prompt_tokens, r.output_tokens) for r in trace.requests]


def test_azure_2023_counts_from_the_first_row(file):
    trace, _ = load(file(AZURE))
    assert shape(trace) == [(0.0, 4808, 10), (0.052, 3180, 8)]
    assert trace.provenance.format == "azure"


def test_azure_2024_mixes_fractions_and_is_put_in_order(file):
    trace, _ = load(file(AZURE_2024))
    assert shape(trace) == [(0.0, 20, 3), (0.75, 10, 2)]
    assert "rows put in order of arrival" in trace.provenance.conversions


def test_burstgpt_reads_columns_by_name_and_drops_failures(file):
    trace, _ = load(file(BURSTGPT))
    assert shape(trace) == [(0.0, 472, 18), (113.5, 1087, 230)]
    assert [(r.cohort, r.session) for r in trace.requests] == [
        ("conversation", None),
        ("api", "s7"),
    ]
    assert list(trace.provenance.dropped.values()) == [1]
    assert shape(load(file(BURSTGPT_OLD))[0]) == [(0.0, 472, 18)]


def test_mooncake_is_milliseconds_and_blocks_of_512(file):
    trace, _ = load(file(MOONCAKE))
    assert shape(trace) == [(0.0, 513, 5), (2.999, 512, 7)]
    assert [r.prefix_blocks for r in trace.requests] == [(0, 1), (0,)]
    assert trace.block_size == BLOCK_SIZE


def test_sharegpt_counts_with_the_tokenizer_it_is_given(file):
    path = file(json.dumps(SHAREGPT, indent=1))
    trace, _ = load(path, count_tokens=words)
    assert Counter(shape(trace)) == Counter([(0.0, 2, 1), (0.0, 1, 3)])
    assert {r.text for r in trace.requests} == {"one two", "four"}
    assert trace.provenance.dropped == {"fewer than two turns": 1}
    with pytest.raises(ContractError, match="tokenizer"):
        load(path)


def test_the_seed_draws_the_order_of_sharegpt(file):
    many = [{"conversations": [{"value": f"p{i}"}, {"value": "a"}]} for i in range(20)]
    path = file(json.dumps(many))
    orders = [
        [r.text for r in load(path, count_tokens=words, seed=seed)[0].requests]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.parametrize(
    ("content", "fmt"),
    [
        (AZURE, TraceFormat.AZURE),
        ("\ufeff" + AZURE, TraceFormat.AZURE),
        (BURSTGPT_OLD, TraceFormat.BURSTGPT),
        (MOONCAKE, TraceFormat.MOONCAKE),
        (json.dumps(SHAREGPT), TraceFormat.SHAREGPT),
        ('{"format": "replayssm-trace"}\n', TraceFormat.REPLAYSSM),
    ],
)
def test_a_format_is_known_by_its_first_line(file, content, fmt):
    assert detect(file(content)) is fmt


@pytest.mark.parametrize("content", ["", "a,b,c\n1,2,3\n", '{"prompt": "x"}\n', "\x00\x01"])
def test_an_unknown_format_is_refused(file, content):
    with pytest.raises(ContractError, match="a trace in one of azure"):
        load(file(content))


BAD = {
    "azure number": (AZURE + "2023-11-16 18:17:05,x,3\n", 4, "ContextTokens", "'x'"),
    "azure zero": (AZURE + "2023-11-16 18:17:05,4,0\n", 4, "GeneratedTokens", "0"),
    "azure time": (AZURE + "yesterday,4,3\n", 4, "TIMESTAMP", "'yesterday'"),
    "azure short": (AZURE + "2023-11-16 18:17:05,4\n", 4, "GeneratedTokens", "'2 columns'"),
    "azure long": (AZURE + "2023-11-16 18:17:05,4,3,9\n", 4, "4", "'9'"),
    "burstgpt time": (BURSTGPT_OLD + "-1,GPT-4,1,1,2,API log\n", 3, "Timestamp", "'-1'"),
    "burstgpt kind": (BURSTGPT_OLD + "1,GPT-4,1,1,2,\n", 3, "Log Type", "''"),
    "mooncake json": (MOONCAKE + '{"timestamp": 1,,}\n', 3, "17", "',}'"),
    "mooncake list": (MOONCAKE + "[1]\n", 3, "1", "[1]"),
    "mooncake blocks": (
        MOONCAKE + '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n',
        3, "hash_ids", "'1 blocks'",
    ),
    "mooncake bool": (
        MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 1, "hash_ids": [1]}\n',
        3, "input_length", "True",
    ),
    "mooncake missing": (MOONCAKE + '{"timestamp": 1}\n', 3, "input_length", "None"),
    "mooncake nan": (MOONCAKE + '{"timestamp": NaN}\n', 3, "timestamp", "nan"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_refused_with_its_place(file, case):
    content, line, column, got = BAD[case]
    with pytest.raises(ContractError) as caught:
        load(file(content, "some.file"))
    told = str(caught.value)
    assert told.startswith(f"some.file line {line}, column {column}: expected "), told
    assert told.endswith(f"got {got}"), told


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_skipped_and_counted_on_request(file, case):
    content, line, _, _ = BAD[case]
    good, _ = load(file(content.rsplit("\n", 2)[0] + "\n"))
    trace, examples = load(file(content), skip_bad=True)
    assert trace.requests == good.requests
    assert trace.provenance.bad_rows == len(examples) == 1
    assert f"line {line}," in examples[0]


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(AZURE.encode() + b"2023-11-16 18:17:05,\xff,3\n")
    with pytest.raises(ContractError, match="line 4, column ContextTokens"):
        load(path)
    assert load(path, skip_bad=True)[0].provenance.bad_rows == 1


def test_a_missing_column_is_refused_in_the_header(file):
    with pytest.raises(ContractError, match=r"line 1: .* got no GeneratedTokens"):
        load(file("TIMESTAMP,ContextTokens\n"), TraceFormat.AZURE)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("[1", "line 1, column 3"),
        ('[{"conversations": []},\n {"a": ]', "line 2, column 8"),
        ('[{"conversations": []}\n {}]', "line 2, column 2"),
    ],
)
def test_broken_json_says_where(file, content, place):
    with pytest.raises(ContractError, match=place):
        load(file(content), TraceFormat.SHAREGPT, count_tokens=words, skip_bad=True)


def test_a_bad_conversation_has_the_line_of_its_entry(file):
    entries = [*SHAREGPT, {"conversations": [{"value": 3}, {"value": "x"}]}]
    content = "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]"
    with pytest.raises(ContractError, match="line 5, column value: expected text, got 3"):
        load(file(content), count_tokens=words)


requests = st.builds(
    lambda at, prompt, output, **rest: TraceRequest(at / 1e6, prompt, output, **rest),
    st.integers(0, 10**10),
    st.integers(1, 2000),
    st.integers(1, 2000),
    cohort=st.sampled_from(["default", "day", "ü"]),
    session=st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=3),
    text=st.none() | st.text(st.characters(codec="utf-8"), min_size=1),
    cancel_after=st.none() | st.integers(0, 9),
    move_after=st.none() | st.integers(0, 9),
)


@given(st.lists(requests, min_size=1, max_size=5), st.none() | st.integers(1, 9))
def test_the_canonical_form_keeps_everything(tmp_path_factory, made, concurrency):
    origin = Provenance("a.csv", "00ff", "azure", len(made), 2, {"why": 1}, ("a", "b"))
    ordered = tuple(sorted(made, key=lambda r: r.at))
    trace = Trace(ordered, origin, concurrency=concurrency)
    path = tmp_path_factory.mktemp("canonical") / "t.jsonl"
    canonical.write(trace, path)
    written = path.read_bytes()
    again, _ = load(path)
    canonical.write(again, path)
    assert path.read_bytes() == written
    assert (again.provenance, again.concurrency) == (origin, concurrency)
    for a, b in zip(again.requests, ordered, strict=True):
        assert abs(a.at - b.at) <= 1e-6
        assert a == TraceRequest(a.at, *(getattr(b, n) for n in b.__slots__[1:]))


def test_ids_and_blocks_survive_the_canonical_form(tmp_path):
    made = (TraceRequest(0.0, 3, 1, prompt_ids=(1, 2, 3), prefix_blocks=(7, 7)),)
    trace = Trace(made, Provenance("x", None, "made", 1), block_size=2)
    canonical.write(trace, tmp_path / "t.jsonl")
    assert load(tmp_path / "t.jsonl")[0] == trace


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ('{"format": "replayssm-trace", "version": 2}', "version"),
        ('{"format": "replayssm-trace", "version": 1, "time_unit": "s"}', "time_unit"),
        ('{"format": "replayssm-trace", "version": 1, "time_unit": "ms"}', "block_size"),
    ],
)
def test_a_header_of_another_version_or_unit_is_refused(file, header, column):
    with pytest.raises(ContractError, match=f"line 1, column {column}"):
        load(file(header + "\n"), skip_bad=True)


def test_a_missing_or_empty_file_is_refused(tmp_path, file):
    with pytest.raises(ContractError, match="a file that exists"):
        load(tmp_path / "none.csv")
    with pytest.raises(ContractError, match="at least one request"):
        load(file(AZURE.splitlines()[0] + "\n"))


def test_the_real_azure_trace_is_read_whole(traces):
    trace, _ = load(traces / "azure_llm_2023_code.csv")
    assert (len(trace.requests), trace.provenance.bad_rows) == (8819, 0)
    assert sorted(r.output_tokens for r in trace.requests)[4409] == 13
    assert round(trace.span / 60) == 57


def test_the_real_mooncake_trace_is_read_whole(traces):
    trace, _ = load(traces / "mooncake_conversation.jsonl")
    assert (len(trace.requests), trace.span) == (12_031, 3536.999)
    assert max(Counter(r.at for r in trace.requests).values()) == 28
