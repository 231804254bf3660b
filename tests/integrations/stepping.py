"""Running models token by token on caches, and comparing what comes out."""

from __future__ import annotations

import inspect

import torch
import transformers

# logits have a standard deviation near 1; both paths round fp32 in another order
BUDGET = 2e-4


def generate(model, ids, tokens=48, **kwargs):
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, max_new_tokens=tokens, **{**options, **kwargs})


def logits_gap(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a.logits, b.logits, strict=True))


def assert_same(plain, replayed, budget=BUDGET):
    assert torch.equal(plain.sequences, replayed.sequences)
    assert logits_gap(plain, replayed) < budget


def new_cache(model):
    return transformers.DynamicCache(config=model.config)


def cache_name(model):
    parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    return next(n for n in ("cache", "past_key_values", "cache_params") if n in parameters)


@torch.no_grad()
def forward(model, ids, cache):
    """Run a forward on a cache with the positions that ``generate`` would use."""
    seen = getattr(cache, "seen", 0)
    cache.seen = seen + ids.shape[1]
    kwargs = {cache_name(model): cache, "use_cache": True}
    if model.config.model_type != "mamba2":
        positions = torch.arange(seen, cache.seen).expand(ids.shape[0], -1)
        kwargs["position_ids"] = positions
    return model(ids, **kwargs).logits


def recurrent_states(cache):
    found = []
    for layer in cache.layers:
        states = getattr(layer, "recurrent_states", None)
        if states is not None:
            found.append(states[0])
    return found


def decoded(model, ids, blocks, **options):
    """Prefill 5 tokens, feed the rest in blocks; returns the logits of everything after the 5."""
    cache, out, at = new_cache(model), [], 5
    forward(model, ids[:, :5], cache)
    for size in blocks:
        out.append(forward(model, ids[:, at : at + size], cache))
        at += size
    return torch.cat(out, 1), cache


def compare_states(theirs, mine, budget=1e-4):
    pairs = list(zip(recurrent_states(theirs), recurrent_states(mine), strict=True))
    assert pairs
    for a, b in pairs:
        if a is None:
            assert b is None
            continue
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert float((a - b).norm() / a.norm()) < budget
