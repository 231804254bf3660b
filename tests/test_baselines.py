"""Snapshot and recompute serve the same requests as state replay, by other means."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from replayssm.baselines import RecomputePool, SnapshotPool
from replayssm.errors import ContractError, SlotError, TicketError
from replayssm.ops import standard_
from replayssm.testing.factories import (
    FAMILIES,
    make_block,
    make_inputs,
    make_layer,
    make_plan,
    make_state,
    make_taps,
    pad_tokens,
    take,
)
from replayssm.testing.oracle import ConvOracle, SerialOracle
from replayssm.types import Decay, Write

LAYERS = (
    make_layer(Write.ADDITIVE, Decay.SCALAR, (1, 2), (6, 5), (7, 4)),
    make_layer(Write.DELTA, Decay.CHANNEL, (1, 2), (18, 5)),
)
TAPS = (make_taps(LAYERS[0].conv, seed=0), None)
BLOCK = 4
pools = pytest.mark.parametrize("kind", [SnapshotPool, RecomputePool])


class Bench:
    """A baseline pool and the serial oracles of its requests."""

    def __init__(self, kind, impl, slots=3):
        self.pool, self.oracles, self.seed = kind(LAYERS, slots, max_block=BLOCK, impl=impl), {}, 0

    def admit(self, position=0):
        self.seed += 1
        states = [make_state(layer, seed=self.seed) for layer in LAYERS]
        window = make_inputs(LAYERS[0].conv, 1, 3, seed=self.seed)[0].T
        ref = self.pool.admit_(states, position, [window, None])
        convs = ConvOracle(*TAPS[0], window), None
        self.oracles[ref] = [
            SerialOracle(*x, conv=c)
            for x, c in zip(zip(LAYERS, states, [position] * 2, strict=True), convs, strict=True)
        ]
        return ref

    def forward(self, refs, lengths, accepted):
        ticket, given = self.pool.begin(refs, lengths), []
        for i, layer in enumerate(LAYERS):
            self.seed += 1
            block = pad_tokens(make_block(layer, len(refs), BLOCK, seed=self.seed), BLOCK + 1)
            x = make_inputs(LAYERS[0].conv, len(refs), BLOCK + 1, seed=self.seed)
            mixed = self.pool.conv_(ticket, i, x, *TAPS[i]) if TAPS[i] else None
            y = self.pool.step_(ticket, i, block)
            given.append((block, x))
            for row, (ref, length) in enumerate(zip(refs, lengths, strict=True)):
                assert not bool(y[row, 0 if ref is None else length :].any())
                if ref is not None:
                    oracle = self.oracles[ref][i]
                    close(y[row, :length], oracle.outputs(block, row, length))
                    if mixed is not None:
                        close(mixed[row, :length], oracle.conv.outputs(x, row, length))
        self.pool.commit_(ticket, accepted)
        for row, ref in enumerate(refs):
            if ref is not None:
                for oracle, (block, x) in zip(self.oracles[ref], given, strict=True):
                    oracle.commit(block, row, accepted[row])
                    if oracle.conv is not None:
                        oracle.conv.commit(x, row, accepted[row])
        for ref in self.oracles:
            self.check(ref)

    def check(self, ref):
        oracles = self.oracles[ref]
        assert self.pool.committed(ref) == oracles[0].committed
        for state, oracle in zip(self.pool.materialise(ref), oracles, strict=True):
            close(state, oracle.state())
        window = self.pool.conv_windows(ref)[0]
        assert torch.equal(window.double(), oracles[0].conv.window())


def close(got, exact):
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


@pools
@pytest.mark.parametrize(
    ("length", "accepted"), [(n, a) for n in range(1, BLOCK + 1) for a in range(n + 1)]
)
def test_every_accepted_count_equals_the_serial_oracle(kind, impl, length, accepted):
    bench = Bench(kind, impl)
    refs = [bench.admit(), bench.admit(position=5)]
    for _ in range(BLOCK + 2):  # longer than the places of a slot
        bench.forward([None, *refs], [1, length, 1], [0, accepted, 1])


@pools
def test_random_lives_equal_the_serial_oracles(kind, impl):
    bench, draw = Bench(kind, impl), random.Random(0)
    live = [bench.admit() for _ in range(3)]
    for turn in range(40):
        rows = draw.sample(live, draw.randint(1, 3))
        lengths = [draw.randint(1, BLOCK) for _ in rows]
        bench.forward(rows, lengths, [draw.randint(0, n) for n in lengths])
        if turn % 9 == 5:
            gone = live.pop(draw.randrange(3))
            bench.pool.release_(gone)
            del bench.oracles[gone]
            live.append(bench.admit(position=turn))


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_hold_the_state_after_every_token(impl, family):
    """Bit for bit what a shorter block leaves in place; the state it starts from is untouched."""
    layer = make_layer(*family, dims=(37, 18))
    block, first = make_block(layer, 2, 3, seed=1), torch.stack([make_state(layer, seed=0)] * 9)
    state, targets = first.clone(), np.array([[2, 5, 7], [6, 6, 8]])
    plan = make_plan([0, 3], [3, 2], [0, 0])
    y = standard_(state, layer, plan, block, impl=impl, targets=targets)
    for row, tokens, slot in ((0, 1, 2), (0, 2, 5), (0, 3, 7), (1, 2, 6)):
        alone, one = first[:1].clone(), take(block, [row], slice(tokens))
        out = standard_(alone, layer, make_plan([0], [tokens], [0]), one, impl=impl)
        assert torch.equal(state[slot], alone[0])
        assert torch.equal(y[row, :tokens], out[0])
    untouched = [0, 1, 3, 4, 8]
    assert torch.equal(state[untouched], first[untouched])


@pytest.mark.parametrize("targets", [np.zeros((1, 2), np.int64), np.full((2, 2), 9), -np.eye(2)])
def test_targets_that_do_not_fit_are_refused(impl, targets):
    state, plan = torch.zeros(9, 2, 5, 18), make_plan([0, 3], [2, 2], [0, 0])
    with pytest.raises(ContractError, match="targets: expected"):
        block = make_block(LAYERS[1], 2, 2, seed=0)
        standard_(state, LAYERS[1], plan, block, impl=impl, targets=targets.astype(np.int64))
    assert not bool(state.any())


@pools
def test_what_a_pool_allocates_is_what_it_says(kind):
    pool = kind(LAYERS, 3, max_block=BLOCK)
    states = BLOCK + 1 if kind is SnapshotPool else 2
    elements = sum(layer.state_elements for layer in LAYERS)
    assert pool.nbytes() == 3 * 4 * (states * elements + 3 * 7)
    kept = [x.untyped_storage().nbytes() for x in (*pool._states, *pool._windows) if x is not None]
    assert pool.nbytes() == sum(kept)


def test_moved_bytes_count_whole_states():
    state = 4 * sum(layer.state_elements for layer in LAYERS)
    snapshot, recompute = (kind(LAYERS, 1, max_block=8) for kind in (SnapshotPool, RecomputePool))
    assert snapshot.moved_bytes(8, 5) == 9 * state  # one read, eight written
    assert recompute.moved_bytes(8, 5) == 4 * state  # each pass reads one and writes one
    assert recompute.moved_bytes(8, 8) == recompute.moved_bytes(8, 0) == 2 * state


@pools
def test_tickets_are_as_strict_as_those_of_a_state_pool(kind):
    bench = Bench(kind, "reference")
    a, b = bench.admit(), bench.admit()
    for lengths in (0, BLOCK + 1):
        with pytest.raises(ContractError, match="lengths: expected 1 to max_block"):
            bench.pool.begin([a], lengths)
    bench.forward([a], [2], [1])
    ticket = bench.pool.begin([a, b], 2)
    with pytest.raises(SlotError, match="is in a forward"):
        bench.pool.begin([a])
    block = make_block(LAYERS[1], 2, 2, seed=0)
    bench.pool.step_(ticket, 1, block)
    with pytest.raises(TicketError, match="already run"):
        bench.pool.step_(ticket, 1, block)
    with pytest.raises(TicketError, match="1 of 2 layers never ran"):
        bench.pool.commit_(ticket, 1)
    with pytest.raises(TicketError, match="spent"):
        bench.pool.commit_(ticket, 1)
    with pytest.raises(TicketError, match="another pool"):
        kind(LAYERS, 1).commit_(ticket, 1)
    with pytest.raises(SlotError, match="half-written"):
        bench.pool.materialise(a)


@pools
def test_a_released_row_is_left_out_of_the_commit(kind):
    """Class 81: the slot already has another tenant when the late commit arrives."""
    bench = Bench(kind, "reference", slots=2)
    a, b = bench.admit(), bench.admit()
    ticket = bench.pool.begin([a, b], 2)
    for i, layer in enumerate(LAYERS):
        if TAPS[i]:
            x = make_inputs(layer.conv, 2, 2, seed=1)
            bench.pool.conv_(ticket, i, x, *TAPS[i])
        bench.pool.step_(ticket, i, make_block(layer, 2, 2, seed=i))
    bench.pool.release_(a)
    tenant = bench.admit(position=3)
    with pytest.raises(SlotError, match="stale"):
        bench.pool.commit_(ticket, 1)
    bench.pool.commit_(ticket, [None, 0])
    bench.check(tenant)
    bench.check(b)
