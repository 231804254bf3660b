"""Tiny random models of every served family, and of refused ones."""

from __future__ import annotations

import pytest
import torch

VOCAB = 96
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
}
MOE = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
LAST_FULL = ["linear_attention", "full_attention", "linear_attention", "full_attention"]

CONFIGS = {
    "Mamba2": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 8,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    "Bamba": {
        **BASE,
        **MAMBA,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "attn_layer_indices": [2],
    },
    "FalconH1": {
        **BASE,
        **MAMBA,
        "mamba_d_ssm": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "mamba_rms_norm": False,
    },
    "GraniteMoeHybrid": {
        **BASE,
        **MAMBA,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "NemotronH": {
        **BASE,
        "intermediate_size": 48,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "num_hidden_layers": 4,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "Zamba2": {
        **BASE,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_expand": 2,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "Qwen3Next": {**BASE, **GDN, **MOE, "intermediate_size": 48, "decoder_sparse_step": 1},
    "Qwen3_5Text": {**BASE, **GDN, **MROPE, "intermediate_size": 48},
    "Qwen3_5MoeText": {**BASE, **GDN, **MOE, **MROPE},
    "OlmoHybrid": {
        **BASE,
        **GDN,
        "intermediate_size": 48,
        "linear_num_key_heads": 4,
    },
    "KimiLinear": {
        **BASE,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": LAST_FULL,
        "mlp_layer_types": ["dense"] * 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
}
FAMILIES = tuple(CONFIGS)
QUICK = ("Bamba", "Qwen3_5Text", "KimiLinear")


def quick_first(names=FAMILIES):
    """Return parameters of a test that the quick suite runs for one family of each kind only."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def build(name, seed=0, dtype=torch.float32, **overrides):
    """Return a tiny random model in evaluation mode, or skip where this transformers lacks it."""
    import transformers

    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(seed)
    config = config_class(**{**CONFIGS[name], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    spread_gates(model)
    return model.to(dtype)


def spread_gates(model):
    """Give the recurrent layers slow and fast heads, so that old tokens matter."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3 - 2.5)
            elif key.endswith("dt_bias"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 4 - 4)


def prompt(rows=2, tokens=11, seed=0):
    """Return ``[rows, tokens]`` random token ids, none of them the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (rows, tokens), generator=generator)
