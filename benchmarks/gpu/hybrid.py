"""Hybrid models from configurations, with random weights that are made where the model runs.

Two real shapes of about four billion parameters, and the same two as toys for a machine without a
GPU. Attention is plain scaled-dot-product attention that reads every key and value once, whatever
the number of query heads: transformers' own form repeats them when there is a mask, which would
take more time than the recurrent layers that are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTENTION = "grouped_sdpa"
# one letter a layer: M recurrent, * attention, - feed-forward
NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_LAYERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}

SHAPES: dict[str, dict[str, Any]] = {
    # Nemotron-H 4B: 24 Mamba-2 layers of 112 heads x 64 x 128, 4 attention, 24 feed-forward
    "nemotron-h-4b": {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 3072,
        "layers_block_type": [NEMOTRON_LAYERS[x] for x in NEMOTRON_PATTERN],
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 112, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8,
    },
    # Qwen3.5 4B: 24 Gated DeltaNet layers of 16/32 heads x 128 x 128, 8 attention
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560,
        "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    },
    "nemotron-h-tiny": {
        "model_type": "nemotron_h", "vocab_size": 96, "hidden_size": 32,
        "layers_block_type": [NEMOTRON_LAYERS[x] for x in "M-*M"], "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    },
    "qwen3.5-tiny": {
        "model_type": "qwen3_5_text", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}  # fmt: skip


def config(name: str, *, layers: int | None = None) -> Any:  # noqa: ANN401 - transformers' config
    """Return a configuration; ``layers`` cuts it to so many, which compiles the same kernels."""
    from transformers import AutoConfig

    fields = dict(SHAPES[name])
    if layers is not None:
        fields["vocab_size"] = 128
        if "layers_block_type" in fields:
            fields["layers_block_type"] = ["linear_attention", "full_attention"]
        else:
            fields |= {"num_hidden_layers": 2}
            fields["layer_types"] = ["linear_attention", "full_attention"]
    return AutoConfig.for_model(**fields)


@torch.no_grad()
def build(name: str, device: torch.device, *, layers: int | None = None) -> Any:  # noqa: ANN401 - transformers' model
    """Return a model in bf16 (fp32 on a CPU) with random weights and slowly decaying gates."""
    from transformers import AutoModelForCausalLM

    _register()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config(name, layers=layers), dtype=dtype, attn_implementation=ATTENTION
        )
    for module in model.modules():
        if hasattr(module, "A_log"):
            # decay rates of 1 to 16, steps of 1e-3 to 1e-1: memories of one to a thousand tokens
            module.A_log.copy_(torch.rand_like(module.A_log.float()) * 2.77)
            step = torch.exp(torch.rand_like(module.dt_bias.float()) * 4.6 - 6.9)
            module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
    return model.to(device).eval()


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **_kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend with all queries of a key head as rows of one product.

    Args:
        module: The attention layer.
        query: ``[B, H, T, D]``.
        key: ``[B, G, L, D]``, H a multiple of G.
        value: As key.
        attention_mask: ``[B, 1, T, L]`` bool, or None.
        scaling: Of the scores.

    Returns:
        ``[B, T, H, D]``, and no weights.
    """
    b, heads, t, dim = query.shape
    groups, length = key.shape[1:3]
    rows = query.reshape(b, groups, heads // groups * t, dim)
    mask = attention_mask
    if mask is not None:
        mask = mask.expand(b, heads // groups, t, length).reshape(b, 1, -1, length)
    y = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return y.reshape(b, heads, t, dim).transpose(1, 2).contiguous(), None


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(*args: object, **kwargs: object) -> Tensor:
        # a mask that may be left out is looked for on the device, and left out of static caches
        never = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
        made: Tensor = sdpa_mask(*args, **{**kwargs, **never})
        return made

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask)
