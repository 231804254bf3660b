"""Lifecycle verbs at every position modulo the window, continued and compared with oracles."""

from __future__ import annotations

import pytest
import torch

from replayssm.errors import SlotError
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.driver import Driver
from replayssm.testing.factories import FAMILIES, make_block, make_layer, make_state
from replayssm.testing.guard import pool_digest, slot_digest
from replayssm.types import Decay, Format, LayerSpec, ReadDepth, Write

WINDOW = 4
LAYERS = tuple(make_layer(*family, (1, 2), (6, 5)) for family in (FAMILIES[0], FAMILIES[3]))
phases = pytest.mark.parametrize("phase", range(2 * WINDOW + 1))


def driver(impl, *, fmt=Format.S32, slots=3, keep=0, max_block=3):
    ring = RingSpec(window=WINDOW, keep=keep, max_block=max_block)
    return Driver(StatePool(LAYERS, slots, state=fmt, ring=ring, impl=impl))


def at_phase(impl, phase, **kwargs):
    d = driver(impl, **kwargs)
    ref = d.admit(position=2)
    for _ in range(phase):
        d.forward([ref], [1], [1])
    return d, ref


def go_on(d, *refs):
    """One window and a bit, with rejections on the way."""
    for accepted in (1, 3, 0, 2, 1):
        d.forward(list(refs), [3] * len(refs), [accepted] * len(refs))
    for ref in refs:
        d.check_state(ref)


@phases
def test_fork_goes_its_own_way(impl, phase):
    d, ref = at_phase(impl, phase, fmt=Format.Q24)
    copy = d.fork(ref)
    assert all(slot_digest(s, ref.slot) == slot_digest(s, copy.slot) for s in d.pool.stores)
    d.forward([copy], [2], [2])
    d.check_state(ref)
    go_on(d, ref, copy)


@phases
def test_release_and_readmission_start_from_nothing(impl, phase):
    """The next tenant equals the same request in a fresh pool, byte for byte."""
    d, ref = at_phase(impl, phase)
    d.release(ref)
    fresh = driver(impl)
    d._seed = fresh._seed = 1000
    second, first = d.admit(position=1), fresh.admit(position=1)
    assert second.slot == ref.slot
    for _ in range(6):
        old, new = d.forward([second], [2], [1]), fresh.forward([first], [2], [1])
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


@phases
def test_an_aborted_block_leaves_no_trace(impl, phase):
    d, ref = at_phase(impl, phase)
    d.pool.fold_([ref])
    before = [x.clone() for x in d.pool.materialise(ref)]
    d.forward([ref], [3], [0])
    assert all(torch.equal(a, b) for a, b in zip(before, d.pool.materialise(ref), strict=True))
    go_on(d, ref)


@phases
def test_reorder_copies_and_drops(impl, phase):
    d, a = at_phase(impl, phase)
    b = d.admit()
    c = d.admit(is_zero=True)
    x, y, z = d.reorder([a, b, c], [2, 0, 2])
    assert d.pool.num_free == 0
    assert x != z
    go_on(d, x, y, z)


@phases
def test_materialise_rebuilds_every_position_it_offers(impl, phase):
    d, ref = at_phase(impl, phase)
    before = pool_digest(d.pool)
    oldest, newest = d.pool.oldest(ref), d.pool.committed(ref)
    assert newest == 2 + phase
    assert newest - oldest <= WINDOW
    for position in range(oldest, newest + 1):
        d.check_state(ref, position)
    assert pool_digest(d.pool) == before
    go_on(d, ref)


@phases
def test_an_early_fold_does_what_the_next_step_would_do(impl, phase):
    (one, a), (two, b) = at_phase(impl, phase), at_phase(impl, phase)
    one.pool.fold_([a])
    one.pool.fold_([a])  # folding again finds nothing to fold
    for _ in range(5):
        x, y = one.forward([a], [1], [1]), two.forward([b], [1], [1])
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
    for x, y in zip(one.pool.stores, two.pool.stores, strict=True):
        assert torch.equal(x.high[a.slot], y.high[b.slot])


@phases
@pytest.mark.parametrize("keep", [0, 3])
def test_kept_entries_stay_rebuildable(impl, phase, keep):
    d, ref = at_phase(impl, phase, keep=keep)
    assert d.pool.committed(ref) - d.pool.oldest(ref) >= min(keep, phase)
    for back in range(min(keep, phase) + 1):
        d.check_state(ref, d.pool.committed(ref) - back)
    go_on(d, ref)


@pytest.mark.parametrize(("length", "accepted"), [(n, a) for n in (1, 2, 3) for a in range(n + 1)])
def test_num_accepted_counts_entries_not_drafts(impl, length, accepted):
    d, ref = at_phase(impl, 3)
    d.forward([ref], [length], [accepted])
    assert d.pool.committed(ref) == 2 + 3 + accepted
    d.check_state(ref)
    go_on(d, ref)


def test_admission_at_any_position_folds_at_absolute_boundaries(impl):
    d = driver(impl, slots=1)
    for position in range(2 * WINDOW):
        ref = d.admit(position=position)
        for _ in range(WINDOW):
            d.forward([ref], [1], [1])
        d.pool.fold_([ref])
        assert d.pool.oldest(ref) == (position + WINDOW) // WINDOW * WINDOW
        d.check_state(ref)
        d.release(ref)


def test_positions_beyond_32_bits_are_only_positions(impl):
    here, far = driver(impl), driver(impl)
    a, b = here.admit(position=1), far.admit(position=1 + WINDOW * 2**40)
    for _ in range(2 * WINDOW):
        x, y = here.forward([a], [2], [1]), far.forward([b], [2], [1])
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


def test_a_thousand_lives_return_every_slot(impl):
    pool = StatePool(LAYERS[:1], 4, impl=impl)
    rng, live, seen = torch.Generator().manual_seed(0), [], set()
    for _ in range(1000):
        draw = int(torch.randint(0, 3, (1,), generator=rng))
        if pool.num_free and (draw == 0 or not live):
            live.append(pool.admit_())
        elif draw == 1 and live and pool.num_free:
            live.append(pool.fork_(live[0]))
        elif live:
            pool.release_(live.pop(draw % len(live)))
        seen |= set(live)
    for ref in live:
        pool.release_(ref)
    assert pool.num_free == 4
    assert len(seen) > 100, "every tenancy has its own name"


def test_read_depth_may_change_between_any_two_steps(impl):
    d, ref = at_phase(impl, 2)
    for t in range(10):
        depth = ReadDepth.HIGH if t % 3 else ReadDepth.FULL
        d.forward([ref], [2], [1], depth=depth)
    d.check_state(ref)


def test_a_batch_of_pads_only_does_nothing(impl):
    d, ref = at_phase(impl, 3)
    before = pool_digest(d.pool)
    outputs = d.forward([None, None], [1, 1], [0, 0])
    assert not any(bool(y.any()) for y in outputs)
    assert pool_digest(d.pool) == before
    assert d.pool.begin([]).refs == ()
    d.check_state(ref)


def test_every_slot_can_be_taken_and_none_twice(impl):
    pool = StatePool(LAYERS, 5, impl=impl)
    assert sorted(pool.admit_().slot for _ in range(5)) == list(range(5))


def test_a_released_row_is_left_out_of_the_commit(impl):
    """The request was aborted while its forward ran; its slot already has another tenant."""
    d, ref = at_phase(impl, 3)
    other = d.admit()
    ticket = d.pool.begin([ref, other])
    for i, layer in enumerate(LAYERS):
        d.pool.step_(ticket, i, make_block(layer, 2, 1, seed=i))
    d.pool.release_(ref)
    tenant = d.pool.admit_([make_state(layer, seed=0) for layer in LAYERS], position=7)
    assert tenant.slot == ref.slot
    with pytest.raises(SlotError, match="stale"):
        d.pool.commit_(ticket, 1)
    d.pool.commit_(ticket, [None, 1])
    assert d.pool.committed(tenant) == 7
    assert d.pool.committed(other) == 1


def test_out_is_written_and_returned(impl):
    pool = StatePool(LAYERS[:1], 1, impl=impl)
    block = make_block(LAYERS[0], 1, 1, seed=0)
    # an output buffer may be any strided view
    buffer = torch.full((1, 1, 5, 2), torch.nan).transpose(2, 3)
    ticket = pool.begin([pool.admit_()])
    y = pool.step_(ticket, 0, block, out=buffer)
    assert y is buffer
    assert bool(buffer.isfinite().all())


@pytest.mark.parametrize("fmt", list(Format))
def test_the_zero_state_is_admitted_with_the_bits_of_its_encoding(fmt: Format) -> None:
    layer = LayerSpec(Write.DELTA, Decay.SCALAR, 1, 2, key_dim=8, value_dim=6)
    pool = StatePool([layer], 2, state=fmt, ring=RingSpec(4, tiles=3), impl="reference")
    for x in pool.stores[0].present().values():
        x.view(torch.uint8).fill_(0x55)
    zero, encoded = pool.admit_(), pool.admit_([torch.zeros(2, 6, 8)])
    for name in ("high", "low", "row_scale", "columns"):
        x = pool.stores[0].present().get(name)
        if x is not None:
            bits = [x[r.slot].contiguous().view(torch.uint8) for r in (zero, encoded)]
            assert torch.equal(*bits), name
