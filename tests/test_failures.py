"""One named test per class of published failure that applies to the core.

The numbers are those of a public survey of bugs in recurrent-state decode, rollback and serving
(ring and cursor 1 to 37, kernels and numerics 38 to 62, padding and order 63 to 75, lifecycle 77 to
95, speculation 97 to 109). Classes that do not apply to the core, and where they will:

====================  ==========================================================================
classes               why not here
====================  ==========================================================================
6, 9, 42, 67, 69, 70  need a device, a graph compiler or graph capture: GPU tests
7, 83, 86, 87, 90     prefix caching: the engine's tests
10, 18, 25, 29, 71,   verify, commit and rollback: ``test_failures_speculation.py``
85, 91, 97, 98, 101,
105
11, 73, 74, 77        chunked prefill, preemption and routing of rows: the engine's tests (77's half
                      that concerns the pool is here)
14, 21, 22, 26, 109   flags, drafters, traffic and timing harnesses: engine and evaluation
17, 23, 47, 61        gates are computed by model adapters; the core takes g and w in fp32
62, 103               chunked prefill: models; long runs in the standard step's own order:
                      ``test_exact.py``
99, 102, 107          drafters, acceptance and draft length: ``engine/speculative``
106                   layers on several devices: GPU tests
38                    no stochastic rounding exists
57                    outputs are cast by the caller's choice of ``out``
75                    nothing that mutates is tuned in place: there is no autotuner
94                    tensor parallelism: models
====================  ==========================================================================
"""

from __future__ import annotations

import pytest
import torch

from replayssm.errors import ContractError, ReplayError, SlotError, TicketError
from replayssm.memory import plan_memory
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.driver import Driver
from replayssm.testing.factories import (
    FAMILIES,
    make_block,
    make_layer,
)
from replayssm.testing.guard import plane_digest, pool_digest, slot_digest
from replayssm.types import Format, ReadDepth

LAYERS = tuple(make_layer(*family, (1, 2), (18, 5)) for family in (FAMILIES[0], FAMILIES[3]))
RING = RingSpec(window=4, max_block=3)


def make_driver(impl, slots=3, **kwargs):
    fields = {"ring": RING, "impl": impl, **kwargs}
    return Driver(StatePool(LAYERS, slots, **fields))


def run_layers(pool, ticket, rows, tokens, seed=0):
    for layer in range(pool.num_layers):
        pool.step_(ticket, layer, make_block(LAYERS[layer], rows, tokens, seed=seed))


@pytest.mark.parametrize("steps", range(2 * RING.ring_len + 1))
def test_reuse_resets_every_cursor(impl, steps):
    """Class 1: one cursor of a reused slot kept the previous tenant's phase."""
    used, fresh = make_driver(impl, 1), make_driver(impl, 1)
    a = used.admit()
    for _ in range(steps):
        used.forward([a], [1], [1])
    used.release(a)
    used._seed = fresh._seed = 99
    b, c = used.admit(is_zero=True), fresh.admit(is_zero=True)
    for _ in range(RING.window + 1):
        x, y = used.forward([b], [2], [1]), fresh.forward([c], [2], [1])
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
    for p, q in zip(used.pool.stores, fresh.pool.stores, strict=True):
        assert plane_digest(p, b.slot) == plane_digest(q, c.slot)


def test_dead_entries_are_masked_not_multiplied(impl):
    """Class 2: 0 x NaN in a ring row outside the window. The driver poisons all of them."""
    d = make_driver(impl)
    refs = [d.admit(), d.admit(position=3)]
    for t in range(15):
        outputs = d.forward(refs, [3, 2], [t % 4, 1])
        assert all(bool(y.isfinite().all()) for y in outputs)


def test_pad_rows_never_read_a_state(impl):
    """Classes 3 and 66: dummy rows of a padded batch read states that were never written."""
    d = make_driver(impl, slots=4)
    ref = d.admit()
    for _ in range(6):
        y = d.forward([None, ref, None, None], [1] * 4, [0, 1, 0, 0])
        assert not any(bool(x[[0, 2, 3]].any()) for x in y)


def test_slots_and_rows_are_different_index_spaces(impl):
    """Class 5: a pool of 64 slots, three rows at slots 61, 7 and 40."""
    d = make_driver(impl, slots=64)
    by_slot = {ref.slot: ref for ref in [d.admit(position=i % 5) for i in range(64)]}
    rows = [by_slot[61], by_slot[7], by_slot[40]]
    for accepted in ([1, 2, 3], [0, 3, 1], [2, 2, 2]):
        d.forward(rows, [3, 3, 3], accepted)
    for ref in (*rows, by_slot[0], by_slot[63]):
        d.check_state(ref)


@pytest.mark.parametrize("layers", [LAYERS[:1], LAYERS])
@pytest.mark.parametrize("fmt", list(Format))
def test_plan_counts_every_byte_that_is_allocated(layers, fmt):
    """Classes 13, 93 and 95: the planner and the allocator used different shapes."""
    for max_block in (1, 5):
        ring = RingSpec(window=16, max_block=max_block)
        pool = StatePool(layers, 3, state=fmt, ring=ring)
        allocated = sum(
            x.untyped_storage().nbytes() for s in pool.stores for x in s.present().values()
        )
        assert allocated == 3 * plan_memory(layers, 1, state=fmt, ring=ring).slot_bytes


def test_the_fold_replays_raw_inputs(impl):
    """Class 15: folding stored corrected values lets a read error into the checkpoint.

    A high read of q16 is wrong by 5e-3; nothing of that may reach the state.
    """
    high, full = (make_driver(impl, 1, state=Format.Q16) for _ in range(2))
    a, b = high.admit(), full.admit()
    for _ in range(40):
        high.forward([a], [1], [1], depth=ReadDepth.HIGH)
        full.forward([b], [1], [1])
    assert all(
        plane_digest(x, a.slot) == plane_digest(y, b.slot)
        for x, y in zip(high.pool.stores, full.pool.stores, strict=True)
    )


def test_gates_and_strengths_are_kept_in_fp32(impl):
    """Class 17, the core's half: a bf16 ring rounds keys and values, never g and w."""
    d = make_driver(impl, 1, ring_dtype=torch.bfloat16)
    store = d.pool.stores[0]
    assert store.g.dtype == store.w.dtype == torch.float32
    ref = d.admit()
    ticket = d.pool.begin([ref])
    blocks = [make_block(layer, 1, 1, seed=1) for layer in LAYERS]
    for i, block in enumerate(blocks):
        d.pool.step_(ticket, i, block)
    assert torch.equal(store.w[ref.slot, :, 0], blocks[0].w[0, 0])
    assert torch.equal(store.g[ref.slot, :, 0], blocks[0].g[0, 0])


@pytest.mark.parametrize("phase", range(RING.window + 1))
def test_an_image_carries_the_pending_ring(impl, phase):
    """Classes 19, 37 and 78: a backup saved the checkpoint and left the ring behind."""
    d = make_driver(impl)
    ref = d.admit()
    for _ in range(phase):
        d.forward([ref], [1], [1])
    image = d.pool.export(ref)
    oracles = d.oracles[ref]
    d.release(ref)
    d.admit()
    back = d.pool.import_(image)
    d.oracles[back] = oracles
    assert back.slot != ref.slot or back.generation != ref.generation
    d.check_state(back)
    for _ in range(RING.window):
        d.forward([back], [2], [2])


def test_an_image_of_another_format_is_refused(impl):
    """Classes 27 and 87: bytes were copied without a schema."""
    image = make_driver(impl, state=Format.F32).pool
    image = image.export(image.admit_())
    pool = StatePool(LAYERS, 1, state=Format.BF16, ring=RING, impl=impl)
    with pytest.raises(ContractError, match="format: expected bf16, got f32"):
        pool.import_(image)


def test_rollbacks_address_positions_not_ring_indices(impl):
    """Class 29: advance, roll back, advance, roll back over the seam of the ring."""
    d = make_driver(impl)
    ref = d.admit()
    for accepted in (3, 3, 3, 1, 0, 2, 0, 0, 3, 1, 1, 0, 2, 3, 3):
        d.forward([ref], [3], [accepted])
        d.check_state(ref)


def test_a_commit_is_consumed_once(impl):
    """Class 30: a replay length was latched and applied on every later step."""
    d = make_driver(impl)
    ref = d.admit()
    ticket = d.pool.begin([ref], 3)
    run_layers(d.pool, ticket, 1, 3)
    d.pool.commit_(ticket, 2)
    with pytest.raises(TicketError, match="spent"):
        d.pool.commit_(ticket, 2)
    assert d.pool.committed(ref) == 2


def test_adaptive_draft_lengths_follow_the_oracle(impl):
    """Class 30: the checkpoint advanced by the ring's length instead of the block's."""
    d = make_driver(impl, ring=RingSpec(window=5, max_block=4))
    ref, rng = d.admit(), torch.Generator().manual_seed(0)
    for _ in range(60):
        length = int(torch.randint(1, 5, (1,), generator=rng))
        d.forward([ref], [length], [int(torch.randint(0, length + 1, (1,), generator=rng))])
    d.check_state(ref)


@pytest.mark.parametrize("accepted", range(4))
@pytest.mark.parametrize("position", range(4))
def test_the_conv_window_is_rolled_back_with_the_state(impl, accepted, position):
    """Class 34: only the matrix state was restored. Prompts may be shorter than the window."""
    layer = make_layer(*FAMILIES[1], (1, 2), (18, 5), (7, 4))
    d = Driver(StatePool([layer], 1, ring=RING, impl=impl))
    ref = d.admit(position, is_zero=position == 0)
    for _ in range(3):
        d.forward([ref], [3], [accepted])
        d.check_windows(ref)
        d.check_state(ref)


@pytest.mark.parametrize("verb", ["export", "materialise", "fork_"])
def test_uncommitted_drafts_cannot_be_saved(impl, verb):
    """Class 31: a saved sequence held optimistic state."""
    d = make_driver(impl)
    ref = d.admit()
    ticket = d.pool.begin([ref], 2)
    run_layers(d.pool, ticket, 1, 2)
    with pytest.raises(SlotError, match="is in a forward"):
        getattr(d.pool, verb)(ref)


@pytest.mark.parametrize("accepted", range(4))
def test_the_count_includes_the_pending_token(impl, accepted):
    """Class 33: the state after a commit equals exactly ``num_accepted`` serial tokens."""
    d = make_driver(impl)
    ref = d.admit()
    d.forward([ref], [3], [accepted])
    assert d.oracles[ref][0].committed == accepted == d.pool.committed(ref)
    d.check_state(ref)


def test_materialised_states_and_images_are_copies(impl):
    """Classes 35 and 91: a snapshot kept aliasing live storage."""
    d = make_driver(impl, state=Format.F32)
    ref = d.admit()
    states, image, count = d.pool.materialise(ref), d.pool.export(ref), d.pool.committed(ref)
    kept = [x.clone() for x in states], image.layers[0]["high"].clone()
    for _ in range(3 * RING.window):
        d.forward([ref], [1], [1])
    assert all(torch.equal(a, b) for a, b in zip(states, kept[0], strict=True))
    assert torch.equal(image.layers[0]["high"], kept[1])
    assert count == 0


def test_counts_follow_the_request_not_the_row(impl):
    """Class 71: a neighbour's accepted count was committed after the batch was compacted."""
    d = make_driver(impl, slots=5)
    live, rng = [d.admit() for _ in range(4)], torch.Generator().manual_seed(0)
    for t in range(30):
        order = torch.randperm(len(live), generator=rng).tolist()
        live = [live[i] for i in order]
        accepted = [int(torch.randint(0, 4, (1,), generator=rng)) for _ in live]
        d.forward(live, [3] * len(live), accepted)
        if t % 7 == 3:
            d.release(live.pop())
            live.append(d.admit())
    for ref in live:
        d.check_state(ref)


def test_a_new_tenant_does_not_see_the_old_state(impl):
    """Classes 77, 82 and 89: a resumed or recycled slot read leftovers. The driver poisons them."""
    d = make_driver(impl, slots=1)
    for _ in range(4):
        ref = d.admit(is_zero=True)
        for _ in range(RING.window + 1):
            y = d.forward([ref], [2], [1])
            assert all(bool(x.isfinite().all()) for x in y)
        d.release(ref)


def test_slots_are_given_back_at_release(impl):
    """Class 79: a slot was held until its request finished."""
    d = make_driver(impl, slots=2)
    for _ in range(50):
        a = d.admit()
        ticket = d.pool.begin([a])
        d.pool.release_(a)  # preempted in the middle of a forward
        d.pool.commit_(ticket, [None])
        del d.oracles[a]
        assert d.pool.num_free == 2


def test_a_late_commit_never_reaches_the_next_tenant(impl):
    """Class 81: an in-flight result arrived after preemption and revived a dead request."""
    d = make_driver(impl, slots=1)
    a = d.admit()
    ticket = d.pool.begin([a], 2)
    run_layers(d.pool, ticket, 1, 2)
    d.pool.release_(a)
    tenant = d.pool.admit_()
    before = pool_digest(d.pool)
    for late in (2, [1]):
        with pytest.raises(SlotError, match="stale"):
            d.pool.commit_(ticket, late)
    d.pool.commit_(ticket, [None])
    with pytest.raises(SlotError, match="stale"):
        d.pool.begin([a])
    assert pool_digest(d.pool) == before
    assert d.pool.committed(tenant) == 0


def test_a_fork_is_not_changed_by_its_sibling(impl):
    """Class 86: a shared prefix state was updated in place by one of its users."""
    d = make_driver(impl)
    ref = d.admit()
    d.forward([ref], [3], [3])
    copy = d.fork(ref)
    before = [slot_digest(s, copy.slot) for s in d.pool.stores]
    for _ in range(2 * RING.window):
        d.forward([ref], [2], [2])
    assert [slot_digest(s, copy.slot) for s in d.pool.stores] == before
    d.check_state(copy)


def test_a_position_that_is_gone_is_refused(impl):
    """Classes 7, 90 and 97: a rewind reported success without a state to go back to."""
    d = make_driver(impl)
    ref = d.admit()
    for _ in range(RING.window + 2):
        d.forward([ref], [1], [1])
    oldest = d.pool.oldest(ref)
    assert oldest == RING.window
    d.check_state(ref, oldest)
    for position in (oldest - 1, d.pool.committed(ref) + 1):
        with pytest.raises(ReplayError, match=f"position: expected {oldest} to"):
            d.pool.materialise(ref, position)
