"""A random tiny model, a run of a few seconds over it, and hand-made section results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from replayssm.evaluate import bottleneck, compatibility, precision, window
from replayssm.evaluate.plan import Plan, Scope
from replayssm.evaluate.result import Result
from replayssm.evaluate.run import evaluate
from replayssm.evaluate.stats import Estimate
from replayssm.evaluate.subject import Subject, from_bytes_model

# records by hand
sys.path.insert(0, str(Path(__file__).parents[1] / "traffic"))

SMALL = Scope(
    window=4,
    steps=12,
    prefills=(4, 9),
    decode_batches=(1, 2),
    decode_samples=3,
    batches=(1, 2),
    windows=(4, 8),
    rounds=3,
    working_set=1,
    budget_bytes=64 << 10,
    buckets=(64, 320),
    text_rows=2,
    probes=((320, 1),),
    block=4,
    drafts=(1, 3),
    draft_rows=2,
    draft_prompt=32,
    draft_tokens=33,
    verify_batch=2,
    rollbacks=60,
)


@pytest.fixture(scope="session")
def subject() -> Subject:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return from_bytes_model("random-gdn", AutoModelForCausalLM.from_config(config).eval())


@pytest.fixture(scope="session")
def result(subject: Subject) -> Result:
    return evaluate(subject, Plan("random-gdn", scope=SMALL))


@pytest.fixture
def small_scope() -> Scope:
    return SMALL


def make_estimate(value: float, low: float | None = None, high: float | None = None) -> Estimate:
    return Estimate(
        value, value if low is None else low, value if high is None else high, 10, "made by hand"
    )


class Made:
    """Section results with chosen numbers for every arm."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.logit_error = 1e-6
        self.kl = {arm.name: make_estimate(1e-6) for arm in plan.arms}
        self.drop = {arm.name: make_estimate(0.0, -0.01, 0.01) for arm in plan.arms}
        self.recall = 0.9
        self.speedup = {arm.name: dict.fromkeys(plan.scope.batches, make_estimate(1.2, 1.1, 1.3))
                        for arm in plan.arms}  # fmt: skip
        self.today = {arm.name: make_estimate(1.2, 1.1, 1.3) for arm in plan.arms}
        self.whole = make_estimate(1.02, 0.98, 1.06)

    def sections(
        self,
    ) -> tuple[
        compatibility.CompatibilityResult,
        bottleneck.BottleneckResult,
        window.WindowResult,
        precision.PrecisionResult,
    ]:
        plan = self.plan
        first, names = plan.arms[0].name, [arm.name for arm in plan.arms]
        agreements = tuple(
            compatibility.Agreement(arm.name, 1, 16, 512, self.logit_error, 1e-7, 0, 0, (1e-6,))
            for arm in plan.arms
            if compatibility.is_exact(arm)
        )
        profiles = tuple(
            bottleneck.Profile(
                batch, 1.0, make_estimate(0.6), make_estimate(0.3), make_estimate(1.4),
                tuple(bottleneck.WholeModel(n, 1.0, None if n == first else self.whole)
                      for n in names),
            )
            for batch in plan.scope.decode_batches
        )  # fmt: skip
        cells = tuple(self._cell(batch, plan.scope.window) for batch in plan.scope.batches)
        arms = tuple(self._precision(n, first) for n in names)
        return (
            compatibility.CompatibilityResult((), agreements),
            bottleneck.BottleneckResult(profiles, "made by hand", 32),
            window.WindowResult("made by hand", cells, cells[-1], 1 << 20, {}),
            precision.PrecisionResult(arms, 4, 100, 8),
        )

    def _cell(self, batch: int, size: int) -> window.Cell:
        first = self.plan.arms[0].name
        timings = tuple(
            window.Timing(
                arm.name, batch, 1.0, 1.0,
                None if arm.name == first else self.speedup[arm.name][batch],
                None if arm.name == "standard bf16" else self.today[arm.name],
                1e-7, True, 1 / size, 0, 1024,
            )
            for arm in self.plan.arms
        )  # fmt: skip
        return window.Cell(batch, size, 2, 1 << 20, timings)

    def _precision(self, name: str, first: str) -> precision.ArmPrecision:
        own = name != first
        bucket = precision.Bucket(
            0, 512, 2000, make_estimate(2.0), make_estimate(0.0) if own else None,
            self.kl[name] if own else None, self.kl[name] if own else None, 0.0,
        )  # fmt: skip
        right = make_estimate(self.recall)
        drop = self.drop[name] if own else None
        return precision.ArmPrecision(name, (bucket,), (), right, drop, 1.0)


@pytest.fixture
def estimate():
    return make_estimate


@pytest.fixture
def made() -> Made:
    return Made(Plan("hand-made"))
