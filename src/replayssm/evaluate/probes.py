r"""Synthetic recall probes: key-value recall, copy and long-range passkey.

A probe is a prompt and the one answer that continues it. Everything needed to answer stands in the
prompt, far before the question, buried in filler text, so a model whose attention sees only a
short window must carry it through its recurrent state. Pure numpy: no model library is imported.

The same line formats are used to train the bundled tiny models (``benchmarks/tiny_data.py``).
Control bytes mark the lines, because they do not occur in the filler.

==========  ============================================  ==================  ===================
kind        stated in the context                         question            chance (whole answer)
==========  ============================================  ==================  ===================
key_value   8 lines ``\x01kk=VV;``, one per pair           ``\x02kk=``          1 / 36**2
copy        ``\x03`` + 12 letters or digits + ``;``  ``\x04``             1 / 36**12
passkey     ``# The pass key is 12345.``                  ``# What is ...``   1 / 10**5
==========  ============================================  ==================  ===================

A model that knows which values were listed but not which key they belong to gets 1/8 of the
key-value probes right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KINDS = ("key_value", "copy", "passkey")
PAIRS = 8
KEY_BYTES = 2
VALUE_BYTES = 2
COPY_BYTES = 12
PASSKEY_DIGITS = 5

_LOWER = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
_UPPER = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", dtype=np.uint8)
_ALNUM = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)
_DIGITS = np.frombuffer(b"0123456789", dtype=np.uint8)

Fact = tuple[bytes, bytes, bytes]
"""(line that states the fact, question, answer)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One question with its context.

    Attributes:
        prompt: context, then the question, as bytes.
        answer: the bytes that must follow the prompt, scored as a whole.
        length: bytes of ``prompt`` plus ``answer``.
        kind: one of ``KINDS``.
        question: how many bytes at the end of ``prompt`` are the question. What comes before is
            the context; zeroing the recurrent state there removes all that was stored of it.
    """

    prompt: bytes
    answer: bytes
    length: int
    kind: str
    question: int


def key_value_facts(rng: np.random.Generator, pairs: int) -> list[Fact]:
    """Return ``pairs`` facts with distinct two-letter keys and random two-byte values."""
    if not 1 <= pairs <= 26**KEY_BYTES:
        raise ValueError(f"pairs must be in 1..{26**KEY_BYTES}, got {pairs}")
    codes = rng.choice(26**KEY_BYTES, size=pairs, replace=False)
    facts = []
    for code in codes:
        key = bytes(_LOWER[[code // 26, code % 26]])
        value = bytes(rng.choice(_UPPER, size=VALUE_BYTES))
        facts.append((b"\x01" + key + b"=" + value + b";", b"\x02" + key + b"=", value))
    return facts


def copy_fact(rng: np.random.Generator, size: int = COPY_BYTES) -> Fact:
    """Return a fact that states ``size`` random letters or digits and asks for all of them."""
    payload = bytes(rng.choice(_ALNUM, size=size))
    return b"\x03" + payload + b";", b"\x04", payload


def passkey_fact(rng: np.random.Generator) -> Fact:
    """Return a fact that states a five-digit number in an English sentence."""
    digits = bytes(rng.choice(_DIGITS, size=PASSKEY_DIGITS))
    return (
        b"\n# The pass key is " + digits + b".\n",
        b"\n# What is the pass key? The pass key is ",
        digits,
    )


def make_probes(
    kind: str,
    length: int,
    count: int,
    *,
    filler: bytes,
    seed: int = 0,
    pairs: int = PAIRS,
    tail: int = 128,
) -> list[Probe]:
    """Return ``count`` probes of one kind, each exactly ``length`` bytes with its answer.

    Args:
        kind: one of ``KINDS``.
        length: bytes of prompt and answer together.
        count: how many probes.
        filler: text that the facts are scattered in; slices of it are used.
        seed: the same arguments give the same probes.
        pairs: facts stated in each ``key_value`` probe.
        tail: bytes of plain filler between the last stated fact and the question, at least; it
            should exceed the attention window.

    Raises:
        ValueError: unknown kind, or ``length`` too short for the facts, or too little filler.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    rng = np.random.default_rng([seed, KINDS.index(kind), length])
    return [_probe(kind, length, rng, filler, pairs, tail) for _ in range(count)]


def _probe(
    kind: str, length: int, rng: np.random.Generator, filler: bytes, pairs: int, tail: int
) -> Probe:
    if kind == "key_value":
        facts = key_value_facts(rng, pairs)
    elif kind == "copy":
        facts = [copy_fact(rng)]
    else:
        facts = [passkey_fact(rng)]
    _, question, answer = facts[int(rng.integers(len(facts)))]
    stated = sum(len(line) for line, _, _ in facts)
    free = length - stated - len(question) - len(answer) - tail
    if free < 0:
        raise ValueError(f"length must be at least {length - free} for {kind}, got {length}")
    if len(filler) < free + tail:
        raise ValueError(f"filler must hold at least {free + tail} bytes, got {len(filler)}")
    start = int(rng.integers(len(filler) - free - tail + 1))
    text = filler[start : start + free + tail]
    cuts = np.sort(rng.integers(free + 1, size=len(facts)))
    parts, last = [], 0
    for (line, _, _), cut in zip(facts, cuts.tolist(), strict=True):
        parts += [text[last:cut], line]
        last = cut
    parts += [text[last:], question]
    return Probe(b"".join(parts), answer, length, kind, len(question))
