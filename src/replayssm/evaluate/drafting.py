"""Greedy decode of single sequences, with and without drafts, forward by forward on a clock."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from replayssm.engine.speculative import (
    DraftModel,
    FixedLength,
    ModelDrafter,
    NgramDrafter,
    SpeculativeSession,
)
from replayssm.errors import UnsupportedError
from replayssm.evaluate.arms import Arm
from replayssm.evaluate.session import Session, enabled
from replayssm.integrations.speculation import Decoder, Verifier
from replayssm.models import tiny
from replayssm.ring import RingSpec
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from replayssm.engine.speculative import Drafter
    from replayssm.evaluate.subject import Subject
    from replayssm.integrations.transformers import Enabled

LOOKUP, TREE, MODEL = "prompt lookup", "lookup tree", "draft model"
TREE_WIDTH = 3
DRAFT_MODEL = "draft-tiny"
DRAFT_ARM = Arm("draft", "replay", Format.S32, ReadDepth.FULL, "the draft model's own state")


class Drafting(Protocol):
    """What a route or a variant says of drafts."""

    @property
    def drafter(self) -> str | None:
        """Name of what proposes them."""
        ...

    @property
    def draft_tokens(self) -> int:
        """Most of them a round."""
        ...


@dataclass(slots=True)
class Loop:
    """One sequence decoded.

    Attributes:
        emitted: Tokens.
        rounds: ``(drafted, accepted)`` of every forward after the prefill.
        marks: Time after each of them, from the first pending token on, in seconds.
    """

    emitted: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)

    def spans(self, tokens: int, size: int) -> NDArray[np.float64]:
        """Return the time of every ``size`` of the first ``tokens`` tokens after the prefill."""
        done = np.concatenate([[0], np.cumsum([1 + kept for _, kept in self.rounds])])
        at = np.interp(np.arange(0, tokens + 1, size), done, [0.0, *self.marks])
        return np.diff(at)


class _Watched:
    """A verifier with a clock: notes every round in a loop."""

    def __init__(self, verifier: Verifier, loop: Loop) -> None:
        self._verifier, self._loop = verifier, loop
        self._drafted, self._start = 0, 0.0

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        logits = self._verifier.prefill(tokens)
        self._start = time.perf_counter()
        return logits

    def verify(
        self, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        self._drafted = len(tokens) - 1
        return self._verifier.verify(tokens, parents)

    def commit(self, path: Sequence[int]) -> None:
        self._verifier.commit(path)
        self._loop.rounds.append((self._drafted, len(path) - 1))
        self._loop.marks.append(time.perf_counter() - self._start)


def decode(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> Loop:
    """Decode greedily, one token a forward, with whatever arm is enabled."""
    session = Session(model)
    token = int(session.feed(torch.tensor([prompt]), last_only=True)[0, -1].argmax())
    loop, start = Loop([token]), time.perf_counter()
    while len(loop.emitted) < tokens:
        token = int(session.feed(torch.tensor([[token]]))[0, -1].argmax())
        loop.emitted.append(token)
        loop.rounds.append((0, 0))
        loop.marks.append(time.perf_counter() - start)
    return loop


def speculate(
    handle: Enabled, prompt: Sequence[int], tokens: int, drafter: Drafter, limit: int
) -> Loop:
    """Decode greedily with drafts.

    Args:
        handle: The enabled model, on the replay path.
        prompt: Token ids.
        tokens: Tokens to emit.
        drafter: A fresh drafter.
        limit: Most drafts a round.
    """
    loop = Loop()
    verifier = _Watched(Verifier(handle, max_nodes=limit), loop)
    session = SpeculativeSession(verifier, drafter, FixedLength(limit))
    loop.emitted = session.generate(prompt, tokens).tokens
    return loop


def drafters(subject: Subject) -> list[str]:
    """Return the drafters that can serve a model: the bundled draft model writes bytes."""
    names = [LOOKUP, TREE]
    if subject.encode is list:
        try:
            tiny.weights_path(DRAFT_MODEL)
        except FileNotFoundError:  # an installation without the weights
            return names
        names.append(MODEL)
    return names


@contextmanager
def drafting(name: str, limit: int, window: int) -> Iterator[Callable[[], Drafter]]:
    """Give a maker of fresh drafters, one a sequence; the draft model is loaded once."""
    if name == LOOKUP:
        yield NgramDrafter
    elif name == TREE:
        depth = max(1, limit // 2)
        yield lambda: NgramDrafter(width=TREE_WIDTH, depth=depth)
    else:
        with enabled(tiny.load(DRAFT_MODEL), DRAFT_ARM, window=window) as handle:
            yield lambda: ModelDrafter(_draft_model(handle, limit))


@contextmanager
def engine_drafters(
    subject: Subject, routes: Iterable[Drafting]
) -> Iterator[dict[str, Callable[[], Drafter]]]:
    """Give an engine the drafters that its routes ask for and that it does not have by itself.

    The bundled draft model is loaded if a route drafts with it. Its caches, one a sequence, lie
    outside of any engine's memory limit.

    Raises:
        UnsupportedError: It is asked for and cannot draft for this model, or is not installed.
    """
    limit = max((x.draft_tokens for x in routes if x.drafter == "model"), default=0)
    if not limit:
        yield {}
        return
    if MODEL not in drafters(subject):
        raise UnsupportedError(
            f"drafter 'model' for {subject.name}: {DRAFT_MODEL} drafts bytes, where it is installed"
        )
    with drafting(MODEL, limit, RingSpec().window) as make:
        yield {"model": make}


def _draft_model(handle: Enabled, limit: int) -> DraftModel:
    # a round forwards the last draft of the one before together with the bonus token
    decoder = Decoder(handle, keep=limit, max_block=2)
    return DraftModel(decoder.step, decoder.rollback)
