"""The plan of a rollout: everything that is decided before anything runs, as one TOML file.

A plan is hashed into the manifest of its run folder first. Nothing in it may then change: a folder
that holds another plan's results is refused.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from replayssm.errors import ContractError
from replayssm.evaluate.decisions.tables import (
    NAME,
    Cohort,
    Cost,
    Design,
    Hardware,
    Strict,
    Traffic,
    Variant,
)

RunMetric = Literal[
    "throughput",
    "goodput",
    "goodput_per_dollar",
    "goodput_per_watt",
    "ttft",
    "tpot",
    "e2el",
    "memory_per_sequence",
]


class Target(Strict):
    """The one metric that a decision is made by, and its margin.

    Attributes:
        metric: Name of the metric.
        margin: The least ratio to the baseline (or, for ``bottleneck``, the least ceiling).
    """

    metric: RunMetric
    margin: PositiveFloat


class Bottleneck(Strict):
    """Margin of the first decision: the least ceiling 1 / (1 - share) worth having."""

    metric: Literal["ceiling"] = "ceiling"
    margin: Annotated[float, Field(ge=1)] = 1.05


class Compatibility(Strict):
    """Margin of the second decision.

    Attributes:
        metric: Largest logit difference over the logits' standard deviation, step by step.
        margin: Its limit, for variants that promise the standard path's fp32 results.
        steps: Steps compared.
        pins: Versions that have to be installed, by package.
    """

    metric: Literal["logit_error"] = "logit_error"
    margin: PositiveFloat = 1e-3
    steps: Annotated[int, Field(ge=8)] = 128
    pins: dict[str, str] = Field(default_factory=dict)


class Precision(Strict):
    """Margins of the fifth decision.

    Attributes:
        metric: The primary one.
        margin: Its limit.
        also: Limits of the others, which must hold as well.
        graders: Names of the graders of replies.
        adversarial: Long prompts with conflicting facts, per cohort.
        buckets: Upper ends of the length buckets, ascending.
        guard_tolerance: Largest |delta logprob| that the guard allows when it samples a request.
    """

    metric: Literal["mean_kl", "p99_logprob", "score_drop"] = "mean_kl"
    margin: PositiveFloat = 0.002
    also: dict[Literal["mean_kl", "p99_logprob", "score_drop"], PositiveFloat] = Field(
        default_factory=dict
    )
    graders: tuple[str, ...] = ("facts", "actions", "format", "consistency")
    adversarial: PositiveInt = 8
    buckets: tuple[PositiveInt, ...] = (512, 2048, 8192)
    guard_tolerance: PositiveFloat = 0.5


class Outcome(Target):
    """Margin of the sixth decision, and what operations must show.

    Attributes:
        metric: Name of the metric.
        margin: The least ratio to the baseline.
        step_p99_over_p50: Largest ratio of the 99th percentile of decode step times to the median.
        drill: Whether the fallback drill has to pass.
    """

    metric: RunMetric = "goodput_per_dollar"
    margin: PositiveFloat = 1.0
    step_p99_over_p50: PositiveFloat | None = None
    drill: bool = True


class Decisions(Strict):
    """One table per decision."""

    bottleneck: Bottleneck = Bottleneck()
    compatibility: Compatibility = Compatibility()
    concurrency: Target = Target(metric="throughput", margin=1.0)
    speculation: Target = Target(metric="tpot", margin=1.05)
    precision: Precision = Precision()
    outcome: Outcome = Outcome()


class Surface(Strict):
    """The grid of the speed-up surface.

    Attributes:
        batches: Sequences decoded together; 1 is always among them.
        prompts: Prompt lengths.
        output: Tokens emitted per sequence.
    """

    batches: tuple[PositiveInt, ...] = (1, 4, 16)
    prompts: tuple[PositiveInt, ...] = (64, 512)
    output: PositiveInt = 32

    @field_validator("batches")
    @classmethod
    def _with_one(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({1, *batches}))


class RolloutPlan(Strict):
    """Everything decided before the run.

    Attributes:
        name: Name of the service.
        model: Bundled name, path or hub id.
        engine: What serves; ``embedded`` is the one in this package.
        seed: Seed of every random choice.
        hardware: Machine and memory.
        design: Repetition.
        cost: Prices.
        traffic: The trace.
        cohorts: Kinds of request.
        variants: Ways to serve; the first is the baseline and on the standard path.
        decisions: Metrics and margins.
        surface: The grid of the third decision.
    """

    name: Annotated[str, Field(pattern=NAME)]
    model: str
    engine: Literal["embedded"] = "embedded"
    seed: Annotated[int, Field(ge=0)] = 0
    hardware: Hardware = Hardware()
    design: Design = Design()
    cost: Cost
    traffic: Traffic
    cohorts: Annotated[tuple[Cohort, ...], Field(min_length=1)]
    variants: Annotated[tuple[Variant, ...], Field(min_length=2)]
    decisions: Decisions = Decisions()
    surface: Surface = Surface()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, table: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        if isinstance(table, dict) and isinstance(table.get("variants"), list):
            expanded = [v for item in table["variants"] for v in _expanded(item)]
            return {**table, "variants": expanded}
        return table

    @model_validator(mode="after")
    def _consistent(self) -> RolloutPlan:
        for what, names in (
            ("cohorts", [c.name for c in self.cohorts]),
            ("variants", [v.name for v in self.variants]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{what} with names of their own, got {names}")
        if self.variants[0].is_replay:
            raise ValueError("the first variant on the standard path, as the baseline")
        for cohort in self.cohorts:
            longest = cohort.prompt_tokens[1] + cohort.output_tokens[1]
            if longest > self.hardware.context:
                raise ValueError(
                    f"hardware.context of at least {longest}, which cohort {cohort.name} needs"
                )
        return self

    @property
    def baseline(self) -> Variant:
        """What every other variant is compared with."""
        return self.variants[0]

    @property
    def candidates(self) -> tuple[Variant, ...]:
        """The variants on the replay path."""
        return tuple(v for v in self.variants if v.is_replay)

    @property
    def digest(self) -> str:
        """SHA-256 of the plan as canonical JSON."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def cohort(self, name: str) -> Cohort:
        """Return one cohort."""
        return next(c for c in self.cohorts if c.name == name)

    def variant(self, name: str) -> Variant:
        """Return one variant."""
        return next(v for v in self.variants if v.name == name)

    def margin(self, decision: str, cohort: Cohort) -> float:
        """Return the margin of a decision for a cohort."""
        own = cohort.margins.get(decision)
        return float(getattr(self.decisions, decision).margin) if own is None else own


def read_plan(path: Path) -> RolloutPlan:
    """Read a plan.

    Raises:
        ContractError: The file is missing, is not TOML, or a key is unknown or has a wrong value;
            the message names the key, what was expected and what came.
    """
    if not path.is_file():
        raise ContractError("--plan", "a TOML file that exists", path.name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ContractError("--plan", "valid TOML", f"{path.name}: {error}") from error
    return parse_plan(table)


def parse_plan(table: dict[str, Any]) -> RolloutPlan:
    """Return the plan that a table holds; raises as :func:`read_plan` does."""
    try:
        return RolloutPlan.model_validate(table)
    except ValidationError as error:
        raise _explain(error) from error


def _expanded(item: Any) -> list[Any]:  # noqa: ANN401
    """Return one variant table per combination of the lists in it, named after what differs."""
    if not isinstance(item, dict):
        return [item]
    lists = {key: value for key, value in item.items() if isinstance(value, list)}
    if not lists:
        return [item]
    name, found = str(item.get("name", "")), []
    for values in product(*lists.values()):
        own = dict(zip(lists, values, strict=True))
        label = "-".join([name, *(str(v) for v in values)])
        found.append({**item, **own, "name": label})
    return found


def _explain(error: ValidationError) -> ContractError:
    first, others = error.errors()[0], error.error_count() - 1
    key = ""
    for part in first["loc"]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    expected = first["msg"].removeprefix("Value error, ")
    expected = expected[:1].lower() + expected[1:]
    if first["type"] == "extra_forbidden":
        expected = "a key that the plan knows"
    elif first["type"] == "missing":
        expected = "a value"
    given = first["input"]
    got = "nothing" if first["type"] == "missing" else repr(given)
    if isinstance(given, dict) and first["type"] != "extra_forbidden":
        got = "nothing" if first["type"] == "missing" else "a table"
    more = (
        f"{others} more keys are wrong" if others > 1 else "1 more key is wrong" if others else ""
    )
    return ContractError(key or "plan", expected, got[:120], more)
