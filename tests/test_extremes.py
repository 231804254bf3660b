"""Gates of 0 and 1, any size of write, resets in the ring, outliers: finite, as the oracle says."""

from __future__ import annotations

import pytest
import torch

from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.budgets import OUTPUT_BUDGET, relative_error
from replayssm.testing.driver import Driver
from replayssm.testing.factories import FAMILIES, Regime, make_block, make_layer, make_state
from replayssm.testing.oracle import SerialOracle
from replayssm.types import Block, Decay, Format, Impl, ReadDepth, Write

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0]}-{f[1]}")


def make_pool(impl, layer, fmt=Format.S32, window=8):
    return StatePool([layer], 1, state=fmt, ring=RingSpec(window, 0, 3), impl=impl)


def decode(pool, layer, blocks, *, depth=ReadDepth.FULL, state=None):
    """Run one-token blocks; return the relative error of the outputs and of the state."""
    oracle, ref = SerialOracle(layer, state), pool.admit_(None if state is None else [state])
    got, exact = [], []
    for block in blocks:
        exact.append(oracle.outputs(block, 0, 1))
        ticket = pool.begin([ref])
        got.append(pool.step_(ticket, 0, block, depth=depth)[0])
        pool.commit_(ticket, 1)
        oracle.commit(block, 0, 1)
    assert all(bool(y.isfinite().all()) for y in got)
    rebuilt = pool.materialise(ref)[0]
    return relative_error(torch.cat(got), torch.cat(exact)), relative_error(rebuilt, oracle.state())


@families
@pytest.mark.parametrize("regime", list(Regime))
@pytest.mark.parametrize("fmt", [Format.S32, Format.Q24])
def test_every_gate_regime_follows_the_oracle(impl, family, regime, fmt):
    pool = make_pool(impl, make_layer(*family, (1, 2), (18, 5)), fmt, window=4)
    d = Driver(pool, regime)
    ref = d.admit()
    for t in range(12):
        d.forward([ref], [3], [1 + t % 3])
    d.check_state(ref)


@families
@pytest.mark.parametrize("g", [-torch.inf, -1000.0, -20.0, -8.0, -5.6, -1.0, -0.1, 0.0])
@pytest.mark.parametrize("window", [16, 32])
def test_a_constant_gate_never_overflows(impl, family, g, window):
    """A ratio of factored decays would leave the fp32 range at (window - 1) g of about -88."""
    layer = make_layer(*family, (1, 2), (18, 5))
    blocks = [make_block(layer, 1, 1, seed=t) for t in range(window + 3)]
    for block in blocks:
        block.g.fill_(g)
    output, state = decode(make_pool(impl, layer, window=window), layer, blocks)
    assert output < 1e-5
    assert state < 1e-5


@families
@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("g", [-1000.0, -torch.inf])
def test_one_reset_anywhere_in_the_ring_clears_what_came_before(impl, family, at, g):
    layer = make_layer(*family, (1, 2), (18, 5))
    blocks = [make_block(layer, 1, 1, seed=t) for t in range(9)]
    blocks[at].g.fill_(g)
    huge = make_state(layer, seed=0, amplitude=1e20)
    output, _ = decode(make_pool(impl, layer), layer, blocks[at:], state=huge)
    assert output < 1e-5


@pytest.mark.parametrize("decay", list(Decay))
def test_identical_unit_keys_with_full_writes_replace_the_value(impl, decay):
    """The delta rule's hardest triangle: (I + A) is all ones below the diagonal."""
    layer = make_layer(Write.DELTA, decay, (1, 2), (18, 5))
    key = torch.nn.functional.normalize(torch.ones(1, 1, 1, 18), dim=-1)
    blocks = []
    for t in range(20):
        b = make_block(layer, 1, 1, seed=t, regime=Regime.OPEN)
        blocks.append(Block(key, key, b.v, b.g, torch.ones_like(b.w)))
    output, _ = decode(make_pool(impl, layer), layer, blocks)
    assert output < 1e-5


@families
@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e15])
def test_values_of_any_magnitude_keep_their_relative_error(impl, family, size):
    layer = make_layer(*family, (1, 2), (18, 5))
    blocks = []
    for t in range(20):
        b = make_block(layer, 1, 1, seed=t)
        blocks.append(Block(b.q, b.k, b.v * size, b.g, b.w))
    for fmt in (Format.S32, Format.Q24):
        output, state = decode(make_pool(impl, layer, fmt), layer, blocks)
        assert output < 1e-5
        assert state < 1e-5


@families
@pytest.mark.parametrize("sigma", [0.0, 1.0, 2.0])
def test_column_scales_absorb_channel_outliers(impl, family, sigma):
    """Section 4's second table: with row and column scales the error does not depend on sigma."""
    layer = make_layer(*family, (1, 2), (64, 32))
    blocks = [
        make_block(layer, 1, 1, seed=t, regime=Regime.SLOW, outliers=sigma) for t in range(80)
    ]
    pool = make_pool(impl, layer, Format.Q24, window=16)
    output, state = decode(pool, layer, blocks, depth=ReadDepth.HIGH)
    assert output < 1.1e-2
    assert state < 2e-6


def test_a_zero_state_reads_as_exactly_zero(impl):
    layer = make_layer(*FAMILIES[0], (1, 2), (18, 5))
    for fmt in Format:
        pool = make_pool(impl, layer, fmt)
        ref = pool.admit_()
        for depth in ReadDepth:
            ticket = pool.begin([ref])
            block = make_block(layer, 1, 1, seed=0)
            block.w.zero_()
            assert not bool(pool.step_(ticket, 0, block, depth=depth).any())
            pool.commit_(ticket, 0)


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("depth", list(ReadDepth))
def test_a_nan_state_is_seen_at_both_depths_and_only_by_its_row(impl, fmt, depth):
    layer = make_layer(*FAMILIES[0], (1, 2), (18, 5))
    state = make_state(layer, seed=0)
    state[1, 2, 3] = torch.nan
    pool = StatePool([layer], 2, state=fmt, ring=RingSpec(window=2), impl=impl)
    bad, good = pool.admit_([state]), pool.admit_([make_state(layer, seed=1)])
    for t in range(5):
        ticket = pool.begin([bad, good])
        y = pool.step_(ticket, 0, make_block(layer, 2, 1, seed=t), depth=depth)
        pool.commit_(ticket, 1)
        is_nan = y.isnan()
        assert bool(is_nan[0, 0, 1, 2])
        is_nan[0, 0, 1, 2] = False
        assert not bool(is_nan.any())


@pytest.mark.parametrize("write", list(Write))
def test_column_scales_follow_a_channel_that_has_become_quiet(impl, write):
    """A fold takes them from the state that it writes: after a reset nothing is left of before."""
    layer = make_layer(write, Decay.SCALAR, (1, 1), (18, 5))
    pool = make_pool(impl, layer, Format.Q24, window=4)
    state = make_state(layer, seed=0)
    state[..., 0] *= 1e6
    ref = pool.admit_([state])
    for t in range(5):
        block = make_block(layer, 1, 1, seed=t)
        if t == 0:
            block.g.fill_(-1000.0)
        ticket = pool.begin([ref])
        pool.step_(ticket, 0, block)
        pool.commit_(ticket, 1)
    stands = pool.oldest(ref)
    assert stands == 4
    columns = pool.stores[0].columns[ref.slot, 0, 0].float()
    amax = pool.materialise(ref, stands)[0][0].abs().amax(0)
    torch.testing.assert_close(columns, amax, rtol=2**-8, atol=0)


@families
@pytest.mark.parametrize("regime", [Regime.TYPICAL, Regime.SLOW])
@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("is_dead", [False, True], ids=["all channels", "some dead at first"])
def test_high_reads_of_a_young_state_cost_what_they_always_cost(
    impl, family, regime, window, tiles, is_dead
):
    """A state that begins at zero, or with silent channels, is as good from its first fold on."""
    if tiles > 1 and impl is not Impl.REFERENCE:
        pytest.skip("the compiled path folds whole heads")
    layer = make_layer(*family, (1, 2), (64, 32))
    state = None
    if is_dead:
        state = make_state(layer, seed=9)
        state[..., ::4] = 0
    blocks = [make_block(layer, 1, 1, seed=t, regime=regime) for t in range(4 * window)]
    ring = RingSpec(window, tiles=tiles)
    pools = [StatePool([layer], 1, state=fmt, ring=ring, impl=impl) for fmt in ("q24", "f32")]
    refs = [pool.admit_(None if state is None else [state]) for pool in pools]
    for start in range(0, 4 * window, window):
        outputs: tuple[list, list] = ([], [])
        for block in blocks[start : start + window]:
            for pool, ref, out in zip(pools, refs, outputs, strict=True):
                ticket = pool.begin([ref])
                out.append(pool.step_(ticket, 0, block, depth=ReadDepth.HIGH))
                pool.commit_(ticket, 1)
        error = relative_error(*(torch.cat(out) for out in outputs))
        assert error < OUTPUT_BUDGET[Format.Q24, ReadDepth.HIGH], start
