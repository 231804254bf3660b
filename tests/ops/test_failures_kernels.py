"""Published failures of kernels and numerics (classes 38 to 63); see ``tests/test_failures.py``."""

from __future__ import annotations

import pytest
import torch

from replayssm.ops import reference
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.storage import LayerStore, StorageSpec, allocate
from replayssm.testing.budgets import relative_error
from replayssm.testing.driver import Driver
from replayssm.testing.factories import (
    FAMILIES,
    Regime,
    make_block,
    make_layer,
    make_plan,
    make_state,
)
from replayssm.testing.guard import bystander_digests
from replayssm.testing.oracle import SerialOracle
from replayssm.types import Format, ReadDepth

LAYERS = tuple(make_layer(*family, (1, 2), (18, 5)) for family in (FAMILIES[0], FAMILIES[3]))
RING = RingSpec(window=4, max_block=3)


def make_driver(impl, slots=3, **kwargs):
    fields = {"ring": RING, "impl": impl, **kwargs}
    return Driver(StatePool(LAYERS, slots, **fields))


@pytest.mark.parametrize("ring_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_pair_of_input_and_ring_dtypes_means_its_numbers(impl, ring_dtype, inputs):
    """Class 39: fp16 bits were multiplied as bf16."""
    layer = LAYERS[1]
    pool = StatePool([layer], 1, state=Format.F32, ring=RING, ring_dtype=ring_dtype, impl=impl)
    state = make_state(layer, seed=0)
    ref, oracle = pool.admit_([state]), SerialOracle(layer, state, ring_dtype=ring_dtype)
    for t in range(6):
        block = make_block(layer, 1, 1, seed=t, dtype=inputs)
        ticket = pool.begin([ref])
        out = torch.empty(block.v.shape)
        pool.step_(ticket, 0, block, out=out)
        assert relative_error(out[0], oracle.outputs(block, 0, 1)) < 1e-5
        pool.commit_(ticket, 1)
        oracle.commit(block, 0, 1)


def test_pads_touch_nothing_in_front_of_the_pool(impl):
    """Classes 41 and 63: index -1 addressed memory before slot 0, or the last slot."""
    d = make_driver(impl)
    first, *_, last = [d.admit() for _ in range(3)]
    assert {first.slot, last.slot} == {0, 2}
    for _ in range(RING.window + 1):
        before = [bystander_digests(s, [first.slot]) for s in d.pool.stores]
        d.forward([None, first, None], [1, 1, 1], [0, 1, 0])
        assert [bystander_digests(s, [first.slot]) for s in d.pool.stores] == before
    d.check_state(last)


@pytest.mark.parametrize("fmt", list(Format))
def test_slot_strides_are_read_from_the_tensor(impl, fmt):
    """Class 43: a padded slot stride was ignored. The driver's slots are 17 elements apart."""
    d = make_driver(impl, state=fmt)
    refs = [d.admit() for _ in range(3)]
    assert not d.pool.stores[0].high.is_contiguous()
    for _ in range(RING.window + 1):
        d.forward(refs, [2] * 3, [2] * 3)
    for ref in refs:
        d.check_state(ref)


def test_addresses_beyond_2_31_elements(impl):
    """Class 45: slot x stride in int32. Memory is reserved, only two slots of it are touched."""
    layer = make_layer(*FAMILIES[0], (1, 1), (8, 4))
    spec = StorageSpec(layer, Format.F32, RING)
    dense, views = allocate(spec, 2, torch.device("cpu")), {}
    for name, x in dense.present().items():
        if name == "high":
            stride = 2**31 + 5
            whole = torch.empty(stride + x[0].numel(), dtype=x.dtype)
            views[name] = whole.as_strided(x.shape, (stride, *x.stride()[1:]))
            assert views[name][1].data_ptr() - whole.data_ptr() > 2**33
        else:
            views[name] = x
    wide = LayerStore(spec, **views)
    outputs = []
    for store in (dense, wide):
        reference.admit_(store, 1, make_state(layer, seed=0))
        block, out = make_block(layer, 1, 1, seed=0), torch.zeros(1, 1, 1, 4)
        step = _step(impl)
        for t in range(6):
            step(store, make_plan([1], [1], [t], folded=[max(t - 1, 0)]), block, ["full"], out)
        outputs.append(out)
    assert torch.equal(*outputs)


def _step(impl):
    if impl == "reference":
        from replayssm.ops import reference as module
    else:
        from replayssm.ops import cpu as module

    def step(store, plan, block, depths, out):
        module.step_(store, plan, block, [ReadDepth(x) for x in depths], out)

    return step


def test_many_rows_and_heads():
    """Class 46: a launch axis ended at 65,535; 70,000 row-heads of a tiny state."""
    pytest.importorskip("numba")
    layer = make_layer(*FAMILIES[0], (100, 100), (2, 2))
    pool = StatePool([layer], 700, ring=RingSpec(2), impl="cpu")
    refs = [pool.admit_() for _ in range(700)]
    one = make_block(layer, 1, 1, seed=0)
    ticket = pool.begin(refs)
    block = type(one)(*(x.repeat(700, *[1] * (x.ndim - 1)) for x in _fields(one)))
    y = pool.step_(ticket, 0, block)
    assert bool((y == y[:1]).all())
    assert bool(y[-1].any())


def _fields(block):
    return block.q, block.k, block.v, block.g, block.w


@pytest.mark.parametrize("regime", [Regime.CLOSED, Regime.RESET, Regime.FAST, Regime.OPEN])
def test_decays_are_segment_sums_never_differences(impl, regime):
    """Classes 49, 50 and 53: -inf minus -inf, exp(-G) of small gates, and gates of exactly 1."""
    d = make_driver(impl, ring=RingSpec(window=16, max_block=3))
    d.regime = regime
    ref = d.admit()
    for _ in range(14):
        y = d.forward([ref], [3], [2])
        assert all(bool(x.isfinite().all()) for x in y)
    d.check_state(ref)


def test_the_past_does_not_depend_on_drafts(impl):
    """Class 51: changing a later token altered earlier outputs in their last bits."""
    seen = []
    for value in (0.0, 1e4):
        pool = StatePool(LAYERS, 1, ring=RING, impl=impl)
        ticket = pool.begin([pool.admit_([make_state(x, seed=0) for x in LAYERS])], 3)
        for i, layer in enumerate(LAYERS):
            block = make_block(layer, 1, 3, seed=i)
            for x in _fields(block):
                x[:, 2] = -value
            seen.append(pool.step_(ticket, i, block)[:, :2].clone())
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


@pytest.mark.parametrize("dims", [(48, 40), (80, 72), (96, 96), (112, 40), (1, 1), (17, 33)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0]}-{f[1]}")
def test_dims_that_fill_no_vector_are_masked(impl, family, dims):
    """Class 54: padded lanes of a key dim took gates from the neighbour."""
    layer = make_layer(*family, (1, 2), dims)
    d = Driver(StatePool([layer], 1, state=Format.Q24, ring=RING, impl=impl))
    ref = d.admit()
    for _ in range(4):
        d.forward([ref], [3], [2])
    d.check_state(ref)


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (4, 12), (16, 32)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0]}-{f[1]}")
def test_gates_and_strengths_are_per_value_head(impl, family, heads):
    """Class 55: scalars were indexed by the key head."""
    layer = make_layer(*family, heads, (6, 3))
    d = Driver(StatePool([layer], 1, ring=RING, impl=impl))
    ref = d.admit()
    for _ in range(4):
        d.forward([ref], [3], [2])
    d.check_state(ref)


def test_rounding_happens_per_fold_not_per_token(impl):
    """Classes 58 and 59: a 16-bit state rounded on every token drifts; a checkpoint does less."""
    layer = make_layer(*FAMILIES[2], (1, 2), (32, 16))
    oracle = SerialOracle(layer)
    pool = StatePool([layer], 1, state=Format.BF16, ring=RingSpec(16), impl=impl)
    ref, plan = pool.admit_(), make_plan([0], [1], [0])
    state = torch.zeros(1, 2, 16, 32, dtype=torch.bfloat16)
    for t in range(256):
        block = make_block(layer, 1, 1, seed=t, regime=Regime.SLOW)
        ticket = pool.begin([ref])
        pool.step_(ticket, 0, block)
        pool.commit_(ticket, 1)
        reference.standard_(state, plan, block, layer.write, torch.zeros_like(block.v))
        oracle.commit(block, 0, 1)
    per_fold = relative_error(pool.materialise(ref)[0], oracle.state())
    per_token = relative_error(state[0].float(), oracle.state())
    assert per_fold < per_token / 2
