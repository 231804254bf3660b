"""What the ops and the constructors refuse, without a pool's bookkeeping in front of them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from replayssm.errors import ContractError, UnsupportedError
from replayssm.ops import standard_, step_
from replayssm.ops.dispatch import choose
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import FAMILIES, make_block, make_layer, make_plan, make_state
from replayssm.testing.guard import pool_digest
from replayssm.types import Format, Impl, LayerSpec

LAYERS = (make_layer(*FAMILIES[2], (1, 2), (6, 5)), make_layer(*FAMILIES[1], (1, 1), (3, 4)))
RING = RingSpec(window=4, max_block=3)


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


def inference_tensor(*shape):
    with torch.inference_mode():
        return torch.empty(shape)


UNFIT_OUTPUTS = {
    "one element for many": lambda _: torch.empty(1, 1, 1, 1).expand(1, 1, 2, 6),
    "inference": lambda _: inference_tensor(1, 1, 2, 6),
    "queries": lambda block: block.q,
    "keys": lambda block: block.k,
    "a view of values": lambda block: block.v.view(1, 1, 2, 6),
}


@pytest.mark.parametrize("name", UNFIT_OUTPUTS)
def test_an_output_that_cannot_be_written_freely_is_refused(impl, name):
    """K = V and H = HV, so that an input has the shape of the output."""
    layer = make_layer(*FAMILIES[2], (2, 2), (6, 6))
    pool = StatePool([layer], 1, ring=RING, impl=impl)
    block, ticket = make_block(layer, 1, 1, seed=0), pool.begin([pool.admit_()])
    before = pool_digest(pool)
    with pytest.raises(ContractError, match=r"^out: expected"):
        pool.step_(ticket, 0, block, out=UNFIT_OUTPUTS[name](block))
    plan = make_plan([0], [1], [0])
    with pytest.raises(ContractError, match=r"^out: expected"):
        standard_(
            torch.zeros(1, 2, 6, 6), layer, plan, block, impl=impl, out=UNFIT_OUTPUTS[name](block)
        )
    assert pool_digest(pool) == before
    pool.step_(ticket, 0, block)


@pytest.mark.parametrize(
    ("argument", "fields"),
    [
        ("depth", {"depth": None}),
        ("block", {"block": ()}),
        ("out", {"out": [0.0]}),
        ("k", {"k": None}),
    ],
)
def test_an_argument_of_another_kind_leaves_the_forward_open(impl, argument, fields):
    pool = StatePool(LAYERS[:1], 1, ring=RING, impl=impl)
    block, ticket = make_block(LAYERS[0], 1, 1, seed=0), pool.begin([pool.admit_()])
    if argument == "k":
        fields = {"block": replace(block, **fields)}
    with pytest.raises(ContractError, match=f"^{argument}: expected"):
        pool.step_(ticket, 0, **{"block": block, **fields})
    pool.step_(ticket, 0, block)


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


def test_auto_leaves_exact_states_to_the_reference_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("replayssm.ops.dispatch.find_spec", lambda name: name)
    gpu = torch.device("cuda")
    assert choose(Impl.AUTO, gpu) is Impl.TRITON
    assert choose(Impl.AUTO, gpu, exact=True) is Impl.REFERENCE


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


def test_a_refusal_crosses_a_process_border():
    error = pickle.loads(pickle.dumps(ContractError("v", "shape (1,)", (2,), "reshape it")))
    assert str(error) == "v: expected shape (1,), got (2,); reshape it"
    assert error.argument == "v"


@pytest.mark.parametrize("made_in", [True, False])
def test_a_pool_serves_inside_and_outside_of_inference_mode(impl, made_in):
    with torch.inference_mode(made_in):
        pool = StatePool(LAYERS[:1], 1, ring=RingSpec(window=2), impl=impl)
        ref = pool.admit_([make_state(LAYERS[0], seed=0)])
    for t in range(5):
        with torch.inference_mode(t % 2 == 0):
            ticket = pool.begin([ref])
            pool.step_(ticket, 0, make_block(LAYERS[0], 1, 1, seed=t))
            pool.commit_(ticket, 1)
    assert pool.committed(ref) == 5
