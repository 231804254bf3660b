"""Rollback of a bound cache, and transformers' assisted generation on top of it.

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
    compare_states,
    forward,
    generate,
    new_cache,
    recurrent_states,
)
from tiny_families import FAMILIES, QUICK, VOCAB, build, prompt  # noqa: E402

import replayssm  # noqa: E402
from replayssm.errors import ContractError, UnsupportedError  # noqa: E402
from replayssm.integrations import crop as cropping  # noqa: E402
from replayssm.models import tiny  # noqa: E402

transformers.logging.set_verbosity_error()

WINDOW = 4
KEEP = 5
TRAINED = tiny.NAMES[:3]
TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"
# 5.17 to 5.19: placeholder layers count as uncroppable, and pure Mamba2 is not served
OLD_LOOP = not hasattr(transformers.cache_utils.Cache, "get_recurrent_state")


def repetitive(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (1, 12), generator=generator).repeat(1, 3)


def likeness(name, noise):
    """Return a model of ``name`` whose weights are off by ``noise`` standard deviations."""
    model = build(name)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1:
                wrong = torch.randn(parameter.shape, generator=generator)
                parameter += noise * parameter.std() * wrong
    # a random model is never confident; with the default threshold it would draft one token
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


class Forwards:
    """Counts the forwards of a model and the tokens that went through it."""

    def __init__(self, model):
        self.count = self.tokens = 0
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _module, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        self.count, self.tokens = self.count + 1, self.tokens + ids.shape[1]


def supports_assistance(name):
    if name == "Mamba2" and OLD_LOOP:
        pytest.skip("this release finds no cache of Mamba2 in its loop")


def crop(cache, tokens):
    cache.crop(-tokens)
    cache.seen -= tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_lookup_equals_plain_greedy(name):
    supports_assistance(name)
    model, ids = build(name), repetitive()
    plain = generate(model, ids, 64)
    with replayssm.enable(model):
        for tokens in (8, 20):
            looked_up = generate(model, ids, 64, prompt_lookup_num_tokens=tokens)
            assert torch.equal(plain.sequences, looked_up.sequences)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Mamba2"])
def test_an_assistant_model_gives_the_tokens_of_plain_greedy(name):
    """20 drafts a round, transformers' default; some are accepted and some are not."""
    model, assistant, ids = build(name), likeness(name, 0.03), repetitive()
    plain = generate(model, ids, 64)
    with replayssm.enable(model), replayssm.enable(assistant):
        forwards = Forwards(model)
        assisted = generate(model, ids, 64, assistant_model=assistant)
    assert torch.equal(plain.sequences, assisted.sequences)
    assert 64 / 21 + 1 < forwards.count < 64


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Mamba2"])
def test_a_model_accepts_everything_it_drafts_itself(name):
    """Classes 33 and 99: a crop that is off by one shows as drafts that are refused."""
    model, twin, ids = build(name), likeness(name, 0.0), repetitive()
    # else transformers masks a pad token that the assistant has drafted
    model.generation_config.pad_token_id = VOCAB
    with replayssm.enable(model), replayssm.enable(twin):
        verified, drafted = Forwards(model), Forwards(twin)
        generate(model, ids, 84, assistant_model=twin)
    # 4 rounds of 20 drafts and a bonus token; the two newest tokens are forwarded again each round
    assert verified.count == 4
    assert drafted.tokens == ids.shape[1] + 3 * 2 + 4 * 19


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("tokens", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_trained_models_speculate_on_repetitive_text(name, tokens):
    model, draft = tiny.load(name), tiny.load("draft-tiny")
    ids = torch.tensor([tiny.encode(TEXT * 4 + "def ")])
    plain = generate(model, ids, tokens).sequences
    with replayssm.enable(model), replayssm.enable(draft):
        for options in ({"prompt_lookup_num_tokens": 8}, {"assistant_model": draft}):
            forwards = Forwards(model)
            assert torch.equal(plain, generate(model, ids, tokens, **options).sequences)
            assert tokens / 21 < forwards.count < tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_class_103_a_long_run_does_not_drift_apart(name):
    """Class 103: verify summed in another order, and the state drifted after some hundred steps."""
    model = tiny.load(name)
    ids = torch.tensor([list(tiny.heldout_text()[:300])])
    plain = generate(model, ids, 512).sequences
    with replayssm.enable(model):
        out = generate(model, ids, 512, prompt_lookup_num_tokens=8, max_matching_ngram_size=2)
    assert torch.equal(plain, out.sequences)


@pytest.mark.parametrize("name", QUICK)
def test_sampling_with_assistance(name):
    """Of one likely token only one can be sampled; and a seed decides everything else."""
    model, assistant, ids = build(name), likeness(name, 0.03), repetitive()
    plain = generate(model, ids, 24).sequences
    with replayssm.enable(model), replayssm.enable(assistant):
        for options in ({"prompt_lookup_num_tokens": 8}, {"assistant_model": assistant}):
            options["do_sample"] = True
            forced = generate(model, ids, 24, top_k=1, **options).sequences
            assert torch.equal(plain, forced)
            seeded = []
            for _ in range(2):
                torch.manual_seed(5)
                seeded.append(generate(model, ids, 24, top_k=20, **options).sequences)
            assert torch.equal(*seeded)


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padding_with_assistance(name):
    supports_assistance(name)
    model, ids = build(name), repetitive()
    mask = torch.ones_like(ids)
    ids[0, :7], mask[0, :7] = 0, 0
    plain = generate(model, ids, 32, attention_mask=mask).sequences
    with replayssm.enable(model):
        out = generate(model, ids, 32, attention_mask=mask, prompt_lookup_num_tokens=8)
    assert torch.equal(plain, out.sequences)


@pytest.mark.parametrize("path", ["replay", "standard"])
def test_only_a_path_that_rolls_back_is_offered_to_assisted_generation(path):
    model, ids = build("Bamba"), repetitive()
    assert model._is_stateful
    with replayssm.enable(model, path=path):
        assert model._is_stateful == (path == "standard")
        if path == "standard":
            with pytest.raises(ValueError, match="stateful"):
                generate(model, ids, 4, prompt_lookup_num_tokens=4)
    assert model._is_stateful
    with pytest.raises(ValueError, match="stateful"):
        generate(model, ids, 4, prompt_lookup_num_tokens=4)


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
