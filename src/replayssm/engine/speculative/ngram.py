"""Prompt lookup: what followed the last time the sequence ended like this.

For every n the index maps an n-gram to the positions that followed it, most recent first. One new
token adds one n-gram per n, so a round costs the same at any context length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.engine.speculative.draft import MAX_NODES, Draft, check_request
from replayssm.engine.speculative.tree import merge_paths
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class NgramDrafter:
    """Proposes the continuation of the longest, then most recent, earlier match of the suffix.

    Args:
        min_n: Shortest suffix that counts as a match, at least 1.
        max_n: Longest suffix looked up.
        width: 1 proposes a chain. More proposes a tree of up to ``width`` continuations that
            differ in their first token.
        depth: Most tokens of one continuation; None allows as many as the round's limit, which
            leaves a tree no room for alternatives.

    Raises:
        ContractError: An argument is out of range.
    """

    def __init__(
        self, min_n: int = 1, max_n: int = 4, *, width: int = 1, depth: int | None = None
    ) -> None:
        if not 1 <= min_n <= max_n:
            raise ContractError("min_n, max_n", "1 <= min_n <= max_n", (min_n, max_n))
        if width < 1 or (depth is not None and depth < 1):
            raise ContractError("width, depth", "at least 1", (width, depth))
        self._lengths = range(min_n, max_n + 1)
        self._width = width
        self._depth = MAX_NODES if depth is None else depth
        self._index: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._seen = 0
        self._last = -1

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Return the draft, empty when no suffix has occurred before.

        Raises:
            ContractError: The context does not continue the one seen before.
        """
        check_request(context, limit)
        self._read(context)
        depth = min(self._depth, limit, MAX_NODES)
        paths = (_copy(context, start, depth) for start in self._starts(context))
        return merge_paths(paths, limit)

    def observe(self, accepted: Sequence[int]) -> None:
        """Mutates nothing: the context brings what was emitted."""

    def _read(self, context: Sequence[int]) -> None:
        """Mutates the index: add the n-grams before every token that is new."""
        size = len(context)
        if size < self._seen or (self._seen and context[self._seen - 1] != self._last):
            raise ContractError(
                "context", f"the {self._seen} tokens seen before, and more", f"{size} tokens"
            )
        for position in range(self._seen, size):
            for n in self._lengths:
                if n > position:
                    break
                key = tuple(context[position - n : position])
                self._index[key] = self._insert(context, self._index.get(key, ()), position)
        self._seen = size
        self._last = int(context[-1])

    def _insert(
        self, context: Sequence[int], old: tuple[int, ...], position: int
    ) -> tuple[int, ...]:
        token = context[position]
        return (position, *(start for start in old if context[start] != token))[: self._width]

    def _starts(self, context: Sequence[int]) -> Iterator[int]:
        """Yield where up to ``width`` continuations start, longest match first."""
        first: set[int] = set()
        for n in reversed(self._lengths):
            for start in self._index.get(tuple(context[-n:]), ()):
                if context[start] not in first and len(first) < self._width:
                    first.add(context[start])
                    yield start


def _copy(context: Sequence[int], start: int, count: int) -> list[int]:
    """Return ``count`` tokens from ``start`` on; past the end, the copy goes on in itself."""
    size = len(context)
    tokens: list[int] = []
    for position in range(start, start + count):
        tokens.append(int(context[position]) if position < size else tokens[position - size])
    return tokens
