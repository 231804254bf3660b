"""Seeded inputs: layers, blocks, states and plans of every family, geometry and gate regime."""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.ring import BlockPlan
from replayssm.types import Block, ConvSpec, Decay, LayerSpec, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

FAMILIES: tuple[tuple[Write, Decay], ...] = tuple(product(Write, Decay))
# (key heads, value heads) and (key dim, value dim): nothing here is friendly to a tile of 16 or 32
HEADS = ((1, 1), (2, 4), (4, 12))
DIMS = ((24, 20), (48, 40), (80, 72), (96, 40), (112, 72))


class Regime(StrEnum):
    """How strongly the gates of a block decay, and how strong its writes are."""

    TYPICAL = "typical"  # memory of tens of tokens
    SLOW = "slow"  # memory of thousands of tokens
    FAST = "fast"  # up to 20 nats a token
    OPEN = "open"  # gates of exactly 1
    CLOSED = "closed"  # a third of the gates are exactly 0
    RESET = "reset"  # one token in five has g = -1000
    HUGE_WRITES = "huge writes"  # additive: dt up to 1e4; delta: beta of exactly 1
    TINY_WRITES = "tiny writes"  # write strengths down to 1e-12, some exactly 0


def make_layer(
    write: Write,
    decay: Decay,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (24, 20),
    conv: tuple[int, int] | None = None,
) -> LayerSpec:
    """Return a layer; ``heads`` is ``(H, HV)``, ``dims`` is ``(K, V)``, ``conv`` ``(C, width)``."""
    return LayerSpec(write, decay, *heads, *dims, None if conv is None else ConvSpec(*conv))


def make_block(
    layer: LayerSpec,
    rows: int,
    tokens: int,
    *,
    seed: int,
    regime: Regime = Regime.TYPICAL,
    dtype: torch.dtype = torch.float32,
    outliers: float = 0.0,
    dominant: float = 0.0,
) -> Block:
    """Return B rows of T tokens as a trained layer might produce them.

    Args:
        layer: Geometry.
        rows: B.
        tokens: T.
        seed: Equal seeds give equal blocks.
        regime: Gates and write strengths.
        dtype: dtype of q, k and v; g and w are fp32.
        outliers: Sigma of a lognormal factor per key channel, the same for every seed.
        dominant: Amplitude of one direction shared by all keys and avoided by all queries.

    Returns:
        A block; keys and queries have norm 1 for delta writes and about 1 for additive ones.
    """
    rng = torch.Generator().manual_seed(seed)
    key_shape = (rows, tokens, layer.key_heads, layer.key_dim)
    q, k = (torch.randn(key_shape, generator=rng) / layer.key_dim**0.5 for _ in range(2))
    v = torch.randn(rows, tokens, layer.value_heads, layer.value_dim, generator=rng)
    if outliers:
        k = k * channel_factors(layer, outliers)
    if dominant:
        direction = _direction(layer)
        k = k + dominant * direction
        q = q - (q * direction).sum(-1, keepdim=True) * direction
    if layer.write is Write.DELTA:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) for x in (q, k))
    g = _gates(layer, rows, tokens, regime, rng)
    w = _strengths(layer, rows, tokens, regime, rng)
    return Block(q.to(dtype), k.to(dtype), v.to(dtype), g, w)


def make_taps(conv: ConvSpec, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return a convolution's ``[C, width]`` weight and ``[C]`` bias."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(conv.channels, conv.width, generator=rng)
    return weight, torch.randn(conv.channels, generator=rng)


def make_inputs(conv: ConvSpec, rows: int, tokens: int, *, seed: int) -> Tensor:
    """Return ``[B, T, C]`` raw inputs of a convolution."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, conv.channels, generator=rng)


def make_state(
    layer: LayerSpec, *, seed: int, amplitude: float = 1.0, outliers: float = 0.0
) -> Tensor:
    """Return a ``[HV, V, K]`` fp32 prefill state."""
    rng = torch.Generator().manual_seed(seed)
    shape = (layer.value_heads, layer.value_dim, layer.key_dim)
    state = amplitude * torch.randn(shape, generator=rng)
    return state * channel_factors(layer, outliers) if outliers else state


def channel_factors(layer: LayerSpec, sigma: float) -> Tensor:
    """Return ``[K]`` lognormal factors; they belong to the layer, so they take no seed."""
    rng = torch.Generator().manual_seed(layer.key_dim)
    return (sigma * torch.randn(layer.key_dim, generator=rng)).exp()


def make_tree(tokens: int, *, seed: int) -> list[int]:
    """Return the parents of a random forest of ``tokens`` drafts."""
    rng = np.random.default_rng(seed)
    return [int(rng.integers(-1, t)) if t else -1 for t in range(tokens)]


def make_plan(
    slots: Sequence[int],
    lengths: Sequence[int],
    committed: Sequence[int],
    *,
    folded: Sequence[int] | None = None,
    base: Sequence[int] | None = None,
    parents: Sequence[Sequence[int]] | None = None,
) -> BlockPlan:
    """Return a plan without a pool; ``folded`` is ``committed`` and ``base`` is 0 by default."""
    return BlockPlan(
        slots=np.array(slots, np.int64),
        base=np.array([0] * len(slots) if base is None else base, np.int64),
        folded=np.array(committed if folded is None else folded, np.int64),
        committed=np.array(committed, np.int64),
        lengths=np.array(lengths, np.int64),
        parents=None if parents is None else np.array(parents, np.int64),
    )


def take(block: Block, rows: slice | Sequence[int], tokens: slice | Sequence[int]) -> Block:
    """Return a block's rows and tokens, in the order given."""
    fields = (block.q, block.k, block.v, block.g, block.w)
    return Block(*(x[:, tokens][rows].clone() for x in fields))


def stack_rows(blocks: Sequence[Block]) -> Block:
    """Return the rows of several blocks of equal T as one block."""
    names = ("q", "k", "v", "g", "w")
    return Block(*(torch.cat([getattr(b, name) for b in blocks]) for name in names))


def pad_tokens(block: Block, tokens: int, value: float = float("nan")) -> Block:
    """Return the block widened to ``tokens`` with lanes that nothing may read."""

    def widen(x: Tensor) -> Tensor:
        wide = x.new_full((x.shape[0], tokens, *x.shape[2:]), value)
        wide[:, : x.shape[1]] = x
        return wide

    return Block(*(widen(x) for x in (block.q, block.k, block.v, block.g, block.w)))


def _direction(layer: LayerSpec) -> Tensor:
    rng = torch.Generator().manual_seed(layer.key_dim + 1)
    direction = torch.randn(layer.key_dim, generator=rng)
    return torch.nn.functional.normalize(direction, dim=0)


def _gates(
    layer: LayerSpec, rows: int, tokens: int, regime: Regime, rng: torch.Generator
) -> Tensor:
    shape = (rows, tokens, *layer.gate_shape())
    unit = torch.rand(shape, generator=rng)
    match regime:
        case Regime.OPEN:
            return torch.zeros(shape)
        case Regime.SLOW:
            return -1e-3 * unit
        case Regime.FAST:
            return -20 * unit
        case Regime.CLOSED:
            return torch.where(unit < 1 / 3, -inf, -0.2 * unit)
        case Regime.RESET:
            reset = torch.rand((rows, tokens), generator=rng) < 0.2
            reset = reset.reshape(rows, tokens, *[1] * (len(shape) - 2))
            return torch.where(reset, -1000.0, -0.2 * unit)
        case _:
            return -0.2 * unit


def _strengths(
    layer: LayerSpec, rows: int, tokens: int, regime: Regime, rng: torch.Generator
) -> Tensor:
    shape = (rows, tokens, layer.value_heads)
    unit = torch.rand(shape, generator=rng)
    match regime:
        case Regime.HUGE_WRITES:
            return torch.ones(shape) if layer.write is Write.DELTA else 10 ** (8 * unit - 4)
        case Regime.TINY_WRITES:
            return torch.where(unit < 0.1, 0.0, 10 ** (-12 * unit))
        case _:
            return unit if layer.write is Write.DELTA else 0.01 + 0.5 * unit
