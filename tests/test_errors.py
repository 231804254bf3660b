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
    UnsupportedError,
)
from replayssm.ops import standard_, step_
from replayssm.ops.dispatch import choose
from replayssm.ring import RingSpec
from replayssm.slots import SlotRef
from replayssm.state import StatePool
from replayssm.testing.factories import FAMILIES, make_block, make_layer, make_plan, make_state
from replayssm.testing.guard import pool_digest
from replayssm.types import Block, Format, Impl, LayerSpec, ReadDepth

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
        ticket = self.pool.begin(self.refs)
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


@pytest.mark.parametrize("name", ["q", "k", "v", "w"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_debug_refuses_nan_and_infinity(impl, name, bad):
    desk = Desk(impl, debug=True)
    ticket = desk.pool.begin(desk.refs)
    block = desk.block()
    getattr(block, name)[1, 0, 0] = bad
    with desk.refuses(ContractError, rf"^{name}: expected finite values, got NaN or infinity"):
        desk.pool.step_(ticket, 0, block)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e-3])
def test_debug_refuses_a_gate_that_grows(impl, bad):
    desk = Desk(impl, debug=True)
    ticket = desk.pool.begin(desk.refs)
    block = desk.block()
    block.g[0, 0, 1] = bad
    with desk.refuses(ContractError, "^g: expected log-decays <= 0"):
        desk.pool.step_(ticket, 0, block)


def test_debug_accepts_what_is_legal_or_never_read(impl):
    """g = -inf is a gate of exactly 0; pad rows and lanes past a length may hold anything."""
    desk = Desk(impl, debug=True)
    ticket = desk.pool.begin([*desk.refs, None], [1, 2, 1])
    for layer in range(2):
        block = desk.block(layer, rows=3, tokens=3)
        block.g[0, 0] = -torch.inf
        for x in (block.q, block.k, block.v, block.g, block.w):
            x[0, 1:], x[1, 2:], x[2] = torch.nan, torch.nan, torch.nan
        assert bool(desk.pool.step_(ticket, layer, block).isfinite().all())
    desk.pool.commit_(ticket, [1, 2, 0])


def test_debug_refuses_a_prefill_state_that_is_not_finite(impl):
    desk = Desk(impl, debug=True)
    states = [make_state(layer, seed=0) for layer in LAYERS]
    states[1][0, 0, 0] = torch.nan
    with desk.refuses(ContractError, r"^states\[1\]: expected finite values"):
        desk.pool.admit_(states)


@pytest.mark.parametrize("slot", [-1, 3, 99])
def test_an_unknown_slot_is_refused(desk, slot):
    with desk.refuses(SlotError, rf"^slot {slot}: expected 0 to 2"):
        desk.pool.begin([SlotRef(slot, 0)])


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
        ContractError, r"^states\[0\]: expected a float tensor on cpu, got torch.int32"
    ):
        desk.pool.admit_([good[0].int(), good[1]])
    with desk.refuses(
        ContractError, r"^states\[0\]: expected a float tensor on cpu, got .* on meta"
    ):
        desk.pool.admit_([good[0].to("meta"), good[1]])
    with desk.refuses(ContractError, "^position: expected a non-negative integer, got -1"):
        desk.pool.admit_(good, position=-1)


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


def test_a_plan_of_another_pool_is_refused_by_the_ops(impl):
    """Compiled code would write behind the last slot without noticing."""
    pool = StatePool(LAYERS, 2, ring=RING, impl=impl)
    block, before = make_block(LAYERS[0], 1, 1, seed=0), pool_digest(pool)
    for slot in (2, -2):
        plan = make_plan([slot], [1], [0])
        with pytest.raises(ContractError, match=r"^plan: expected slots -1 to 1, got"):
            step_(pool.stores[0], plan, block, impl=impl)
        with pytest.raises(ContractError, match=r"^plan: expected slots -1 to 1, got"):
            standard_(torch.zeros(2, 2, 5, 6), LAYERS[0], plan, block, impl=impl)
    with pytest.raises(ContractError, match=r"at most max_block \(3\) tokens"):
        step_(
            pool.stores[0], make_plan([0], [4], [0]), make_block(LAYERS[0], 1, 4, seed=0), impl=impl
        )
    assert pool_digest(pool) == before


def test_an_unfit_standard_state_is_refused(impl):
    block, plan = make_block(LAYERS[0], 1, 2, seed=0), make_plan([0], [2], [0])
    with pytest.raises(ContractError, match=r"^state: expected shape \(2, 2, 5, 6\)"):
        standard_(torch.zeros(2, 2, 6, 5), LAYERS[0], plan, block, impl=impl)
    with pytest.raises(ContractError, match=r"^state: expected float32 or bfloat16"):
        standard_(torch.zeros(2, 2, 5, 6).double(), LAYERS[0], plan, block, impl=impl)
    tree = make_plan([0], [2], [0], parents=[[-1, -1]])
    with pytest.raises(
        ContractError, match="plan: expected chains on the standard path, got a tree"
    ):
        standard_(torch.zeros(2, 2, 5, 6), LAYERS[0], tree, block, impl=impl)


@pytest.mark.parametrize(
    ("name", "value"), [("state", "fp8"), ("impl", "cuda"), ("slots", 0), ("layers", ())]
)
def test_an_impossible_pool_is_refused(name, value):
    fields = {"layers": LAYERS, "slots": 1, name: value}
    with pytest.raises(ContractError, match="expected"):
        StatePool(**fields)


def test_an_impossible_layer_is_refused():
    with pytest.raises(
        ContractError, match=r"^value_heads: expected a multiple of key_heads \(2\)"
    ):
        LayerSpec("delta", "scalar", 2, 3, 4, 4)
    with pytest.raises(ContractError, match=r"^key_dim: expected a positive integer, got 0"):
        LayerSpec("delta", "scalar", 1, 1, 0, 4)


def test_an_explicit_choice_that_cannot_be_served_raises():
    with pytest.raises(
        UnsupportedError, match="impl=cpu: the cpu implementation needs CPU tensors"
    ):
        choose(Impl.CPU, torch.device("meta"))
    with pytest.raises(UnsupportedError, match=r"impl=cpu: .* folds whole slots"):
        StatePool(LAYERS, 1, ring=RingSpec(tiles=2), impl="cpu")
    assert choose(Impl.AUTO, torch.device("meta")) is Impl.REFERENCE
    assert choose("reference", torch.device("cpu")) is Impl.REFERENCE


def test_a_tree_is_refused_by_an_implementation_that_reads_chains():
    desk = Desk(Impl.CPU)
    ticket = desk.pool.begin(desk.refs, 2, [[-1, -1], [-1, 0]])
    with desk.refuses(UnsupportedError, "impl=cpu: the cpu implementation reads chains, not trees"):
        desk.pool.step_(ticket, 0, desk.block(tokens=2))


@pytest.mark.parametrize("fmt", list(Format))
def test_inputs_that_require_gradients_leave_no_graph_in_the_pool(impl, fmt):
    pool = StatePool(LAYERS[:1], 1, state=fmt, ring=RING, impl=impl)
    ref = pool.admit_([make_state(LAYERS[0], seed=0).requires_grad_()])
    for t in range(6):
        block = make_block(LAYERS[0], 1, 1, seed=t)
        for x in (block.q, block.k, block.v, block.g, block.w):
            x.requires_grad_()
        ticket = pool.begin([ref])
        assert not pool.step_(ticket, 0, block).requires_grad
        pool.commit_(ticket, 1)
    assert not any(x.requires_grad for x in pool.stores[0].present().values())
