"""What a drafter proposes: tokens, the tree they form, and the probabilities they were drawn from.

Two countings meet here. A draft has N nodes, 0 to N - 1. The block that verifies it has T = N + 1
tokens: the pending token is token 0 and node i is token i + 1, so the verifier returns ``[N + 1,
vocab]`` rows and row i + 1 says what follows node i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_NODES = 64
"""Most nodes of one draft, chain or tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Proposed tokens in topological order.

    Attributes:
        tokens: ``[N]`` int64 token ids, N <= 64.
        parents: ``[N]`` int64; ``parents[i] < i`` is the node that node i continues, -1 continues
            the pending token. Siblings carry different tokens.
        q: ``[N, vocab]`` float32, or None. Row i is the distribution that token i was *sampled*
            from. Only a sampled chain has it: an argmax or top-k token is a deterministic
            candidate, and calling its softmax q would make the residual rule lossy.

    Raises:
        ContractError: A shape, dtype or value breaks the above.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    q: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype != np.int64:
                raise ContractError(name, "int64 of shape [N]", f"{array.dtype} {array.shape}")
        count = len(self.tokens)
        if count > MAX_NODES:
            raise ContractError("tokens", f"at most {MAX_NODES} nodes", count)
        if len(self.parents) != count:
            raise ContractError("parents", f"{count} nodes, as in tokens", len(self.parents))
        if count and self.tokens.min() < 0:
            raise ContractError("tokens", "token ids >= 0", self.tokens.tolist())
        if ((self.parents >= np.arange(count)) | (self.parents < -1)).any():
            raise ContractError("parents", "-1 <= parents[i] < i", self.parents.tolist())
        if len(self.index()) != count:
            raise ContractError(
                "tokens", "different tokens at siblings", self.tokens.tolist(), "merge the nodes"
            )
        if self.q is not None:
            self._check_q(self.q)

    def _check_q(self, q: NDArray[np.float32]) -> None:
        if not self.is_chain:
            raise ContractError("q", "None for a tree", "probabilities")
        if q.ndim != 2 or len(q) != len(self) or q.dtype != np.float32:
            raise ContractError("q", f"float32 [{len(self)}, vocab]", f"{q.dtype} {q.shape}")

    @classmethod
    def chain(cls, tokens: Sequence[int], q: NDArray[np.float32] | None = None) -> Draft:
        """Return the draft in which every token continues the one before it."""
        return cls(np.asarray(tokens, np.int64), np.arange(-1, len(tokens) - 1, dtype=np.int64), q)

    @classmethod
    def empty(cls) -> Draft:
        """Return the draft without nodes: its block is a plain step."""
        return cls.chain(())

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the node before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def index(self) -> dict[tuple[int, int], int]:
        """Return ``{(parent, token): node}``, the children of every node."""
        pairs = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    def depths(self) -> NDArray[np.int64]:
        """Return ``[N]`` int64 draft positions: 0 for a child of the pending token."""
        depths = np.zeros(len(self), np.int64)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return depths

    def block_tokens(self, pending: int) -> NDArray[np.int64]:
        """Return ``[N + 1]`` int64 tokens of the block: the pending token, then the nodes."""
        return np.concatenate(([pending], self.tokens)).astype(np.int64)

    def block_parents(self) -> NDArray[np.int64]:
        """Return ``[N + 1]`` int64 parents in block counting; -1 continues the committed tokens."""
        return np.concatenate(([-1], self.parents + 1)).astype(np.int64)


@runtime_checkable
class Drafter(Protocol):
    """Proposes continuations for one request.

    A round is ``propose``, a verify, ``observe``. The context only ever grows by what ``observe``
    was told.
    """

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Return a draft of at most ``limit`` nodes, possibly none.

        Args:
            context: Prompt and every emitted token; the last one is the pending token.
            limit: Most nodes wanted, at least 0.
        """
        ...

    def observe(self, accepted: Sequence[int]) -> None:
        """Mutates the drafter: follow what a round emitted.

        Args:
            accepted: Accepted drafts in order, then the bonus token; empty when the block was
                aborted. A drafter with a state takes its own tokens back by count.
        """
        ...


def check_request(context: Sequence[int], limit: int) -> None:
    """Refuse an empty context or a negative limit."""
    if not len(context):
        raise ContractError("context", "at least the pending token", "nothing")
    if limit < 0:
        raise ContractError("limit", "an integer >= 0", limit)
