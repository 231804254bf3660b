"""Drift: how the error of a long sequence grows, for every format and read depth.

One request runs twice in a pool, once per read depth, with bf16 inputs and slowly decaying gates,
next to the fp64 recurrence on the same inputs. A checkpoint rounds once per fold; what matters is
whether its error settles (slope per fold of about 0) or grows with the number of folds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.ops import reference, standard_
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.budgets import relative_error
from replayssm.testing.factories import Regime, make_block, make_plan, take
from replayssm.types import Block, Format, Impl, LayerSpec, ReadDepth

SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Drift:
    """Relative errors against fp64 of one way to keep a state.

    Attributes:
        name: Format, or ``standard bf16`` for a state rounded on every token.
        read: Read depth; empty for the standard path.
        first: Error of the outputs of the first eighth of the tokens.
        last: Error of the outputs of the last eighth.
        state: Error of the final state.
        slope_per_fold: Growth of the state's error per fold, fitted over the second half.
    """

    name: str
    read: str
    first: float
    last: float
    state: float
    slope_per_fold: float


@dataclass(frozen=True, slots=True)
class _Truth:
    stream: Block
    outputs: Tensor
    states: dict[int, Tensor]


def measure_drift(
    layer: LayerSpec,
    tokens: int,
    *,
    formats: Sequence[Format] = tuple(Format),
    window: int = 16,
    impl: Impl = Impl.AUTO,
    seed: int = 0,
) -> Iterator[Drift]:
    """Yield the drift of the standard bf16 state and of every format at both depths.

    Args:
        layer: Geometry.
        tokens: Length of the sequence; a multiple of 32.
        formats: Formats to measure.
        window: Tokens between two folds.
        impl: Implementation.
        seed: Equal seeds give equal sequences.
    """
    truth = _truth(layer, tokens, seed)
    yield _standard(layer, truth, window, impl)
    for fmt in formats:
        yield from _format(layer, truth, fmt, window, impl)


def _samples(tokens: int) -> list[int]:
    return [(i + 1) * tokens // SAMPLES for i in range(SAMPLES)]


def _truth(layer: LayerSpec, tokens: int, seed: int) -> _Truth:
    stream = make_block(layer, 1, tokens, seed=seed, regime=Regime.SLOW, dtype=torch.bfloat16)
    q, k = (
        reference.expand_heads(x[0].double(), layer.value_heads, 1) for x in (stream.q, stream.k)
    )
    g = stream.g[0].double()
    g = g if g.ndim == 3 else g.unsqueeze(-1)
    entries = reference.Entries(k, stream.v[0].double(), g, stream.w[0].double())
    shape = (layer.value_heads, layer.value_dim, layer.key_dim)
    state, outputs, states = torch.zeros(shape, dtype=torch.float64), [], {}
    wanted = set(_samples(tokens))
    for t in range(tokens):
        state = reference.write_entry(state, entries, t, layer.write)
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        if t + 1 in wanted:
            states[t + 1] = state
    return _Truth(stream, torch.stack(outputs), states)


def _format(
    layer: LayerSpec, truth: _Truth, fmt: Format, window: int, impl: Impl
) -> Iterator[Drift]:
    tokens, ring = len(truth.outputs), RingSpec(window=window)
    pool = StatePool([layer], 2, state=fmt, ring=ring, ring_dtype=torch.bfloat16, impl=impl)
    depths = [ReadDepth.HIGH, ReadDepth.FULL]
    refs = [pool.admit_() for _ in depths]
    outputs = torch.zeros(2, *truth.outputs.shape)
    errors = []
    for t in range(tokens):
        one = take(truth.stream, [0, 0], [t])
        ticket = pool.begin(refs)
        pool.step_(ticket, 0, one, depth=depths, out=outputs[:, t : t + 1])
        pool.commit_(ticket, 1)
        if t + 1 in truth.states:
            errors.append(relative_error(pool.materialise(refs[0])[0], truth.states[t + 1]))
    for depth, y in zip(depths, outputs, strict=True):
        yield _drift(fmt.value, depth.value, y, truth, errors, tokens / window)


def _standard(layer: LayerSpec, truth: _Truth, window: int, impl: Impl) -> Drift:
    tokens, plan = len(truth.outputs), make_plan([0], [1], [0])
    shape = (1, layer.value_heads, layer.value_dim, layer.key_dim)
    state, outputs, errors = torch.zeros(shape, dtype=torch.bfloat16), [], []
    for t in range(tokens):
        out = torch.empty(1, 1, layer.value_heads, layer.value_dim)
        one = take(truth.stream, [0], [t])
        outputs.append(standard_(state, layer, plan, one, impl=impl, out=out)[0, 0])
        if t + 1 in truth.states:
            errors.append(relative_error(state[0].float(), truth.states[t + 1]))
    y = torch.stack(outputs)
    return _drift("standard bf16", "", y, truth, errors, tokens / window)


def _drift(
    name: str, read: str, y: Tensor, truth: _Truth, errors: list[float], folds: float
) -> Drift:
    part = len(y) // 8
    return Drift(
        name=name,
        read=read,
        first=relative_error(y[:part], truth.outputs[:part]),
        last=relative_error(y[-part:], truth.outputs[-part:]),
        state=errors[-1],
        slope_per_fold=_slope(errors[SAMPLES // 2 :]) * SAMPLES / folds,
    )


def _slope(values: list[float]) -> float:
    x = torch.arange(len(values), dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())
