"""The recall probes: exact lengths, determinism, and that the context holds the answer."""

from __future__ import annotations

import pytest

from replayssm.evaluate.probes import KINDS, PAIRS, make_probes

FILLER = b"def f(x):\n    return x + 1\n" * 400


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [384, 2048])
def test_probes_are_exact_and_deterministic(kind: str, length: int) -> None:
    probes = make_probes(kind, length, 5, filler=FILLER, seed=3)
    assert probes == make_probes(kind, length, 5, filler=FILLER, seed=3)
    assert probes != make_probes(kind, length, 5, filler=FILLER, seed=4)
    for probe in probes:
        assert len(probe.prompt) + len(probe.answer) == probe.length == length
        context = probe.prompt[: -probe.question]
        assert probe.answer in context
        assert probe.answer not in probe.prompt[-probe.question - 100 :]


def test_key_value_question_names_a_stated_pair() -> None:
    probe = make_probes("key_value", 1024, 1, filler=FILLER)[0]
    question = probe.prompt[-probe.question :]
    assert probe.prompt.count(b"\x01") == PAIRS
    assert b"\x01" + question[1:] + probe.answer + b";" in probe.prompt


@pytest.mark.parametrize(
    ("kind", "length", "filler", "message"),
    [
        ("riddle", 512, FILLER, "kind must be"),
        ("copy", 100, FILLER, "length must be"),
        ("copy", 4096, b"short", "filler must hold"),
    ],
)
def test_bad_arguments_are_named(kind: str, length: int, filler: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_probes(kind, length, 1, filler=filler)
