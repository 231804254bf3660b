"""Acceptance rules: which drafts of a verified block stay, and the token after them.

The count every rule reports is the pool's ``num_accepted``: entries to keep = 1 + accepted drafts.
The 1 is the pending token, whose entry the block wrote. The bonus token is emitted now but has no
entry yet: it is the next block's pending token. So a round keeps 1 + a entries and emits a + 1
tokens, and these are different tokens.

Three rules, all lossless:

* greedy: descend while some child carries the argmax.
* sampled, for deterministic candidates (n-gram, top-k, trees): draw y from p at each node and
  descend if y is a child. Every emitted token is a plain draw from p, whatever was proposed.
* residual, for a chain sampled from q: keep d with probability min(1, p(d) / q(d)), else draw from
  (p - q)+ over its sum. Then P(y) = min(p, q)(y) + (1 - sum min(p, q)) (p - q)+(y) / sum (p - q)+
  = p(y), and a draft is kept with probability sum min(p, q).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.engine.speculative.sampling import normalised, sample_token
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from replayssm.engine.speculative.draft import Draft


@dataclass(frozen=True, slots=True)
class Accepted:
    """Outcome of one verified block.

    Attributes:
        path: Accepted nodes from the pending token downwards.
        bonus: The token after them; it has no entry yet.
    """

    path: tuple[int, ...]
    bonus: int

    @property
    def num_accepted(self) -> int:
        """Entries to keep: 1 for the pending token and one per accepted draft."""
        return 1 + len(self.path)

    @property
    def is_prefix(self) -> bool:
        """Whether the kept entries are the first of the block, as in every chain.

        Otherwise ``num_accepted`` alone does not say which entries stay: the path does.
        """
        return self.path == tuple(range(len(self.path)))

    def emitted(self, draft: Draft) -> list[int]:
        """Return the tokens this round emits: the accepted drafts, then the bonus token."""
        return [*draft.tokens[list(self.path)].tolist(), self.bonus]


def accept_greedy(logits: NDArray[np.floating[Any]], draft: Draft) -> Accepted:
    """Accept what greedy plain decode would have emitted. Ties go to the lowest token id.

    Args:
        logits: ``[N + 1, vocab]``, any floating dtype; row 0 follows the pending token, row i + 1
            follows node i.
        draft: N nodes, chain or tree.

    Raises:
        ContractError: Shapes disagree, a draft is outside the vocabulary, or a row on the path
            holds NaN.
    """
    _check_rows("logits", logits, draft)

    def pick(row: NDArray[np.floating[Any]]) -> int:
        token = int(np.argmax(row))
        if np.isnan(row[token]):
            raise ContractError("logits", "no NaN", f"NaN at token {token}")
        return token

    return _descend(logits, draft, pick)


def accept_sampled(
    probabilities: NDArray[np.floating[Any]], draft: Draft, rng: np.random.Generator
) -> Accepted:
    """Accept deterministic candidates by sampling from the model and looking the draw up.

    Args:
        probabilities: ``[N + 1, vocab]``, after temperature and any filter; rows as in
            :func:`accept_greedy`.
        draft: N nodes, chain or tree.
        rng: Advanced by one uniform number per emitted token. A drafter must not share it.

    Raises:
        ContractError: Shapes disagree, a draft is outside the vocabulary, or a row on the path is
            no distribution.
    """
    _check_rows("probabilities", probabilities, draft)
    return _descend(
        probabilities, draft, lambda row: sample_token(normalised("probabilities", row), rng)
    )


def accept_residual(
    probabilities: NDArray[np.floating[Any]], draft: Draft, rng: np.random.Generator
) -> Accepted:
    """Accept a chain whose tokens were sampled from ``draft.q``.

    Args:
        probabilities: ``[N + 1, vocab]`` p; rows as in :func:`accept_greedy`.
        draft: A chain with q.
        rng: Advanced by one uniform number per draft looked at and one for the bonus token. The
            drafter must not have drawn the chain from it.

    Raises:
        ContractError: The draft has no q, shapes disagree, a draft is outside the vocabulary or
            has q = 0, or a row on the path is no distribution.
    """
    if draft.q is None:
        raise ContractError("draft", "a chain with q", "no q", "use accept_sampled")
    _check_rows("probabilities", probabilities, draft)
    if draft.q.shape[1] != probabilities.shape[1]:
        raise ContractError("q", f"vocab {probabilities.shape[1]}", draft.q.shape[1])
    for node, token in enumerate(draft.tokens.tolist()):
        p = normalised("probabilities", probabilities[node])
        q = normalised("q", draft.q[node])
        if not q[token] > 0:
            raise ContractError("q", f"q > 0 at the token sampled for node {node}", q[token])
        if rng.random() * q[token] < p[token]:
            continue
        rest = np.maximum(p - q, 0)
        # a rejection implies p < q somewhere, so the rest vanishes by rounding only: then p = q
        return Accepted(tuple(range(node)), sample_token(rest if rest.any() else p, rng))
    last = normalised("probabilities", probabilities[len(draft)])
    return Accepted(tuple(range(len(draft))), sample_token(last, rng))


def recompute_path(draft: Draft, continuation: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that a known continuation accepts, without looking at any verifier.

    Acceptance reported by a verifier is compared with this: more than an independent plain decode
    accepts means that the verifier has drifted towards the drafter.

    Args:
        draft: N nodes.
        continuation: Tokens an independent plain decode emits after the pending token.
    """
    children, node = draft.index(), -1
    path: list[int] = []
    for token in continuation:
        child = children.get((node, int(token)))
        if child is None:
            break
        path.append(child)
        node = child
    return tuple(path)


def _descend(
    rows: NDArray[np.floating[Any]],
    draft: Draft,
    pick: Callable[[NDArray[np.floating[Any]]], int],
) -> Accepted:
    children, node = draft.index(), -1
    path: list[int] = []
    while True:
        token = pick(rows[node + 1])
        child = children.get((node, token))
        if child is None:
            return Accepted(tuple(path), token)
        path.append(child)
        node = child


def _check_rows(name: str, rows: NDArray[np.floating[Any]], draft: Draft) -> None:
    if rows.ndim != 2 or len(rows) != len(draft) + 1:
        raise ContractError(name, f"shape [{len(draft) + 1}, vocab]", rows.shape)
    if len(draft) and draft.tokens.max() >= rows.shape[1]:
        raise ContractError("draft", f"tokens below {rows.shape[1]}", draft.tokens.tolist())
