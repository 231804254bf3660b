"""What a run will measure and the margins it will be judged by, fixed and hashed beforehand."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from typing import TYPE_CHECKING

from replayssm.errors import ContractError
from replayssm.evaluate import arms
from replayssm.evaluate.arms import Arm

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Margins:
    """Limits that an arm must keep to; compared with the worse end of each interval.

    The reasons behind the defaults:

    * ``mean_kl``: by Pinsker's inequality a KL of 0.002 nats bounds the mean total variation by
      ``sqrt(0.002 / 2)`` = 3.2 %: at most about 3 in 100 sampled tokens could come out different.
    * ``p99_kl``: the same bound for the worst token in a hundred, total variation under 16 %.
    * ``bits_per_byte``: 0.5 % is well under the gap between two training runs of one recipe.
    * ``recall_drop``: 3 points is what 129 probes can rule out when not one answer changes, so a
      smaller margin could not be passed by a perfect arm in a default run.
    * ``speedup``: below 5 % the change is not worth its complexity.
    * ``logit_error``, ``state_error``: for arms that promise fp32 results. Sums in another order
      move fp32 results by about 1e-6 a step; ten layers and 512 steps leave two orders of room.

    Attributes:
        mean_kl: Largest mean KL from the reference's next-token distribution, nats per token, in
            the worst length bucket.
        p99_kl: Largest 99th percentile of it, nats.
        bits_per_byte: Largest relative increase of bits per byte.
        recall_drop: Largest drop of the share of probes answered right.
        speedup: Least speed-up of a state update; the interval must also lie above 1.
        logit_error: Largest difference of a logit, relative to the logits' standard deviation.
        state_error: Largest relative difference (Frobenius norm) of a layer's state.
    """

    mean_kl: float = 0.002
    p99_kl: float = 0.05
    bits_per_byte: float = 0.005
    recall_drop: float = 0.03
    speedup: float = 1.05
    logit_error: float = 1e-3
    state_error: float = 1e-4

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
                raise ContractError(f"margins.{item.name}", "a positive finite number", value)
        if self.speedup < 1:
            raise ContractError("margins.speedup", "at least 1", self.speedup)


@dataclass(frozen=True, slots=True)
class Scope:
    """Sizes of a run.

    Attributes:
        window: Window of the arms in the compatibility and precision sections.
        steps: Decode steps compared one by one.
        prefills: Prompt lengths the step-by-step comparison starts from.
        decode_batches: Batches of the bottleneck section; the largest that fits is added.
        decode_samples: Interleaved rounds per batch there, at most.
        batches: Batches of the window section.
        windows: Windows of the window section.
        rounds: Interleaved rounds per cell there, at most.
        cell_seconds: Time after which a cell of either section starts no further round, once it
            has three.
        working_set: Bytes of fp32 state that a cell cycles through, if memory allows.
        budget_bytes: The equal memory limit under which arms pick their own largest batch.
        buckets: Upper ends of the length buckets, ascending.
        text_rows: Held-out sequences, each as long as the last bucket.
        probes: ``(length, probes per kind)`` pairs.
        block: Tokens per forward in the precision section; a divisor of ``window``, so that every
            token finds the ring as deep as it would in single steps.
        drafts: Draft lengths of the speculation section.
        draft_rows: Sequences decoded there.
        draft_prompt: Tokens of their prompts.
        draft_tokens: Tokens emitted per sequence, one at the prefill and whole stretches of 32.
        verify_batch: Batch of its layer-level timings.
        rollbacks: Rounds of its rollback torture.
    """

    window: int = 16
    steps: int = 512
    prefills: tuple[int, ...] = (16, 128, 1024)
    decode_batches: tuple[int, ...] = (1, 16, 64)
    decode_samples: int = 6
    batches: tuple[int, ...] = (1, 4, 16, 64)
    windows: tuple[int, ...] = (8, 16, 32)
    rounds: int = 8
    cell_seconds: float = 2.0
    working_set: int = 64 << 20
    budget_bytes: int = 128 << 20
    buckets: tuple[int, ...] = (512, 2048, 8192)
    text_rows: int = 2
    probes: tuple[tuple[int, int], ...] = ((256, 39), (1024, 3), (8192, 1))
    block: int = 16
    drafts: tuple[int, ...] = (3, 7)
    draft_rows: int = 3
    draft_prompt: int = 256
    draft_tokens: int = 97
    verify_batch: int = 16
    rollbacks: int = 2000

    def __post_init__(self) -> None:
        if self.block < 1 or self.window % self.block:
            raise ContractError("scope.block", f"a divisor of window ({self.window})", self.block)


# sized for three models under ten arms in well under an hour on two cores
FULL_SCOPE = Scope(
    decode_samples=12,
    batches=(1, 4, 16, 64, 256),
    windows=(8, 16, 32, 64),
    rounds=12,
    budget_bytes=256 << 20,
    text_rows=4,
    probes=((256, 80), (1024, 16), (4096, 4), (8192, 2)),
    drafts=(1, 3, 7, 15),
    draft_rows=4,
    draft_tokens=193,
    rollbacks=5000,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the run.

    Attributes:
        model: Name of the model; a local path is cut to its last part.
        arms: What is compared; the first is the reference.
        margins: Limits.
        scope: Sizes.
        seed: Seed of texts, probes, inputs and resampling.
    """

    model: str
    arms: tuple[Arm, ...] = arms.DEFAULT
    margins: Margins = Margins()
    scope: Scope = Scope()
    seed: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of the plan as canonical JSON."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def candidates(self) -> tuple[Arm, ...]:
        """The arms on the replay path."""
        return tuple(arm for arm in self.arms if arm.is_replay)


def read_margins(path: Path) -> Margins:
    """Read ``[margins]`` from a TOML file; what it does not name keeps its default.

    Raises:
        ContractError: The file is missing, is not TOML, or names an unknown margin.
    """
    if not path.is_file():
        raise ContractError("--margins", "a TOML file that exists", path.name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ContractError("--margins", "valid TOML", f"{path.name}: {error}") from error
    if set(table) != {"margins"} or not isinstance(table["margins"], dict):
        raise ContractError("--margins", "one table [margins]", sorted(table))
    unknown = set(table["margins"]) - {item.name for item in fields(Margins)}
    if unknown:
        names = ", ".join(item.name for item in fields(Margins))
        raise ContractError("--margins", f"names out of {names}", sorted(unknown))
    return replace(Margins(), **table["margins"])
