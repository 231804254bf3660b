"""One shape table sizes, allocates and predicts: bytes agree to the last one."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm.errors import ContractError
from replayssm.memory import GIB, moved_bytes, plan_memory
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.storage import RING_DTYPES, StorageSpec, allocate
from replayssm.testing.factories import FAMILIES, make_layer
from replayssm.testing.guard import guarded_store
from replayssm.types import Decay, Format, LayerSpec, ReadDepth, Write


@st.composite
def layers(draw):
    key_heads = draw(st.integers(1, 3))
    return LayerSpec(
        draw(st.sampled_from(Write)),
        draw(st.sampled_from(Decay)),
        key_heads,
        key_heads * draw(st.integers(1, 4)),
        draw(st.integers(1, 20)),
        draw(st.integers(4, 20)),
    )


@st.composite
def specs(draw):
    window = draw(st.integers(4, 20))
    ring = RingSpec(
        window, draw(st.integers(0, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    )
    return draw(layers()), draw(st.sampled_from(Format)), ring, draw(st.sampled_from(RING_DTYPES))


def measured(tensors):
    """Bytes of the storages behind tensors: what was really allocated."""
    return sum(x.untyped_storage().nbytes() for x in tensors)


@given(specs(), st.integers(1, 5))
def test_predicted_bytes_are_the_allocated_bytes(fields, slots):
    spec = StorageSpec(*fields)
    store = allocate(spec, slots, torch.device("cpu"))
    tensors = store.present()
    assert measured(tensors.values()) == spec.nbytes(slots)
    assert measured(tensors[name] for name in "kvgw") == spec.ring_nbytes(slots)
    assert spec.nbytes(slots) == slots * spec.nbytes(1)


@given(specs(), st.integers(1, 5))
def test_pool_and_plan_agree_with_the_allocator(fields, slots):
    layer, fmt, ring, dtype = fields
    pool = StatePool([layer, layer], slots, state=fmt, ring=ring, ring_dtype=dtype)
    allocated = sum(measured(store.present().values()) for store in pool.stores)
    plan = plan_memory([layer, layer], 1.0, state=fmt, ring=ring, ring_dtype=dtype)
    assert pool.nbytes() == allocated == slots * plan.slot_bytes
    assert plan.slots == GIB // plan.slot_bytes
    assert plan.slots * plan.slot_bytes <= plan.budget_bytes < (plan.slots + 1) * plan.slot_bytes
    assert plan.ring_bytes < plan.slot_bytes
    assert plan.standard_bytes == 2 * 4 * layer.state_elements
    assert plan.standard_slots == GIB // plan.standard_bytes


def test_a_fresh_pool_shows_no_foreign_memory():
    store = allocate(StorageSpec(make_layer(*FAMILIES[0]), Format.Q24, RingSpec()), 2, "cpu")
    assert not any(bool(x.any()) for x in store.present().values())


def test_bytes_of_planes_are_those_of_the_format_table():
    layer = make_layer(*FAMILIES[0], (1, 1), (128, 64))
    elements = layer.state_elements
    got = {
        fmt: sum(x.nbytes for x in (s.high, s.low) if x is not None) / elements
        for fmt in Format
        for s in [allocate(StorageSpec(layer, fmt, RingSpec()), 1, torch.device("cpu"))]
    }
    assert got == {"f32": 4, "s32": 4, "q24": 3, "q16": 2, "bf16": 2}


@pytest.mark.parametrize("gib", [0, -1.0, nan, inf, 1e308])
def test_a_plan_needs_a_positive_budget(gib):
    with pytest.raises(ContractError, match="gib: expected a positive finite number"):
        plan_memory([make_layer(*FAMILIES[0])], gib)


def test_a_plan_needs_layers():
    with pytest.raises(ContractError, match="layers: expected at least one layer"):
        plan_memory([], 1.0)


def test_impossible_storage_is_refused_by_name():
    layer = make_layer(*FAMILIES[0], dims=(4, 3))
    with pytest.raises(ContractError, match="ring_dtype: expected one of"):
        StorageSpec(layer, Format.F32, RingSpec(), torch.float64)
    with pytest.raises(ContractError, match=r"tiles: expected at most value_dim \(3\), got 4"):
        StorageSpec(layer, Format.F32, RingSpec(tiles=4))


def test_choices_given_as_text_mean_the_same_choice():
    """Code compares choices by identity; a string must not silently mean the other one."""
    layer = LayerSpec("delta", "channel", 1, 2, 4, 3)
    assert layer.write is Write.DELTA
    assert layer.decay is Decay.CHANNEL
    assert StorageSpec(layer, "q24", RingSpec()).format is Format.Q24
    with pytest.raises(ContractError, match="Write: expected one of additive, delta, got 'add'"):
        LayerSpec("add", "scalar", 1, 1, 1, 1)


@pytest.mark.parametrize("fmt", list(Format))
def test_guarded_stores_have_gaps_around_every_slot(fmt):
    spec = StorageSpec(make_layer(*FAMILIES[3]), fmt, RingSpec())
    guarded = guarded_store(spec, 3)
    digest = guarded.guard_digest()
    for x in guarded.store.present().values():
        x.zero_()
    assert guarded.guard_digest() == digest
    for name, whole in guarded.storage.items():
        kept, whole[-1] = whole[-1].clone(), 1
        assert guarded.guard_digest() != digest, name
        whole[-1] = kept


@pytest.mark.parametrize("depth", list(ReadDepth))
def test_moved_bytes_count_planes_folds_and_entries(depth):
    """By hand: 5 of 8 tokens kept, window 16, an additive layer of one head with K = 4, V = 3."""
    layer = make_layer(*FAMILIES[0], (1, 1), (4, 3), (6, 4))
    spec = StorageSpec(layer, Format.S32, RingSpec(window=16, max_block=8), torch.bfloat16)
    planes = 12 * ((2 if depth is ReadDepth.HIGH else 4) + 2 * 4 * 5 / 16)
    entry = (4 + 3) * 2 + 2 * 4
    entries = 7.5 + 8 + 8 + 5  # half a window and the block are read, the block written, 5 folded
    inputs = (3 + 8) * 6 * 2
    assert moved_bytes(spec, 8, 5, depth) == planes + entries * entry + inputs
