"""Drafting with a model that is itself recurrent: it follows by count, and takes back by count.

The model is two callables, so a pool with ``keep`` >= the draft length serves as well as a toy.
Of a chain d_1 .. d_N the last token is never forwarded: the state holds N - 1 of the drafts, and
after a of them were accepted the newest ``rejected - 1 = N - a - 1`` are taken back (none when all
were accepted; then d_N is forwarded together with the bonus token).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.engine.speculative.draft import MAX_NODES, Draft, check_request
from replayssm.engine.speculative.follow import common_prefix
from replayssm.engine.speculative.sampling import check_sampling, sample_token, softmax
from replayssm.engine.speculative.tree import expand_top_k
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.engine.speculative.follow import DraftModel


class ModelDrafter:
    """A chain from a draft model: argmax, or sampled with its q kept for the residual rule.

    Args:
        model: The draft model, at the start of the request or at a prefix of it.
        temperature: 0 takes the argmax; above 0 samples and records q.
        rng: Generator of the drafter's own; needed when sampling, never shared with acceptance.

    Raises:
        ContractError: Sampling without a generator, or a negative temperature.
    """

    def __init__(
        self,
        model: DraftModel,
        *,
        temperature: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        check_sampling(temperature, rng)
        self.model = model
        self._temperature = temperature
        self._rng = rng
        self._chain: list[int] = []

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Return a chain of ``limit`` tokens (at most 64)."""
        check_request(context, limit)
        self.observe(())
        if limit == 0:
            return Draft.empty()
        logits = self.model.follow(context)
        rows: list[NDArray[np.float32]] = []
        for left in reversed(range(min(limit, MAX_NODES))):
            self._chain.append(self._pick(logits, rows))
            if left:
                logits = self.model.feed(self._chain[-1:])
        return Draft.chain(self._chain, np.stack(rows) if rows else None)

    def observe(self, accepted: Sequence[int]) -> None:
        """Mutates the model's state: take the forwarded drafts that were rejected back."""
        forwarded = max(len(self._chain) - 1, 0)
        kept = common_prefix(self._chain, accepted)
        self.model.take_back(max(forwarded - kept, 0))
        self._chain = []

    def _pick(self, logits: NDArray[np.floating[Any]], rows: list[NDArray[np.float32]]) -> int:
        if self._rng is None or self._temperature == 0:
            return int(np.argmax(logits))
        # the token is drawn from the stored row itself: the rule divides by what was drawn from
        rows.append(softmax(logits, self._temperature).astype(np.float32))
        return sample_token(rows[-1].astype(np.float64), self._rng)


class ModelTreeDrafter:
    """A top-k tree from a draft model; its state is back at the pending token after every round.

    Args:
        model: The draft model, at the start of the request or at a prefix of it.
        width: Children per forwarded node, at least 1.
        forwards: Most nodes forwarded per round, besides the pending token, at least 0.

    Raises:
        ContractError: An argument is out of range.
    """

    def __init__(self, model: DraftModel, *, width: int = 3, forwards: int = 4) -> None:
        if width < 1 or forwards < 0:
            raise ContractError("width, forwards", "width >= 1, forwards >= 0", (width, forwards))
        self.model = model
        self._width = width
        self._forwards = forwards

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Return the ``limit`` most probable nodes (at most 64) of the tree that was grown."""
        check_request(context, limit)
        if limit == 0:
            return Draft.empty()
        logits = self.model.follow(context)
        return expand_top_k(self.model, logits, self._width, self._forwards, limit)

    def observe(self, accepted: Sequence[int]) -> None:
        """Mutates nothing: no draft is in the state, and the context brings what was emitted."""
