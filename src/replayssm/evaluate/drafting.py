"""Greedy decode with drafts: a verify is one forward, and a crop takes back what was rejected."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from replayssm.engine.speculative import (
    AcceptanceStats,
    DraftModel,
    ModelDrafter,
    NgramDrafter,
    accept_greedy,
)
from replayssm.evaluate.arms import Arm
from replayssm.evaluate.session import Session, enabled
from replayssm.models import tiny
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from replayssm.engine.speculative import Drafter
    from replayssm.evaluate.subject import Subject

LOOKUP, MODEL = "prompt lookup", "draft model"
DRAFT_MODEL = "draft-tiny"
DRAFT_ARM = Arm("draft", "replay", Format.S32, ReadDepth.FULL, "the draft model's own state")


@dataclass(slots=True)
class Loop:
    """One sequence decoded.

    Attributes:
        emitted: Tokens.
        marks: Time after every forward, from the first pending token on, prefill excluded.
        rounds: ``(drafted, accepted)`` of every forward.
        stats: Counts over the rounds.
    """

    emitted: list[int]
    marks: list[float] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def spans(self, tokens: int, size: int) -> NDArray[np.float64]:
        """Return the time of every ``size`` of the first ``tokens`` tokens after the prefill."""
        done = np.concatenate([[0], np.cumsum([1 + kept for _, kept in self.rounds])])
        at = np.interp(np.arange(0, tokens + 1, size), done, [0.0, *self.marks])
        return np.diff(at)


def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    tokens: int,
    drafter: Drafter | None = None,
    limit: int = 0,
) -> Loop:
    """Decode greedily; without a drafter one token at a time.

    Args:
        model: The model, with an arm enabled that can take back ``limit`` tokens.
        prompt: Token ids.
        tokens: Tokens to emit.
        drafter: A fresh drafter of chains.
        limit: Most drafts a round.
    """
    session = Session(model)
    first = int(session.feed(_row(prompt), last_only=True)[0, -1].argmax())
    loop, context = Loop([first]), [*prompt, first]
    start = time.perf_counter()
    while len(loop.emitted) < tokens:
        if drafter is None:
            new = [int(session.feed(_row(context[-1:]))[0, -1].argmax())]
            loop.rounds.append((0, 0))
        else:
            new = _round(session, context, drafter, limit, loop)
            drafter.observe(new)
        loop.emitted += new
        context += new
        loop.marks.append(time.perf_counter() - start)
    return loop


def _round(
    session: Session, context: list[int], drafter: Drafter, limit: int, loop: Loop
) -> list[int]:
    """Verify one draft, take back what was rejected, and return what was emitted."""
    draft = drafter.propose(context, limit)
    logits = session.feed(_row(draft.block_tokens(context[-1]).tolist()))[0]
    accepted = accept_greedy(logits.numpy(), draft)
    session.take_back(len(draft) - len(accepted.path))
    loop.rounds.append((len(draft), len(accepted.path)))
    loop.stats.record_(draft, accepted)
    return [int(token) for token in accepted.emitted(draft)]


def drafters(subject: Subject) -> list[str]:
    """Return the drafters that can serve a model: the bundled draft model writes bytes."""
    names = [LOOKUP]
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
        return
    model = tiny.load(DRAFT_MODEL)
    # a round forwards the last draft of the one before together with the bonus token
    with enabled(model, DRAFT_ARM, window=window, max_block=2, keep=limit):
        yield lambda: ModelDrafter(_draft_model(model))


def _draft_model(model: PreTrainedModel) -> DraftModel:
    session = Session(model)

    def step(tokens: Sequence[int]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = session.feed(_row(tokens), last_only=True)[0, -1].numpy()
        return logits

    return DraftModel(step, session.take_back)


def _row(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)])
