"""Positions, boundaries, sizes, and what is folded when: integers only, no tensors.

A slot has three absolute token counts:

* ``base``: tokens in the checkpoint when the slot was admitted;
* ``committed``: tokens of the sequence, the one number that moves;
* ``folded``: the value of ``committed`` up to which the planes have been brought.

Entry ``p`` (the token at absolute position p) lives at ring index ``p % ring_len``, its convolution
input at ``p % conv_len(width)`` of a ring of its own. Value tile i folds at boundaries ``b`` with
``b % window == phase_i``, so where a tile stands is a function of ``base`` and ``folded`` alone:
the same with or without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RingSpec:
    """Sizes of the rings of one pool.

    Attributes:
        window: Tokens between two folds of the same value tile.
        keep: Newest committed entries that are never folded, so they can be taken back.
        max_block: Largest T of one block.
        tiles: Value tiles of a head that fold at their own time (1 is the classic flush).
    """

    window: int = 16
    keep: int = 0
    max_block: int = 1
    tiles: int = 1

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("keep", 0), ("max_block", 1), ("tiles", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ContractError(name, f"an integer >= {least}", value)
        if self.tiles > self.window:
            raise ContractError("tiles", f"at most window ({self.window})", self.tiles)

    @property
    def ring_len(self) -> int:
        """Entries of an SSM ring: the unfolded past, a block in flight and one uncommitted."""
        return self.window + self.keep + 2 * self.max_block

    @property
    def most_unfolded(self) -> int:
        """Most committed entries that no fold has reached yet, just before a forward folds."""
        return self.window - 1 + self.keep + self.max_block

    def conv_len(self, width: int) -> int:
        """Return the entries of the ring that feeds a convolution of ``width``.

        A forward at count c writes up to position ``c + max_block - 1`` and leaves no checkpoint
        older than ``c - keep - window + 1``. So this length holds the ``width - 1`` inputs before
        every position that can still be rebuilt, whatever the block accepts.
        """
        return width - 1 + self.most_unfolded

    def phase(self, tile: int) -> int:
        """Return the position of ``tile``'s boundaries modulo the window."""
        return tile * self.window // self.tiles

    def folded_to(self, tile: int, base: int, folded: int) -> int:
        """Return the absolute position up to which ``tile`` is folded.

        Args:
            tile: Value tile.
            base: Position of the checkpoint at admission.
            folded: Committed count that the planes were last brought to.
        """
        newest = folded - self.keep
        phase = self.phase(tile)
        boundary = (newest - phase) // self.window * self.window + phase
        return max(base, boundary)

    def boundaries(self, tile: int, start: int, stop: int) -> list[int]:
        """Return the boundaries of ``tile`` in ``(start, stop]``, ascending."""
        phase = self.phase(tile)
        first = (start - phase) // self.window * self.window + phase + self.window
        return list(range(first, stop + 1, self.window))

    def oldest_needed(self, base: int, folded: int) -> int:
        """Return the oldest position whose entry some tile has not folded yet."""
        return min(self.folded_to(tile, base, folded) for tile in range(self.tiles))


def tile_rows(tile: int, tiles: int, value_dim: int) -> range:
    """Return the value rows of ``tile`` when V is cut into ``tiles`` nearly equal parts."""
    return range(tile * value_dim // tiles, (tile + 1) * value_dim // tiles)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Where every row of a block stands, decided once per forward and shared by all layers.

    Each field is ``[B]`` int64. ``slots`` is -1 for a pad row, whose other fields are 0.
    ``lengths`` is the number of tokens of the row's block. ``folded`` is where the planes are,
    ``committed`` where they are brought before the block is read.

    ``parents`` is ``[B, T]`` int64, or None when every row is a chain. Token t of row b continues
    token ``parents[b, t] < t`` of the block, or the committed sequence where it is -1. The ring
    counts nodes: token t's entry is at position ``committed + t`` until the commit.

    ``on_device`` is where implementations keep copies of the plan on their devices, so that a
    forward's layers share one.
    """

    slots: NDArray[np.int64]
    base: NDArray[np.int64]
    folded: NDArray[np.int64]
    committed: NDArray[np.int64]
    lengths: NDArray[np.int64]
    parents: NDArray[np.int64] | None = None
    on_device: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def rows(self) -> int:
        """B."""
        return len(self.slots)

    def ancestors(self, row: int, token: int) -> list[int]:
        """Return the block's tokens from the root of ``token`` to itself, oldest first."""
        if self.parents is None:
            return list(range(token + 1))
        path = []
        while token >= 0:
            path.append(token)
            token = int(self.parents[row, token])
        return path[::-1]
