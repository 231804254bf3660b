"""``exact=True``: outputs and states are those of the standard step, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayssm.errors import ContractError, UnsupportedError
from replayssm.ops import standard_
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import (
    FAMILIES,
    Regime,
    make_block,
    make_layer,
    make_plan,
    make_state,
    make_tree,
    take,
)
from replayssm.testing.guard import plane_digest, pool_digest
from replayssm.types import Format, Impl, ReadDepth

# the reference takes seconds for as many rounds as the kernels
ROUNDS = [
    pytest.param(Impl.REFERENCE, 128),
    pytest.param(Impl.REFERENCE, 512, marks=pytest.mark.slow),
    pytest.param(Impl.AUTO, 512),
]
RING = RingSpec(window=5, max_block=4)
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0]}-{f[1]}")
formats = pytest.mark.parametrize("fmt", [Format.F32, Format.S32])


class Pair:
    """One sequence in an exact pool, and its state on the standard path of the same impl."""

    def __init__(self, layer, impl, fmt, ring, dtype=torch.float32):
        self.layer, self.impl, self.dtype = layer, impl, dtype
        self.pool = StatePool(
            [layer], 2, state=fmt, ring=ring, ring_dtype=dtype, impl=impl, exact=True
        )
        self.pool.admit_()  # so that the sequence is not in slot 0
        state = make_state(layer, seed=0)
        self.ref, self.state = self.pool.admit_([state], position=3), state.unsqueeze(0).clone()

    def standard(self, state, block, path):
        """Run some tokens of the block on a state, one call a token, as a plain decode does."""
        plan = make_plan([0], [1], [0])
        outputs = [
            standard_(state, self.layer, plan, take(block, [0], [t]), impl=self.impl) for t in path
        ]
        return torch.cat(outputs, 1) if path else block.v[:, :0]

    def verify(self, block, kept, parents=None):
        """Run a block through both; keep a path. Every path's outputs must be the same bits."""
        ticket = self.pool.begin([self.ref], block.tokens, None if parents is None else [parents])
        y = self.pool.step_(ticket, 0, block)
        leaves = [block.tokens - 1] if parents is None else range(block.tokens)
        for leaf in leaves:
            path = ticket.plan.ancestors(0, leaf)
            assert torch.equal(y[:, path], self.standard(self.state.clone(), block, path))
        if parents is None:
            self.pool.commit_(ticket, len(kept))
        else:
            self.pool.commit_paths_(ticket, [kept])
        self.standard(self.state, block, kept)

    def check_state(self):
        assert torch.equal(self.pool.materialise(self.ref)[0], self.state[0])

    def check_checkpoint(self):
        """The planes alone, at a boundary: nothing is left to replay."""
        self.pool.fold_([self.ref])
        assert self.pool.oldest(self.ref) == self.pool.committed(self.ref)
        store = self.pool.stores[0]
        planes = store.planes(self.ref.slot)
        if planes.low is None:
            assert torch.equal(planes.high, self.state[0])
        self.check_state()


@families
@formats
@pytest.mark.parametrize(("which", "rounds"), ROUNDS)
def test_rounds_that_reject_every_draft(which, rounds, family, fmt):
    pair = Pair(make_layer(*family, (1, 2), (18, 6)), which, fmt, RING)
    rng = np.random.default_rng(0)
    for turn in range(rounds):
        block = make_block(pair.layer, 1, 4, seed=turn)
        pair.verify(block, list(range(rng.integers(0, 2))))
        if not turn % 16:
            pair.check_state()
    pair.check_state()
    while pair.pool.committed(pair.ref) % RING.window:
        pair.verify(make_block(pair.layer, 1, 1, seed=turn), [0])
    pair.check_checkpoint()


@families
@pytest.mark.parametrize("regime", [Regime.TYPICAL, Regime.CLOSED, Regime.FAST])
@pytest.mark.parametrize("seed", range(3))
def test_any_window_block_and_acceptance(impl, family, regime, seed):
    rng = np.random.default_rng(seed)
    window, keep, widest = (int(n) for n in rng.integers([1, 0, 1], [20, 4, 9]))
    ring = RingSpec(window=window, keep=keep, max_block=widest)
    fmt = (Format.F32, Format.S32)[seed % 2]
    dtype = (torch.float32, torch.bfloat16)[seed // 2]
    pair = Pair(make_layer(*family, (2, 4), (37, 21)), impl, fmt, ring, dtype)
    for turn in range(24):
        nodes = int(rng.integers(1, widest + 1))
        block = make_block(pair.layer, 1, nodes, seed=turn, regime=regime, dtype=dtype)
        parents = make_tree(nodes, seed=turn) if turn % 2 else None
        kept = list(range(rng.integers(0, nodes + 1)))
        if parents is not None:
            kept = make_plan([0], [nodes], [0], parents=[parents]).ancestors(0, nodes - 1)
        pair.verify(block, kept, parents)
        pair.check_state()
        most = pair.pool.committed(pair.ref) - pair.pool.oldest(pair.ref)
        assert pair.pool.committed(pair.ref) < 3 + keep or most >= keep


@families
def test_rows_of_a_batch_are_exact_each(impl, family):
    """A pad row, and rows of other lengths at other phases, in blocks that fold and do not."""
    layer, slots = make_layer(*family, (1, 2), (33, 10)), 3
    pool = StatePool([layer], slots, ring=RING, impl=impl, exact=True)
    states = torch.stack([make_state(layer, seed=i) for i in range(slots)])
    refs = [pool.admit_([state], position=i) for i, state in enumerate(states)]
    rng = np.random.default_rng(1)
    for turn in range(12):
        rows, lengths = [refs[2], None, refs[0], refs[1]], [4, 1, 2, 1 + turn % 4]
        block = make_block(layer, 4, 5, seed=turn)
        ticket = pool.begin(rows, lengths)
        y, trial = pool.step_(ticket, 0, block), states.clone()
        plan = make_plan([2, -1, 0, 1], lengths, [0] * 4)
        assert torch.equal(y, standard_(trial, layer, plan, block, impl=impl))
        kept = [int(rng.integers(0, n + 1)) for n in lengths]
        pool.commit_(ticket, kept)
        standard_(states, layer, make_plan([2, -1, 0, 1], kept, [0] * 4), block, impl=impl)
    for ref, state in zip(refs, states, strict=True):
        assert torch.equal(pool.materialise(ref)[0], state)


@families
@formats
def test_what_was_rejected_leaves_no_trace(impl, family, fmt):
    """Given the kept inputs, planes are the same with and without speculation."""
    digests = []
    for drafts in (0, 3):
        pair = Pair(make_layer(*family, (1, 2), (18, 6)), impl, fmt, RING)
        for turn in range(17):
            block = make_block(pair.layer, 1, 1, seed=turn)
            wrong = make_block(pair.layer, 1, drafts, seed=1000 + turn)
            names = ("q", "k", "v", "g", "w")
            both = [torch.cat([getattr(x, n) for x in (block, wrong)], 1) for n in names]
            pair.verify(type(block)(*both), [0])
        pair.pool.fold_([pair.ref])
        digests.append(plane_digest(pair.pool.stores[0], pair.ref.slot))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("fmt", "tiles"), [("q24", 1), ("q16", 1), ("bf16", 1), ("f32", 2), ("s32", 4)]
)
def test_what_cannot_be_exact_is_refused(fmt, tiles):
    layer, ring = make_layer(*FAMILIES[0]), RingSpec(window=4, tiles=tiles)
    with pytest.raises(UnsupportedError, match=r"^exact=True: needs a state in f32 or s32 and"):
        StatePool([layer], 1, state=fmt, ring=ring, impl="reference", exact=True)


def test_a_read_that_cannot_be_exact_is_refused(impl):
    layer = make_layer(*FAMILIES[0])
    pool = StatePool([layer], 1, ring_dtype=torch.bfloat16, impl=impl, exact=True)
    ticket, before = pool.begin([pool.admit_()]), pool_digest(pool)
    block = make_block(layer, 1, 1, seed=0, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="exact=True: needs full reads"):
        pool.step_(ticket, 0, block, depth=ReadDepth.HIGH)
    with pytest.raises(ContractError, match=r"k: expected torch.bfloat16, which the ring"):
        pool.step_(ticket, 0, make_block(layer, 1, 1, seed=0))
    assert pool_digest(pool) == before
    pool.step_(ticket, 0, block)
