"""Committing a tree moves the same entries as the reference, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayssm.ops import compact_
from replayssm.ring import BlockPlan, RingSpec
from replayssm.storage import LayerStore, StorageSpec, allocate
from replayssm.types import ConvSpec, Decay, Format, Impl, LayerSpec, Write

CONV = ConvSpec(300, 4)  # more than a program's channels
LAYERS = (
    LayerSpec(Write.DELTA, Decay.CHANNEL, 2, 2, key_dim=20, value_dim=12, conv=CONV),
    LayerSpec(Write.ADDITIVE, Decay.SCALAR, 1, 4, key_dim=8, value_dim=24),
)
# the block's nodes are kept in order from a root down; None was released, () was aborted
PATHS = [(0, 2, 5), (1, 3, 4), None, (), (0, 1, 2, 3, 4, 5), (5,)]


@pytest.mark.parametrize("layer", LAYERS, ids=["channel", "scalar"])
def test_kept_entries_move_to_the_front(device: torch.device, layer: LayerSpec) -> None:
    ring = RingSpec(4, max_block=6)
    store = allocate(StorageSpec(layer, Format.F32, ring, torch.float32), 8, device)
    gen = torch.Generator(device).manual_seed(0)
    for x in store.present().values():
        x.normal_(generator=gen)
    twin = LayerStore(store.spec, **{n: x.clone() for n, x in store.present().items()})
    slots = np.array([3, 0, -1, 5, 7, 1])
    committed = np.array([0, 13, 0, 9, 22, 16])
    parents = np.full((6, 6), -1)
    plan = BlockPlan(slots, 0 * slots, committed, committed, np.full(6, 6), parents)
    compact_(store, plan, PATHS, impl=Impl.TRITON)
    compact_(twin, plan, PATHS, impl=Impl.REFERENCE)
    for name, x in store.present().items():
        assert torch.equal(x, twin.present()[name]), name
