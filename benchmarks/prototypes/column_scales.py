"""Error of a high read of q24 by window after a start from zero: the table of decision 0003.

python benchmarks/prototypes/column_scales.py

Column scales from the fold cycle before, from the state itself, or none, on the reference's own
fold and formats.
"""

from __future__ import annotations

import torch

from replayssm.formats import column_amax, column_scale, decode, encode
from replayssm.ops.reference import Entries, expand_heads, fold_serial
from replayssm.testing.factories import Regime, make_block, make_layer
from replayssm.types import Decay, Format, ReadDepth, Write

LAYER = make_layer(Write.DELTA, Decay.CHANNEL, (1, 4), (128, 64))
RULES = ("cycle before", "unset ones own", "own", "none")
WINDOWS, SEEDS, QUERIES = 8, 4, 64


def columns(rule, amax, before):
    if rule == "none" or (rule == "cycle before" and not before.any()):
        return torch.ones_like(amax).bfloat16()
    if rule == "own":
        return column_scale(amax)
    return column_scale(torch.where(before > 0, before, amax) if "unset" in rule else before)


def fold(state, window, regime, seed):
    block = make_block(LAYER, 1, window, seed=seed, regime=regime)
    k = expand_heads(block.k[0], LAYER.value_heads, 1)
    entries = Entries(k, block.v[0].float(), block.g[0].float(), block.w[0])
    return fold_serial(state, entries, LAYER.write)


def errors(rule, window, regime):
    """Return the relative error of every window, root mean square over seeds."""
    found = torch.zeros(WINDOWS)
    for seed in range(SEEDS):
        state = torch.zeros(LAYER.value_heads, LAYER.value_dim, LAYER.key_dim)
        before = torch.zeros(LAYER.value_heads, LAYER.key_dim)
        queries = torch.randn(QUERIES, LAYER.key_dim, generator=torch.Generator().manual_seed(seed))
        for i in range(WINDOWS):
            state = fold(state, window, regime, 1000 * seed + i)
            amax = column_amax(state)
            scale = columns(rule, amax, before)
            high = decode(encode(state, Format.Q24, scale), Format.Q24, ReadDepth.HIGH, scale)
            exact, read = (torch.einsum("hvk,qk->qhv", s, queries) for s in (state, high))
            found[i] += ((read - exact).norm() / exact.norm()) ** 2 / SEEDS
            before = amax
    return found.sqrt()


if __name__ == "__main__":
    for window in (4, 16):
        for regime in (Regime.TYPICAL, Regime.SLOW):
            for rule in RULES:
                per_mille = "  ".join(f"{1e3 * x:5.1f}" for x in errors(rule, window, regime))
                print(f"window {window:2}  {regime:8} {rule:15} {per_mille}")
