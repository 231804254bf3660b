"""Every refusal: one message that names the argument, what was expected and what came; no trace."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from replayssm.errors import (
    CapacityError,
    ContractError,
    ReplayError,
    SlotError,
    TicketError,
)
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import FAMILIES, make_block, make_layer, make_state
from replayssm.testing.guard import pool_digest
from replayssm.types import Block, Impl, ReadDepth

LAYERS = (make_layer(*FAMILIES[2], (1, 2), (6, 5)), make_layer(*FAMILIES[1], (1, 1), (3, 4)))
RING = RingSpec(window=4, max_block=3)


class Desk:
    """A pool with two live slots in the middle of their windows, and blocks that fit it."""

    def __init__(self, impl=Impl.REFERENCE, *, debug=False, slots=3):
        self.pool = StatePool(LAYERS, slots, ring=RING, impl=impl, debug=debug)
        self.refs = [self.admit() for _ in range(2)]
        for t in range(5):
            self.run(t)

    def admit(self):
        return self.pool.admit_([make_state(layer, seed=0) for layer in LAYERS])

    def block(self, layer=0, rows=2, tokens=1, seed=0):
        return make_block(LAYERS[layer], rows, tokens, seed=seed)

    def run(self, seed):
        self.run_open(self.pool.begin(self.refs), seed)

    def run_open(self, ticket, seed=0):
        for layer in range(2):
            self.pool.step_(ticket, layer, self.block(layer, seed=seed))
        self.pool.commit_(ticket, 1)

    @contextmanager
    def refuses(self, kind, message):
        before = pool_digest(self.pool)
        with pytest.raises(kind, match=message) as caught:
            yield
        assert isinstance(caught.value, ReplayError)
        assert pool_digest(self.pool) == before


@pytest.fixture
def desk(impl):
    return Desk(impl)


def changed(block, **fields):
    old = {name: getattr(block, name) for name in ("q", "k", "v", "g", "w")}
    return Block(**{**old, **fields})


SHAPES = {
    "q": (2, 1, 1, 6),
    "k": (2, 1, 1, 6),
    "v": (2, 1, 2, 5),
    "g": (2, 1, 2),
    "w": (2, 1, 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shape_is_refused(desk, name):
    ticket = desk.pool.begin(desk.refs)
    good = desk.block()
    bad = getattr(good, name)[..., :-1]
    message = rf"^{name}: expected shape {SHAPES[name]}, got {tuple(bad.shape)}"
    with desk.refuses(ContractError, message.replace("(", r"\(").replace(")", r"\)")):
        desk.pool.step_(ticket, 0, changed(good, **{name: bad}))
    desk.pool.step_(ticket, 0, good)  # the forward may be tried again
    desk.pool.step_(ticket, 1, desk.block(1))
    desk.pool.commit_(ticket, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_dtype_is_refused(desk, name):
    ticket = desk.pool.begin(desk.refs)
    block = desk.block()
    bad = changed(block, **{name: getattr(block, name).to(torch.int64)})
    with desk.refuses(ContractError, rf"^{name}: expected one of .*, got torch.int64"):
        desk.pool.step_(ticket, 0, bad)


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_device_is_refused(desk, name):
    ticket = desk.pool.begin(desk.refs)
    block = desk.block()
    bad = changed(block, **{name: getattr(block, name).to("meta")})
    with desk.refuses(ContractError, rf"^{name}: expected device cpu, got meta"):
        desk.pool.step_(ticket, 0, bad)


def test_a_block_without_token_dimension_is_refused(desk):
    ticket = desk.pool.begin(desk.refs)
    with desk.refuses(ContractError, r"^q: expected 4 dimensions \[B, T, H, K\]"):
        desk.pool.step_(ticket, 0, changed(desk.block(), q=torch.zeros(2, 1, 6)))


def test_fewer_tokens_than_planned_are_refused(desk):
    ticket = desk.pool.begin(desk.refs, [1, 3])
    with desk.refuses(ContractError, "^q: expected at least 3 tokens, as planned, got 2 tokens"):
        desk.pool.step_(ticket, 0, desk.block(tokens=2))


VERBS = {
    "begin": lambda pool, ref: pool.begin([ref]),
    "fold_": lambda pool, ref: pool.fold_([ref]),
    "release_": lambda pool, ref: pool.release_(ref),
    "fork_": lambda pool, ref: pool.fork_(ref),
    "reorder_": lambda pool, ref: pool.reorder_([ref], [0]),
    "materialise": lambda pool, ref: pool.materialise(ref),
    "export": lambda pool, ref: pool.export(ref),
    "committed": lambda pool, ref: pool.committed(ref),
    "oldest": lambda pool, ref: pool.oldest(ref),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_name_of_another_pool_is_refused_by_every_verb(desk, verb):
    other = Desk()
    foreign = other.refs[0]
    assert (foreign.slot, foreign.generation) == (desk.refs[0].slot, desk.refs[0].generation)
    with desk.refuses(
        SlotError, rf"^slot {foreign.slot}: this name was handed out by another pool"
    ):
        VERBS[verb](desk.pool, foreign)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("is_readmitted", [False, True])
def test_a_stale_name_is_refused_by_every_verb(desk, verb, is_readmitted):
    ref = desk.refs[0]
    desk.pool.release_(ref)
    if is_readmitted:
        assert desk.admit().slot == ref.slot
    with desk.refuses(SlotError, rf"slot {ref.slot}: this name is stale"):
        VERBS[verb](desk.pool, ref)


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("release_", "committed", "oldest")])
def test_a_slot_in_a_forward_is_refused_by_every_verb_but_release(desk, verb):
    desk.pool.begin([desk.refs[0]])
    with desk.refuses(SlotError, "is in a forward; commit its ticket first"):
        VERBS[verb](desk.pool, desk.refs[0])
    desk.pool.release_(desk.refs[0])


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "release_"])
def test_an_invalid_slot_only_allows_release(desk, verb):
    ticket = desk.pool.begin([desk.refs[0]])
    desk.pool.step_(ticket, 0, desk.block(rows=1))
    with pytest.raises(TicketError, match="1 of 2 layers never ran in this forward"):
        desk.pool.commit_(ticket, 1)
    with desk.refuses(SlotError, "was left half-written by a forward that failed; release it"):
        VERBS[verb](desk.pool, desk.refs[0])
    desk.pool.release_(desk.refs[0])
    assert desk.pool.num_free == 2
    desk.pool.begin([desk.refs[1]])  # its neighbour is not concerned


def test_a_step_that_breaks_half_way_leaves_its_slots_invalid(desk, monkeypatch):
    """Not a refusal: planes may have been folded by then, so nothing but release is safe."""
    ticket = desk.pool.begin(desk.refs)

    def break_down(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("replayssm.state.step_", break_down)
    with pytest.raises(RuntimeError, match="out of memory"):
        desk.pool.step_(ticket, 0, desk.block())
    for ref in desk.refs:
        with pytest.raises(SlotError, match="half-written"):
            desk.pool.begin([ref])
        desk.pool.release_(ref)


@pytest.mark.parametrize("verb", ["begin", "fold_", "reorder_"])
def test_a_slot_named_twice_is_refused(desk, verb):
    twice = [desk.refs[0], desk.refs[1], desk.refs[0]]
    arguments = ([0, 1, 2],) if verb == "reorder_" else ()
    with desk.refuses(SlotError, r"^refs: expected every slot at most once, got \[0, 1, 0\]"):
        getattr(desk.pool, verb)(twice, *arguments)


def test_a_spent_ticket_is_refused(desk):
    ticket = desk.pool.begin(desk.refs)
    for layer in range(2):
        desk.pool.step_(ticket, layer, desk.block(layer))
    desk.pool.commit_(ticket, 1)
    with desk.refuses(TicketError, "the ticket is spent; begin a new forward"):
        desk.pool.commit_(ticket, 1)
    with desk.refuses(TicketError, "the ticket is spent"):
        desk.pool.step_(ticket, 0, desk.block())


def test_another_pools_ticket_is_refused(desk, impl):
    ticket = Desk(impl).pool.begin([])
    for verb in (
        lambda: desk.pool.step_(ticket, 0, desk.block()),
        lambda: desk.pool.commit_(ticket, 1),
    ):
        with desk.refuses(TicketError, "the ticket belongs to another pool"):
            verb()


def test_a_layer_runs_once_in_a_forward(desk):
    ticket = desk.pool.begin(desk.refs)
    desk.pool.step_(ticket, 0, desk.block())
    with desk.refuses(TicketError, "layer 0 has already run in this forward"):
        desk.pool.step_(ticket, 0, desk.block())


@pytest.mark.parametrize("layer", [-1, 2])
def test_an_unknown_layer_is_refused(desk, layer):
    ticket = desk.pool.begin(desk.refs)
    with desk.refuses(ContractError, rf"^layer: expected 0 to 1, got {layer}"):
        desk.pool.step_(ticket, layer, desk.block())


def test_a_step_after_release_is_refused(desk):
    ticket = desk.pool.begin(desk.refs)
    desk.pool.release_(desk.refs[1])
    with desk.refuses(SlotError, "slot 1: this name is stale"):
        desk.pool.step_(ticket, 0, desk.block())


def test_a_commit_in_which_no_layer_ran_moves_nothing(desk):
    before = pool_digest(desk.pool)
    with pytest.raises(TicketError, match="no layer ran in this forward; it was closed"):
        desk.pool.commit_(desk.pool.begin(desk.refs), 1)
    assert pool_digest(desk.pool) == before
    desk.pool.commit_(desk.pool.begin(desk.refs), 0)
    assert pool_digest(desk.pool) == before


COUNTS = {
    "too many": ([2, 1], r"^num_accepted: expected 0 to 1 for row 0, got 2"),
    "negative": ([1, -1], r"^num_accepted: expected 0 to 1 for row 1, got -1"),
    "missing": ([1, None], r"^num_accepted: expected 0 to 1 for row 1, got None"),
    "short": ([1], r"^num_accepted: expected 2 of them, got 1"),
    "fraction": ([0.5, 1], r"^num_accepted: expected integers, got \[0.5, 1\]"),
}


@pytest.mark.parametrize("case", COUNTS)
def test_an_impossible_num_accepted_is_refused_and_may_be_corrected(desk, case):
    counts, message = COUNTS[case]
    ticket = desk.pool.begin(desk.refs)
    for layer in range(2):
        desk.pool.step_(ticket, layer, desk.block(layer))
    with desk.refuses(ContractError, message):
        desk.pool.commit_(ticket, counts)
    desk.pool.commit_(ticket, [1, 0])
    assert [desk.pool.committed(ref) for ref in desk.refs] == [6, 5]


@pytest.mark.parametrize("counts", [np.array([1, 0]), torch.tensor([1, 0]), [np.int64(1), False]])
def test_counts_may_come_from_any_array(desk, counts):
    ticket = desk.pool.begin(desk.refs, np.array([1, 1]))
    for layer in range(2):
        desk.pool.step_(ticket, layer, desk.block(layer))
    desk.pool.commit_(ticket, counts)
    assert [desk.pool.committed(ref) for ref in desk.refs] == [6, 5]


LENGTHS = {
    "zero": ([1, 0], r"^lengths: expected 1 to max_block \(3\), got 0"),
    "long": (4, r"^lengths: expected 1 to max_block \(3\), got 4"),
    "short": ([1], "^lengths: expected 2 of them, got 1"),
    "fraction": ([1.5, 1], "^lengths: expected integers"),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_impossible_lengths_are_refused(desk, case):
    lengths, message = LENGTHS[case]
    with desk.refuses(ContractError, message):
        desk.pool.begin(desk.refs, lengths)


PARENTS = {
    "rows": [[-1]],
    "nodes": [[-1], [-1]],
    "itself": [[-1, 1], [-1, 0]],
    "later": [[1, -1], [-1, 0]],
    "below": [[-1, 0], [-2, 0]],
}


@pytest.mark.parametrize("case", PARENTS)
def test_parents_that_are_no_forest_are_refused(desk, case):
    with desk.refuses(ContractError, "^parents: expected"):
        desk.pool.begin(desk.refs, 2, PARENTS[case])


def test_a_full_pool_refuses_admission_and_copies(desk):
    desk.admit()
    with desk.refuses(CapacityError, "no free slot: all 3 are taken; release some first"):
        desk.admit()
    with desk.refuses(CapacityError, "no free slot"):
        desk.pool.fork_(desk.refs[0])
    with desk.refuses(CapacityError, "reorder_: too few free slots"):
        desk.pool.reorder_(desk.refs, [0, 0, 1])


@pytest.mark.parametrize("index", [[2], [-1]])
def test_reorder_to_an_unknown_row_is_refused(desk, index):
    with desk.refuses(ContractError, "^index: expected rows 0 to 1"):
        desk.pool.reorder_(desk.refs, index)


def test_impossible_admissions_are_refused(desk):
    good = [make_state(layer, seed=0) for layer in LAYERS]
    with desk.refuses(ContractError, "^states: expected 2 tensors, one a layer, got 1"):
        desk.pool.admit_(good[:1])
    with desk.refuses(ContractError, r"^states\[1\]: expected shape \(1, 4, 3\), got \(2, 5, 6\)"):
        desk.pool.admit_([good[0], good[0]])
    with desk.refuses(
        ContractError, r"^states\[0\]: expected a dense float tensor on cpu, got torch.int32"
    ):
        desk.pool.admit_([good[0].int(), good[1]])
    with desk.refuses(
        ContractError, r"^states\[0\]: expected a dense float tensor on cpu, got .* on meta"
    ):
        desk.pool.admit_([good[0].to("meta"), good[1]])


@pytest.mark.parametrize("position", [3, 6])
def test_a_position_that_cannot_be_rebuilt_is_refused(desk, position):
    desk.pool.fold_(desk.refs)
    with desk.refuses(ContractError, rf"^position: expected 4 to 5, got {position}"):
        desk.pool.materialise(desk.refs[0], position)


DEPTHS = {
    "unknown": ("deep", "^ReadDepth: expected one of high, full, got 'deep'"),
    "short": ([ReadDepth.HIGH], "^depth: expected one read depth or 2 of them, got 1 of them"),
    "unknown in a row": (["high", "low"], "^ReadDepth: expected one of high, full, got 'low'"),
}


@pytest.mark.parametrize("case", DEPTHS)
def test_an_unknown_read_depth_is_refused(desk, case):
    depth, message = DEPTHS[case]
    ticket = desk.pool.begin(desk.refs)
    with desk.refuses(ContractError, message):
        desk.pool.step_(ticket, 0, desk.block(), depth=depth)


OUTS = {
    "shape": (torch.empty(2, 1, 5, 2), r"^out: expected shape \(2, 1, 2, 5\)"),
    "dtype": (torch.empty(2, 1, 2, 5, dtype=torch.int8), "^out: expected one of"),
    "device": (torch.empty(2, 1, 2, 5, device="meta"), "^out: expected device cpu"),
}


@pytest.mark.parametrize("case", OUTS)
def test_an_unfit_out_is_refused(desk, case):
    out, message = OUTS[case]
    ticket = desk.pool.begin(desk.refs)
    with desk.refuses(ContractError, message):
        desk.pool.step_(ticket, 0, desk.block(), out=out)


@pytest.mark.parametrize("verb", ["fold_", "crop_", "reorder_"])
def test_a_pad_row_is_refused_where_every_row_must_have_a_slot(desk, verb):
    rest = {"fold_": (), "crop_": (1,), "reorder_": ([1, 1],)}[verb]
    with desk.refuses(ContractError, "^refs: expected a slot in every row, got a pad row, row 0"):
        getattr(desk.pool, verb)([None, desk.refs[1]], *rest)


@pytest.mark.parametrize("index", [[1.0, 1.0], [None, 0], ["0", "1"]])
def test_an_index_that_names_no_rows_is_refused(desk, index):
    with desk.refuses(ContractError, "^index: "):
        desk.pool.reorder_(desk.refs, index)


def test_reorder_takes_the_rows_of_a_tensor(desk):
    moved = desk.pool.reorder_(desk.refs, torch.tensor([1, 1]))
    assert len({ref.slot for ref in moved}) == 2


@pytest.mark.parametrize("position", [-1, 1.5, 2**63 - 1, 2**63, "1"])
def test_a_position_that_cannot_be_counted_on_takes_no_slot(desk, position):
    with desk.refuses(ContractError, "^position: expected an integer from 0 to "):
        desk.pool.admit_(position=position)
    assert desk.pool.num_free == 1


def test_a_sparse_state_takes_no_slot(desk):
    states = [make_state(layer, seed=0) for layer in LAYERS]
    with desk.refuses(ContractError, r"^states\[1\]: expected a dense float tensor"):
        desk.pool.admit_([states[0], states[1].to_sparse()])
    assert desk.pool.num_free == 1


@pytest.mark.parametrize("call", ["name", "lengths", "layer", "parents", "accepted"])
def test_things_of_another_kind_are_refused(desk, call):
    if call == "name":
        with desk.refuses(ContractError, "^refs: expected names handed out by the pool, got 0"):
            desk.pool.begin([0])
    elif call == "lengths":
        with desk.refuses(ContractError, "^lengths: expected integers, got 1.0"):
            desk.pool.begin(desk.refs, 1.0)
    elif call == "parents":
        with desk.refuses(ContractError, "^parents: expected integers, got"):
            desk.pool.begin(desk.refs, 2, [[-0.5, 0], [-1, 0]])
    else:
        ticket = desk.pool.begin(desk.refs)
        with desk.refuses(ContractError, "^(layer|num_accepted): "):
            if call == "layer":
                desk.pool.step_(ticket, 0.0, desk.block())
            else:
                desk.pool.commit_(ticket, None)
        desk.run_open(ticket)


@pytest.mark.parametrize("field", ["window", "keep", "max_block", "tiles"])
def test_ring_sizes_are_integers(field):
    with pytest.raises(ContractError, match=f"^{field}: expected an integer"):
        RingSpec(**{field: 4.0})
