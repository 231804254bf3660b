"""Interleaved timing: A, B, A, B, ... in whole fold cycles, nothing dropped."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

try:
    import resource
except ImportError:  # not on Windows; the count is then reported as unknown
    resource = None  # type: ignore[assignment]

LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Samples:
    """Durations of one arm, in the order they were measured.

    Attributes:
        seconds: One duration per round; round i of every arm was measured back to back.
        switches: Involuntary context switches during each sample, or an empty tuple where the
            platform does not say. Samples with switches are kept: a paired interval widens instead.
    """

    seconds: tuple[float, ...]
    switches: tuple[int, ...]

    @property
    def median(self) -> float:
        """Median duration in seconds."""
        return float(np.median(self.seconds))


def interleave(
    arms: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    limit_s: float = float("inf"),
    device: torch.device | None = None,
) -> dict[str, Samples]:
    """Time every arm once per round, the order rotating from round to round.

    Args:
        arms: What to run; one call is one sample (for replay: whole fold cycles).
        rounds: Samples per arm, at most. Every arm must have run before, so that compilation and
            first touch are not timed.
        limit_s: Stop after the round in which this time is used up, never under ``LEAST_ROUNDS``.
            It looks at the clock alone, so it cannot favour an arm.
        device: Synchronised around each sample when it is a GPU.
    """
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    switches: dict[str, list[int]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        begun = time.perf_counter()
        for r in range(rounds):
            if r >= LEAST_ROUNDS and time.perf_counter() - begun > limit_s:
                break
            shift = r % len(names)
            for name in names[shift:] + names[:shift]:
                before = _switches()
                seconds[name].append(_once(arms[name], device))
                if before is not None:
                    switches[name].append((_switches() or before) - before)
    finally:
        if enabled:
            gc.enable()
    return {name: Samples(tuple(seconds[name]), tuple(switches[name])) for name in names}


def _once(call: Callable[[], None], device: torch.device | None) -> float:
    _synchronise(device)
    start = time.perf_counter()
    call()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def _switches() -> int | None:
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
