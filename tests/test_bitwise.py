"""The bitwise promises, and no others: what may never show in a checkpoint or an output.

Bookkeeping and the integer cut are in ``test_ring.py`` and ``test_formats.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayssm.ops.dispatch import unavailable
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import (
    FAMILIES,
    Regime,
    make_block,
    make_layer,
    make_state,
    pad_tokens,
    stack_rows,
    take,
)
from replayssm.testing.guard import (
    guard_pool_,
    plane_digest,
    poison_dead_,
    poison_slot_,
    slot_digest,
)
from replayssm.types import Block, Format, ReadDepth

TOKENS = 29
LAYERS = tuple(make_layer(*family, (1, 2), (18, 5)) for family in FAMILIES)
RINGS = {
    "whole": RingSpec(window=4, max_block=4),
    "keep": RingSpec(window=4, keep=3, max_block=4),
    "short window": RingSpec(window=2, max_block=4),
    "tiles": RingSpec(window=8, max_block=4, tiles=4),
}
formats = pytest.mark.parametrize("fmt", list(Format))
rings = pytest.mark.parametrize("name", RINGS)


def make_pool(impl, fmt, ring, slots=1):
    if unavailable(impl, torch.device("cpu"), tiles=ring.tiles):
        pytest.skip(f"{impl.value} does not fold value tiles")
    return StatePool(LAYERS, slots, state=fmt, ring=ring, impl=impl)


def states(seed=0):
    return [make_state(layer, seed=seed) for layer in LAYERS]


def streams(seed=0):
    """The tokens a request will commit, whatever is drafted in between."""
    return [make_block(layer, 1, TOKENS, seed=seed) for layer in LAYERS]


def one_by_one(pool, ref, depth=ReadDepth.FULL, tokens=TOKENS):
    outputs, stream = [], streams()
    for t in range(tokens):
        ticket = pool.begin([ref])
        for layer, block in enumerate(stream):
            one = take(block, [0], [t])
            outputs.append(pool.step_(ticket, layer, one, depth=depth))
        pool.commit_(ticket, 1)
    return outputs


def speculate(pool, ref, seed, depth=ReadDepth.FULL, tokens=TOKENS):
    """Blocks of the true tokens followed by drafts that will be rejected."""
    rng, stream, at, forward = np.random.default_rng(seed), streams(), 0, 0
    while at < tokens:
        true = int(rng.integers(0, min(3, tokens - at) + 1))
        drafts = int(rng.integers(1 if not true else 0, 5 - true))
        ticket = pool.begin([ref], true + drafts)
        for layer, block in enumerate(stream):
            wrong = make_block(LAYERS[layer], 1, drafts, seed=500 + forward)
            block = take(block, [0], range(at, at + true))
            names = ("q", "k", "v", "g", "w")
            both = [torch.cat([getattr(x, n) for x in (block, wrong)], 1) for n in names]
            pool.step_(ticket, layer, Block(*both), depth=depth)
        pool.commit_(ticket, true)
        at, forward = at + true, forward + 1


def checkpoints(pool, ref):
    pool.fold_([ref])
    return [plane_digest(store, ref.slot) for store in pool.stores]


@formats
@rings
def test_speculation_leaves_no_trace_in_the_checkpoint(impl, fmt, name):
    plain, drafted = (make_pool(impl, fmt, RINGS[name]) for _ in range(2))
    a, b = plain.admit_(states(), 3), drafted.admit_(states(), 3)
    one_by_one(plain, a)
    speculate(drafted, b, seed=1)
    assert checkpoints(plain, a) == checkpoints(drafted, b)
    x, y = plain.materialise(a), drafted.materialise(b)
    assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


@formats
@rings
def test_read_depth_leaves_no_trace_in_the_checkpoint(impl, fmt, name):
    high, full = (make_pool(impl, fmt, RINGS[name]) for _ in range(2))
    a, b = high.admit_(states()), full.admit_(states())
    one_by_one(high, a, ReadDepth.HIGH)
    one_by_one(full, b, ReadDepth.FULL)
    assert checkpoints(high, a) == checkpoints(full, b)


@formats
def test_the_batch_leaves_no_trace_in_the_checkpoint(impl, fmt):
    """Alone, or with five others of other lengths at other positions, in another slot."""
    alone, crowd = make_pool(impl, fmt, RINGS["whole"]), make_pool(impl, fmt, RINGS["whole"], 6)
    a = alone.admit_(states())
    others = [crowd.admit_(states(seed), position=seed) for seed in range(1, 6)]
    b = crowd.admit_(states())
    one_by_one(alone, a)
    stream = streams()
    for t in range(TOKENS):
        rows = [*others[: t % 6], b, *others[t % 6 :]]
        ticket = crowd.begin(rows, [1 if ref == b else 1 + t % 4 for ref in rows])
        for layer in range(len(LAYERS)):
            block = make_block(LAYERS[layer], 6, 4, seed=t)
            for x, mine in zip(_fields(block), _fields(stream[layer]), strict=True):
                x[t % 6, 0] = mine[0, t]
            crowd.step_(ticket, layer, block)
        crowd.commit_(ticket, [int(n) for n in ticket.plan.lengths])
    assert checkpoints(alone, a) == checkpoints(crowd, b)


def _fields(block):
    return block.q, block.k, block.v, block.g, block.w


@rings
def test_s32_is_f32(impl, name):
    f32, s32 = make_pool(impl, Format.F32, RINGS[name]), make_pool(impl, Format.S32, RINGS[name])
    a, b = f32.admit_(states()), s32.admit_(states())
    for x, y in zip(one_by_one(f32, a), one_by_one(s32, b), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(f32.materialise(a), s32.materialise(b), strict=True):
        assert torch.equal(x, y)


@formats
def test_poison_and_guards_are_invisible(impl, fmt):
    """NaN in dead entries, free slots, pad rows and lanes, between slots: the same output bits."""
    clean, dirty = (make_pool(impl, fmt, RINGS["whole"], 3) for _ in range(2))
    guarded = guard_pool_(dirty)
    before = [g.guard_digest() for g in guarded]
    a, b = clean.admit_(states()), dirty.admit_(states())
    stream = streams()
    for t in range(TOKENS):
        for store in dirty.stores:
            poison_slot_(store, 1)
            base, folded, committed = dirty._slots.counts(b.slot)
            live = range(dirty.ring.oldest_needed(base, folded), committed)
            poison_dead_(store, b.slot, live)
        tickets = clean.begin([a]), dirty.begin([None, b, None])
        for layer, block in enumerate(stream):
            one = take(block, [0], [t])
            pad = take(one, [0], [0])
            for x in _fields(pad):
                x.fill_(torch.nan)
            wide = pad_tokens(stack_rows([pad, one, pad]), 3)
            expected = clean.step_(tickets[0], layer, one)
            got = dirty.step_(tickets[1], layer, wide)
            assert torch.equal(got[1, :1], expected[0])
            assert not bool(got[[0, 2]].any())
            assert not bool(got[1, 1:].any())
        clean.commit_(tickets[0], 1)
        dirty.commit_(tickets[1], 1)
    assert checkpoints(clean, a) == checkpoints(dirty, b)
    assert [g.guard_digest() for g in guarded] == before


def test_strided_inputs_give_the_bits_of_contiguous_ones(impl):
    pools = [make_pool(impl, Format.Q24, RINGS["whole"]) for _ in range(2)]
    refs = [pool.admit_(states()) for pool in pools]
    for t in range(9):
        outputs = []
        for pool, ref, is_strided in zip(pools, refs, (False, True), strict=True):
            ticket = pool.begin([ref], 2)
            for layer in range(len(LAYERS)):
                block = make_block(LAYERS[layer], 1, 2, seed=t)
                if is_strided:
                    block = Block(*(_strided(x) for x in _fields(block)))
                outputs.append(pool.step_(ticket, layer, block))
            pool.commit_(ticket, 1)
        half = len(LAYERS)
        for x, y in zip(outputs[:half], outputs[half:], strict=True):
            assert torch.equal(x, y)


def _strided(x):
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


@pytest.mark.parametrize("regime", list(Regime))
def test_a_later_draft_does_not_change_an_earlier_output(impl, regime):
    outputs = []
    for changed in (3, 4):
        pool = make_pool(impl, Format.S32, RINGS["whole"])
        ticket = pool.begin([pool.admit_(states())], 4)
        for layer in range(len(LAYERS)):
            block = make_block(LAYERS[layer], 1, 4, seed=layer, regime=regime)
            for x in _fields(block):
                x[:, changed:] = -1e3
            outputs.append(pool.step_(ticket, layer, block)[:, :3].clone())
    half = len(LAYERS)
    for x, y in zip(outputs[:half], outputs[half:], strict=True):
        assert torch.equal(x, y)


def test_the_same_step_twice_gives_the_same_bits(impl):
    """No race, no uninitialised scratch: a hundred copies of one pool agree."""
    reference, seen = make_pool(impl, Format.Q24, RINGS["whole"]), set()
    one_by_one(reference, reference.admit_(states()), tokens=5)
    for _ in range(20):
        pool = make_pool(impl, Format.Q24, RINGS["whole"])
        ref = pool.admit_(states())
        outputs = one_by_one(pool, ref, tokens=5)
        digest = tuple(slot_digest(store, ref.slot) for store in pool.stores)
        seen.add((digest, tuple(y.numpy().tobytes() for y in outputs)))
    assert len(seen) == 1
