"""Long sequences: no format's error grows with the number of folds."""

from __future__ import annotations

import pytest

from replayssm.testing.budgets import OUTPUT_BUDGET, STATE_BUDGET
from replayssm.testing.drift import measure_drift
from replayssm.testing.factories import make_layer
from replayssm.types import Decay, Format, Impl, ReadDepth, Write

# budgets are those of a delta layer, whose writes correct what they find; an additive state
# forgets by its gate alone, and sums the roundings of about 60 folds
MEMORY = {Write.DELTA: 1, Write.ADDITIVE: 4}


def check(write, tokens, impl, dims):
    layer = make_layer(write, Decay.SCALAR, (1, 1), dims)
    standard, *found = measure_drift(layer, tokens, impl=impl)
    assert len(found) == 2 * len(Format)
    for drift in found:
        fmt, depth = Format(drift.name), ReadDepth(drift.read)
        factor = MEMORY[write]
        assert drift.last < factor * OUTPUT_BUDGET[fmt, depth], drift
        assert drift.state < factor * STATE_BUDGET[fmt], drift
        # over as many folds again, the error would grow by less than a budget
        folds = tokens / 16
        assert drift.slope_per_fold * folds < factor * STATE_BUDGET[fmt] / 2, drift
    # rounding once per fold beats rounding once per token
    bf16 = next(d for d in found if d.name == "bf16")
    assert bf16.state < standard.state / 2


@pytest.mark.parametrize("write", list(Write))
def test_error_settles_within_a_thousand_tokens(impl, write):
    check(write, 512 if impl is Impl.REFERENCE else 1024, impl, (32, 16))


@pytest.mark.slow
@pytest.mark.parametrize("write", list(Write))
def test_error_does_not_grow_over_8192_tokens(write):
    check(write, 8192, Impl.AUTO, (64, 64))
