"""Adapters against the step functions of transformers they map, argument by argument."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from replayssm.errors import ContractError, UnsupportedError  # noqa: E402
from replayssm.models.adapters import ungroup  # noqa: E402
from replayssm.models.delta import GdnAdapter, KdaAdapter  # noqa: E402
from replayssm.models.mamba2 import Mamba2Adapter, time_step  # noqa: E402
from replayssm.models.registry import ADAPTERS, recognise, refusal  # noqa: E402
from replayssm.ops import standard_  # noqa: E402
from replayssm.ring import BlockPlan  # noqa: E402
from replayssm.types import Block, Decay, Impl, LayerSpec, Write  # noqa: E402

B, K, V = 2, 6, 5
MAMBA2 = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 2, 4, K, V)
GDN = LayerSpec(Write.DELTA, Decay.SCALAR, 2, 4, K, V)
KDA = LayerSpec(Write.DELTA, Decay.CHANNEL, 4, 4, K, V)


def modeling(name):
    try:
        return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def run(adapter, site, arguments, spec, state):
    """Answer a call from the adapter: what the function returns, and the new state."""
    block = adapter.block(site, arguments, spec)
    own = adapter.from_model(state).clone()
    rows = np.arange(B, dtype=np.int64)
    zero = np.zeros(B, np.int64)
    plan = BlockPlan(rows, zero, zero, zero, np.full(B, block.tokens, np.int64))
    out = torch.empty(block.v.shape)
    standard_(own, spec, plan, block, impl=Impl.REFERENCE, out=out)
    return adapter.finish(site, arguments, out, "state"), adapter.to_model(own)


def mamba2_arguments(**changes):
    hv, g = MAMBA2.value_heads, MAMBA2.key_heads
    arguments = {
        "hidden_states": randn(B, hv, V),
        "dt": randn(B, hv, 1, seed=1).expand(B, hv, V),
        "A": -randn(hv, 1, 1, seed=2).exp().expand(hv, V, K),
        "B": randn(B, g, K, seed=3),
        "C": randn(B, g, K, seed=4),
        "D": randn(hv, 1, seed=5).expand(hv, V),
        "dt_bias": randn(hv, 1, seed=6).expand(hv, V),
        "dt_softplus": True,
        "z": None,
    }
    return {**arguments, **changes}


MAMBA2_FAMILIES = ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"]
GDN_FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lara_mini"]
KDA_FAMILIES = ["kimi_linear"]


@pytest.mark.parametrize("name", MAMBA2_FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"z": randn(B, 4, V, seed=7)},
        {"D": None},
        {"dt_bias": None},
        {"dt_softplus": False},
        {"dt": torch.full((B, 4, V), 40.0)},
        {"dt": torch.full((B, 4, V), -40.0)},
    ],
    ids=["plain", "z", "no D", "no bias", "no softplus", "long steps", "short steps"],
)
def test_mamba2_step(name, changes):
    adapter, arguments = Mamba2Adapter(), mamba2_arguments(**changes)
    if not arguments["dt_softplus"]:
        arguments["dt"] = arguments["dt"].abs()
    state = randn(B, MAMBA2.value_heads, V, K, seed=8)
    got, after = run(adapter, adapter.step, arguments, MAMBA2, state)
    theirs = state.clone()
    wanted = modeling(name).mamba2_selective_state_update(theirs, **arguments)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(after, theirs)


def test_mamba2_chunk_is_a_row_of_steps():
    adapter, tokens = Mamba2Adapter(), 5
    hv, g = MAMBA2.value_heads, MAMBA2.key_heads
    arguments = {
        "hidden_states": randn(B, tokens, hv, V),
        "dt": randn(B, tokens, hv, seed=1),
        "A": -randn(hv, seed=2).exp(),
        "B": randn(B, tokens, g, K, seed=3),
        "C": randn(B, tokens, g, K, seed=4),
        "D": randn(hv, seed=5),
        "dt_bias": randn(hv, seed=6),
        "dt_softplus": True,
        "return_final_states": True,
    }
    state = randn(B, hv, V, K, seed=8)
    (got, handed), after = run(adapter, adapter.chunk, arguments, MAMBA2, state)
    wanted, final = modeling("mamba2").mamba2_chunk_scan(
        **arguments, chunk_size=4, initial_states=state
    )
    assert handed == "state"
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, final, rtol=1e-4, atol=1e-5)


def test_time_step_stays_in_its_dtype():
    dt = randn(3, 4).bfloat16()
    assert time_step(dt, torch.ones(4), softplus=True).dtype == torch.bfloat16


def delta_arguments(spec, tokens=3, heads=None, **changes):
    hv = spec.value_heads
    gate = (B, tokens, hv) if spec.decay is Decay.SCALAR else (B, tokens, hv, K)
    arguments = {
        "query": randn(B, tokens, heads or spec.key_heads, K),
        "key": randn(B, tokens, heads or spec.key_heads, K, seed=1),
        "value": randn(B, tokens, hv, V, seed=2),
        "g": -randn(*gate, seed=3).exp(),
        "beta": randn(B, tokens, hv, seed=4).sigmoid(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    return {**arguments, **changes}


@pytest.mark.parametrize("name", GDN_FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"g": torch.zeros(B, 3, 4)},
        {"g": torch.full((B, 3, 4), -200.0)},
        {"beta": torch.full((B, 3, 4), 2.0)},
        {"use_qk_l2norm_in_kernel": False},
    ],
    ids=["plain", "gate 1", "gate 0", "beta 2", "no norm"],
)
def test_gdn_step(name, changes):
    adapter, home = GdnAdapter(), modeling(name)
    # older versions hand the keys repeated to every value head
    arguments = delta_arguments(GDN, **changes)
    repeated = {n: arguments[n].repeat_interleave(2, dim=2) for n in ("query", "key")}
    state = randn(B, GDN.value_heads, K, V, seed=8)
    wanted, final = home.torch_recurrent_gated_delta_rule(
        **{**arguments, **repeated}, initial_state=state
    )
    for given in (arguments, {**arguments, **repeated}):
        (got, handed), after = run(adapter, adapter.step, given, GDN, state)
        assert handed == "state"
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(after, final)


@pytest.mark.parametrize("name", KDA_FAMILIES)
@pytest.mark.parametrize("gate", [None, 0.0, -5.0, -200.0])
def test_kda_step(name, gate):
    changes = {} if gate is None else {"g": torch.full((B, 3, 4, K), gate)}
    adapter, arguments = KdaAdapter(), delta_arguments(KDA, **changes)
    state = randn(B, KDA.value_heads, K, V, seed=8)
    wanted, final = modeling(name).recurrent_kimi_delta_attention(**arguments, initial_state=state)
    (got, _), after = run(adapter, adapter.step, arguments, KDA, state)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(after, final)


def test_no_state_is_handed_back_unasked():
    adapter, arguments = GdnAdapter(), delta_arguments(GDN, output_final_state=False)
    (_, handed), _ = run(adapter, adapter.step, arguments, GDN, randn(B, 4, K, V))
    assert handed is None


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_packed_sequences_are_refused(name):
    adapter = GdnAdapter()
    with pytest.raises(UnsupportedError, match=name):
        adapter.block(adapter.chunk, delta_arguments(GDN, **{name: torch.zeros(1)}), GDN)


def test_ungroup_keeps_one_head_of_every_group():
    x = randn(B, 3, 2, K)
    assert torch.equal(ungroup(x.repeat_interleave(3, dim=2), 2, "key"), x)
    assert ungroup(x, 2, "key") is x
    with pytest.raises(ContractError, match="key"):
        ungroup(randn(B, 3, 5, K), 2, "key")


def test_layouts_round_trip():
    for adapter in ADAPTERS:
        state = randn(B, 4, V, K)
        assert torch.equal(adapter.from_model(adapter.to_model(state)), state)
        assert adapter.to_model(state).is_contiguous()


def test_ordinary_modules_are_neither_served_nor_refused():
    for module in (torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Conv1d(2, 2, 2)):
        assert recognise(module) is None
        assert refusal(module) is None


def run_raw(adapter, site, arguments, spec, state):
    """The same from raw arguments, with what kernels do inside done here in torch."""
    raw, inside = adapter.raw_block(site, arguments, spec)
    q, k, g, w = raw.q, raw.k, raw.g, raw.w
    if inside.get("gates") == "dt":
        w = torch.nn.functional.softplus(g + inside["bias"])
        g = -inside["rate"] * w
    if inside.get("norm"):
        q, k = (x * torch.rsqrt((x * x).sum(-1, True) + inside["norm_eps"]) for x in (q, k))
    block = Block(q * inside.get("q_scale", 1.0), k, raw.v, g, w)
    own, rows, zero = adapter.from_model(state).clone(), np.arange(B), np.zeros(B, np.int64)
    plan = BlockPlan(rows, zero, zero, zero, np.full(B, block.tokens, np.int64))
    y = standard_(own, spec, plan, block, impl=Impl.REFERENCE)
    if inside.get("skip") is not None:
        y = y + inside["skip"].unsqueeze(-1) * raw.v
    if inside.get("z") is not None:
        y = y * torch.nn.functional.silu(inside["z"])
    return adapter.finish_raw(site, arguments, y, "state"), adapter.to_model(own)


@pytest.mark.parametrize("changes", [{}, {"z": randn(B, 4, V, seed=7)}, {"D": None}], ids=str)
def test_a_raw_mamba2_block_says_all_that_is_done_inside(changes):
    adapter, arguments = Mamba2Adapter(), mamba2_arguments(**changes)
    state = randn(B, MAMBA2.value_heads, V, K, seed=8)
    got, want = (f(adapter, adapter.step, arguments, MAMBA2, state) for f in (run_raw, run))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("changes", [{"dt_softplus": False}, {"dt_bias": None}], ids=str)
def test_mamba2_without_what_kernels_do_has_no_raw_block(changes):
    adapter = Mamba2Adapter()
    assert adapter.raw_block(adapter.step, mamba2_arguments(**changes), MAMBA2) is None


@pytest.mark.parametrize(("adapter", "spec"), [(GdnAdapter(), GDN), (KdaAdapter(), KDA)])
@pytest.mark.parametrize("changes", [{}, {"use_qk_l2norm_in_kernel": False}, {"scale": 0.3}])
def test_a_raw_delta_block_says_all_that_is_done_inside(adapter, spec, changes):
    arguments = delta_arguments(spec, heads=spec.value_heads, **changes)
    state = randn(B, spec.value_heads, K, V, seed=8)
    got, want = (f(adapter, adapter.chunk, arguments, spec, state) for f in (run_raw, run))
    (y, handed), after = got
    torch.testing.assert_close((y, after), (want[0][0], want[1]))
    assert handed == want[0][1] == "state"
