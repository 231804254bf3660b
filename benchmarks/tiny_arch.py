"""Configurations, initial weights and GPU training kernels of the tiny models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, BambaConfig, KimiLinearConfig, Qwen3_5TextConfig

from replayssm.models.tiny import WINDOW, register_window_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "initializer_range": 0.04,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "replayssm_window": WINDOW,
}


def build_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model.

    Raises:
        ValueError: unknown name.
    """
    if name == "mamba2-tiny":
        return BambaConfig(
            **COMMON,
            intermediate_size=448,
            num_hidden_layers=6,
            attn_layer_indices=[2],
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
            mamba_expand=2,
            mamba_chunk_size=64,
        )
    if name == "gdn-tiny":
        return _gdn(["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"] * 3)
    if name == "draft-tiny":
        return _gdn(["linear_attention", "full_attention"], heads=2, intermediate=512)
    if name == "kda-tiny":
        return _kda()
    raise ValueError(f"unknown model {name!r}")


def _gdn(layers: list[str], heads: int = 4, intermediate: int = 384) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        **COMMON,
        intermediate_size=intermediate,
        num_hidden_layers=len(layers),
        layer_types=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )


def _kda() -> KimiLinearConfig:
    layers = ["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"] * 2
    return KimiLinearConfig(
        **COMMON,
        intermediate_size=352,
        num_hidden_layers=len(layers),
        layer_types=layers,
        mlp_layer_types=["dense"] * len(layers),
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        linear_num_heads=4,
        linear_head_dim=128,
    )


def build_model(
    name: str,
    seed: int,
    *,
    dt_range: tuple[float, float] = (1e-3, 1e-1),
    a_range: tuple[float, float] = (0.1, 8.0),
    skip: float = 1.0,
) -> PreTrainedModel:
    """Return a freshly initialised model with windowed attention, in fp32 on the CPU.

    Args:
        name: a tiny model's name.
        seed: of the initial weights.
        dt_range: dt starts log-uniform in this range ...
        a_range: ... and A in this one, so that some heads keep thousands of bytes from the start.
        skip: initial D of Mamba-2. Its output norm spans skip and read together, so a small dt
            with D = 1 hides what is read from the state.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        build_config(name), attn_implementation=register_window_attention()
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(math.log(a_range[0]), math.log(a_range[1]))
            elif key.endswith("dt_bias"):
                low, high = (math.log(x) for x in dt_range)
                dt = torch.empty_like(parameter).uniform_(low, high).exp()
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif key.endswith(".D"):
                parameter.fill_(skip)
    return model


def ssd_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = 64,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    return_final_states: bool = False,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    initial_states: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    # transformers hands this function the extras of its other backends.
    **_extras: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2 over whole sequences as matrix products; one group only.

    Same arguments and results as transformers' ``mamba2_chunk_scan``, several times faster on a
    GPU, because no product of chunk, head and state size is materialised.
    """
    if z is not None or not dt_softplus or B.shape[2] != 1 or dt_bias is None or D is None:
        raise ValueError("expected one group, softplus, a dt bias, D, and no gate in the scan")
    length, heads, dim = hidden_states.shape[1:]
    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    pad = -length % chunk_size
    x = F.pad(hidden_states * dt[..., None].to(hidden_states.dtype), (0, 0, 0, 0, 0, pad))
    x = x.unflatten(1, (-1, chunk_size)).transpose(2, 3)
    decay = F.pad(dt * A.float(), (0, 0, 0, pad)).unflatten(1, (-1, chunk_size)).transpose(2, 3)
    b, c = (F.pad(m[:, :, 0], (0, 0, 0, pad)).unflatten(1, (-1, chunk_size)) for m in (B, C))
    total = decay.cumsum(-1)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
    inner = (total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf).exp()
    scores = (c @ b.transpose(-1, -2))[:, :, None] * inner.to(c.dtype)
    out = (scores @ x).transpose(2, 3)
    to_end = (total[..., -1:] - total).exp()[..., None].to(x.dtype)
    written = (x * to_end).transpose(-1, -2).flatten(2, 3) @ b
    states, final = _carry(written.unflatten(2, (heads, dim)), total[..., -1], initial_states)
    read = c @ states.to(c.dtype).flatten(2, 3).transpose(-1, -2)
    from_start = total.exp().transpose(2, 3)[..., None]
    out = out + read.unflatten(-1, (heads, dim)) * from_start.to(read.dtype)
    out = out.flatten(1, 2)[:, :length] + hidden_states * D[:, None].to(hidden_states.dtype)
    return (out, final) if return_final_states else out


def _carry(
    written: torch.Tensor, decay: torch.Tensor, initial: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state at the start of every chunk, and the last; fp32 throughout."""
    with torch.autocast(written.device.type, enabled=False):
        written = written.float()
        first = torch.zeros_like(written[:, 0]) if initial is None else initial.float()
        entries = torch.cat((first[:, None], written), dim=1)
        total = F.pad(decay, (0, 0, 1, 0)).cumsum(1).transpose(1, 2)
        steps = total.shape[-1]
        later = torch.ones(steps, steps, dtype=torch.bool, device=total.device).triu(1)
        weight = (total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", weight, entries)
    return states[:, :-1], states[:, -1]


def use_reference_kernels() -> None:
    """Make transformers use its own torch functions, whatever kernels are installed."""
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.qwen3_5 import modeling_qwen3_5

    for module, name in (
        (modeling_qwen3_5, "torch_chunk_gated_delta_rule"),
        (modeling_kimi_linear, "chunk_kimi_delta_attention"),
    ):
        function = getattr(module, name)
        setattr(module, name, getattr(function, "__wrapped__", function))


def use_training_kernels(limit: int) -> None:
    """Replace the per-sequence functions of the three architectures by fast GPU ones.

    GDN and KDA both run through ``fla``'s KDA kernels (a scalar decay is a channel decay with
    equal channels), because its GDN backward pass refuses Hopper with Triton 3.4 to 3.7.0.
    ``limit`` bounds the launch configurations tried per Triton kernel; all of them would take
    minutes to compile.
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.kda import chunk_kda
    from transformers.models.bamba import modeling_bamba
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.qwen3_5 import modeling_qwen3_5

    _limit_autotuning(limit)

    def delta(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = True,
        **_extras: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if g.ndim == 3:
            g = g[..., None].expand(*g.shape, key.shape[-1])
        return chunk_kda(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            g.float().contiguous(),
            beta.float(),
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    def conv(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_extras: object,
    ) -> torch.Tensor:
        x = hidden_states.transpose(1, 2).contiguous()
        bias = None if bias is None else bias.to(x.dtype)
        out, _ = causal_conv1d(x, weight.to(x.dtype), bias, activation=activation)
        return out.transpose(1, 2)

    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta
    modeling_kimi_linear.chunk_kimi_delta_attention = delta
    modeling_bamba.mamba2_chunk_scan = ssd_chunk_scan
    for module in (modeling_qwen3_5, modeling_kimi_linear, modeling_bamba):
        module.causal_conv1d_fn = conv


def _limit_autotuning(limit: int) -> None:
    import sys

    import triton
    from triton.runtime.autotuner import Autotuner

    def effort(config: triton.Config) -> tuple[int, int]:
        return abs(config.num_warps - 4), abs(config.num_stages - 3)

    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None) if hasattr(kernel, "run") else None
            if kernel is not None and len(kernel.configs) > limit:
                kernel.configs = sorted(kernel.configs, key=effort)[:limit]
