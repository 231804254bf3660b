"""What only a device shows: graphs, pools past 2^31 elements, strided pools, bystanders."""

from __future__ import annotations

import pytest
import torch

from replayssm.ops import step_
from replayssm.ops.dispatch import choose
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.storage import LayerStore
from replayssm.testing.factories import make_block, make_state
from replayssm.types import Block, Decay, Format, Impl, LayerSpec, ReadDepth, Write

LAYER = LayerSpec(Write.DELTA, Decay.SCALAR, 2, 4, key_dim=64, value_dim=64)
ONE_PASS = LayerSpec(Write.DELTA, Decay.SCALAR, 2, 8, key_dim=128, value_dim=128)
ADDITIVE = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 2, 16, key_dim=128, value_dim=64)
LAYERS = [(LAYER, "q24"), (ONE_PASS, "bf16"), (ONE_PASS, "s32"), (ADDITIVE, "bf16"),
          (ADDITIVE, "q24")]  # fmt: skip
IDS = ["gdn-q24", "gdn-bf16", "gdn-s32", "mamba2-bf16", "mamba2-q24"]
MAMBA = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 8, 128, key_dim=128, value_dim=64)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


def block_on(layer: LayerSpec, rows: int, seed: int, device: torch.device) -> Block:
    block = make_block(layer, rows, 1, seed=seed)
    q, k, v = (x.to(device, torch.bfloat16) for x in (block.q, block.k, block.v))
    return Block(q, k, v, block.g.to(device), block.w.to(device))


def make_pool(layer: LayerSpec, slots: int, device: torch.device, fmt: str = "q24") -> StatePool:
    return StatePool(
        [layer], slots, state=Format(fmt), ring=RingSpec(4), ring_dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip


def test_auto_is_triton_on_a_gpu(gpu: torch.device) -> None:
    assert choose(Impl.AUTO, gpu) is Impl.TRITON


@pytest.mark.parametrize(("layer", "fmt"), LAYERS, ids=IDS)
def test_a_captured_step_replays_over_any_mix_of_folding_rows(
    layer: LayerSpec, fmt: str, gpu: torch.device
) -> None:
    from replayssm.ops.triton.host import step_ as launch_
    from replayssm.ops.triton.plan import device_plan

    pools = [make_pool(layer, 3, gpu, fmt) for _ in range(2)]
    states = [make_state(layer, seed=i).to(gpu) for i in range(3)]
    refs = [[pool.admit_([state], position=i) for i, state in enumerate(states)] for pool in pools]
    depth = [ReadDepth.HIGH] * 3
    static = block_on(layer, 3, 0, gpu)
    ticket = pools[1].begin(refs[1])
    resident = device_plan(ticket.plan, pools[1].ring, depth, 1, gpu)
    out = torch.empty_like(static.v)
    launch_(pools[1].stores[0], resident, static, out)  # compiled before it is captured
    pools[1].release_(refs[1][0])
    pools[1] = make_pool(layer, 3, gpu, fmt)
    refs[1] = [pools[1].admit_([state], position=i) for i, state in enumerate(states)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_(pools[1].stores[0], resident, static, out)
    for step in range(9):
        block = block_on(layer, 3, step, gpu)
        ticket = pools[0].begin(refs[0])
        expected = pools[0].step_(ticket, 0, block, depth=depth)
        fresh = device_plan(ticket.plan, pools[0].ring, depth, 1, gpu)
        pools[0].commit_(ticket, 1)
        resident.counts.copy_(fresh.counts)
        resident.due.copy_(fresh.due)
        for name in ("q", "k", "v", "g", "w"):
            getattr(static, name).copy_(getattr(block, name))
        graph.replay()
        assert torch.equal(out, expected)
    first, second = (pool.stores[0].present() for pool in pools)
    planes = [name for name in ("high", "low", "row_scale") if name in first]
    assert all(torch.equal(first[name], second[name]) for name in planes)


def test_a_pool_past_two_to_the_31_elements(gpu: torch.device) -> None:
    slots = 2**31 // MAMBA.state_elements + 3
    pool = make_pool(MAMBA, slots, gpu, "f32")
    small = make_pool(MAMBA, 1, gpu, "f32")
    state = make_state(MAMBA, seed=0).to(gpu)
    refs = [pool.admit_([state]) for _ in range(slots)]
    other = small.admit_([state])
    for step in range(6):
        block = block_on(MAMBA, 1, step, gpu)
        outputs = []
        for where, ref in ((pool, refs[-1]), (small, other)):
            ticket = where.begin([ref])
            outputs.append(where.step_(ticket, 0, block))
            where.commit_(ticket, 1)
        assert torch.equal(*outputs)
    assert refs[-1].slot == slots - 1
    assert torch.equal(pool.stores[0].high[refs[-1].slot], small.stores[0].high[0])
    assert torch.equal(pool.stores[0].high[refs[0].slot], state)


@pytest.mark.parametrize(("layer", "fmt"), LAYERS, ids=IDS)
def test_strided_slots_and_bystanders(layer: LayerSpec, fmt: str, gpu: torch.device) -> None:
    dense, wide = make_pool(layer, 4, gpu, fmt), make_pool(layer, 8, gpu, fmt)
    views = {name: x[::2] for name, x in wide.stores[0].present().items()}
    strided = LayerStore(wide.stores[0].spec, **views)
    for x in wide.stores[0].present().values():
        x[1::2].view(torch.uint8).fill_(0x7B)
    before = {name: x[1::2].clone() for name, x in wide.stores[0].present().items()}
    refs = [dense.admit_([make_state(layer, seed=i).to(gpu)], position=i) for i in range(4)]
    for name, x in dense.stores[0].present().items():
        views[name].copy_(x)
    for step in range(6):
        ticket = dense.begin(refs[:3])
        block = block_on(layer, 3, step, gpu)
        expected = dense.step_(ticket, 0, block, depth=ReadDepth.HIGH)
        got = step_(strided, ticket.plan, block, depth=ReadDepth.HIGH)
        dense.commit_(ticket, 1)
        assert torch.equal(got, expected)
    for name, x in dense.stores[0].present().items():
        assert torch.equal(views[name], x), name
        assert torch.equal(wide.stores[0].present()[name][1::2], before[name]), name
