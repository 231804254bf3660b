"""``replayssm.enable`` against plain transformers: tokens, logits, states and every cache verb."""

from __future__ import annotations

import copy
import gc
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from stepping import (  # noqa: E402
    BUDGET,
    assert_same,
    cache_name,
    compare_states,
    decoded,
    forward,
    generate,
    logits_gap,
    new_cache,
    recurrent_states,
)
from tiny_families import FAMILIES, QUICK, build, prompt, quick_first  # noqa: E402

import replayssm  # noqa: E402
from replayssm.errors import ContractError, DriftError, SlotError, UnsupportedError  # noqa: E402
from replayssm.models.delta import KdaAdapter  # noqa: E402
from replayssm.models.mamba2 import Mamba2Adapter  # noqa: E402

transformers.logging.set_verbosity_error()

WINDOW = 8


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("path, state", [("replay", "s32"), ("replay", "q24"), ("standard", "f32")])
def test_greedy_tokens_and_logits_equal_plain(name, path, state):
    model, ids = build(name), prompt()
    plain = generate(model, ids)
    with replayssm.enable(model, path=path, state=state, window=WINDOW) as handle:
        replayed = generate(model, ids)
        assert_same(plain, replayed)
        # the pool lives as long as the cache that generate() returned
        assert (handle.pool is None) == (path == "standard")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("state", ["f32", "s32", "q24"])
def test_256_tokens_equal_plain(name, state):
    model, ids = build(name), prompt()
    plain = generate(model, ids, 256)
    with replayssm.enable(model, state=state):
        assert_same(plain, generate(model, ids, 256))


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padding(name):
    model, ids = build(name), prompt(rows=3)
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    ids[2, :9], mask[2, :9] = 0, 0
    plain = generate(model, ids, 20, attention_mask=mask)
    with replayssm.enable(model, window=WINDOW):
        assert_same(plain, generate(model, ids, 20, attention_mask=mask))


@pytest.mark.parametrize("name", QUICK)
def test_sampling_with_a_seed(name):
    model, ids = build(name), prompt()
    torch.manual_seed(3)
    plain = generate(model, ids, 24, do_sample=True, temperature=0.8, top_k=20)
    with replayssm.enable(model, window=WINDOW):
        torch.manual_seed(3)
        assert_same(plain, generate(model, ids, 24, do_sample=True, temperature=0.8, top_k=20))


@pytest.mark.parametrize("name", FAMILIES)
def test_beam_search(name):
    model, ids = build(name), prompt()
    plain = model.generate(ids, max_new_tokens=20, num_beams=3, do_sample=False)
    for path in ("replay", "standard"):
        with replayssm.enable(model, path=path, window=WINDOW):
            beams = model.generate(ids, max_new_tokens=20, num_beams=3, do_sample=False)
        assert torch.equal(plain, beams)


def test_static_cache():
    model, ids = build("Bamba"), prompt()
    plain = generate(model, ids, 20)
    with replayssm.enable(model, window=WINDOW):
        for _ in range(2):
            again = generate(model, ids, 20, cache_implementation="static")
            assert_same(plain, again)


@pytest.mark.slow
def test_compiled_models_run_with_graph_breaks():
    model, ids = build("Qwen3_5Text"), prompt(tokens=5 + WINDOW + 2)
    plain, _ = decoded(model, ids, [1] * (WINDOW + 2))
    compiled = torch.compile(model, backend="eager")
    with replayssm.enable(model, window=WINDOW) as handle:
        replayed, _ = decoded(compiled, ids, [1] * (WINDOW + 2))
        assert handle.pool is not None
    assert float((plain - replayed).abs().max()) < BUDGET


class Collect(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer():
    model, ids = build("Qwen3_5Text"), prompt(rows=1)
    with replayssm.enable(model, window=WINDOW):
        streamer = Collect()
        out = model.generate(ids, max_new_tokens=12, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == out[0].tolist()


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("more", [1, 2, WINDOW - 1, WINDOW + 1])
@pytest.mark.parametrize("path", ["replay", "standard"])
def test_a_chat_goes_on(name, more, path):
    """Prefill, decode, prefill again on the live cache, decode."""
    model, ids = build(name), prompt(tokens=40)
    blocks = [1] * 7 + [more] + [1] * (WINDOW + 2)
    plain, _ = decoded(model, ids, blocks)
    with replayssm.enable(model, path=path, window=WINDOW):
        replayed, _ = decoded(model, ids, blocks)
    assert float((plain - replayed).abs().max()) < BUDGET


@pytest.mark.parametrize("name", quick_first())
@pytest.mark.parametrize("path", ["replay", "standard"])
def test_blocks_equal_single_steps(name, path):
    model, ids = build(name), prompt(tokens=45)
    with replayssm.enable(model, path=path, window=WINDOW, max_block=8) as handle:
        single, _ = decoded(model, ids, [1] * 40)
        blocks, cache = decoded(model, ids, [8, 3, 1, 8, 5, 7, 8])
        if path == "replay":
            ref = cache.layers[handle.mixers[0].layer_idx].binding.rows.refs[0]
            assert handle.pool.committed(ref) == 45
    assert float((single - blocks).abs().max()) < BUDGET


@pytest.mark.parametrize("name", FAMILIES)
def test_switching_off_and_on_at_every_phase_of_the_window(name):
    """``disable`` leaves the model's own state behind, wherever the window stands."""
    model, ids = build(name), prompt(tokens=5 + WINDOW + 2)
    theirs, mine = new_cache(model), new_cache(model)
    forward(model, ids[:, :5], theirs)
    forward(model, ids[:, :5], mine)
    for t in range(5, ids.shape[1]):
        forward(model, ids[:, t : t + 1], theirs)
    for t in range(5, ids.shape[1]):
        with replayssm.enable(model, window=WINDOW, self_test=False):
            forward(model, ids[:, t : t + 1], mine)
    compare_states(theirs, mine)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("state", ["s32", "q24"])
def test_materialised_states_equal_the_models_own(name, state):
    model, ids = build(name), prompt(tokens=5 + 2 * WINDOW + 1)
    caches = [new_cache(model)]
    forward(model, ids[:, :5], caches[0])
    snapshots = []
    for t in range(5, ids.shape[1]):
        forward(model, ids[:, t : t + 1], caches[0])
        snapshots.append([None if s is None else s.clone() for s in recurrent_states(caches[0])])
    with replayssm.enable(model, state=state, window=WINDOW):
        mine = new_cache(model)
        forward(model, ids[:, :5], mine)
        for t, wanted in enumerate(snapshots, 5):
            forward(model, ids[:, t : t + 1], mine)
            for a, b in zip(wanted, recurrent_states(mine), strict=True):
                if a is not None:
                    assert float((a - b).norm() / a.norm()) < 1e-4


@pytest.mark.parametrize("name", quick_first())
def test_bf16_runs_near_plain(name):
    model, ids = build(name, dtype=torch.bfloat16), prompt(tokens=30)
    plain, _ = decoded(model, ids, [1] * 25)
    with replayssm.enable(model, window=WINDOW) as handle:
        replayed, _ = decoded(model, ids, [1] * 25)
        assert handle.ring_dtype == torch.bfloat16
    assert replayed.dtype == plain.dtype
    gap = (plain - replayed).float().norm() / plain.float().norm()
    assert float(gap) < 0.1


@pytest.mark.parametrize(
    "path, state", [("standard", "bf16"), ("replay", "bf16"), ("replay", "q16")]
)
def test_coarse_states_run_and_differ(path, state):
    model, ids = build("Qwen3_5Text"), prompt(tokens=40)
    plain, _ = decoded(model, ids, [1] * 30)
    with replayssm.enable(model, path=path, state=state, window=WINDOW):
        replayed, _ = decoded(model, ids, [1] * 30)
    gap = float((plain - replayed).norm() / plain.norm())
    assert 1e-6 < gap < 0.1


def test_read_depth_acts_at_once():
    model, ids = build("Bamba"), prompt(tokens=30)

    def run(depth):
        cache = new_cache(model)
        with replayssm.enable(model, state="q24", window=WINDOW) as handle:
            forward(model, ids[:, :5], cache)
            handle.read = depth
            rough = forward(model, ids[:, 5:6], cache)
            handle.read = "full"
            return rough, forward(model, ids[:, 6:7], cache)

    (full, after_full), (high, after_high) = run("full"), run("high")
    assert not torch.equal(full, high)
    # the error of a high read is not fed back into the recurrent state
    assert float((after_full - after_high).abs().max()) < float((full - high).abs().max())


def test_disable_restores_functions_and_behaviour():
    model, ids = build("Bamba"), prompt()
    home = sys.modules[type(model).__module__]
    names = ("mamba2_selective_state_update", "mamba2_chunk_scan")
    before = [getattr(home, name) for name in names]
    plain = generate(model, ids, 10)
    replayssm.enable(model)
    assert all(getattr(home, n) is not f for n, f in zip(names, before, strict=True))
    replayssm.disable(model)
    assert [getattr(home, name) for name in names] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    again = generate(model, ids, 10)
    assert logits_gap(plain, again) == 0


def test_disable_twice_says_so():
    model = build("Bamba")
    replayssm.enable(model)
    with pytest.raises(ContractError, match="one that is not enabled"):
        replayssm.enable(model)
    replayssm.disable(model)
    with pytest.raises(ContractError, match="an enabled model"):
        replayssm.disable(model)


def test_context_manager_disables_after_an_error():
    model = build("Bamba")
    with pytest.raises(RuntimeError, match="stop"), replayssm.enable(model):
        raise RuntimeError("stop")
    assert not hasattr(model, "_replayssm_enabled")


@pytest.mark.parametrize("name", QUICK)
def test_a_cache_outlives_disable_and_enable(name):
    """A chat may start plain, go on enabled and end plain."""
    model, ids = build(name), prompt(tokens=30)
    plain, theirs = decoded(model, ids, [1] * 25)
    cache, out = new_cache(model), []
    forward(model, ids[:, :5], cache)
    for t in range(5, 30):
        if t == 8:
            replayssm.enable(model, window=WINDOW)
        if t == 22:
            replayssm.disable(model)
        out.append(forward(model, ids[:, t : t + 1], cache))
    assert float((plain - torch.cat(out, 1)).abs().max()) < BUDGET
    compare_states(theirs, cache)
    assert [type(a) for a in theirs.layers] == [type(b) for b in cache.layers]


def test_two_models_at_once():
    one, two, ids = build("Bamba"), build("Bamba", seed=5), prompt()
    plain = [generate(one, ids, 20), generate(two, ids, 20)]
    replayssm.enable(one, window=WINDOW)
    replayssm.enable(two, window=WINDOW, state="q24")
    assert_same(plain[0], generate(one, ids, 20))
    assert_same(plain[1], generate(two, ids, 20))
    replayssm.disable(one)
    assert_same(plain[1], generate(two, ids, 20))
    assert logits_gap(plain[0], generate(one, ids, 20)) == 0
    replayssm.disable(two)


def test_a_model_that_is_dropped_gives_its_functions_back():
    model = build("OlmoHybrid")
    home = sys.modules[type(model).__module__]
    before = home.torch_recurrent_gated_delta_rule
    handle = replayssm.enable(model)
    assert home.torch_recurrent_gated_delta_rule is not before
    del handle, model
    gc.collect()
    assert home.torch_recurrent_gated_delta_rule is before


def test_a_cache_serves_one_model():
    one, two, ids = build("Bamba"), build("Bamba", seed=5), prompt()
    with replayssm.enable(one), replayssm.enable(two):
        cache = new_cache(one)
        forward(one, ids, cache)
        with pytest.raises(ContractError, match="the cache of another one"):
            forward(two, ids[:, :1], cache)


class Broken(Mamba2Adapter):
    def finish(self, site, arguments, y, state):
        return super().finish(site, {**arguments, "D": None}, y, state)


class Moved(KdaAdapter):
    def block(self, site, arguments, spec):
        return super().block(site, {**arguments, "g": arguments["g"] * 1.001}, spec)


@pytest.mark.parametrize(
    "name, adapter, what", [("Bamba", Broken(), "output"), ("KimiLinear", Moved(), "output|state")]
)
def test_self_test_sees_a_drifted_adapter(monkeypatch, name, adapter, what):
    from replayssm.models import registry

    model = build(name)
    monkeypatch.setattr(registry, "ADAPTERS", (adapter,))
    with pytest.raises(DriftError, match=what):
        replayssm.enable(model)
    assert not hasattr(model, "_replayssm_enabled")
    replayssm.enable(model, self_test=False)
    replayssm.disable(model)


def test_self_test_sees_a_renamed_argument(monkeypatch):
    model = build("Qwen3_5Text")
    home = sys.modules[type(model).__module__]
    original = home.torch_recurrent_gated_delta_rule

    def renamed(query, key, value, decay=None, beta=None, initial_state=None, **kwargs):
        g = kwargs.pop("g", decay)
        return original(
            query, key, value, g=g * 0.5, beta=beta, initial_state=initial_state, **kwargs
        )

    monkeypatch.setattr(home, "torch_recurrent_gated_delta_rule", renamed)
    with pytest.raises(DriftError):
        replayssm.enable(model)


def test_self_test_changes_nothing():
    model, ids = build("Qwen3_5Text"), prompt()
    plain = generate(model, ids, 8)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with replayssm.enable(model):
        pass
    assert torch.equal(torch.rand(3), expected)
    assert logits_gap(plain, generate(model, ids, 8)) == 0


@pytest.mark.parametrize("path", ["replay", "standard"])
@pytest.mark.parametrize("name", ["FalconH1", "Qwen3_5Text"])
def test_rows_can_be_selected_and_repeated(name, path):
    model, ids = build(name), prompt(rows=3, tokens=20)
    with replayssm.enable(model, path=path, window=WINDOW):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        forward(model, ids[:, 9:10], cache)
        twin = copy.deepcopy(cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        picked = torch.tensor([2, 2, 0, 0])
        for t in range(10, 20):
            a = forward(model, ids[picked, t : t + 1], cache)
            b = forward(model, ids[:, t : t + 1], twin)
            assert float((a - b[picked]).abs().max()) < BUDGET


def test_a_dropped_cache_frees_its_pool_at_once():
    model, ids = build("Bamba"), prompt()
    with replayssm.enable(model) as handle:
        cache = new_cache(model)
        forward(model, ids, cache)
        forward(model, ids[:, :1], cache)
        assert handle.pool is not None
        gc.disable()
        try:
            del cache
            assert handle.pool is None
        finally:
            gc.enable()


@pytest.mark.parametrize("path", ["replay", "standard"])
def test_copies_of_a_cache_are_given_back_too(path):
    model, ids = build("Bamba"), prompt(tokens=20)
    plain, _ = decoded(model, ids, [1] * 15)
    with replayssm.enable(model, path=path, window=WINDOW):
        cache = new_cache(model)
        forward(model, ids[:, :5], cache)
        forward(model, ids[:, 5:6], cache)
        twin = copy.deepcopy(cache)
    for one in (cache, twin):
        rest = [forward(model, ids[:, t : t + 1], one) for t in range(6, 20)]
        assert float((plain[:, 1:] - torch.cat(rest, 1)).abs().max()) < BUDGET


def test_a_copied_cache_is_independent():
    model, ids = build("Bamba"), prompt(tokens=20)
    with replayssm.enable(model, window=WINDOW):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        twin = copy.deepcopy(cache)
        first = [forward(model, ids[:, t : t + 1], cache) for t in range(9, 20)]
        second = [forward(model, ids[:, t : t + 1], twin) for t in range(9, 20)]
    assert torch.equal(torch.cat(first), torch.cat(second))
    assert type(twin.layers[0]).__name__ == type(new_cache(model).layers[0]).__name__


def test_reset_starts_a_new_sequence():
    model, ids = build("Qwen3_5Text"), prompt(rows=1, tokens=14)
    with replayssm.enable(model, window=WINDOW):
        cache = new_cache(model)
        forward(model, ids[:, :9], cache)
        forward(model, ids[:, 9:10], cache)
        cache.reset()
        assert all(s is None for s in recurrent_states(cache))


def test_a_forward_that_fails_half_way_spoils_the_cache():
    model, ids = build("Bamba"), prompt()
    with replayssm.enable(model):
        cache = new_cache(model)
        forward(model, ids, cache)
        layer = model.model.layers[2]
        stop = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("stop")))
        with pytest.raises(OSError, match="stop"):
            forward(model, ids[:, :1], cache)
        stop.remove()
        with pytest.raises(SlotError, match="half-written"):
            forward(model, ids[:, :1], cache)
        with pytest.raises(SlotError, match="fresh cache"):
            recurrent_states(cache)
        fresh = new_cache(model)
        forward(model, ids, fresh)


def test_another_batch_size_is_refused():
    model, ids = build("Qwen3_5Text"), prompt(rows=3)
    with replayssm.enable(model):
        cache = new_cache(model)
        forward(model, ids, cache)
        with pytest.raises((ContractError, RuntimeError)):
            forward(model, ids[:2, :1], cache)


def test_forward_without_a_cache_is_untouched():
    model, ids = build("KimiLinear"), prompt()
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        with replayssm.enable(model) as handle:
            assert torch.equal(plain, model(ids, use_cache=False).logits)
            assert handle.pool is None


def test_training_through_decode_is_refused():
    model, ids = build("Qwen3_5Text").train(), prompt()
    with replayssm.enable(model):
        cache = new_cache(model)
        kwargs = {cache_name(model): cache, "use_cache": True}
        model(ids, **kwargs)
        with pytest.raises(UnsupportedError, match="training"):
            model(ids[:, :1], **kwargs)


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"path": "fast"}, "path"),
        ({"state": "int8"}, "state"),
        ({"read": "low"}, "read"),
        ({"window": 0}, "window"),
        ({"max_block": 0}, "max_block"),
        ({"path": "standard", "state": "q24"}, "state"),
    ],
)
def test_bad_options_name_themselves(options, argument):
    model = build("Bamba")
    with pytest.raises(ContractError, match=argument):
        replayssm.enable(model, **options)
    assert not hasattr(model, "_replayssm_enabled")


def test_handle_reports_its_settings():
    model = build("Bamba")
    with replayssm.enable(model, window=4, state="q24", read="high", impl="reference") as handle:
        assert handle.model is model
        assert len(handle.specs) == 3
        assert (handle.path, handle.state, handle.read, handle.window, handle.impl) == (
            "replay",
            "q24",
            "high",
            4,
            "reference",
        )
        assert handle.pool is None
        generate(model, prompt(), 2)


def test_a_copy_of_an_enabled_model_is_refused():
    model = build("Qwen3_5Text")
    with (
        replayssm.enable(model),
        pytest.raises(UnsupportedError, match="a copy of an enabled model"),
    ):
        copy.deepcopy(model)
    with replayssm.enable(copy.deepcopy(model)):
        pass


def test_high_reads_of_the_standard_path_are_refused():
    model = build("Qwen3_5Text")
    with pytest.raises(ContractError, match=r"^read: expected full on the standard path"):
        replayssm.enable(model, path="standard", read="high")
    with replayssm.enable(model):
        pass
