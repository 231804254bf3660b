from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm.traffic.sse import EventDecoder

text = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=8)
ends = st.sampled_from(["\n", "\r\n", "\r"])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def decode(parts):
    decoder = EventDecoder()
    return [event for part in parts for event in decoder.feed(part)]


@given(
    st.lists(st.lists(text, min_size=1, max_size=3), max_size=4),
    ends,
    st.booleans(),
    st.lists(st.integers(0, 500), max_size=30),
)
def test_events_do_not_depend_on_how_bytes_are_cut(events, end, has_mark, places):
    stream = "\ufeff" if has_mark else ""
    for lines in events:
        stream += f": keep-alive{end}"
        stream += "".join(f"data: {line}{end}" for line in lines)
        stream += f"id: 7{end}{end}"
    data = stream.encode()
    expected = [event for lines in events if (event := "\n".join(lines))]
    assert decode([data]) == expected
    assert decode(cut(data, places)) == expected
    assert decode([bytes([b]) for b in data]) == expected


def test_what_is_not_ended_is_no_event():
    assert decode([b"data: one\n\ndata: tw"]) == ["one"]
    assert decode([b"data: one\n\ndata: two\n"]) == ["one"]


def test_comments_other_fields_and_empty_events_are_left_out():
    assert decode([b": ping\n\nevent: x\nretry: 5\n\n\n\ndata:tight\n\ndata\n\n"]) == ["tight"]


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UnicodeDecodeError):
        decode([b"data: \xff\n\n"])
