"""The oracle of one request: the serial recurrence in fp64, fed with the tokens it committed.

It knows no checkpoint, ring, window, format or batch, and shares no code with the reference, so
nothing that those get wrong can hide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.types import Write

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
        states, outputs = {-1: self._states[-1]}, []
        q = block.q[row].double()
        for t in range(length):
            parent = t - 1 if parents is None else int(parents[t])
            states[t] = self._after(states[parent], block, row, t)
            outputs.append(torch.stack([states[t][hv] @ q[t, h] for hv, h in self._heads()]))
        return torch.stack(outputs)

    def commit(self, block: Block, row: int, tokens: int | Sequence[int]) -> None:
        """Commit tokens of a row's block: the first ``tokens``, or a path of token indices."""
        for t in range(tokens) if isinstance(tokens, int) else tokens:
            self._states.append(self._after(self._states[-1], block, row, t))

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

    def _heads(self) -> list[tuple[int, int]]:
        return [(hv, hv // self.layer.heads_per_key) for hv in range(self.layer.value_heads)]

    def _after(self, state: Tensor, block: Block, row: int, t: int) -> Tensor:
        """Return the state after one token, head by head, as the algebra is written down."""
        k, v = (x[row, t].to(self.ring_dtype).double() for x in (block.k, block.v))
        g, w = (x[row, t].float().double() for x in (block.g, block.w))
        heads = []
        for hv, h in self._heads():
            decayed = state[hv] * torch.exp(g[hv])
            u = v[hv]
            if self.layer.write is Write.DELTA:
                u = u - decayed @ k[h]
            heads.append(decayed + w[hv] * torch.outer(u, k[h]))
        return torch.stack(heads)
