"""Slot images: complete, self-describing, independent of their pool, refused if foreign."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch

from replayssm.errors import CapacityError, ContractError
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.driver import Driver
from replayssm.testing.factories import FAMILIES, make_layer
from replayssm.testing.guard import pool_digest
from replayssm.types import Format, LayerSpec

LAYERS = tuple(make_layer(*family, (1, 2), (6, 5)) for family in (FAMILIES[0], FAMILIES[3]))
RING = RingSpec(window=4, max_block=2)


def driver(impl, fmt=Format.Q24, ring=RING, slots=2):
    return Driver(StatePool(LAYERS, slots, state=fmt, ring=ring, impl=impl))


SWEEP = [(Format.Q24, phase) for phase in range(9)] + [(fmt, 6) for fmt in Format]


@pytest.mark.parametrize(("fmt", "phase"), SWEEP)
def test_a_slot_continues_in_another_pool_as_if_nothing_had_happened(impl, fmt, phase):
    """Every position modulo twice the window; rings of another length; the next window equal."""
    here, there = driver(impl, fmt), driver(impl, fmt, RingSpec(window=4, max_block=5))
    ref = here.admit(position=1)
    for _ in range(phase):
        here.forward([ref], [1], [1])
    there.admit()  # the import lands in another slot than it left
    there._seed = here._seed
    moved = there.pool.import_(here.pool.export(ref))
    there.oracles[moved] = [oracle.fork() for oracle in here.oracles[ref]]
    there.poison(moved)
    there.check_state(moved)
    for _ in range(6):
        a, b = here.forward([ref], [2], [1]), there.forward([moved], [2], [1])
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_image_holds_live_entries_only(impl):
    here = driver(impl)
    ref = here.admit()
    for expected in (0, 1, 2, 3, 4, 1, 2):
        # the fold at boundary 4 happens when the next forward begins
        image = here.pool.export(ref)
        assert image.committed - image.oldest == expected
        for tensors in image.layers:
            assert all(tensors[name].shape[1] == expected for name in "kvgw")
            assert not any(bool(x.isnan().any()) for x in tensors.values())
        here.forward([ref], [1], [1])


def test_an_image_shares_no_memory_with_its_pool(impl):
    here = driver(impl)
    ref = here.admit()
    here.forward([ref], [2], [2])
    image = here.pool.export(ref)
    kept = [{name: x.clone() for name, x in layer.items()} for layer in image.layers]
    for _ in range(12):
        here.forward([ref], [2], [2])
    here.release(ref)
    for before, after in zip(kept, image.layers, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    again = here.pool.import_(image)
    for layer in image.layers:
        for x in layer.values():
            x.zero_()
    assert bool(here.pool.stores[0].high[again.slot].any())


def test_a_pickled_image_is_the_same_image(impl):
    """Also those of uint16 planes, which pickle itself does not know."""
    here, there = driver(impl, Format.S32), driver(impl, Format.S32)
    ref = here.admit()
    for _ in range(6):
        here.forward([ref], [1], [1])
    image = here.pool.export(ref)
    for carried in (pickle.loads(pickle.dumps(image)), copy.deepcopy(image)):
        assert replace(carried, layers=()) == replace(image, layers=())
        again = there.pool.export(there.pool.import_(carried))
        for before, after in zip(image.layers, again.layers, strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)


def image_of(impl="reference", **kwargs):
    here = driver(impl, **kwargs)
    ref = here.admit()
    here.forward([ref], [2], [2])
    return here.pool, here.pool.export(ref)


OTHERS = {
    "format": {"state": Format.Q16},
    "ring_dtype": {"ring_dtype": torch.bfloat16},
    "window": {"ring": RingSpec(window=5, max_block=2)},
    "keep": {"ring": RingSpec(window=4, keep=1, max_block=2)},
    "tiles": {"ring": RingSpec(window=4, max_block=2, tiles=2)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_pool_that_would_read_the_bytes_otherwise_is_refused(name):
    _, image = image_of()
    fields = {"state": Format.Q24, "ring": RING, "impl": "reference", **OTHERS[name]}
    pool = StatePool(LAYERS, 2, **fields)
    before = pool_digest(pool)
    with pytest.raises(ContractError, match=f"image layer 0 {name}: expected"):
        pool.import_(image)
    assert pool_digest(pool) == before


def _without(image, name):
    return tuple({n: x for n, x in layer.items() if n != name} for layer in image.layers)


def _with(image, name, change):
    return tuple({**layer, name: change(layer[name])} for layer in image.layers)


DAMAGE = {
    "schema": (lambda i: replace(i, schema="replayssm.slot/0"), "image: expected schema"),
    "layers": (lambda i: replace(i, specs=i.specs[:1]), "image: expected 2 layers, got 1"),
    "tensors": (lambda i: replace(i, layers=i.layers[:1]), "tensors of 2 layers, got 1"),
    "missing": (lambda i: replace(i, layers=_without(i, "low")), "layer 0 low: .* got nothing"),
    "short": (
        lambda i: replace(i, layers=_with(i, "v", lambda x: x[:, :1])),
        "layer 0 v: expected",
    ),
    "dtype": (lambda i: replace(i, layers=_with(i, "k", torch.Tensor.double)), "layer 0 k: .*64"),
    "plane": (lambda i: replace(i, layers=_with(i, "high", lambda x: x[:1])), "layer 0 high"),
    "oldest": (lambda i: replace(i, oldest=1), "image: expected 0 <= base <= oldest"),
    "committed": (lambda i: replace(i, committed=-1), "image: expected 0 <= base <= oldest"),
    "longer": (
        lambda i: replace(i, committed=40),
        "image: expected at most 5 live entries, got 40",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_image_is_refused_before_a_slot_is_taken(damage):
    pool, image = image_of()
    change, message = DAMAGE[damage]
    before = pool_digest(pool)
    with pytest.raises(ContractError, match=message):
        pool.import_(change(image))
    assert pool_digest(pool) == before


def test_another_geometry_is_refused():
    _, image = image_of()
    other = [LayerSpec(x.write, x.decay, 1, 2, 6, 4) for x in LAYERS]
    with pytest.raises(ContractError, match="image layer 0 layer: expected"):
        StatePool(other, 1, state=Format.Q24, ring=RING).import_(image)


def test_a_full_pool_refuses_an_import():
    pool, image = image_of()
    pool.admit_()
    before = pool_digest(pool)
    with pytest.raises(CapacityError, match="no free slot: all 2 are taken"):
        pool.import_(image)
    assert pool_digest(pool) == before


def test_an_image_survives_a_file():
    pool, image = image_of()
    file = io.BytesIO()
    torch.save(image, file)
    file.seek(0)
    ref = pool.import_(torch.load(file, weights_only=False))
    again = pool.export(ref)
    for before, after in zip(image.layers, again.layers, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
