"""Layouts that several packages share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.cases import Inputs, Point


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 arguments: scalars are views with stride 0 over headdim and dstate."""

    x: Tensor  # [B, T, heads, headdim]
    dt: Tensor  # [B, T, heads, headdim]
    decay: Tensor  # [heads, headdim, dstate]
    b: Tensor  # [B, T, groups, dstate]
    c: Tensor  # [B, T, groups, dstate]
    skip: Tensor  # [heads, headdim]
    bias: Tensor  # [heads, headdim]


def mamba(point: Point, inputs: Inputs, weights: torch.dtype = torch.float32) -> Mamba:
    """Return Mamba-2 arguments; ``weights`` is the dtype of D and the bias of dt."""
    at = point.case.layer
    hv, v, k = at.value_heads, at.value_dim, at.key_dim
    return Mamba(
        x=inputs.v,
        dt=inputs.a[..., None].expand(-1, -1, -1, v),
        decay=(-inputs.a_log.exp())[:, None, None].expand(hv, v, k),
        b=inputs.k,
        c=inputs.q,
        skip=inputs.skip.to(weights)[:, None].expand(hv, v),
        bias=inputs.bias.to(weights)[:, None].expand(hv, v),
    )


def packed(inputs: Inputs) -> Tensor:
    """Return ``[B, 2 H K + HV V]``: q, k and v of one token, as a convolution leaves them."""
    return torch.cat([x.flatten(1) for x in (inputs.q, inputs.k, inputs.v)], 1)


def gates(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return log-decays and strengths in fp32, for kernels that take them ready made."""
    rate = inputs.a_log.exp()
    rate = rate[:, None] if inputs.a.ndim == 4 else rate
    gate = torch.nn.functional.softplus(inputs.a.float() + inputs.bias)
    return -rate * gate, inputs.b.float().sigmoid()
