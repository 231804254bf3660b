"""Every implementation against the conformance suite: budgets, guards, poison, pads, bystanders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayssm.ops import reference
from replayssm.ops.dispatch import unavailable
from replayssm.state import StatePool
from replayssm.testing.budgets import Budget, output_budget, plain_outputs, relative_error
from replayssm.testing.conformance import Case, cases, check_case
from replayssm.testing.factories import (
    FAMILIES,
    Regime,
    make_block,
    make_layer,
    make_plan,
    make_state,
)
from replayssm.types import Format, Impl, ReadDepth

CASES = list(cases())


def step_of(impl):
    if impl is Impl.REFERENCE:
        return reference.step_
    from replayssm.ops import cpu

    return cpu.step_


@pytest.mark.parametrize("case", CASES, ids=str)
def test_implementation_keeps_its_budget_and_its_hands_off(impl, case):
    reason = unavailable(impl, torch.device("cpu"), tiles=case.ring.tiles)
    if reason is not None:
        pytest.skip(reason)
    check_case(step_of(impl), case)


def test_suite_covers_every_family_format_and_geometry():
    seen = {(c.layer.write, c.layer.decay, c.format) for c in CASES}
    assert seen == {(*family, fmt) for family in FAMILIES for fmt in Format}
    assert len({(c.layer.key_dim, c.layer.value_dim) for c in CASES}) == 5
    assert len({(c.layer.key_heads, c.layer.value_heads) for c in CASES}) == 3


def _wrong_decay(store, plan, block, depth, out):
    reference.step_(store, plan, replace(block, g=block.g * 1.001), depth, out)


def _writes_through_pads(store, plan, block, depth, out):
    reference.step_(store, plan, block, depth, out)
    store.w[1] = 0


def _touches_the_guard(store, plan, block, depth, out):
    reference.step_(store, plan, block, depth, out)
    beyond = store.w.storage_offset() + store.w.shape[1] * store.w.shape[2]
    store.w.as_strided((1,), (1,), beyond).fill_(0)


def _leaves_a_pad_row_unwritten(store, plan, block, depth, out):
    reference.step_(store, plan, block, depth, out)
    out[1] = torch.nan


def _keeps_the_old_checkpoint(store, plan, block, depth, out):
    old = store.high.clone()
    reference.step_(store, plan, block, depth, out)
    store.high.copy_(old)


def _multiplies_dead_entries_by_zero(store, plan, block, depth, out):
    reference.step_(store, plan, block, depth, out)
    out += 0 * store.v[plan.slots[0]].sum()


FAULTS = [
    _wrong_decay,
    _writes_through_pads,
    _touches_the_guard,
    _leaves_a_pad_row_unwritten,
    _keeps_the_old_checkpoint,
    _multiplies_dead_entries_by_zero,
]


@pytest.mark.parametrize("regime", [Regime.HUGE_WRITES, Regime.RESET])
def test_no_order_of_key_channels_is_over_budget(regime):
    """Where products of keys cancel, the order of their sums decides the error of plain torch."""
    layer = make_layer(*FAMILIES[1], dims=(20, 24))
    for seed in range(3):
        pool = StatePool([layer], 3, state=Format.F32, impl=Impl.REFERENCE)
        refs = [pool.admit_([make_state(layer, seed=i)]) for i in range(3)]
        ticket, block = pool.begin(refs), make_block(layer, 3, 1, seed=seed, regime=regime)
        pool.step_(ticket, 0, block, depth=ReadDepth.FULL)
        depth, store = [ReadDepth.FULL] * 3, pool.stores[0]
        budget = output_budget(store, ticket.plan, block, depth, torch.float32)
        for turn in range(layer.key_dim):
            got = plain_outputs(store, ticket.plan, block, depth, torch.float32, turn)
            assert budget.excess(got) <= 1


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda f: f.__name__.strip("_"))
def test_suite_finds_a_planted_fault(faulty):
    case = Case(make_layer(*FAMILIES[2]), Format.F32)
    with pytest.raises(AssertionError, match="forward"):
        check_case(faulty, case)


def test_budget_counts_what_is_not_finite():
    budget = Budget(torch.tensor([[1.0, torch.nan]], dtype=torch.float64), torch.tensor([0.5]))
    assert budget.excess(torch.tensor([[1.25, torch.nan]])) == 0.5
    assert budget.excess(torch.tensor([[torch.nan, torch.nan]])) == torch.inf
    assert budget.excess(torch.tensor([[1.0, 0.0]])) == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0]}-{f[1]}")
def test_standard_step_keeps_its_budget(impl, family, dtype):
    """fp32 states stay within a few roundings of fp64; bf16 states round where plain torch does."""
    layer = make_layer(*family, (2, 4), (80, 40))
    plan = make_plan([2, -1, 0], [5, 0, 3], [0, 0, 0])
    block = make_block(layer, 3, 6, seed=0)
    for x in (block.q, block.k, block.v, block.g, block.w):
        x[1], x[2, 3:] = torch.nan, torch.nan
    start = torch.randn(4, 4, 40, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = {}
    for name, step in (("plain", reference.standard_), ("own", _standard_of(impl))):
        state, out = start.clone(), torch.full_like(block.v, torch.nan)
        step(state, plan, block, layer.write, out)
        results[name] = state, out
    (plain, plain_out), (own, own_out) = results["plain"], results["own"]
    # one flipped rounding of the state moves it by an ulp and every later output by as much
    allowed = 2e-6 if dtype is torch.float32 else 2 * 2.0**-8
    assert relative_error(own_out, plain_out) < allowed
    assert relative_error(own, plain) < allowed
    assert torch.equal(own[[1, 3]], start[[1, 3]])
    assert not bool(own_out[1].any())
    assert not bool(own_out[2, 3:].any())


def _standard_of(impl):
    if impl is Impl.REFERENCE:
        return reference.standard_
    from replayssm.ops import cpu

    return cpu.standard_
