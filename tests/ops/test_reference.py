"""The specification against the recurrence, in fp64, free of any format or kernel."""

from __future__ import annotations

import pytest
import torch

from replayssm.ops import reference
from replayssm.ops.reference import Entries, fold_blocked, fold_serial, pull_back, recurrence
from replayssm.ring import RingSpec, tile_rows
from replayssm.storage import StorageSpec, allocate
from replayssm.testing.budgets import relative_error
from replayssm.testing.factories import (
    DIMS,
    FAMILIES,
    HEADS,
    Regime,
    make_block,
    make_layer,
    make_plan,
    make_state,
    make_tree,
)
from replayssm.testing.oracle import SerialOracle
from replayssm.types import Block, Format, ReadDepth

CPU = torch.device("cpu")
EXACT = 1e-13
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0]}-{f[1]}")


def entries_of(layer, tokens, *, seed, regime=Regime.TYPICAL):
    block = make_block(layer, 1, tokens, seed=seed, regime=regime).to(torch.float64)
    g = block.g[0] if block.g.ndim == 4 else block.g[0].unsqueeze(-1)
    q, k = (reference.expand_heads(x[0], layer.value_heads, 1) for x in (block.q, block.k))
    return q, Entries(k, block.v[0], g, block.w[0])


def state_of(layer, seed=0):
    return make_state(layer, seed=seed).double()


@families
@pytest.mark.parametrize("regime", list(Regime))
@pytest.mark.parametrize("heads", HEADS)
def test_pull_back_equals_the_recurrence(family, regime, heads):
    layer = make_layer(*family, heads)
    q, entries = entries_of(layer, 21, seed=1, regime=regime)
    state = state_of(layer)
    expected, _ = recurrence(state, q, entries, layer.write)
    for t in (0, 1, 7, 20):
        x, y = pull_back(q[t], entries.select(slice(0, t + 1)), layer.write)
        assert relative_error(torch.einsum("hvk,hk->hv", state, x) + y, expected[t]) < EXACT


@families
@pytest.mark.parametrize("dims", DIMS)
def test_pull_back_holds_for_odd_dims(family, dims):
    layer = make_layer(*family, (2, 4), dims)
    q, entries = entries_of(layer, 9, seed=2)
    state = state_of(layer)
    expected, _ = recurrence(state, q, entries, layer.write)
    x, y = pull_back(q[8], entries, layer.write)
    assert relative_error(torch.einsum("hvk,hk->hv", state, x) + y, expected[8]) < EXACT


@families
@pytest.mark.parametrize("seed", range(4))
def test_every_path_of_a_tree_is_read_as_if_it_were_alone(family, seed):
    layer = make_layer(*family)
    ring = RingSpec(window=4, max_block=8)
    store = allocate(StorageSpec(layer, Format.F32, ring), 1, CPU)
    state = make_state(layer, seed=seed)
    reference.admit_(store, 0, state)
    parents = make_tree(8, seed=seed)
    plan = make_plan([0], [8], [0], parents=[parents])
    block, out = make_block(layer, 1, 8, seed=seed), torch.zeros(1, 8, 4, 20, dtype=torch.float64)
    reference.step_(store, plan, block, [ReadDepth.FULL], out, compute=torch.float64)
    for token in range(8):
        alone = SerialOracle(layer, state)
        path = plan.ancestors(0, token)
        alone.commit(block, 0, path[:-1])
        only = Block(*(x[:, [token]] for x in (block.q, block.k, block.v, block.g, block.w)))
        assert relative_error(out[0, token], alone.outputs(only, 0, 1)[0]) < EXACT


@families
@pytest.mark.parametrize("regime", list(Regime))
@pytest.mark.parametrize("n", [0, 1, 2, 16])
def test_blocked_fold_equals_serial_fold(family, regime, n):
    layer = make_layer(*family)
    _, entries = entries_of(layer, max(n, 1), seed=3, regime=regime)
    entries = entries.select(slice(0, n))
    state = state_of(layer)
    serial = fold_serial(state, entries, layer.write)
    blocked = fold_blocked(state, entries, layer.write)
    assert bool(blocked.isfinite().all())
    assert relative_error(blocked, serial) < EXACT


@families
def test_value_rows_never_mix(family):
    """A tile of value rows folded by itself equals its rows of the whole fold, bit for bit."""
    layer = make_layer(*family)
    _, entries = entries_of(layer, 6, seed=4)
    state = state_of(layer)
    whole = fold_serial(state, entries, layer.write)
    for tiles in (1, 4, 8):
        for tile in range(tiles):
            rows = tile_rows(tile, tiles, layer.value_dim)
            cut = slice(rows.start, rows.stop)
            part = fold_serial(state[:, cut], entries.rows(rows), layer.write)
            assert relative_error(part, whole[:, cut]) < EXACT


@families
def test_nothing_to_pull_back_leaves_the_query_alone(family):
    layer = make_layer(*family)
    q, entries = entries_of(layer, 1, seed=5)
    x, y = pull_back(q[0], entries.select(slice(0, 0)), layer.write)
    assert torch.equal(x, q[0])
    assert y.shape == (layer.value_heads, layer.value_dim)
    assert not bool(y.any())


@families
@pytest.mark.parametrize("tiles", [1, 4, 8])
@pytest.mark.parametrize("keep", [0, 5])
def test_outputs_and_state_equal_the_serial_oracle(family, tiles, keep):
    """Random blocks and acceptance over several windows; only fp32 planes stand between."""
    layer = make_layer(*family)
    ring = RingSpec(window=8, keep=keep, max_block=4, tiles=tiles)
    store = allocate(StorageSpec(layer, Format.F32, ring), 1, CPU)
    state, base = make_state(layer, seed=6), 3
    reference.admit_(store, 0, state)
    oracle = SerialOracle(layer, state, base)
    rng = torch.Generator().manual_seed(tiles + keep)
    folded = committed = base
    for forward in range(20):
        length, accepted = (int(torch.randint(1, 5, (1,), generator=rng)) for _ in range(2))
        block = make_block(layer, 1, length, seed=forward)
        plan = make_plan([0], [length], [committed], folded=[folded], base=[base])
        out = torch.zeros(block.v.shape, dtype=torch.float64)
        reference.step_(store, plan, block, [ReadDepth.FULL], out, compute=torch.float64)
        # planes are fp32, so the whole path is exact to fp32; the arithmetic on them is fp64
        assert relative_error(out[0], oracle.outputs(block, 0, length)) < 1e-6
        oracle.commit(block, 0, min(accepted, length))
        folded, committed = committed, committed + min(accepted, length)
        rebuilt = reference.materialise(store, 0, base, folded, committed)
        assert relative_error(rebuilt, oracle.state()) < 1e-6


@families
def test_the_state_decides_the_output_not_the_split_into_checkpoint_and_ring(family):
    """One token read through 1 .. 9 entries of ring gives the same number."""
    layer = make_layer(*family)
    q, entries = entries_of(layer, 9, seed=7)
    state = state_of(layer)
    seen = []
    for n in range(9):
        checkpoint = fold_serial(state, entries.select(slice(0, n)), layer.write)
        x, y = pull_back(q[8], entries.select(slice(n, 9)), layer.write)
        seen.append(torch.einsum("hvk,hk->hv", checkpoint, x) + y)
    for other in seen[1:]:
        assert relative_error(other, seen[0]) < EXACT


@families
def test_standard_step_is_the_recurrence(family):
    layer = make_layer(*family)
    state = make_state(layer, seed=8).unsqueeze(0).repeat(3, 1, 1, 1)
    kept, oracle = state.clone(), SerialOracle(layer, state[2])
    block = make_block(layer, 2, 5, seed=8)
    plan = make_plan([2, -1], [4, 0], [0, 0])
    out = torch.full_like(block.v, torch.nan)
    reference.standard_(state, plan, block, layer.write, out)
    assert relative_error(out[0, :4], oracle.outputs(block, 0, 4)) < 1e-6
    oracle.commit(block, 0, 4)
    assert relative_error(state[2], oracle.state()) < 1e-6
    assert torch.equal(state[:2], kept[:2])
    assert not bool(out[0, 4:].any())
    assert not bool(out[1].any())


def test_bf16_standard_state_is_rounded_after_every_token():
    layer = make_layer(*FAMILIES[0])
    state = make_state(layer, seed=9).to(torch.bfloat16).unsqueeze(0)
    block, plan = make_block(layer, 1, 2, seed=9), make_plan([0], [2], [0])
    exact = SerialOracle(layer, state[0])
    exact.commit(block, 0, 1)
    rounded = SerialOracle(layer, exact.state().float().to(torch.bfloat16))
    out = torch.zeros_like(block.v)
    reference.standard_(state, plan, block, layer.write, out)
    second = Block(*(x[:, 1:] for x in (block.q, block.k, block.v, block.g, block.w)))
    assert relative_error(out[0, 1], rounded.outputs(second, 0, 1)[0]) < 1e-6


def test_one_dominant_key_direction_costs_a_high_read_more_and_a_full_read_nothing():
    """Section 4's known limit: the error of a high read is relative to the state."""
    layer, ring = make_layer(*FAMILIES[0], dims=(64, 40)), RingSpec(window=16)
    errors = {}
    for dominant in (0.0, 10.0):
        store = allocate(StorageSpec(layer, Format.Q24, ring), 1, CPU)
        oracle = SerialOracle(layer)
        reference.admit_(store, 0, torch.zeros(4, 40, 64))
        for t in range(64):
            block = make_block(layer, 1, 1, seed=t, dominant=dominant, regime=Regime.SLOW)
            plan = make_plan([0], [1], [t], folded=[max(t - 1, 0)])
            exact = oracle.outputs(block, 0, 1)
            for depth in ReadDepth:
                out = torch.zeros(1, 1, 4, 40)
                reference.step_(store, plan, block, [depth], out)
                plan = make_plan([0], [1], [t])
                errors[dominant, depth] = relative_error(out[0], exact)
            oracle.commit(block, 0, 1)
    assert errors[10.0, ReadDepth.HIGH] > 3 * errors[0.0, ReadDepth.HIGH]
    assert errors[10.0, ReadDepth.HIGH] < 0.15
    assert errors[10.0, ReadDepth.FULL] < 1e-5
