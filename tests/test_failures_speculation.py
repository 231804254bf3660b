"""One named test per class of published failure of verify, commit and rollback.

The numbers are those of ``test_failures.py``, which says where the other classes are tested.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch

from replayssm.errors import ContractError
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.driver import Driver
from replayssm.testing.factories import (
    FAMILIES,
    make_block,
    make_inputs,
    make_layer,
    make_state,
    make_taps,
    take,
)
from replayssm.testing.guard import pool_digest
from replayssm.types import Format

LAYERS = (
    make_layer(*FAMILIES[0], (1, 2), (18, 5), (6, 4)),
    make_layer(*FAMILIES[3], (1, 2), (6, 5)),
)
KEEP, BLOCK, WINDOW = 4, 3, 4
RING = RingSpec(window=WINDOW, keep=KEEP, max_block=BLOCK)


def make_driver(impl, slots=3, **kwargs):
    return Driver(StatePool(LAYERS, slots, **{"ring": RING, "impl": impl, **kwargs}))


def decode(d, ref, tokens):
    for _ in range(tokens):
        d.forward([ref], [1], [1])


@pytest.mark.parametrize("step", range(1, 3 * WINDOW + 1))
def test_a_preempted_request_resumes_at_its_own_position(impl, step):
    """Class 10: the write position of a resumed request was computed from the old prompt."""
    d = make_driver(impl, slots=2)
    ref = d.admit(position=3)
    decode(d, ref, step)
    states, windows = d.pool.materialise(ref), d.pool.conv_windows(ref)
    again = d.pool.admit_(states, d.pool.committed(ref), windows)
    d.oracles[again] = [oracle.fork() for oracle in d.oracles[ref]]
    d.release(ref)
    for accepted in (2, 0, 3, 1, 3):
        d.forward([again], [BLOCK], [accepted])
        d.check_state(again)


@pytest.mark.parametrize("fmt", [Format.S32, Format.Q24, Format.BF16])
def test_always_rejecting_leaves_the_committed_state_alone(impl, fmt):
    """Class 18: rejected drafts left a numerical trace. 256 rounds, bit for bit, in any format."""
    drafted, plain = (make_driver(impl, 1, state=fmt).pool for _ in range(2))
    states = [make_state(layer, seed=7) for layer in LAYERS]
    a, b = drafted.admit_(states), plain.admit_(states)
    taps = make_taps(LAYERS[0].conv, seed=0)
    for turn in range(256):
        blocks = [make_block(layer, 1, BLOCK, seed=2 * turn + i) for i, layer in enumerate(LAYERS)]
        x = make_inputs(LAYERS[0].conv, 1, BLOCK, seed=turn)
        for pool, ref, tokens in ((drafted, a, BLOCK), (plain, b, 1)):
            ticket = pool.begin([ref], tokens)
            pool.conv_(ticket, 0, x[:, :tokens], *taps)
            for i, block in enumerate(blocks):
                pool.step_(ticket, i, take(block, [0], slice(tokens)))
            pool.commit_(ticket, 1)
        assert torch.equal(drafted.conv_windows(a)[0], plain.conv_windows(b)[0])
    for x, y in zip(drafted.materialise(a), plain.materialise(b), strict=True):
        assert torch.equal(x, y)


def test_one_commit_moves_state_window_and_any_sibling(impl):
    """Class 25: a path that returned early kept a sibling's state of rejected tokens.

    A sibling is a function of ``committed``: here a running sum, kept at every position.
    """
    d, draw = make_driver(impl), random.Random(0)
    ref = d.admit(is_zero=True)
    sums, kept = [0], 0
    for _ in range(40):
        drafts = [draw.randint(1, 9) for _ in range(BLOCK)]
        first, accepted = d.pool.committed(ref), draw.randint(0, BLOCK)
        for t, draft in enumerate(drafts):  # written for every draft, at absolute positions
            sums[first + t + 1 :] = [sums[first + t] + draft]
        d.forward([ref], [BLOCK], [accepted])
        kept += sum(drafts[:accepted])
        assert sums[d.pool.committed(ref)] == kept
        d.check_state(ref)  # and its windows


def test_rollbacks_of_rollbacks_land_on_their_positions(impl):
    """Class 29: advance 10, take back 4, advance 4, take back 2, over the seam of the ring."""
    d = make_driver(impl)
    ref = d.admit()
    for _ in range(4):
        for advance, back in ((10, 4), (4, 2), (3, 1)):
            decode(d, ref, advance)
            d.crop(ref, back)
            d.check_state(ref)
    decode(d, ref, 2 * WINDOW)


def test_counts_stay_with_requests_when_the_batch_changes_before_the_commit(impl):
    """Class 71: rows were removed and reused between a verify and its commit."""
    d, draw = make_driver(impl, slots=5), random.Random(0)
    for _ in range(4):
        d.admit()
    for turn in range(60):
        rows = draw.sample(d.live, draw.randint(1, 4))
        lengths = [draw.randint(1, BLOCK) for _ in rows]
        leaving = [draw.randrange(len(rows))] if turn % 3 == 0 else []
        kept = [draw.randint(0, n) for n in lengths]
        d.forward(rows, lengths, kept, departing=leaving)
        for ref in d.live:
            d.check_state(ref)


@pytest.mark.parametrize("path", [[1, 2], [0, 2], [2], [1]])
def test_a_path_is_loaded_before_it_is_stored(impl, path):
    """Class 85: a block was overwritten while it was read. Here source and target overlap."""
    trees = {(1, 2): [-1, -1, 1], (0, 2): [-1, 0, 0], (2,): [-1, 0, -1], (1,): [-1, -1, 0]}
    d = make_driver(impl)
    ref = d.admit()
    for _ in range(2 * RING.ring_len):
        d.forward([ref], [BLOCK], [path], parents=[trees[tuple(path)]])
        d.check_state(ref)


@pytest.mark.parametrize("last", range(1, 5))
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_short_last_chunk_carries_its_window(width, last):
    """Class 91: the window was lost when a chunk was shorter than it, and tokens looked right."""
    layer = make_layer(*FAMILIES[0], (1, 1), (4, 3), (6, width))
    x, taps = make_inputs(layer.conv, 1, 7 + last, seed=0), make_taps(layer.conv, seed=0)
    pool = StatePool([layer], 1, ring=RingSpec(window=4, max_block=7))
    ref = pool.admit_()
    for chunk in (x[:, :7], x[:, 7:]):
        ticket = pool.begin([ref], chunk.shape[1])
        pool.conv_(ticket, 0, chunk, *taps)
        pool.step_(ticket, 0, make_block(layer, 1, chunk.shape[1], seed=0))
        pool.commit_(ticket, chunk.shape[1])
    assert torch.equal(pool.conv_windows(ref)[0], x[0].T[:, -width + 1 :])


@pytest.mark.parametrize("phase", range(2 * WINDOW))
def test_a_trim_restores_or_refuses(impl, phase):
    """Classes 97 and 98: a trim reported success and left the recurrent state as it was."""
    d = make_driver(impl)
    ref = d.admit()
    decode(d, ref, KEEP + phase)
    most = d.pool.committed(ref) - d.pool.oldest(ref)
    assert most >= KEEP
    before = pool_digest(d.pool)
    for count in (most + 1, -1):
        with pytest.raises(ContractError, match="tokens: expected 0 to"):
            d.pool.crop_([ref], count)
    assert pool_digest(d.pool) == before
    d.crop(ref, most)
    d.check_state(ref)
    d.forward([ref], [BLOCK], [2])
    d.check_state(ref)


def test_a_hundred_rollbacks_hold_no_more_memory(impl):
    """Class 101: memory grew with every request or rollback."""
    pool = StatePool(LAYERS[1:], 2, ring=RING, impl=impl)
    block = make_block(LAYERS[1], 1, BLOCK, seed=0)
    places = [x.data_ptr() for s in pool.stores for x in s.present().values()]

    def live_objects(rounds):
        for turn in range(rounds):
            ref = pool.admit_()
            for accepted in (2, 0, 1):
                ticket = pool.begin([ref], BLOCK)
                pool.step_(ticket, 0, block)
                pool.commit_(ticket, accepted)
            pool.crop_([ref], turn % 3)
            pool.release_(ref)
        gc.collect()
        return len(gc.get_objects())

    live_objects(3)
    before = live_objects(3)
    assert live_objects(40) - before < 20
    assert [x.data_ptr() for s in pool.stores for x in s.present().values()] == places


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_a_block_as_long_as_the_buffer_survives_what_happens_before_its_commit(impl, accepted):
    """Class 105: drafts outgrew the buffer, and rollback read memory that was used again."""
    d = make_driver(impl)
    ref, other = d.admit(), d.admit()
    with pytest.raises(ContractError, match=f"lengths: expected 1 to max_block .{BLOCK}."):
        d.pool.begin([ref], BLOCK + 1)
    blocks = [make_block(layer, 1, BLOCK, seed=i) for i, layer in enumerate(LAYERS)]
    x = make_inputs(LAYERS[0].conv, 1, BLOCK, seed=0)
    for _ in range(WINDOW):
        ticket = d.pool.begin([ref], BLOCK)
        d.pool.conv_(ticket, 0, x, *d.taps[0])
        for i, block in enumerate(blocks):
            d.pool.step_(ticket, i, block)
        decode(d, other, 2)  # another request's forward, and its memory, in between
        d.pool.commit_(ticket, accepted)
        for oracle, block in zip(d.oracles[ref], blocks, strict=True):
            oracle.commit(block, 0, accepted)
        d.oracles[ref][0].conv.commit(x, 0, accepted)
        d.check_state(ref)
