"""Debug mode checks values too, and only those that something will read."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from replayssm.errors import ContractError
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import FAMILIES, make_block, make_layer, make_state
from replayssm.testing.guard import pool_digest

LAYERS = (make_layer(*FAMILIES[2], (1, 2), (6, 5)), make_layer(*FAMILIES[1], (1, 1), (3, 4)))


def make_pool(impl):
    ring = RingSpec(window=4, max_block=3)
    pool = StatePool(LAYERS, 3, ring=ring, impl=impl, debug=True)
    return pool, [pool.admit_() for _ in range(2)]


@contextmanager
def refuses(pool, message):
    before = pool_digest(pool)
    with pytest.raises(ContractError, match=message):
        yield
    assert pool_digest(pool) == before


@pytest.mark.parametrize("name", ["q", "k", "v", "w"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_debug_refuses_nan_and_infinity(impl, name, bad):
    pool, refs = make_pool(impl)
    ticket, block = pool.begin(refs), make_block(LAYERS[0], 2, 1, seed=0)
    getattr(block, name)[1, 0, 0] = bad
    with refuses(pool, rf"^{name}: expected finite values, got NaN or infinity"):
        pool.step_(ticket, 0, block)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e-3])
def test_debug_refuses_a_gate_that_grows(impl, bad):
    pool, refs = make_pool(impl)
    ticket, block = pool.begin(refs), make_block(LAYERS[0], 2, 1, seed=0)
    block.g[0, 0, 1] = bad
    with refuses(pool, "^g: expected log-decays <= 0"):
        pool.step_(ticket, 0, block)


def test_debug_accepts_what_is_legal_or_never_read(impl):
    """g = -inf is a gate of exactly 0; pad rows and lanes past a length may hold anything."""
    pool, refs = make_pool(impl)
    ticket = pool.begin([*refs, None], [1, 2, 1])
    for layer in range(2):
        block = make_block(LAYERS[layer], 3, 3, seed=0)
        block.g[0, 0] = -torch.inf
        for x in (block.q, block.k, block.v, block.g, block.w):
            x[0, 1:], x[1, 2:], x[2] = torch.nan, torch.nan, torch.nan
        assert bool(pool.step_(ticket, layer, block).isfinite().all())
    pool.commit_(ticket, [1, 2, 0])


def test_debug_refuses_a_prefill_state_that_is_not_finite(impl):
    pool, _ = make_pool(impl)
    states = [make_state(layer, seed=0) for layer in LAYERS]
    states[1][0, 0, 0] = torch.nan
    with refuses(pool, r"^states\[1\]: expected finite values"):
        pool.admit_(states)
