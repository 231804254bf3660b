"""The oracles of one request: recurrence and convolution in fp64, fed with its committed tokens.

They know no checkpoint, ring, window, format or batch, and share no code with the reference, so
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


class ConvOracle:
    """The inputs of one sequence's convolution, every one of them, in fp64.

    Args:
        weight: ``[C, width]`` taps, the token's own last.
        bias: ``[C]``.
        window: ``[C, width - 1]`` inputs before the sequence; None is zeros.
        ring_dtype: dtype that inputs are stored in; the oracle sees them rounded to it.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        window: Tensor | None = None,
        ring_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.weight, self.bias, self.ring_dtype = weight, bias, ring_dtype
        past = weight.shape[1] - 1
        first = torch.zeros(len(weight), past) if window is None else window
        self._inputs = list(first.to(ring_dtype).double().unbind(1))

    def outputs(
        self, x: Tensor, row: int, length: int, parents: Sequence[int] | None = None
    ) -> Tensor:
        """Return ``[length, C]`` outputs of a row of inputs ``[B, T, C]``; nothing is committed."""
        outputs, behind = [], {-1: self._inputs}
        for t in range(length):
            parent = t - 1 if parents is None else int(parents[t])
            behind[t] = [*behind[parent], x[row, t].to(self.ring_dtype).double()]
            seen = torch.stack(behind[t][-self.weight.shape[1] :], 1)
            outputs.append((self.weight.double() * seen).sum(1) + self.bias.double())
        return torch.stack(outputs)

    def window(self, back: int = 0) -> Tensor:
        """Return the ``[C, width - 1]`` fp64 inputs before the token ``back`` from the end."""
        stop = len(self._inputs) - back
        return torch.stack(self._inputs[stop - self.weight.shape[1] + 1 : stop], 1)

    def commit(self, x: Tensor, row: int, tokens: int | Sequence[int]) -> None:
        """Commit inputs of a row: the first ``tokens``, or a path of token indices."""
        for t in range(tokens) if isinstance(tokens, int) else tokens:
            self._inputs.append(x[row, t].to(self.ring_dtype).double())

    def rewind(self, tokens: int) -> None:
        """Forget the newest committed inputs."""
        del self._inputs[len(self._inputs) - tokens :]

    def fork(self) -> ConvOracle:
        """Return an oracle that goes its own way from here."""
        other = ConvOracle(self.weight, self.bias, None, self.ring_dtype)
        other._inputs = list(self._inputs)
        return other


class SerialOracle:
    """One sequence in one layer.

    Args:
        layer: Geometry.
        state: ``[HV, V, K]`` prefill state; None is the zero state.
        position: Tokens that the state has seen.
        ring_dtype: dtype that keys and values are stored in; the oracle sees them rounded to it.
        conv: The layer's convolution, which is forked and rewound with the state.
    """

    def __init__(
        self,
        layer: LayerSpec,
        state: Tensor | None = None,
        position: int = 0,
        ring_dtype: torch.dtype = torch.float32,
        conv: ConvOracle | None = None,
    ) -> None:
        self.layer, self.base, self.ring_dtype, self.conv = layer, position, ring_dtype, conv
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
        if self.conv is not None:
            self.conv.rewind(tokens)

    def fork(self) -> SerialOracle:
        """Return an oracle that goes its own way from here."""
        conv = None if self.conv is None else self.conv.fork()
        other = SerialOracle(self.layer, None, self.base, self.ring_dtype, conv)
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
