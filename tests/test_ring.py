"""Ring arithmetic against a list of integers that is folded by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm.errors import ContractError
from replayssm.ring import RingSpec, tile_rows
from replayssm.testing.factories import make_plan


@st.composite
def rings(draw: st.DrawFn) -> RingSpec:
    window = draw(st.integers(1, 24))
    return RingSpec(
        window, draw(st.integers(0, 9)), draw(st.integers(1, 9)), draw(st.integers(1, window))
    )


def brute_force(ring: RingSpec, tile: int, base: int, folded: int) -> int:
    """Walk every position and remember the last one that is a boundary."""
    at = base
    for position in range(base + 1, folded - ring.keep + 1):
        if position % ring.window == ring.phase(tile):
            at = position
    return at


@given(rings(), st.integers(0, 60), st.integers(0, 80), st.data())
def test_a_tile_stands_at_the_newest_boundary_behind_keep(ring, base, more, data):
    tile = data.draw(st.integers(0, ring.tiles - 1))
    assert ring.folded_to(tile, base, base + more) == brute_force(ring, tile, base, base + more)


@given(rings(), st.integers(0, 60), st.lists(st.integers(0, 9), max_size=12), st.data())
def test_where_a_tile_stands_does_not_depend_on_the_steps_that_led_there(ring, base, steps, data):
    tile = data.draw(st.integers(0, ring.tiles - 1))
    at, folded = base, base
    for step in steps:
        folded += step
        stop = ring.folded_to(tile, base, folded)
        for boundary in ring.boundaries(tile, at, stop):
            assert at < boundary <= stop
            assert boundary % ring.window == ring.phase(tile)
            at = boundary
        assert at == stop
    assert at == ring.folded_to(tile, base, folded)


@given(rings(), st.integers(-50, 50), st.integers(0, 60), st.data())
def test_boundaries_are_exactly_those_of_the_half_open_interval(ring, start, length, data):
    tile = data.draw(st.integers(0, ring.tiles - 1))
    phase, positions = ring.phase(tile), range(start + 1, start + length + 1)
    expected = [p for p in positions if (p - phase) % ring.window == 0]
    assert ring.boundaries(tile, start, start + length) == expected


@given(
    rings(),
    st.integers(0, 99),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30),
)
def test_no_entry_is_overwritten_before_every_tile_has_folded_it(ring, base, moves):
    """Walk blocks and partial commits; the ring is a list of the positions written last."""
    cells: dict[int, int] = {}
    folded = committed = base
    for length, accepted in moves:
        block = min(length, ring.max_block)
        folded = max(folded, committed)
        oldest = ring.oldest_needed(base, folded)
        for position in range(committed, committed + block):
            cells[position % ring.ring_len] = position
        for position in range(oldest, committed + block):
            assert cells[position % ring.ring_len] == position
        committed += min(accepted, block)
        # until the next fold, the planes still stand where this forward brought them
        for position in range(oldest, committed):
            assert cells[position % ring.ring_len] == position


@given(rings(), st.integers(0, 60), st.integers(0, 40))
def test_kept_entries_are_never_folded(ring, base, more):
    newest = base + more
    stands = [ring.folded_to(tile, base, newest) for tile in range(ring.tiles)]
    assert all(at <= max(base, newest - ring.keep) for at in stands)
    assert ring.oldest_needed(base, newest) == min(stands)


@given(rings())
def test_phases_are_distinct_and_spread_over_the_window(ring):
    phases = [ring.phase(tile) for tile in range(ring.tiles)]
    assert phases[0] == 0
    assert phases == sorted(set(phases))
    assert phases[-1] < ring.window
    gaps = [b - a for a, b in zip(phases, [*phases[1:], ring.window], strict=True)]
    assert max(gaps) - min(gaps) <= 1


@given(st.integers(1, 40), st.data())
def test_tiles_partition_the_value_rows(value_dim, data):
    tiles = data.draw(st.integers(1, value_dim))
    rows = [row for tile in range(tiles) for row in tile_rows(tile, tiles, value_dim)]
    assert rows == list(range(value_dim))
    assert all(len(tile_rows(tile, tiles, value_dim)) for tile in range(tiles))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("window", {"window": 0}),
        ("keep", {"keep": -1}),
        ("max_block", {"max_block": 0}),
        ("tiles", {"tiles": 0}),
        ("tiles", {"window": 4, "tiles": 5}),
    ],
)
def test_impossible_sizes_are_refused_by_name(name, sizes):
    with pytest.raises(ContractError, match=rf"^{name}: expected .*, got {sizes[name]}"):
        RingSpec(**sizes)


def test_ancestors_walk_to_the_root():
    plan = make_plan([0, 1], [4, 4], [0, 0], parents=[[-1, 0, 0, 2], [-1, -1, 1, 0]])
    assert plan.ancestors(0, 3) == [0, 2, 3]
    assert plan.ancestors(1, 2) == [1, 2]
    assert make_plan([0], [3], [0]).ancestors(0, 2) == [0, 1, 2]
