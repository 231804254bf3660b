"""Adapters of delta-rule mixers: Gated DeltaNet and Kimi Delta Attention.

* GDN: Qwen3-Next, Qwen3.5 (dense and MoE), OlmoHybrid and the mixers derived from them. Scalar
  decay.
* KDA: KimiLinear and the mixers derived from it. One decay per key channel.

Both get q and k raw, g as a natural-log decay and beta as the write strength: the gates (softplus,
sigmoid, a lower bound) are the mixer's own code, upstream of the functions named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from replayssm.models.adapters import Adapter, Site, refuse_packed, ungroup
from replayssm.types import Block, Decay, LayerSpec, Write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

L2_EPS = 1e-6
PER_TOKEN = ("query", "key", "value", "g", "beta")


class DeltaAdapter(Adapter):
    """What GDN and KDA share: delta write, normalised keys, a K x V state in the model."""

    transposed = True

    def normalise(self, x: Tensor) -> Tensor:
        """Return ``x / sqrt(sum(x^2) + eps)`` over the last dimension, as the model's step does."""
        raise NotImplementedError

    def block(self, site: Site, arguments: Mapping[str, Any], spec: LayerSpec) -> Block:
        """Map the arguments: normalise q and k in fp32, scale q, undo a repeat of key heads."""
        refuse_packed(arguments)
        q = ungroup(arguments["query"], spec.key_heads, "query").float()
        k = ungroup(arguments["key"], spec.key_heads, "key").float()
        if arguments.get("use_qk_l2norm_in_kernel", False):
            q, k = self.normalise(q), self.normalise(k)
        scale = arguments.get("scale")
        q = q * (spec.key_dim**-0.5 if scale is None else scale)
        g, w = arguments["g"].float(), arguments["beta"].float()
        return Block(q=q, k=k, v=arguments["value"], g=g, w=w)

    def raw_block(
        self, site: Site, arguments: Mapping[str, Any], spec: LayerSpec
    ) -> tuple[Block, dict[str, Any]] | None:
        """Map the arguments; norm and scale are left to the kernels."""
        refuse_packed(arguments)
        q, k = (ungroup(arguments[n], spec.key_heads, n) for n in ("query", "key"))
        scale = arguments.get("scale")
        inside = {
            "norm": bool(arguments.get("use_qk_l2norm_in_kernel", False)),
            "norm_eps": L2_EPS,
            "q_scale": spec.key_dim**-0.5 if scale is None else scale,
        }
        return Block(q=q, k=k, v=arguments["value"], g=arguments["g"], w=arguments["beta"]), inside

    def finish_raw(
        self, site: Site, arguments: Mapping[str, Any], y: Tensor, state: object
    ) -> object:
        """As :meth:`finish`."""
        return self.finish(site, arguments, y, state)

    def finish(self, site: Site, arguments: Mapping[str, Any], y: Tensor, state: object) -> object:
        """Cast to the query's dtype and hand the state back where it was asked for."""
        wanted = arguments.get("output_final_state", False)
        return y.to(arguments["query"].dtype), state if wanted else None


class GdnAdapter(DeltaAdapter):
    """Gated DeltaNet: one decay per value head; value heads may share key heads."""

    family = "gdn"
    step = Site("torch_recurrent_gated_delta_rule", "initial_state", PER_TOKEN)
    chunk = Site("torch_chunk_gated_delta_rule", "initial_state", PER_TOKEN)
    attributes = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")

    def spec(self, mixer: nn.Module) -> LayerSpec:
        """Return the geometry."""
        at: Any = mixer
        return LayerSpec(
            Write.DELTA,
            Decay.SCALAR,
            at.num_k_heads,
            at.num_v_heads,
            at.head_k_dim,
            at.head_v_dim,
        )

    def normalise(self, x: Tensor) -> Tensor:
        """Multiply by the reciprocal root, the form of GDN step functions."""
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


class KdaAdapter(DeltaAdapter):
    """Kimi Delta Attention: one decay per value head and key channel."""

    family = "kda"
    step = Site("recurrent_kimi_delta_attention", "initial_state", PER_TOKEN)
    chunk = Site("chunk_kimi_delta_attention", "initial_state", PER_TOKEN)
    attributes = ("num_heads", "head_dim", "forget_gate")

    def spec(self, mixer: nn.Module) -> LayerSpec:
        """Return the geometry: every head has its own key, K = V."""
        at: Any = mixer
        heads, dim = at.num_heads, at.head_dim
        return LayerSpec(Write.DELTA, Decay.CHANNEL, heads, heads, dim, dim)

    def normalise(self, x: Tensor) -> Tensor:
        """Divide by the root, the form of KDA step functions."""
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
