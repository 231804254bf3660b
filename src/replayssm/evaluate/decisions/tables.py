"""The tables that a plan is made of: machine, repetition, prices, cohorts, variants."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from replayssm.types import Format, ReadDepth

HOURS_A_MONTH = 730.0
NAME = r"^[a-z0-9][a-z0-9._-]*$"
Span = tuple[PositiveInt, PositiveInt]
DECISIONS = (
    "bottleneck",
    "compatibility",
    "concurrency",
    "speculation",
    "precision",
    "outcome",
)


class Strict(BaseModel):
    """A table that takes no key it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Hardware(Strict):
    """What every variant runs on, and the memory that each of them gets.

    Attributes:
        device: ``cpu`` or ``cuda``.
        threads: Threads of torch and of the compiled kernels.
        memory_mib: Memory for states, rings and attention caches: the same for every variant.
        context: Longest prompt and reply together, tokens.
        max_batch: Most sequences in one step.
        prefill_chunk: Most prompt tokens in one step.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt = 2
    memory_mib: PositiveFloat = 64.0
    context: PositiveInt = 8192
    max_batch: PositiveInt = 64
    prefill_chunk: PositiveInt = 512


class Design(Strict):
    """How runs are repeated.

    Attributes:
        pairs: Pairs of the pilot.
        max_pairs: Most pairs; the pilot's spread says how many of them are used.
        confidence: Level of the intervals.
        power: Chance of seeing an effect of the size ``effect`` that the number of pairs is set by.
        effect: That relative effect.
        warmups: Untimed runs of every variant first.
        surface_pairs: Pairs of each cell of the speed-up surface.
    """

    pairs: Annotated[int, Field(ge=8)] = 8
    max_pairs: Annotated[int, Field(ge=8, le=1000)] = 16
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    power: Annotated[float, Field(gt=0.5, lt=1)] = 0.8
    effect: Annotated[float, Field(gt=0, lt=1)] = 0.05
    warmups: PositiveInt = 1
    surface_pairs: Annotated[int, Field(ge=8)] = 8

    @model_validator(mode="after")
    def _ordered(self) -> Design:
        if self.max_pairs < self.pairs:
            raise ValueError(f"max_pairs must be at least pairs ({self.pairs})")
        return self


class Cost(Strict):
    """Prices.

    Attributes:
        per_gpu_hour: Price of one machine's hour; or
        per_kwh: price of energy, with
        watts: the machine's draw under load.
        machines: Machines that the fixed cost is shared by.
        monthly: What the change costs to keep, by name (fork upkeep, observability, ..), a month.
    """

    per_gpu_hour: PositiveFloat | None = None
    per_kwh: PositiveFloat | None = None
    watts: PositiveFloat | None = None
    machines: PositiveInt = 1
    monthly: dict[str, NonNegativeFloat] = {}

    @model_validator(mode="after")
    def _one_price(self) -> Cost:
        by_energy = self.per_kwh is not None and self.watts is not None
        if by_energy == (self.per_gpu_hour is not None):
            raise ValueError("either per_gpu_hour, or per_kwh and watts")
        return self

    def per_hour(self, *, changed: bool) -> float:
        """Return the price of one machine's hour, the fixed cost of the change included or not."""
        if self.per_gpu_hour is not None:
            price = self.per_gpu_hour
        else:
            price = (self.per_kwh or 0.0) * (self.watts or 0.0) / 1000
        fixed = sum(self.monthly.values()) / HOURS_A_MONTH / self.machines
        return price + (fixed if changed else 0.0)


class Slo(Strict):
    """Limits on one request, in ms; a limit that is not named does not apply.

    Attributes:
        ttft_ms: From schedule to the first token.
        tpot_ms: Mean time per token after the first.
        e2el_ms: From schedule to the last token.
    """

    ttft_ms: PositiveFloat | None = None
    tpot_ms: PositiveFloat | None = None
    e2el_ms: PositiveFloat | None = None


class Traffic(Strict):
    """The traffic of the whole replay.

    Attributes:
        trace: Canonical trace file, relative to the plan.
        speedup: How much faster than recorded it is replayed.
        seconds: How much of it, from its start; None is all.
    """

    trace: str
    speedup: PositiveFloat = 1.0
    seconds: PositiveFloat | None = None


class Cohort(Strict):
    """A kind of request that is routed as one.

    A request belongs to the first cohort that it names or, naming none, whose ranges hold it.

    Attributes:
        name: Short name.
        mode: Whether someone waits for every token (``interactive``) or for the result.
        arrival: ``scheduled`` at the trace's times, ``closed`` with a fixed number in flight, or
            ``offline``, all at once.
        concurrency: Requests in flight, for ``closed``.
        prompt_tokens: Least and most prompt tokens.
        output_tokens: Least and most tokens to emit.
        requests: Requests in each timed run.
        graded: Replies that the precision decision grades.
        slo: Limits.
        margins: Margins that differ for this cohort, by decision.
    """

    name: Annotated[str, Field(pattern=NAME)]
    mode: Literal["interactive", "batch"]
    arrival: Literal["scheduled", "closed", "offline"] = "closed"
    concurrency: PositiveInt = 1
    prompt_tokens: Span
    output_tokens: Span
    requests: PositiveInt = 8
    graded: PositiveInt = 32
    slo: Slo = Slo()
    margins: dict[str, PositiveFloat] = {}

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _ascending(cls, span: Span) -> Span:
        if span[0] > span[1]:
            raise ValueError("the least before the most")
        return span

    @field_validator("margins")
    @classmethod
    def _known(cls, margins: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(margins) - set(DECISIONS))
        if unknown:
            raise ValueError(f"names out of {', '.join(DECISIONS)}")
        return margins

    def holds(self, prompt: int, output: int) -> bool:
        """Tell whether lengths lie in this cohort's ranges."""
        low, high = self.prompt_tokens
        least, most = self.output_tokens
        return low <= prompt <= high and least <= output <= most


class Variant(Strict):
    """One way to serve a request.

    Attributes:
        name: Short name.
        path: ``standard`` or ``replay``.
        state: State format.
        window: Window of the replay path.
        read: Planes that a step reads.
        drafter: None, ``ngram`` or ``model``.
        draft_tokens: Most drafts a round.
    """

    name: Annotated[str, Field(pattern=NAME)]
    path: Literal["standard", "replay"]
    state: Format = Format.S32
    window: PositiveInt = 16
    read: ReadDepth = ReadDepth.FULL
    drafter: Literal["ngram", "model"] | None = None
    draft_tokens: Annotated[int, Field(ge=0, le=64)] = 0

    @model_validator(mode="after")
    def _possible(self) -> Variant:
        if (self.drafter is None) != (self.draft_tokens == 0):
            raise ValueError("a drafter and draft_tokens of 1 or more, or neither")
        if self.path == "standard":
            if self.drafter is not None or self.read is not ReadDepth.FULL:
                raise ValueError("no drafter and full reads on the standard path")
            if self.state not in (Format.F32, Format.BF16):
                raise ValueError("state f32 or bf16 on the standard path")
        return self

    @property
    def is_replay(self) -> bool:
        """Whether this is a candidate (state replay), not a baseline."""
        return self.path == "replay"

    @property
    def pool(self) -> tuple[Format, int]:
        """State format and window: what one pool has, so variants that share it share a process."""
        return self.state, self.window
