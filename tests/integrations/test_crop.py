"""Rollback of a bound cache: what ``cache.crop`` takes back, and what it refuses.

The numbers of classes are those of a public survey of bugs in recurrent-state decode, rollback and
serving, as in ``tests/test_failures.py``.
"""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from stepping import (  # noqa: E402
    BUDGET,
    OLD_LOOP,
    compare_states,
    forward,
    new_cache,
    recurrent_states,
)
from tiny_families import FAMILIES, QUICK, build, prompt  # noqa: E402

import replayssm  # noqa: E402
from replayssm.errors import ContractError, UnsupportedError  # noqa: E402
from replayssm.integrations import crop as cropping  # noqa: E402

transformers.logging.set_verbosity_error()

WINDOW = 4
KEEP = 5


def crop(cache, tokens):
    cache.crop(-tokens)
    cache.seen -= tokens


def oracle(model, ids, start):
    """Return plain logits of every position from ``start`` on, one token a forward."""
    cache = new_cache(model)
    forward(model, ids[:, :start], cache)
    rest = [forward(model, ids[:, t : t + 1], cache) for t in range(start, ids.shape[1])]
    return torch.cat(rest, dim=1)


@pytest.mark.parametrize("name", [*QUICK, "FalconH1"])
@pytest.mark.parametrize("block", [False, True], ids=["singles", "block"])
def test_crop_at_every_phase(name, block):
    """Classes 29, 34 and 97: state, convolution, keys and values go back together, every time."""
    model, ids, wrong = build(name), prompt(tokens=24), prompt(tokens=KEEP, seed=9)
    wanted = oracle(model, ids, 7)
    with replayssm.enable(model, window=WINDOW, keep=KEEP, self_test=False):
        for phase in range(WINDOW + 1):
            cache = new_cache(model)
            forward(model, ids[:, :7], cache)
            for t in range(7, 7 + phase):
                forward(model, ids[:, t : t + 1], cache)
            at = 7 + phase
            for count in range(KEEP + 1):
                for part in [wrong[:, :count]] if block else wrong[:, :count].split(1, dim=1):
                    if part.shape[1]:
                        forward(model, part, cache)
                crop(cache, count)
                out = forward(model, ids[:, at : at + 1], cache)
                assert float((out[:, 0] - wanted[:, at - 7]).abs().max()) < BUDGET
                at += 1


@pytest.mark.parametrize("name", FAMILIES)
def test_crop_of_a_prefill(name):
    """The first assisted forward: prompt and drafts together, then a crop."""
    model, ids, wrong = build(name), prompt(tokens=30), prompt(tokens=20, seed=9)
    wanted = oracle(model, ids, 25)
    with replayssm.enable(model, window=WINDOW, self_test=False) as handle:
        for count in (0, 1, 7, 20):
            cache = new_cache(model)
            cache.activate_past_recording()
            forward(model, torch.cat([ids[:, :25], wrong[:, :count]], dim=1), cache)
            assert cache.is_croppable or OLD_LOOP
            # a long prompt is no long draft
            assert handle.pool.ring.keep == 20
            crop(cache, count)
            out = [forward(model, ids[:, t : t + 1], cache) for t in range(25, 30)]
            assert float((torch.cat(out, dim=1) - wanted).abs().max()) < BUDGET


@pytest.mark.parametrize("tokens", [1, 2, 5, 21])
def test_a_short_prompt_can_be_taken_back_whole(tokens):
    model, ids = build("Bamba"), prompt(tokens=30)
    fresh = new_cache(model)
    wanted = forward(model, ids, fresh)
    with replayssm.enable(model, window=WINDOW, self_test=False):
        cache = new_cache(model)
        cache.activate_past_recording()
        forward(model, ids[:, :tokens], cache)
        taken = min(tokens, 20)
        crop(cache, taken)
        out = forward(model, ids[:, tokens - taken :], cache)
    assert float((out - wanted[:, tokens - taken :]).abs().max()) < BUDGET


@pytest.mark.parametrize("name", FAMILIES)
def test_recording_and_cropping_is_no_trap(name):
    """Class 97: transformers' own crop reports success and leaves the recurrent state as it was."""
    model, ids, wrong = build(name), prompt(tokens=20), prompt(tokens=3, seed=9)
    wanted = oracle(model, ids, 9)
    with replayssm.enable(model, window=WINDOW, self_test=False):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        cache.activate_past_recording()
        forward(model, wrong, cache)
        crop(cache, 3)
        out = [forward(model, ids[:, t : t + 1], cache) for t in range(9, 20)]
    assert float((torch.cat(out, dim=1) - wanted).abs().max()) < BUDGET


def assert_refused(model, ids, cache, tokens, error):
    """Assert that taking ``tokens`` back raises and changes nothing."""
    twin = copy.deepcopy(cache)
    with pytest.raises(error, match=r"crop|tokens_to_remove"):
        cache.crop(-tokens)
    lengths = [
        [x.get_seq_length() for x in c.layers if hasattr(x, "get_seq_length")]
        for c in (cache, twin)
    ]
    assert lengths[0] == lengths[1]
    for t in range(ids.shape[1]):
        one, other = (forward(model, ids[:, t : t + 1], c) for c in (cache, twin))
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FAMILIES)
def test_beyond_keep_is_refused_and_nothing_changes(name):
    """Class 98: a trim that cannot be done was ignored without a word."""
    model, ids = build(name), prompt(tokens=15)
    with replayssm.enable(model, window=WINDOW, keep=KEEP, self_test=False):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        forward(model, ids[:, 9:10], cache)
        assert_refused(model, ids[:, 10:], cache, KEEP + 1, ContractError)
        with pytest.raises(ContractError, match="minus the number"):
            cache.crop(2)


@pytest.mark.parametrize("name", QUICK)
def test_nothing_can_be_taken_back_that_was_not_kept(name):
    model, ids = build(name), prompt(tokens=15)
    with replayssm.enable(model, window=WINDOW, self_test=False):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        cache.crop(0)
        assert not cache.is_croppable
        assert_refused(model, ids[:, 9:12], cache, 1, ContractError)
        cache.activate_past_recording()
        forward(model, ids[:, 12:13], cache)
        # recording began after the first twelve
        assert_refused(model, ids[:, 13:], cache, 2, ContractError)


def test_the_standard_path_takes_nothing_back():
    model, ids = build("Qwen3_5Text"), prompt(tokens=15)
    with pytest.raises(ContractError, match="keep"):
        replayssm.enable(model, path="standard", keep=2)
    with replayssm.enable(model, path="standard", self_test=False):
        cache = new_cache(model)
        cache.activate_past_recording()
        forward(model, ids[:, :9], cache)
        assert not cache.is_croppable
        assert_refused(model, ids[:, 9:], cache, 1, UnsupportedError)


def test_one_layer_alone_is_not_cropped():
    model, ids = build("FalconH1"), prompt(tokens=9)
    with replayssm.enable(model, keep=KEEP, self_test=False):
        cache = new_cache(model)
        forward(model, ids, cache)
        cache.layers[0].crop(0)
        with pytest.raises(UnsupportedError, match=r"cache\.crop"):
            cache.layers[1].crop(-1)


def test_attention_that_forgot_refuses_before_anything_moves():
    from transformers.cache_utils import DynamicSlidingWindowLayer

    def layer(recording):
        sliding = DynamicSlidingWindowLayer(sliding_window=4)
        if recording:
            sliding.activate_past_recording()
        sliding.update(torch.ones(1, 1, 6, 2), torch.ones(1, 1, 6, 2))
        return sliding

    cropping.check([layer(True)], -2, 5, path="replay")
    with pytest.raises(UnsupportedError, match="activate_past_recording"):
        cropping.check([layer(False)], -2, 5, path="replay")
    cropping.crop_attention([layer(False)], 0)
    kept = layer(True)
    cropping.crop_attention([kept], -2)
    assert kept.get_seq_length() == 4


@pytest.mark.parametrize("name", QUICK)
def test_longer_drafts_widen_the_rings(name):
    model, ids, wrong = build(name), prompt(tokens=30), prompt(tokens=65, seed=9)
    wanted = oracle(model, ids, 9)
    with replayssm.enable(model, window=WINDOW, self_test=False) as handle:
        cache = new_cache(model)
        cache.activate_past_recording()
        forward(model, ids[:, :9], cache)
        assert handle.pool.ring.keep == 20
        out = []
        for t, drafts in zip(range(9, 30), (30, 64, 20, 4, *[0] * 17), strict=True):
            block = torch.cat([ids[:, t : t + 1], wrong[:, :drafts]], dim=1)
            out.append(forward(model, block, cache)[:, :1])
            crop(cache, drafts)
        assert handle.pool.ring.keep == 64
    assert float((torch.cat(out, dim=1) - wanted).abs().max()) < BUDGET


@pytest.mark.parametrize("name", ["FalconH1", *QUICK])
def test_rows_move_after_a_crop(name):
    """reorder, repeat and reset see what the crop left."""
    model, ids, wrong = build(name), prompt(rows=3, tokens=20), prompt(rows=3, tokens=4, seed=9)
    picked = torch.tensor([2, 2, 0])
    wanted = oracle(model, ids[picked].repeat_interleave(2, dim=0), 9)
    with replayssm.enable(model, window=WINDOW, keep=KEEP, self_test=False):
        cache = new_cache(model)
        # older releases keep zeros as keys and values after a reset
        for _ in range(1 if OLD_LOOP else 2):
            forward(model, ids[:, :9], cache)
            forward(model, wrong, cache)
            crop(cache, 4)
            cache.reorder_cache(picked)
            cache.batch_repeat_interleave(2)
            rows = ids[picked].repeat_interleave(2, dim=0)
            out = [forward(model, rows[:, t : t + 1], cache) for t in range(9, 20)]
            assert float((torch.cat(out, dim=1) - wanted).abs().max()) < BUDGET
            cache.reset()
            cache.seen = 0


@pytest.mark.parametrize("name", QUICK)
def test_class_35_a_copied_cache_is_cropped_alone(name):
    model, ids = build(name), prompt(tokens=20)
    wanted = oracle(model, ids, 9)
    with replayssm.enable(model, window=WINDOW, keep=KEEP, self_test=False):
        cache = new_cache(model)
        forward(model, ids[:, :13], cache)
        twin = copy.deepcopy(cache)
        crop(twin, 4)
        for one, start in ((cache, 13), (twin, 9)):
            out = [forward(model, ids[:, t : t + 1], one) for t in range(start, 20)]
            assert float((torch.cat(out, dim=1) - wanted[:, start - 9 :]).abs().max()) < BUDGET


@pytest.mark.parametrize("name", FAMILIES)
def test_disable_after_a_crop_leaves_plain_tensors(name):
    model, ids, wrong = build(name), prompt(tokens=20), prompt(tokens=4, seed=9)
    wanted, theirs = oracle(model, ids, 9), new_cache(model)
    forward(model, ids[:, :9], theirs)
    with replayssm.enable(model, window=WINDOW, keep=KEEP, self_test=False):
        cache = new_cache(model)
        forward(model, torch.cat([ids[:, :9], wrong], dim=1), cache)
        crop(cache, 4)
    compare_states(theirs, cache)
    assert "crop" not in cache.__dict__
    out = [forward(model, ids[:, t : t + 1], cache) for t in range(9, 20)]
    assert float((torch.cat(out, dim=1) - wanted).abs().max()) < BUDGET


@pytest.mark.parametrize("name", QUICK)
def test_the_convolution_state_shows_the_newest_inputs(name):
    """Class 34: a convolution window that a rollback left behind."""
    model, ids = build(name), prompt(tokens=14)
    theirs = new_cache(model)
    forward(model, ids[:, :10], theirs)
    with replayssm.enable(model, window=WINDOW, keep=KEEP, self_test=False):
        mine = new_cache(model)
        forward(model, ids, mine)
        crop(mine, 4)
        for a, b in zip(theirs.layers, mine.layers, strict=True):
            if getattr(a, "conv_states", {}).get(0) is not None:
                one, other = a.conv_states[0], b.conv_states[0]
                assert one.shape == other.shape
                # the oldest of them is not read by any convolution
                assert float((one - other)[..., 1:].abs().max()) < BUDGET
    assert all(s is not None for s in recurrent_states(mine)[:1])


def test_class_101_rounds_do_not_grow_the_memory():
    model, ids = build("Bamba"), prompt(rows=1, tokens=9)
    with replayssm.enable(model, window=WINDOW, self_test=False) as handle:
        cache = new_cache(model)
        cache.activate_past_recording()
        forward(model, ids, cache)
        forward(model, ids, cache)
        pool, size = handle.pool, handle.pool.nbytes()
        for _ in range(100):
            crop(cache, 9)
            forward(model, ids, cache)
        assert handle.pool is pool
        assert pool.nbytes() == size
        assert cache.get_seq_length() == 18
