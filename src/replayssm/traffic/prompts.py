"""Prompts for a trace that gives only lengths and block identities.

Token ids are built directly: text that is decoded and encoded again comes back with another length.
Every generator is seeded by a stable hash, so equal blocks are equal tokens in every process.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from replayssm.traffic.trace import TraceRequest

CACHED_BLOCKS = 4096
# short common words, which most tokenizers take as one token each
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "with",
    "be",
)


class Prompts:
    """Token ids or text of requests.

    Args:
        vocabulary: Ids are drawn from ``[first_id, vocabulary)``.
        first_id: Smallest id; those below are usually special.
        block_size: Tokens of a prefix block.
        seed: Seed. Another seed gives other prompts of the same lengths, so that a server's prefix
            cache does not answer for the model in the second run.
    """

    def __init__(
        self, vocabulary: int, *, block_size: int, first_id: int = 0, seed: int = 0
    ) -> None:
        if not 0 <= first_id < vocabulary:
            raise ContractError("first_id", f"an id below the vocabulary ({vocabulary})", first_id)
        self._vocabulary, self._first, self._seed = vocabulary, first_id, seed
        self._size = block_size
        self._block = lru_cache(CACHED_BLOCKS)(self._draw_block)

    @property
    def settings(self) -> dict[str, int]:
        """What prompts are made with, by name."""
        return {"vocabulary": self._vocabulary, "first_id": self._first, "seed": self._seed}

    def ids(self, index: int, request: TraceRequest) -> list[int]:
        """Return the ``[prompt_tokens]`` token ids of a request.

        Args:
            index: Its place in the trace: where nothing is shared, the seed of its prompt.
            request: The request.
        """
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        if request.prefix_blocks is None:
            drawn = self._draw(request.prompt_tokens, "request", index)
        else:
            drawn = np.concatenate([self._block(block) for block in request.prefix_blocks])
        ids: list[int] = drawn[: request.prompt_tokens].tolist()
        return ids

    def text(self, index: int, request: TraceRequest) -> str:
        """Return a prompt as text; about one token a word unless the trace has the text."""
        if request.text is not None:
            return request.text
        return " ".join(WORDS[i % len(WORDS)] for i in self.ids(index, request))

    def _draw_block(self, block: int) -> NDArray[np.int64]:
        return self._draw(self._size, "block", block)

    def _draw(self, count: int, kind: str, identity: int) -> NDArray[np.int64]:
        key = f"{self._seed}/{kind}/{identity}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return np.random.default_rng(seed).integers(self._first, self._vocabulary, count)
