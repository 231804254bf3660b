"""The oracle of one request: the serial recurrence in fp64, fed with the tokens it committed.

It knows no checkpoint, ring, window, format or batch, so nothing that those get wrong can hide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.ops.reference import Entries, expand_heads, write_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replayssm.types import Block, LayerSpec


class SerialOracle:
    """One sequence in one layer.

    Args:
        layer: Geometry.
        state: ``[HV, V, K]`` prefill state; None is the zero state.
        position: Tokens that the state has seen.
        ring_dtype: dtype that keys and values are stored in; the oracle sees them rounded to it.
    """

    def __init__(
        self,
        layer: LayerSpec,
        state: Tensor | None = None,
        position: int = 0,
        ring_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layer, self.base, self.ring_dtype = layer, position, ring_dtype
        shape = (layer.value_heads, layer.value_dim, layer.key_dim)
        first = torch.zeros(shape) if state is None else state.float()
        # one state per position, so that any of them can be asked for again
        self._states = [first.double().clone()]

    @property
    def committed(self) -> int:
        """Token count."""
        return self.base + len(self._states) - 1

    def state(self, position: int | None = None) -> Tensor:
        """Return the ``[HV, V, K]`` fp64 state at a position, by default the newest."""
        at = self.committed if position is None else position
        return self._states[at - self.base]

    def outputs(
        self, block: Block, row: int, length: int, parents: Sequence[int] | None = None
    ) -> Tensor:
        """Return ``[length, HV, V]`` outputs of a row's block; nothing is committed.

        Args:
            block: ``[B, T, ...]`` inputs.
            row: Row of this sequence.
            length: Tokens that count.
            parents: Token that each token continues, -1 for the committed sequence; None is a
                chain.
        """
        entries, states, outputs = self._entries(block, row), {-1: self._states[-1]}, []
        q = expand_heads(block.q[row].double(), self.layer.value_heads, 1)
        for t in range(length):
            parent = t - 1 if parents is None else int(parents[t])
            states[t] = write_entry(states[parent], entries, t, self.layer.write)
            outputs.append(torch.einsum("hvk,hk->hv", states[t], q[t]))
        return torch.stack(outputs)

    def commit(self, block: Block, row: int, tokens: int | Sequence[int]) -> None:
        """Commit tokens of a row's block: the first ``tokens``, or a path of token indices."""
        entries = self._entries(block, row)
        for t in range(tokens) if isinstance(tokens, int) else tokens:
            self._states.append(write_entry(self._states[-1], entries, t, self.layer.write))

    def rewind(self, tokens: int) -> None:
        """Forget the newest committed tokens."""
        if not 0 <= tokens < len(self._states):
            raise ValueError(f"tokens: expected 0 to {len(self._states) - 1}, got {tokens}")
        del self._states[len(self._states) - tokens :]

    def fork(self) -> SerialOracle:
        """Return an oracle that goes its own way from here."""
        other = SerialOracle(self.layer, None, self.base, self.ring_dtype)
        other._states = list(self._states)
        return other

    def _entries(self, block: Block, row: int) -> Entries:
        k, v = (x[row].to(self.ring_dtype).double() for x in (block.k, block.v))
        g, w = (x[row].float().double() for x in (block.g, block.w))
        g = g if g.ndim == 3 else g.unsqueeze(-1)
        return Entries(expand_heads(k, self.layer.value_heads, 1), v, g, w)
