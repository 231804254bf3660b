"""Adapter of Mamba-2 mixers: Mamba2, Bamba, FalconH1, GraniteMoeHybrid, NemotronH, Zamba2.

In the words of the algebra: k = B, q = C, v = x, w = dt, g = A dt, additive, scalar decay; the
mixer's own outputs are ``y + D x``, times ``silu(z)`` where the step function is handed z.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from replayssm.models.adapters import Adapter, Site, refuse_packed
from replayssm.types import Block, Decay, LayerSpec, Write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return the discretisation step dt, in dt's dtype, with the step function's own operations.

    The step functions of transformers apply no ``time_step_limit``; only their chunk functions do.

    Args:
        dt: ``[..., HV]`` raw.
        bias: ``[HV]`` or None.
        softplus: Whether dt is a softplus away from the raw number.
    """
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


class Mamba2Adapter(Adapter):
    """Mamba-2: additive write, scalar decay, keys shared by groups of heads."""

    family = "mamba2"
    step = Site("mamba2_selective_state_update", "state")
    chunk = Site("mamba2_chunk_scan", "initial_states", ("hidden_states", "dt", "B", "C", "z"))
    transposed = False
    attributes = ("A_log", "dt_bias", "D", "num_heads", "head_dim", "ssm_state_size", "n_groups")

    def spec(self, mixer: nn.Module) -> LayerSpec:
        """Return the geometry: H = groups, K = d_state, V = head_dim."""
        at: Any = mixer
        return LayerSpec(
            Write.ADDITIVE, Decay.SCALAR, at.n_groups, at.num_heads, at.ssm_state_size, at.head_dim
        )

    def block(self, site: Site, arguments: Mapping[str, Any], spec: LayerSpec) -> Block:
        """Map the arguments; the step function's arrive expanded over V and K."""
        refuse_packed(arguments)
        a, dt, bias = arguments["A"], arguments["dt"], arguments.get("dt_bias")
        if not site.tokens:
            a, dt = a[:, 0, 0], dt[..., 0].unsqueeze(1)
            bias = None if bias is None else bias[:, 0]
        w = time_step(dt, bias, bool(arguments.get("dt_softplus", False))).float()
        k, q, v = (self._with_tokens(site, arguments[n]) for n in ("B", "C", "hidden_states"))
        return Block(q=q, k=k, v=v, g=a.float() * w, w=w)

    def finish(self, site: Site, arguments: Mapping[str, Any], y: Tensor, state: object) -> object:
        """Add the skip ``D x`` and the gate ``silu(z)`` in fp32, then cast to x's dtype."""
        x = self._with_tokens(site, arguments["hidden_states"])
        d, z = arguments.get("D"), arguments.get("z")
        if d is not None:
            d = d if site.tokens else d[:, 0]
            y = y + x.float() * d.float().unsqueeze(-1)
        if z is not None:
            y = y * F.silu(self._with_tokens(site, z).float())
        y = y.to(x.dtype)
        if not site.tokens:
            return y.squeeze(1)
        return (y, state) if arguments.get("return_final_states", False) else y

    def raw_block(
        self, site: Site, arguments: Mapping[str, Any], spec: LayerSpec
    ) -> tuple[Block, dict[str, Any]] | None:
        """Map raw dt; softplus, skip and gate are left to the kernels. None without a softplus."""
        refuse_packed(arguments)
        dt, a, bias, d = (
            arguments["dt"],
            arguments["A"],
            arguments.get("dt_bias"),
            arguments.get("D"),
        )
        if not arguments.get("dt_softplus", False) or bias is None:
            return None
        if not site.tokens:
            dt, a, bias = dt[..., 0].unsqueeze(1), a[:, 0, 0], bias[:, 0]
            d = None if d is None else d[:, 0]
        k, q, v = (self._with_tokens(site, arguments[n]) for n in ("B", "C", "hidden_states"))
        z = arguments.get("z")
        inside = {"gates": "dt", "rate": -a.float(), "bias": bias, "skip": d}
        if z is not None:
            inside["z"] = self._with_tokens(site, z)
        return Block(q=q, k=k, v=v, g=dt, w=dt), inside

    def finish_raw(
        self, site: Site, arguments: Mapping[str, Any], y: Tensor, state: object
    ) -> object:
        """Cast to x's dtype."""
        y = y.to(arguments["hidden_states"].dtype)
        if not site.tokens:
            return y.squeeze(1)
        return (y, state) if arguments.get("return_final_states", False) else y

    @staticmethod
    def _with_tokens(site: Site, x: Tensor) -> Tensor:
        return x if site.tokens else x.unsqueeze(1)
