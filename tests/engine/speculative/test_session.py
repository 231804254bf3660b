"""The speculative loop on a toy verifier: what it asks for, commits, emits and stops at."""

from __future__ import annotations

import numpy as np
import pytest

from replayssm.engine.speculative import (
    FixedLength,
    NgramDrafter,
    ScriptDrafter,
    SpeculativeSession,
    even_schedule,
)
from replayssm.errors import ContractError

VOCAB = 7


class Counting:
    """A model whose next token is the sum of all tokens so far plus one, modulo the vocabulary."""

    def __init__(self):
        self.kept, self.block, self.commits = [], None, []

    def prefill(self, tokens):
        self.kept += tokens
        return self._logits(self.kept)

    def verify(self, tokens, parents=None):
        assert self.block is None
        self.block = list(tokens)
        lines = []
        for token, parent in enumerate(range(-1, len(tokens) - 1) if parents is None else parents):
            lines.append([*(lines[parent] if parent >= 0 else []), tokens[token]])
        return np.stack([self._logits(self.kept + line) for line in lines])

    def commit(self, path):
        self.kept += [self.block[token] for token in path]
        self.block = None
        self.commits.append(list(path))

    @staticmethod
    def _logits(tokens):
        return np.eye(VOCAB)[(sum(tokens) + 1) % VOCAB]


def truth(prompt, count):
    line = list(prompt)
    for _ in range(count):
        line.append((sum(line) + 1) % VOCAB)
    return line


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("width", [1, 3])
def test_emits_what_plain_decode_would(drafts, width):
    verifier = Counting()
    session = SpeculativeSession(verifier, NgramDrafter(width=width), FixedLength(drafts))
    done = session.generate([3, 1], 50)
    assert done.tokens == truth([3, 1], 50)[2:]
    assert verifier.kept == truth([3, 1], 49)
    assert done.rounds == done.stats.plain + done.stats.verifies
    assert done.stats.accepted == 49 - done.rounds


def test_a_script_decides_the_number_of_rounds():
    verifier = Counting()
    line = truth([3, 1], 41)
    drafter = ScriptDrafter(line, even_schedule(3, 10), VOCAB)
    done = SpeculativeSession(verifier, drafter, FixedLength(4)).generate([3, 1], 41)
    assert done.tokens == line[2:]
    # 3 of 4 accepted, and a bonus token, in each of the 10 rounds
    assert done.rounds == 10
    assert done.stats.length == 4


def test_stops_at_the_first_stop_token():
    line = truth([3, 1], 50)[2:]
    stop = line[9]
    done = SpeculativeSession(Counting(), NgramDrafter(), FixedLength(4)).generate(
        [3, 1], 50, {stop}
    )
    assert done.tokens == line[: line.index(stop) + 1]


def test_an_acceptance_that_fails_aborts_the_block():
    class Broken(Counting):
        def verify(self, tokens, parents=None):
            return super().verify(tokens, parents) * np.nan

    verifier = Broken()
    with pytest.raises(ContractError, match="NaN"):
        SpeculativeSession(verifier, NgramDrafter(), FixedLength(2)).generate([3, 1], 5)
    assert verifier.commits == [[]]


@pytest.mark.parametrize(
    "options, named", [({"temperature": -1.0}, "temperature"), ({"temperature": 1.0}, "rng")]
)
def test_bad_options_name_themselves(options, named):
    with pytest.raises(ContractError, match=named):
        SpeculativeSession(Counting(), NgramDrafter(), FixedLength(2), **options)
    session = SpeculativeSession(Counting(), NgramDrafter(), FixedLength(2))
    with pytest.raises(ContractError, match="prompt"):
        session.generate([], 5)
    with pytest.raises(ContractError, match="max_new_tokens"):
        session.generate([1], 0)
