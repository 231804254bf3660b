"""Shapes, the raw inputs of one layer-step, and the fp64 recurrence that outputs are judged by."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.types import Decay, LayerSpec, Write

# entries kept of a verified block of T tokens: one step in two accepts a bit more than half
KEPT = {1: 1, 2: 1, 4: 3, 8: 5}


@dataclass(frozen=True)
class Case:
    """One layer geometry.

    Attributes:
        name: As on the command line.
        family: ``mamba2``, ``gdn`` or ``kda``.
        layer: Heads and dims.
    """

    name: str
    family: str
    layer: LayerSpec


def _case(family: str, name: str, h: int, hv: int, k: int, v: int) -> Case:
    write = Write.ADDITIVE if family == "mamba2" else Write.DELTA
    decay = Decay.CHANNEL if family == "kda" else Decay.SCALAR
    return Case(f"{family}-{name}", family, LayerSpec(write, decay, h, hv, k, v))


CASES = {
    case.name: case
    for case in (
        _case("mamba2", "128x64x128", 8, 128, 128, 64),
        _case("mamba2", "96x80x128", 8, 96, 128, 80),
        _case("gdn", "16-64x128x128", 16, 64, 128, 128),
        _case("gdn", "16-32x128x128", 16, 32, 128, 128),
        _case("kda", "32x128x128", 32, 32, 128, 128),
        _case("mamba2", "tiny", 1, 2, 32, 16),
        _case("gdn", "tiny", 1, 2, 32, 16),
        _case("kda", "tiny", 2, 2, 32, 16),
    )
}


@dataclass(frozen=True)
class Point:
    """What one figure is measured at: geometry, rows, tokens of a block, window."""

    case: Case
    batch: int
    tokens: int = 1
    window: int = 16

    @property
    def kept(self) -> int:
        """Entries of every block that are committed."""
        return KEPT[self.tokens]

    @property
    def state_elements(self) -> int:
        """Elements of all rows' states."""
        return self.batch * self.case.layer.state_elements

    @property
    def entry_elements(self) -> tuple[int, int, int]:
        """Elements of one token of all rows: keys, values, gates."""
        at = self.case.layer
        gates = 1
        for size in at.gate_shape():
            gates *= size
        rows = self.batch
        return rows * at.key_heads * at.key_dim, rows * at.value_heads * at.value_dim, rows * gates

    @property
    def io_bytes(self) -> int:
        """Bytes of a layer-step's bf16 inputs (k, q, v, gate, strength) and outputs."""
        keys, values, gates = self.entry_elements
        strengths = 0 if self.case.family == "mamba2" else self.batch * self.case.layer.value_heads
        return 2 * self.tokens * (2 * keys + 2 * values + gates + strengths)

    def at(self, batch: int) -> Point:
        """Return the same point with another batch."""
        return replace(self, batch=batch)


@dataclass(frozen=True)
class Inputs:
    """Raw inputs of B rows and T tokens, as the projections of a layer hand them over in bf16.

    Attributes:
        q: ``[B, T, H, K]``; C of Mamba-2.
        k: ``[B, T, H, K]``; B of Mamba-2.
        v: ``[B, T, HV, V]``; x of Mamba-2.
        a: ``[B, T, HV]`` or ``[B, T, HV, K]`` gate input; dt of Mamba-2.
        b: ``[B, T, HV]`` strength input of the delta families.
        a_log: ``[HV]`` fp32; the decay rate is ``-exp(a_log)``.
        bias: ``[HV]`` or ``[HV, K]`` fp32, with values that bf16 holds, added to ``a``.
        skip: ``[HV]`` fp32, with values that bf16 holds; D of Mamba-2.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    bias: Tensor
    skip: Tensor

    def to(self, device: torch.device) -> Inputs:
        """Return the same inputs on a device."""
        return Inputs(*(getattr(self, f.name).to(device) for f in fields(self)))


def draw(
    point: Point, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """Draw inputs: unit normal projections, gates that decay slowly, writes of every strength.

    Args:
        point: Shapes.
        device: Where to.
        seed: Of the tokens; the layer's parameters are always the same.
        dtype: Of everything that a projection hands over.
    """
    at, rows, t = point.case.layer, point.batch, point.tokens

    def normal(seed: int, *shape: int) -> Tensor:
        gen = torch.Generator(device).manual_seed(seed)
        return torch.randn(*shape, generator=gen, device=device)

    def uniform(seed: int, low: float, high: float, *shape: int) -> Tensor:
        gen = torch.Generator(device).manual_seed(seed)
        return torch.rand(*shape, generator=gen, device=device) * (high - low) + low

    hv, gate = at.value_heads, at.gate_shape()
    # softplus of the bias is spread evenly over the logarithms of 1e-3 .. 1e-1
    step = uniform(1, -6.9, -2.3, *gate).exp()
    bias = (step + torch.log(-torch.expm1(-step))).bfloat16().float()
    return Inputs(
        q=normal(5 * seed, rows, t, at.key_heads, at.key_dim).to(dtype),
        k=normal(5 * seed + 1, rows, t, at.key_heads, at.key_dim).to(dtype),
        v=normal(5 * seed + 2, rows, t, hv, at.value_dim).to(dtype),
        a=(normal(5 * seed + 3, rows, t, *gate) * 0.5).to(dtype),
        b=normal(5 * seed + 4, rows, t, hv).to(dtype),
        a_log=uniform(2, -0.7, 1.4, hv),
        bias=bias,
        skip=normal(3, hv).bfloat16().float(),
    )


@dataclass(frozen=True)
class Entries64:
    """The inputs in fp64 after gates and norms: q, k ``[B, T, HV, K]``, v, w, decay, skip."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    decay: Tensor
    skip: Tensor


def entries64(point: Point, x: Inputs) -> Entries64:
    """Apply gates, norms and scale in fp64; keys are repeated to the value heads."""
    at = point.case.layer
    q, k, v, a, b = (t.double() for t in (x.q, x.k, x.v, x.a, x.b))
    gate = F.softplus(a + x.bias.double())
    rate = x.a_log.double().exp()
    rate = rate[:, None] if at.decay is Decay.CHANNEL else rate
    decay = torch.exp(-rate * gate)
    if point.case.family == "mamba2":
        w, skip = gate, x.skip.double()[:, None] * v
    else:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, w, skip = q * at.key_dim**-0.5, b.sigmoid(), torch.zeros_like(v)
    q, k = (t.repeat_interleave(at.heads_per_key, 2) for t in (q, k))
    decay = decay if at.decay is Decay.CHANNEL else decay.unsqueeze(-1)
    return Entries64(q, k, v, w, decay, skip)


def recurrence(point: Point, state: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """Run the block's tokens from a state ``[B, HV, V, K]`` in fp64.

    Returns:
        Outputs of all T tokens ``[B, T, HV, V]``, and the state after the kept ones.
    """
    e, outputs, kept = entries64(point, x), [], state
    for t in range(point.tokens):
        state = state * e.decay[:, t, :, None]
        u = e.v[:, t]
        if point.case.layer.write is Write.DELTA:
            u = u - torch.einsum("bhvk,bhk->bhv", state, e.k[:, t])
        state = state + (e.w[:, t, :, None] * u)[..., None] * e.k[:, t, :, None]
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, e.q[:, t]) + e.skip[:, t])
        if t + 1 == point.kept:
            kept = state
    return torch.stack(outputs, 1), kept
