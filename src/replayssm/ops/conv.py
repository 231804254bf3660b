"""The causal depthwise convolution in front of a recurrent layer, and the ring of its raw inputs.

Output t is ``bias + sum_i weight[:, i] x_i`` over the token's own input and the ``width - 1``
before it: its ancestors in the block, nearest first, then the committed history. Plain torch
without a loop over rows, so that it runs on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan
    from replayssm.storage import LayerStore


def conv_(
    store: LayerStore, plan: BlockPlan, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Convolve a block and write its inputs to the ring positions of its tokens.

    Inputs are rounded to the ring's dtype before any of them is read, so that a token sees the same
    numbers whether its neighbours came in its own block or in an earlier one.

    Args:
        store: Layer tensors.
        plan: Rows of this forward.
        x: ``[B, T, C]`` raw inputs.
        weight: ``[C, width]``, the tap of the token itself last.
        bias: ``[C]`` or None.

    Returns:
        ``[B, T, C]`` in x's dtype, summed in fp32, no activation; pad rows and tokens past a row's
        length are 0.
    """
    ring, width = _ring(store), weight.shape[1]
    slots, first = plan.slots.clip(min=0), plan.committed
    behind = (first[:, None] + np.arange(1 - width, 0)) % ring.shape[1]
    inputs = x.to(ring.dtype)
    source = torch.cat([ring[_on(ring, slots[:, None]), _on(ring, behind)], inputs], 1).float()
    y = torch.zeros(x.shape, device=x.device)
    if bias is not None:
        y += bias.float()
    for tap, read in enumerate(_reads(plan, source, x.shape[1])):
        y += weight[:, tap].float() * read
    is_real = np.arange(x.shape[1]) < plan.lengths[:, None]
    rows, tokens = is_real.nonzero()
    at = (first[rows] + tokens) % ring.shape[1]
    ring[_on(ring, slots[rows]), _on(ring, at)] = inputs[_on(ring, rows), _on(ring, tokens)]
    if not is_real.all():
        y = torch.where(_on(ring, is_real).unsqueeze(-1), y, 0.0)
    return y.to(x.dtype)


def _reads(plan: BlockPlan, source: Tensor, tokens: int) -> Iterator[Tensor]:
    """Yield, per tap and oldest first, the inputs that all tokens read: ``[B, T, C]`` each."""
    width = source.shape[1] - tokens + 1
    if plan.parents is None:
        for tap in range(width):
            yield source[:, tap : tap + tokens]
        return
    for index in _taps(plan.parents, tokens, width):
        column = _on(source, index).unsqueeze(-1).expand(-1, -1, source.shape[2])
        yield source.gather(1, column)


def _taps(nodes: NDArray[np.int64], tokens: int, width: int) -> list[NDArray[np.int64]]:
    """Return, per tap and oldest first, which input every token of trees reads: ``[B, T]`` each.

    Inputs are numbered as they are laid out for reading: ``width - 1`` of history, then the block.
    """
    past, shape = width - 1, (len(nodes), tokens)
    parents = np.broadcast_to(np.arange(-1, tokens - 1), shape).copy()
    parents[:, : nodes.shape[1]] = nodes
    history = np.broadcast_to(np.arange(-1, past - 1), (len(nodes), past))
    before = np.concatenate([history, parents + past], 1)
    taps = [np.broadcast_to(np.arange(past, past + tokens), shape)]
    for _ in range(past):
        taps.append(np.take_along_axis(before, taps[-1], 1))
    return taps[::-1]


def compact_(store: LayerStore, plan: BlockPlan, paths: Sequence[tuple[int, ...] | None]) -> None:
    """Move each row's kept inputs to the front of its block; it loads before it stores."""
    ring = _ring(store)
    for row, path in enumerate(paths):
        slot, first = int(plan.slots[row]), int(plan.committed[row])
        if slot >= 0 and path:
            source = [(first + node) % ring.shape[1] for node in path]
            target = [(first + i) % ring.shape[1] for i in range(len(path))]
            ring[slot, target] = ring[slot, source]


def admit_(store: LayerStore, slot: int, position: int, window: Tensor | None) -> None:
    """Overwrite the inputs before ``position`` with a window ``[C, width - 1]``, None for zeros."""
    ring = _ring(store)
    if window is None:
        ring[slot].zero_()  # what is not before the position is never read
    else:
        ring[slot, _window_index(store, position)] = window.T.to(ring.dtype)


def window(store: LayerStore, slot: int, position: int) -> Tensor:
    """Return a copy of the inputs before ``position``: ``[C, width - 1]``, the newest last."""
    return _ring(store)[slot, _window_index(store, position)].T.contiguous()


def _window_index(store: LayerStore, position: int) -> list[int]:
    return store.spec.live_entries("conv", range(position, position))


def _ring(store: LayerStore) -> Tensor:
    if store.conv is None:
        raise TypeError("conv: this layer keeps no inputs of a convolution")
    return store.conv


def _on(ring: Tensor, index: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.array(index)).to(ring.device)
