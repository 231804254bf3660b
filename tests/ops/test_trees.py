"""Trees of drafts, on every implementation: what a node sees is its own path and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayssm.errors import ContractError
from replayssm.ops import step_
from replayssm.ops.reference import admit_
from replayssm.ring import RingSpec
from replayssm.storage import StorageSpec, allocate
from replayssm.testing.budgets import clone_store
from replayssm.testing.factories import (
    FAMILIES,
    make_block,
    make_layer,
    make_plan,
    make_state,
    make_tree,
    take,
)
from replayssm.testing.guard import plane_digest, slot_digest
from replayssm.types import Format, ReadDepth

RING = RingSpec(window=4, keep=1, max_block=64)
# rows of a forward: a pad row in front, rows at other phases, ragged numbers of nodes
SLOTS, LENGTHS, COMMITTED = [-1, 2, 0, 1], [0, 11, 3, 1], [0, 6, 5, 4]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0]}-{f[1]}")
depths = pytest.mark.parametrize("depth", list(ReadDepth))


def filled_store(impl, family, fmt):
    """Three slots with up to 6 committed entries behind checkpoints at 0 or 4 tokens."""
    layer = make_layer(*family, dims=(37, 21))
    store = allocate(StorageSpec(layer, fmt, RING), 3, torch.device("cpu"))
    for slot in range(3):
        admit_(store, slot, make_state(layer, seed=slot))
    block = make_block(layer, 3, 6, seed=9)
    step_(store, make_plan([0, 1, 2], [6] * 3, [0] * 3), block, impl=impl)
    return store


def trees(lengths, seed=0):
    """One tree a row, padded with parents that nothing may follow."""
    widest = max(lengths)
    return [
        make_tree(n, seed=seed + row) + [widest] * (widest - n) for row, n in enumerate(lengths)
    ]


@families
@depths
@pytest.mark.parametrize("fmt", list(Format))
def test_every_path_reads_the_bits_of_the_same_tokens_in_a_chain(impl, family, depth, fmt):
    store = filled_store(impl, family, fmt)
    plan = make_plan(SLOTS, LENGTHS, COMMITTED, folded=[0] * 4, parents=trees(LENGTHS))
    block = make_block(store.spec.layer, 4, 12, seed=1)
    alone = clone_store(store)
    y = step_(store, plan, block, depth=depth, impl=impl)
    assert not bool(y[0].any())
    for row in (1, 2, 3):
        assert not bool(y[row, LENGTHS[row] :].any())
        for token in range(LENGTHS[row]):
            path, slot = plan.ancestors(row, token), SLOTS[row]
            chain = make_plan([slot], [len(path)], [COMMITTED[row]], folded=[0])
            got = step_(clone_store(alone), chain, take(block, [row], path), depth=depth, impl=impl)
            assert torch.equal(got[0], y[row, path]), (row, path)


@families
@depths
def test_a_node_shows_in_its_descendants_only(impl, family, depth):
    store, nodes = filled_store(impl, family, Format.S32), 9
    plan = make_plan([1], [nodes], [5], folded=[5], parents=[make_tree(nodes, seed=3)])
    block = make_block(store.spec.layer, 1, nodes, seed=2)
    y = step_(clone_store(store), plan, block, depth=depth, impl=impl)
    for node in range(nodes):
        spoiled = take(block, [0], slice(None))
        for x in (spoiled.q, spoiled.k, spoiled.v, spoiled.g, spoiled.w):
            x[:, node] = torch.nan
        z = step_(clone_store(store), plan, spoiled, depth=depth, impl=impl)
        is_below = [node in plan.ancestors(0, t) for t in range(nodes)]
        assert torch.equal(z.isnan().flatten(2).any(-1)[0], torch.tensor(is_below))
        others = [t for t in range(nodes) if not is_below[t]]
        assert torch.equal(z[:, others], y[:, others])


@families
@pytest.mark.parametrize("shape", ["bush", "comb", "chain", "random"])
def test_64_nodes(impl, family, shape):
    """The widest, the deepest and an uneven tree, each against its longest path as a chain."""
    parents = {
        "bush": [-1] * 64,
        "comb": [-1, *(2 * (t // 2) - (1 if t % 2 else 2) for t in range(1, 64))],
        "chain": list(range(-1, 63)),
        "random": make_tree(64, seed=5),
    }[shape]
    store = filled_store(impl, family, Format.F32)
    plan = make_plan([2], [64], [6], folded=[6], parents=[parents])
    block = make_block(store.spec.layer, 1, 64, seed=4)
    y = step_(clone_store(store), plan, block, impl=impl)
    path = max((plan.ancestors(0, t) for t in range(64)), key=len)
    chain = make_plan([2], [len(path)], [6], folded=[6])
    got = step_(clone_store(store), chain, take(block, [0], path), impl=impl)
    assert torch.equal(got[0], y[0, path])


@families
@pytest.mark.parametrize("fmt", list(Format))
def test_a_verify_that_does_not_fold_leaves_every_plane(impl, family, fmt):
    store = filled_store(impl, family, fmt)
    plan = make_plan([1, 0], [7, 5], [6, 6], folded=[0, 0], parents=trees([7, 5]))
    planes, bystander = [plane_digest(store, slot) for slot in (0, 1)], slot_digest(store, 2)
    step_(store, plan, make_block(store.spec.layer, 2, 7, seed=5), impl=impl)
    assert [plane_digest(store, slot) for slot in (0, 1)] != planes
    planes = [plane_digest(store, slot) for slot in (0, 1)]
    settled = make_plan([1, 0], [7, 5], [6, 6], folded=[6, 6], parents=trees([7, 5], seed=7))
    step_(store, settled, make_block(store.spec.layer, 2, 7, seed=6), impl=impl)
    assert [plane_digest(store, slot) for slot in (0, 1)] == planes
    assert slot_digest(store, 2) == bystander


@pytest.mark.parametrize("parents", [[0, 0, 1], [-2, 0, 1], [-1, 2, 1]])
def test_parents_come_before_their_nodes(impl, parents):
    store = filled_store(impl, FAMILIES[0], Format.F32)
    before = slot_digest(store, 0)
    block = make_block(store.spec.layer, 1, 3, seed=0)
    with pytest.raises(ContractError, match=r"-1 <= parents\[b, t\] < t"):
        step_(store, make_plan([0], [3], [6], folded=[0], parents=[parents]), block, impl=impl)
    short = make_plan([0], [3], [6], folded=[0], parents=[parents[:2]])
    with pytest.raises(ContractError, match="parents of shape"):
        step_(store, short, block, impl=impl)
    assert slot_digest(store, 0) == before
    assert np.array_equal(short.parents, [parents[:2]])
