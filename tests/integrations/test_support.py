"""``replayssm.support`` and what ``enable`` refuses."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES, build  # noqa: E402

import replayssm  # noqa: E402
from replayssm.errors import ContractError, UnsupportedError  # noqa: E402

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
REFUSED = {
    "Mamba": ({**TINY, "state_size": 8}, "Mamba-1"),
    "FalconMamba": ({**TINY, "state_size": 8}, "Mamba-1"),
    "Jamba": (
        {**TINY, **ATTENTION, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
        "Mamba-1",
    ),
    "RecurrentGemma": ({**TINY, **ATTENTION, "lru_width": 32}, "RG-LRU"),
    "Llama": ({**TINY, **ATTENTION}, "no recurrent layer"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_served_family(name):
    model = build(name)
    report = replayssm.support(model)
    assert report.supported, report.reasons
    assert report.recurrent_layers == report.served_layers == len(report.layers) > 0
    assert all(row.served and row.family and row.key_dim for row in report.layers)
    assert report.transformers == transformers.__version__
    assert report.state_elements > 0
    json.dumps(report.to_dict())


@pytest.mark.parametrize("name", ["Bamba", "Qwen3_5Text"])
def test_a_configuration_is_enough(name):
    model = build(name)
    assert replayssm.support(model.config).layers == replayssm.support(model).layers


def test_rows_carry_the_head_grouping():
    (row, *_) = replayssm.support(build("Qwen3Next")).layers
    assert (row.key_heads, row.value_heads, row.heads_per_key) == (2, 4, 2)
    assert row.model_layout == "[B, HV, K, V]"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_say_why(name):
    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    options, why = REFUSED[name]
    model = transformers.AutoModelForCausalLM.from_config(config_class(**options))
    report = replayssm.support(model)
    assert not report.supported
    assert any(why in reason for reason in report.reasons)
    with pytest.raises(UnsupportedError, match=why):
        replayssm.enable(model)


def test_draft_heads_are_reported():
    assert replayssm.support(build("Bamba")).draft_head.status == "absent"
    head = replayssm.support(build("Qwen3Next")).draft_head
    assert head.status == "refused"
    assert head.reason


def test_meta_models_and_compiled_models_are_refused():
    model = build("Bamba")
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        replayssm.enable(torch.compile(model))
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(UnsupportedError, match="meta"):
        replayssm.enable(empty)


def test_other_objects_are_refused():
    with pytest.raises(ContractError, match="model"):
        replayssm.enable(torch.nn.Linear(2, 2))
    with pytest.raises(ContractError, match="model_or_config"):
        replayssm.support("a name")


def test_fp64_models_are_refused():
    with pytest.raises(UnsupportedError, match="float64"):
        replayssm.enable(build("Bamba", dtype=torch.float64))
