"""Measuring how kernels are best launched on a device, and which path is faster there.

Never on live state: everything runs on :mod:`~replayssm.ops.triton.scratch` copies, and what comes
out are two tables. The launch table says how the steps are launched (:mod:`.launch` reads it), the
policy table how long both paths take (:mod:`replayssm.policy` reads it).

The launch of a replay step has a dozen sizes. They are found one after another: from the launch
that is chosen without this measurement, every size is set to each of its alternatives in turn and
the fastest one stays. A launch that fails to compile, or whose outputs are not those of the first
one, is passed over.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from replayssm.ops.triton import one_pass, pull_and_read
from replayssm.ops.triton.call import power_of_two
from replayssm.ops.triton.launch import (
    Launch,
    StandardLaunch,
    choose_launch,
    choose_standard,
    fitted,
)
from replayssm.ops.triton.scratch import Replayed, Rewritten, microseconds, outputs
from replayssm.policy import Measured
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from replayssm.storage import StorageSpec

ALTERNATIVES: dict[str, tuple[int, ...]] = {
    "fold_programs": (0, 132, 264, 528, 792, 1056),
    "chunk": (8, 16, 32, 64, 128),
    "read_rows": (8, 16, 32, 64, 128),
    "full_rows": (16, 32, 64),
    "fold_rows": (8, 16, 32, 64),
    "fold_chunk": (16, 32, 64, 128),
    "warps": (1, 2, 4),
    "fold_warps": (1, 2, 4),
    "pull_warps": (1, 2, 4),
    "pull_registers": (0, 48, 64, 96, 112, 168),
    "fold_registers": (0, 128, 168),
    "early_read": (False, True),
    "whole": (False, True),
}
READ_SIZES = ("chunk", "read_rows", "full_rows", "warps", "early_read", "whole")
"""Those that mean nothing where a read pulls back by itself; full reads keep what they had."""
STANDARD_ROWS, STANDARD_WARPS = (4, 8, 16, 32, 64), (1, 2, 4)
TOLERANCE = 2e-2
"""Relative difference of outputs up to which two launches compute the same: rounding only."""
GAIN = 0.005
"""Part of the time that a size has to save to be changed: under it is noise."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: a layer in a format, rows, tokens, and the depth of its reads."""

    spec: StorageSpec
    rows: int
    tokens: int
    depth: ReadDepth

    @property
    def standard_dtype(self) -> torch.dtype:
        """What the standard path's state would be instead: fp32 or bf16."""
        return torch.bfloat16 if self.spec.format is Format.BF16 else torch.float32

    @property
    def name(self) -> str:
        """One line's worth."""
        at = self.spec.layer
        return (
            f"{at.write.value} {at.decay.value} {at.key_heads}/{at.value_heads}x{at.value_dim}x"
            f"{at.key_dim} {self.spec.format.value} {self.depth.value} rows={self.rows} "
            f"tokens={self.tokens} window={self.spec.ring.window}"
        )


@dataclass
class Tuning:
    """What was found so far, and where it is written after every point.

    Attributes:
        device: Where kernels run.
        launches: File of the launch table.
        log: Takes a line of progress.
        rules: Rules of the replay step.
        standard: Rules of the standard step.
    """

    device: torch.device
    launches: Path
    log: Callable[[str], None]
    rules: list[dict[str, Any]] = field(default_factory=list)
    standard: list[dict[str, Any]] = field(default_factory=list)
    _replay_of: dict[Point, Launch] = field(default_factory=dict)
    _standard_of: dict[Point, StandardLaunch] = field(default_factory=dict)

    def tune_replay(self, point: Point, passes: int) -> None:
        """Find the launch of the replay step at a point, once for both read depths.

        Not where a step is one pass, whose sizes follow from the rows.
        """
        if one_pass.folds(point.spec, self.device):
            return
        same = next((p for p in self._replay_of if replace(p, depth=point.depth) == point), None)
        if same is not None:
            self._replay_of[point] = self._replay_of[same]
            return
        self.log(f"replay {point.name}")
        launch, _ = tune_replay(point, self.device, passes=passes, log=self.log)
        self._replay_of[point] = launch
        self.rules.append(
            {"when": _when(point, point.spec.format.value), "launch": _changed(launch)}
        )
        self._write()

    def tune_standard(self, point: Point) -> None:
        """Find the launch of the standard step that a point is compared with, once."""
        name = "bf16" if point.standard_dtype is torch.bfloat16 else "f32"
        when = _when(point, name)
        known = next((rule for rule in self.standard if rule["when"] == when), None)
        if known is None:
            self.log(f"standard {name} {point.name}")
            launch, _ = tune_standard(point, self.device, log=self.log)
            known = {"when": when, "launch": _changed(launch)}
            self.standard.append(known)
            self._write()
        self._standard_of[point] = StandardLaunch(**known["launch"])

    def measure(self, points: Sequence[Point]) -> Measured:
        """Return a row of the policy table from points that differ in their rows only, ascending.

        Both steps are launched as was found here, or as the device's table says.
        """
        first, slow, fast = points[0], [], []
        for point in points:
            slow.append(round(self._standard_us(point), 2))
            fast.append(round(self._replay_us(point), 2))
            self.log(f"{point.name}: standard {slow[-1]:.1f} us, replay {fast[-1]:.1f} us")
        return Measured(
            replace(first.spec.layer, conv=None), first.spec.format, first.depth, first.tokens,
            first.spec.ring.window, tuple(point.rows for point in points), tuple(slow),
            tuple(fast),
        )  # fmt: skip

    def _standard_us(self, point: Point) -> float:
        layer, dtype = point.spec.layer, point.standard_dtype
        work = Rewritten(layer, dtype, point.rows, point.tokens, self.device)
        return _warm_us(work, self._standard_of.get(point), self.device)

    def _replay_us(self, point: Point) -> float:
        work = Replayed(point.spec, point.rows, point.tokens, point.depth, self.device)
        return _warm_us(work, self._replay_of.get(point), self.device)

    def _write(self) -> None:
        write_launches(self.launches, {"rules": self.rules, "standard": self.standard})


def tune_replay(
    point: Point, device: torch.device, *, passes: int, log: Callable[[str], None]
) -> tuple[Launch, float]:
    """Return the fastest launch found for a point, and its microseconds."""
    work = Replayed(point.spec, point.rows, point.tokens, point.depth, device)
    start = choose_launch(point.spec, point.rows, point.tokens, device)
    names = [x.name for x in fields(Launch) if x.name in ALTERNATIVES]
    is_many = point.rows >= pull_and_read.LEAST_ROWS and point.depth is ReadDepth.HIGH
    if is_many and pull_and_read.serves(point.spec, device):
        names = [name for name in names if name not in READ_SIZES]
    names.sort(key=list(ALTERNATIVES).index)
    changes = [partial(_with, name=name, spec=point.spec) for name in names]
    return _descend(work, start, changes, device, passes, log)


def tune_standard(
    point: Point, device: torch.device, *, log: Callable[[str], None]
) -> tuple[StandardLaunch, float]:
    """Return the fastest launch of the standard step at a point, and its microseconds."""
    layer, dtype = point.spec.layer, point.standard_dtype
    work = Rewritten(layer, dtype, point.rows, point.tokens, device)
    start = choose_standard(layer, dtype, point.rows, point.tokens, device)
    most = power_of_two(layer.value_dim)
    every = [
        StandardLaunch(rows, warps)
        for rows in STANDARD_ROWS
        if rows <= most
        for warps in STANDARD_WARPS
    ]
    return _descend(work, start, [lambda _: every], device, 1, log)


def write_launches(path: Path, table: dict[str, list[dict[str, Any]]]) -> None:
    """Write a launch table, a rule a line; of several that match, more tokens and rows go first."""

    def order(rule: dict[str, Any]) -> tuple[int, int]:
        return -rule["when"].get("tokens", 1), -rule["when"].get("rows", 1)

    def lines(rules: list[dict[str, Any]]) -> str:
        return ",\n".join(f"    {json.dumps(rule)}" for rule in sorted(rules, key=order))

    parts = [f"  {json.dumps(name)}: [\n{lines(rules)}\n  ]" for name, rules in table.items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _warm_us(work: Replayed | Rewritten, launch: Any, device: torch.device) -> float:  # noqa: ANN401 - a launch of either kind
    for call in work.cycle(launch):
        call()
    return microseconds(work.cycle(launch), device)


def _descend(
    work: Replayed | Rewritten,
    start: Any,  # noqa: ANN401 - a launch of either kind
    changes: Sequence[Callable[[Any], list[Any]]],
    device: torch.device,
    passes: int,
    log: Callable[[str], None],
) -> tuple[Any, float]:
    want = outputs(work, start)
    best, fastest = start, microseconds(work.cycle(start), device)
    log(f"  {fastest:8.2f} us  {_changed(start)}")
    known = {start}
    for _ in range(passes):
        before = best
        for change in changes:
            for launch in change(best):
                if launch in known:
                    continue
                known.add(launch)
                us = _time(work, launch, want, device)
                if us is not None and us < fastest * (1 - GAIN):
                    best, fastest = launch, us
                    log(f"  {us:8.2f} us  {_changed(launch)}")
        if best == before:
            break
    return best, fastest


def _with(launch: Launch, name: str, spec: StorageSpec) -> list[Launch]:
    """Return the launches of a layer that differ from one in a single size."""
    sizes: list[dict[str, Any]] = [{name: value} for value in ALTERNATIVES[name]]
    return [fitted(replace(launch, **size), spec) for size in sizes]


def _time(
    work: Replayed | Rewritten,
    launch: Any,  # noqa: ANN401
    want: torch.Tensor,
    device: torch.device,
) -> float | None:
    """Return microseconds of a launch; None where it does not run or computes something else."""
    try:
        got = outputs(work, launch)
    except Exception as error:  # a compiler says no in many ways
        if _is_fatal(error):
            raise
        return None
    difference = (got - want).norm() / want.norm()
    return microseconds(work.cycle(launch), device) if difference <= TOLERANCE else None


def _is_fatal(error: Exception) -> bool:
    # after one of these the device answers nothing any more
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _when(point: Point, state: str) -> dict[str, Any]:
    at = point.spec.layer
    when: dict[str, Any] = {
        "writes": [at.write.value], "decays": [at.decay.value], "formats": [state],
    }  # fmt: skip
    return when | {n: v for n, v in (("tokens", point.tokens), ("rows", point.rows)) if v > 1}


def _changed(launch: Launch | StandardLaunch) -> dict[str, int]:
    """Return the sizes of a launch that are not those which a rule leaves out."""
    given = {f.name: f.default for f in fields(launch)}
    return {name: value for name, value in asdict(launch).items() if value != given[name]}
