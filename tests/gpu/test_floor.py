"""The floor of the kernel benchmark moves the bytes that a replay step is counted for."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu.cases import CASES, KEPT, Point  # noqa: E402

ARMS = ("f32 full", "s32 high", "s32 full", "q24 high", "q24 full", "q16 high", "bf16 full")


@pytest.mark.parametrize("tokens", sorted(KEPT))
@pytest.mark.parametrize("case", ["mamba2-128x64x128", "gdn-16-64x128x128", "kda-32x128x128"])
@pytest.mark.parametrize("arm", ARMS)
def test_words_of_a_floor_are_the_bytes_of_its_step(arm: str, case: str, tokens: int) -> None:
    from gpu import floor, launches

    point = Point(CASES[case], 256, tokens)
    found = next(x for x in floor.arms_of(launches.arms()) if x.name.startswith(f"floor {arm}"))
    read, rest, entry, inputs, outputs = found.words(point)
    folds, units = point.kept / point.window, point.batch * point.case.layer.value_heads
    entries = (point.window - 1) / 2 + point.kept + tokens
    words = read * (1 + folds) + rest * 2 * folds + entry * entries + inputs + outputs
    # scales are counted as read, and written by the step that folds
    assert units * words * floor.WORD == pytest.approx(found.traffic(point).total, rel=0.02)
