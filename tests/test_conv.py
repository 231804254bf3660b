"""The convolution's inputs live in a ring of their own and follow the one number that moves."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d

from replayssm.errors import ContractError, SlotError, TicketError
from replayssm.memory import plan_memory
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.driver import Driver
from replayssm.testing.factories import (
    FAMILIES,
    make_block,
    make_inputs,
    make_layer,
    make_state,
    make_taps,
    make_tree,
)
from replayssm.testing.guard import pool_digest, slot_digest
from replayssm.types import ConvSpec

WINDOW = 4
CONV = ConvSpec(6, 4)
LAYERS = (
    make_layer(*FAMILIES[0], (1, 2), (6, 5), (6, 4)),
    make_layer(*FAMILIES[1], (1, 1), (5, 3)),
    make_layer(*FAMILIES[3], (1, 2), (6, 5), (9, 2)),
)
phases = pytest.mark.parametrize("phase", range(2 * WINDOW + 1))
widths = pytest.mark.parametrize("width", [2, 3, 4])


def driver(impl="reference", *, slots=3, keep=0, max_block=3, tiles=1, **kwargs):
    ring = RingSpec(window=WINDOW, keep=keep, max_block=max_block, tiles=tiles)
    return Driver(StatePool(LAYERS, slots, ring=ring, impl=impl, **kwargs))


def at_phase(impl, phase, **kwargs):
    d = driver(impl, **kwargs)
    ref = d.admit(position=2)
    for _ in range(phase):
        d.forward([ref], [1], [1])
    return d, ref


def go_on(d, *refs):
    for accepted in (1, 3, 0, 2, 1):
        d.forward(list(refs), [3] * len(refs), [accepted] * len(refs))
        for ref in refs:
            d.check_windows(ref)


def conv_pool(width, **kwargs):
    layer = make_layer(*FAMILIES[0], (1, 1), (4, 3), (6, width))
    ring = RingSpec(window=WINDOW, max_block=7)
    return StatePool([layer], 2, **{"ring": ring, "impl": "reference", **kwargs})


def forward(pool, refs, x, taps, accepted, parents=None):
    """One forward of a one-layer pool; return the convolution's outputs."""
    ticket = pool.begin(refs, x.shape[1], parents)
    y = pool.conv_(ticket, 0, x, *taps)
    pool.step_(ticket, 0, make_block(pool.specs[0].layer, len(refs), x.shape[1], seed=0))
    if parents is None:
        pool.commit_(ticket, accepted)
    else:
        pool.commit_paths_(ticket, accepted)
    return y


def whole(x, window, taps):
    """The convolution of a whole sequence ``[N, C]`` behind a window ``[C, width - 1]``."""
    padded = torch.cat([window, x.T], 1).unsqueeze(0)
    return conv1d(padded, taps[0].unsqueeze(1), taps[1], groups=len(taps[0]))[0].T


@widths
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("prompt", [0, 1, 9])
def test_every_split_equals_the_convolution_of_the_whole_sequence(width, tokens, prompt):
    """A prompt shorter than the window leaves zeros in front of it."""
    pool, taps = conv_pool(width), make_taps(ConvSpec(6, width), seed=1)
    window = make_inputs(ConvSpec(6, width), 1, width - 1, seed=2)[0].T
    window[:, : max(0, width - 1 - prompt)] = 0
    x = make_inputs(ConvSpec(6, width), 1, 21, seed=3)
    ref, got = pool.admit_(None, prompt, [window]), []
    for start in range(0, 21, tokens):
        piece = x[:, start : start + tokens]
        got.append(forward(pool, [ref], piece, taps, piece.shape[1])[0])
    torch.testing.assert_close(torch.cat(got), whole(x[0], window, taps), rtol=1e-5, atol=1e-5)
    everything = torch.cat([window, x[0].T], 1)
    assert torch.equal(pool.conv_windows(ref)[0], everything[:, -width + 1 :])


@widths
@pytest.mark.parametrize(("length", "accepted"), [(n, a) for n in (1, 4, 7) for a in range(n + 1)])
def test_the_window_follows_the_accepted_entries(width, length, accepted):
    pool, taps = conv_pool(width), make_taps(ConvSpec(6, width), seed=1)
    ref, kept = pool.admit_(), [torch.zeros(width - 1, 6)]
    for turn in range(8):
        x = make_inputs(ConvSpec(6, width), 1, length, seed=turn)
        forward(pool, [ref], x, taps, accepted)
        kept.append(x[0, :accepted])
        assert torch.equal(pool.conv_windows(ref)[0], torch.cat(kept)[-width + 1 :].T)


@widths
@pytest.mark.parametrize("seed", range(6))
def test_a_tree_equals_each_of_its_paths_alone(width, seed):
    pool, taps = conv_pool(width), make_taps(ConvSpec(6, width), seed=1)
    conv, parents = ConvSpec(6, width), make_tree(7, seed=seed)
    window = make_inputs(conv, 1, width - 1, seed=2)[0].T
    x = make_inputs(conv, 1, 7, seed=seed)
    tree = pool.admit_(None, 1, [window])
    ticket = pool.begin([tree], 7, [parents])
    y = pool.conv_(ticket, 0, x, *taps)
    pool.step_(ticket, 0, make_block(pool.specs[0].layer, 1, 7, seed=0))
    for node in range(7):
        path = ticket.plan.ancestors(0, node)
        alone = pool.admit_(None, 1, [window])
        assert torch.equal(forward(pool, [alone], x[:, path], taps, len(path)), y[:, path])
        expected = pool.conv_windows(alone)[0]
        pool.release_(alone)
    pool.commit_paths_(ticket, [path])
    assert torch.equal(pool.conv_windows(tree)[0], expected)


def test_a_later_token_changes_no_earlier_output():
    taps = make_taps(CONV, seed=1)
    for t in range(7):
        x = make_inputs(CONV, 1, 7, seed=2)
        pools = conv_pool(4), conv_pool(4)
        a = forward(pools[0], [pools[0].admit_()], x, taps, 7)
        x[:, t] += 1
        b = forward(pools[1], [pools[1].admit_()], x, taps, 7)
        assert torch.equal(a[:, :t], b[:, :t])
        assert not torch.equal(a[:, t], b[:, t])


@pytest.mark.parametrize("ring_dtype", [torch.float32, torch.bfloat16])
def test_one_block_equals_single_steps_bit_for_bit(ring_dtype):
    """Also where the ring rounds: a token reads rounded neighbours from its own block too."""
    x, taps = make_inputs(CONV, 1, 7, seed=2), make_taps(CONV, seed=1)
    pool = conv_pool(4, ring_dtype=ring_dtype)
    a, b = pool.admit_(), pool.admit_()
    block = forward(pool, [a], x, taps, 7)
    steps = [forward(pool, [b], x[:, t : t + 1], taps, 1) for t in range(7)]
    assert torch.equal(block, torch.cat(steps, 1))


def test_outputs_have_the_dtype_of_the_inputs():
    x, (weight, bias) = make_inputs(CONV, 1, 2, seed=2).bfloat16(), make_taps(CONV, seed=1)
    pool = conv_pool(4, ring_dtype=torch.bfloat16)
    y = forward(pool, [pool.admit_()], x, (weight.bfloat16(), bias.bfloat16()), 2)
    assert y.dtype == torch.bfloat16
    assert pool.conv_windows(pool.admit_())[0].dtype == torch.bfloat16


@phases
def test_crop_takes_back_inputs_at_every_phase(impl, phase):
    d, ref = at_phase(impl, phase + 3, keep=3)
    for tokens in (0, 1, 2):  # three in all, as many as keep promises
        d.crop(ref, tokens)
        d.check_windows(ref)
    go_on(d, ref)


@phases
@pytest.mark.parametrize("tiles", [1, 3])
def test_windows_are_there_wherever_a_state_can_be_rebuilt(phase, tiles):
    d, ref = at_phase("reference", phase, keep=1, tiles=tiles)
    for length, accepted in ((3, 3), (3, 0), (2, 1), (3, 2)):
        d.forward([ref], [length], [accepted])
        for position in range(d.pool.oldest(ref), d.pool.committed(ref) + 1):
            d.check_windows(ref, position)
    with pytest.raises(ContractError, match="position: expected"):
        d.pool.conv_windows(ref, d.pool.oldest(ref) - 1)


@phases
def test_the_next_tenant_sees_nothing_of_the_last_one(impl, phase):
    """Released slots are poisoned; a tenant without windows starts from zeros."""
    d, ref = at_phase(impl, phase)
    d.release(ref)
    again = d.admit(position=phase, is_zero=True)
    assert again.slot == ref.slot
    assert not any(bool(x.any()) for x in d.pool.conv_windows(again) if x is not None)
    go_on(d, again)


@phases
def test_a_fork_and_an_image_carry_the_inputs(impl, phase):
    d, ref = at_phase(impl, phase)
    copy = d.fork(ref)
    assert all(slot_digest(s, ref.slot) == slot_digest(s, copy.slot) for s in d.pool.stores)
    image = d.pool.export(ref)
    live = image.committed - image.oldest
    assert image.layers[0]["conv"].shape == (live + 3, 6)
    assert "conv" not in image.layers[1]
    other = driver(impl, max_block=4)
    other.admit()
    moved = other.pool.import_(image)
    other.oracles[moved] = [oracle.fork() for oracle in d.oracles[ref]]
    other.poison(moved)
    go_on(d, ref, copy)
    go_on(other, moved)


def test_an_image_that_spans_more_than_the_ring_of_inputs_is_refused():
    here = driver(max_block=4)
    ref = here.admit()
    here.forward([ref], [4], [3])
    here.forward([ref], [4], [4])
    image = here.pool.export(ref)
    there = driver(max_block=1)
    before = pool_digest(there.pool)
    with pytest.raises(ContractError, match="image: expected at most 4 live entries, got 7"):
        there.pool.import_(image)
    assert pool_digest(there.pool) == before


def test_reorder_carries_the_inputs(impl):
    d, a = at_phase(impl, 3)
    b, c = d.admit(), d.admit(is_zero=True)
    go_on(d, *d.reorder([a, b, c], [2, 0, 2]))


def test_planned_bytes_hold_the_inputs():
    bare = [make_layer(*FAMILIES[0], (1, 2), (6, 5))]
    ring = RingSpec(window=16, keep=2, max_block=5)
    given = [make_layer(*FAMILIES[0], (1, 2), (6, 5), (6, 4))]
    for dtype in (torch.float32, torch.bfloat16):
        plans = [plan_memory(x, 1, ring=ring, ring_dtype=dtype) for x in (bare, given)]
        inputs = (3 + 15 + 2 + 5) * 6 * dtype.itemsize
        assert plans[1].slot_bytes - plans[0].slot_bytes == inputs
        assert plans[1].ring_bytes - plans[0].ring_bytes == inputs
        pool = StatePool(given, 3, ring=ring, ring_dtype=dtype)
        assert pool.nbytes() == 3 * plans[1].slot_bytes


def test_pad_rows_and_lanes_are_zero_and_write_nothing(impl):
    d, ref = at_phase(impl, 3)
    other = d.admit()
    d.forward([None, ref, None, other], [1, 3, 2, 1], [0, 2, 0, 1], lanes=2)
    d.check_windows(ref)
    d.check_windows(other)


@pytest.mark.parametrize("missing", ["conv", "step"])
def test_a_forward_that_missed_a_convolution_leaves_its_slot_invalid(missing):
    pool = conv_pool(4)
    ref = pool.admit_()
    ticket = pool.begin([ref])
    if missing == "step":
        pool.conv_(ticket, 0, make_inputs(CONV, 1, 1, seed=0), *make_taps(CONV, seed=0))
        message = "1 of 1 layers never ran"
    else:
        pool.step_(ticket, 0, make_block(pool.specs[0].layer, 1, 1, seed=0))
        message = "1 of 1 convolutions never ran"
    with pytest.raises(TicketError, match=message):
        pool.commit_(ticket, 1)
    with pytest.raises(SlotError, match="half-written"):
        pool.materialise(ref)
    pool.release_(ref)


def test_a_convolution_runs_once_a_forward():
    pool, x, taps = conv_pool(4), make_inputs(CONV, 1, 1, seed=0), make_taps(CONV, seed=0)
    ticket = pool.begin([pool.admit_()])
    pool.conv_(ticket, 0, x, *taps)
    with pytest.raises(TicketError, match="layer 0 has already run"):
        pool.conv_(ticket, 0, x, *taps)
    with pytest.raises(TicketError, match="another pool"):
        conv_pool(4).conv_(ticket, 0, x, *taps)


REFUSED = {
    "layer without": (1, (1, 2, 6), (6, 4), 6, "layer: expected a layer with a convolution"),
    "unknown layer": (3, (1, 2, 6), (6, 4), 6, "layer: expected 0 to 2, got 3"),
    "dimensions": (0, (2, 6), (6, 4), 6, r"x: expected 3 dimensions \[B, T, C\]"),
    "too short": (0, (1, 1, 6), (6, 4), 6, "x: expected at least 2 tokens, as planned, got 1"),
    "channels": (0, (1, 2, 5), (6, 4), 6, r"x: expected shape \(1, 2, 6\), got \(1, 2, 5\)"),
    "width": (0, (1, 2, 6), (6, 3), 6, r"weight: expected shape \(6, 4\), got \(6, 3\)"),
    "bias": (0, (1, 2, 6), (6, 4), 5, r"bias: expected shape \(6,\), got \(5,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_do_not_fit_are_refused(case):
    layer, x, weight, bias, message = REFUSED[case]
    d = driver()
    ticket = d.pool.begin([d.admit()], 2)
    before = pool_digest(d.pool)
    with pytest.raises(ContractError, match=f"^{message}"):
        d.pool.conv_(ticket, layer, torch.zeros(x), torch.zeros(weight), torch.zeros(bias))
    assert pool_digest(d.pool) == before


def test_debug_refuses_inputs_that_are_not_finite():
    d = driver(debug=True)
    x, taps = make_inputs(CONV, 1, 3, seed=0), make_taps(CONV, seed=0)
    x[:, 1] = torch.inf
    x[:, 2] = torch.nan  # past the row's length, where nothing is read
    with pytest.raises(ContractError, match="x: expected finite values"):
        d.pool.conv_(d.pool.begin([d.admit()], 2), 0, x, *taps)
    d.pool.conv_(d.pool.begin([d.admit()], 1), 0, x, *taps)


WINDOWS = {
    "count": ([None], "windows: expected 3 tensors, one a layer, got 1"),
    "shape": ([torch.zeros(6, 4), None, None], r"windows\[0\]: expected shape \(6, 3\)"),
    "dtype": ([torch.zeros(6, 3).int(), None, None], r"windows\[0\]: expected a dense float"),
    "layer without": ([None, torch.zeros(6, 3), None], r"windows\[1\]: expected None, the layer"),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_that_do_not_fit_are_refused(case):
    windows, message = WINDOWS[case]
    pool = driver().pool
    before = pool_digest(pool)
    with pytest.raises(ContractError, match=f"^{message}"):
        pool.admit_([make_state(layer, seed=0) for layer in LAYERS], 2, windows)
    assert pool_digest(pool) == before


@pytest.mark.parametrize(("channels", "width"), [(0, 4), (6, 1)])
def test_impossible_convolutions_are_refused(channels, width):
    with pytest.raises(ContractError, match="expected an integer >="):
        ConvSpec(channels, width)
