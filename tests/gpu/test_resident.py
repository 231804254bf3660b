"""Rows whose counts live on the device: a pool's own steps, with nothing asked of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayssm.errors import ContractError, SlotError, UnsupportedError
from replayssm.integrations.resident import ResidentReplay, ResidentStandard
from replayssm.ring import BlockPlan, RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import make_block, make_state
from replayssm.types import Block, ConvSpec, Decay, Format, Impl, LayerSpec, ReadDepth, Write

CONV = ConvSpec(12, 4)
LAYER = LayerSpec(Write.DELTA, Decay.SCALAR, 1, 2, key_dim=16, value_dim=16, conv=CONV)
RINGS = (RingSpec(4), RingSpec(4, max_block=3), RingSpec(8, keep=2, max_block=3, tiles=4))


def make_pool(ring: RingSpec, device: torch.device) -> tuple[StatePool, list]:
    pool = StatePool([LAYER], 3, state=Format.F32, ring=ring, device=device, impl=Impl.TRITON)
    refs = [pool.admit_([make_state(LAYER, seed=i).to(device)], position=3 * i) for i in range(3)]
    return pool, refs


def inputs(tokens: int, seed: int, device: torch.device) -> tuple[Block, torch.Tensor]:
    block = make_block(LAYER, 3, tokens, seed=seed)
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(3, tokens, CONV.channels, generator=gen)
    fields = (block.q, block.k, block.v, block.g, block.w)
    return Block(*(f.to(device) for f in fields)), x.to(device)


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_steps_are_those_of_the_pool(device: torch.device, ring: RingSpec) -> None:
    tokens = ring.max_block
    (pool, refs), (twin, others) = make_pool(ring, device), make_pool(ring, device)
    rows = ResidentReplay(twin, others, tokens=tokens)
    weight = torch.randn(CONV.channels, CONV.width, generator=torch.Generator().manual_seed(9))
    weight = weight.to(device)
    for step in range(9):
        block, x = inputs(tokens, step, device)
        accepted = [1 + (step + row) % tokens for row in range(3)]
        ticket = pool.begin(refs, tokens)
        want = pool.conv_(ticket, 0, x, weight), pool.step_(ticket, 0, block)
        pool.commit_(ticket, accepted)
        rows.begin(tokens)
        got = rows.conv(0, x, weight, None), rows.step(0, block, ReadDepth.FULL)
        rows.accepted.copy_(torch.tensor(accepted))
        rows.commit()
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    with pytest.raises(SlotError):
        twin.begin(others)
    rows.close()
    assert [twin.committed(r) for r in others] == [pool.committed(r) for r in refs]
    for a, b in zip(refs, others, strict=True):
        assert torch.equal(pool.materialise(a)[0], twin.materialise(b)[0])


def test_snapshots_go_on_from_the_last_kept_token(device: torch.device) -> None:
    from replayssm.ops import standard_

    tokens, index = 3, np.arange(3)
    rows = ResidentStandard([LAYER], 3, tokens=tokens, device=device)
    state = torch.zeros(3, 2, 16, 16, device=device)
    for step in range(5):
        block, _ = inputs(tokens, step, device)
        kept = 1 + step % tokens
        whole, part = (
            BlockPlan(index, 0 * index, 0 * index, 0 * index, 0 * index + n) for n in (tokens, kept)
        )
        want = standard_(state.clone(), LAYER, whole, block, impl=Impl.TRITON)
        standard_(state, LAYER, part, block, impl=Impl.TRITON)
        rows.accepted.fill_(kept)
        got = rows.step(0, block, ReadDepth.FULL)
        rows.commit()
        assert torch.equal(got, want)


def test_what_the_host_cannot_do_is_refused(device: torch.device) -> None:
    pool, refs = make_pool(RingSpec(4), device)
    rows = ResidentReplay(pool, refs, depth="full")
    block, _ = inputs(1, 0, device)
    with pytest.raises(ContractError):
        rows.begin(2)
    with pytest.raises(ContractError):
        rows.step(0, block, ReadDepth.HIGH)
    with pytest.raises(UnsupportedError):
        rows.materialise()
    with pytest.raises(UnsupportedError):
        rows.select([0, 1, 2])
    reference = StatePool([LAYER], 1, impl=Impl.REFERENCE)
    with pytest.raises(UnsupportedError):
        ResidentReplay(reference, [reference.admit_()])
