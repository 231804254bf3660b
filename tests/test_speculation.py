"""Trees commit a path, and crop takes back what keep promises."""

from __future__ import annotations

import random

import pytest
import torch

from replayssm import Block, Decay, LayerSpec, RingSpec, StatePool, Write
from replayssm.errors import ContractError
from replayssm.testing.guard import plane_digest
from replayssm.types import Format, Impl

NODES, KEEP = 7, 3


def inputs(layer: LayerSpec, tokens: int, seed: int) -> Block:
    made = torch.Generator().manual_seed(seed)
    h, hv = layer.key_heads, layer.value_heads
    k = torch.randn(1, tokens, h, layer.key_dim, generator=made)
    return Block(
        torch.randn(1, tokens, h, layer.key_dim, generator=made),
        torch.nn.functional.normalize(k, dim=-1),
        torch.randn(1, tokens, hv, layer.value_dim, generator=made),
        -torch.rand(1, tokens, *layer.gate_shape(), generator=made),
        torch.rand(1, tokens, hv, generator=made),
    )


def pool_of(layer: LayerSpec, impl: Impl, fmt: Format = Format.S32) -> StatePool:
    ring = RingSpec(window=8, max_block=NODES, keep=KEEP)
    return StatePool([layer] * 2, 2, state=fmt, ring=ring, impl=impl)


@pytest.mark.parametrize("write", list(Write))
@pytest.mark.parametrize("decay", list(Decay))
@pytest.mark.parametrize("fmt", list(Format))
def test_accepted_path_is_all_that_a_tree_leaves_behind(impl, write, decay, fmt):
    layer, draw = LayerSpec(write, decay, 2, 4, 12, 10), random.Random(0)
    ours, plain = pool_of(layer, impl, fmt), pool_of(layer, impl, fmt)
    a, b = ours.admit_(), plain.admit_()
    for turn in range(12):
        parents = [-1, *(draw.randrange(-1, t) for t in range(1, NODES))]
        blocks = [inputs(layer, NODES, 2 * turn + i) for i in range(2)]
        ticket = ours.begin([a], NODES, [parents])
        seen = [ours.step_(ticket, i, block) for i, block in enumerate(blocks)]
        path = ticket.plan.ancestors(0, draw.randrange(NODES))
        ours.commit_paths_(ticket, [path])
        ticket = plain.begin([b], len(path))
        for i, block in enumerate(blocks):
            kept = Block(*(getattr(block, name)[:, path] for name in "qkvgw"))
            assert torch.equal(plain.step_(ticket, i, kept), seen[i][:, path])
        plain.commit_(ticket, len(path))
        back = draw.randrange(min(KEEP, ours.committed(a) - ours.oldest(a)) + 1)
        ours.crop_([a], back)
        plain.crop_([b], back)
        assert ours.committed(a) == plain.committed(b)
    for x, y in zip(ours.materialise(a), plain.materialise(b), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(ours.stores, plain.stores, strict=True):
        assert plane_digest(x, a.slot) == plane_digest(y, b.slot)


def test_count_on_a_tree_must_be_a_path(impl):
    layer = LayerSpec(Write.DELTA, Decay.SCALAR, 1, 1, 8, 8)
    pool = pool_of(layer, impl)
    ref = pool.admit_()
    ticket = pool.begin([ref], 3, [[-1, -1, 1]])
    for i in range(2):
        pool.step_(ticket, i, inputs(layer, 3, i))
    with pytest.raises(ContractError, match="root-to-node path"):
        pool.commit_(ticket, 2)
    with pytest.raises(ContractError, match="root-to-node path"):
        pool.commit_paths_(ticket, [[0, 2]])
    pool.commit_paths_(ticket, [[1, 2]])
    assert pool.committed(ref) == 2


@pytest.mark.parametrize("phase", range(8))
def test_crop_takes_back_keep_at_every_phase_and_no_more(impl, phase):
    layer = LayerSpec(Write.DELTA, Decay.SCALAR, 1, 1, 8, 8)
    pool = pool_of(layer, impl)
    ref = pool.admit_()
    states = []
    for token in range(16 + phase):
        ticket = pool.begin([ref])
        for i in range(2):
            pool.step_(ticket, i, inputs(layer, 1, 2 * token + i))
        pool.commit_(ticket, 1)
        states.append(pool.materialise(ref))
    most = pool.committed(ref) - pool.oldest(ref)
    assert most >= KEEP
    with pytest.raises(ContractError, match="keep"):
        pool.crop_([ref], most + 1)
    pool.crop_([ref], 0)
    assert pool.committed(ref) == 16 + phase
    pool.crop_([ref], KEEP)
    for now, then in zip(pool.materialise(ref), states[-1 - KEEP], strict=True):
        # folded since, so some entries were added to it in another order
        torch.testing.assert_close(now, then, rtol=1e-5, atol=1e-6)
