"""What the benchmark asks of a kernel: an arm prepares state sets, a state set launches steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.cases import Inputs, Point

STATES = {"f32": torch.float32, "bf16": torch.bfloat16}
# the standard kernel that a state is compared with holds the same number of bytes, or more
REFERENCE = {"f32": "f32", "s32": "f32", "q24": "f32", "bf16": "bf16", "q16": "bf16"}


class Kind(StrEnum):
    """How a kernel treats the state."""

    STANDARD = "standard"  # reads and writes it at every step
    SNAPSHOT = "snapshot"  # writes it after every token of a block, so that any can be kept
    REPLAY = "replay"  # a checkpoint and the inputs that came after it
    FLOOR = "floor"  # moves the bytes of a replay step and computes nothing


@dataclass(frozen=True)
class Traffic:
    """Bytes of one average layer-step of all rows, each counted once.

    Attributes:
        state_read: State, planes and scales read.
        state_written: The same, written; of a whole fold cycle by its steps.
        ring: Entries read and written.
        io: Inputs and outputs.
    """

    state_read: float
    state_written: float
    ring: float
    io: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.state_read + self.state_written + self.ring + self.io


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of each stream, bytes read and written counted."""

    read: float
    rewrite: float
    copy: float
    write: float

    def of(self, traffic: Traffic) -> float:
        """Return the ceiling for this mix of reads and writes.

        Linear in the share of written bytes between reading, rewriting in place (one half) and
        writing. Inputs and outputs count as read, of rings nothing is said: both are small.
        """
        written = traffic.state_written / traffic.total
        if written <= 0.5:
            return self.read + (self.rewrite - self.read) * 2 * written
        return self.rewrite + (self.write - self.rewrite) * (2 * written - 1)


class StateSet(Protocol):
    """State, rings, scratch and inputs of one layer for every row of a batch.

    Row b starts at position b of the cycle, with entries of zero strength before it, so that rows
    stand at different positions from the first step on.
    """

    def load(self, inputs: Inputs) -> None:
        """Take the inputs of the steps to come, in the kernel's own layout; never timed."""

    def launch(self, step: int) -> Tensor:
        """Launch all of step number ``step``; return its outputs ``[B, T, HV, V]``.

        It can be captured in a CUDA graph: no synchronisation, no copy from the host.
        """


class Arm(Protocol):
    """One kernel with one state format and one launch configuration."""

    @property
    def name(self) -> str:
        """Unique; shown in the table."""

    @property
    def kind(self) -> Kind:
        """What it is compared as."""

    @property
    def state(self) -> str:
        """State format, a key of ``REFERENCE``."""

    @property
    def depth(self) -> str:
        """``full``, or ``high`` where a read skips the low plane."""

    @property
    def tolerance(self) -> float:
        """Largest relative error of its outputs at which it is timed."""

    def refuses(self, point: Point) -> str:
        """Return why this arm cannot run at a point; empty where it can."""

    def period(self, point: Point) -> int:
        """Return the steps after which launches and folds repeat."""

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> StateSet:
        """Allocate one state set.

        Args:
            point: Shapes.
            device: Where to.
            seed: Of a random state; None for an empty one.
            steps: ``launch`` is called with 0 .. steps - 1.
        """

    def traffic(self, point: Point) -> Traffic:
        """Return the bytes of an average layer-step."""


def new_states(
    point: Point, slots: int, dtype: torch.dtype, device: torch.device, seed: int | None
) -> Tensor:
    """Return ``[slots, HV, V, K]`` states: zeros, or normal numbers of deviation 0.1."""
    at = point.case.layer
    state = torch.zeros(slots, at.value_heads, at.value_dim, at.key_dim, dtype=dtype, device=device)
    if seed is not None:
        state.normal_(std=0.1, generator=torch.Generator(device).manual_seed(seed))
    return state


def steps_of_rows(rows: int, steps: int, period: int) -> Tensor:
    """Return ``[steps, B]`` int64: where in its cycle each row stands when row b starts at b."""
    return (torch.arange(steps)[:, None] + torch.arange(rows)[None]) % period


def standard_traffic(point: Point, state: str) -> Traffic:
    """Bytes of a kernel that reads each state once and writes it once."""
    size = point.state_elements * STATES[state].itemsize
    return Traffic(size, size, 0, point.io_bytes)


def snapshot_traffic(point: Point, state: str) -> Traffic:
    """Bytes of a kernel that reads each state once and writes it after every token."""
    size = point.state_elements * STATES[state].itemsize
    return Traffic(size, size * point.tokens, 0, point.io_bytes)


@dataclass(frozen=True)
class Cycle:
    """The steady cycle of a kernel that keeps entries: how full its ring is at every step.

    Attributes:
        filled: Entries in the ring when a step starts, for each step of the cycle.
        folds: Whether the step folds them.
    """

    filled: tuple[int, ...]
    folds: tuple[bool, ...]

    @property
    def period(self) -> int:
        """Steps of the cycle."""
        return len(self.filled)

    def traffic(self, point: Point, state_bytes: float, entry: float, written: float) -> Traffic:
        """Return bytes where every step reads the state and a fold writes it.

        Args:
            point: Shapes.
            state_bytes: Of all rows' states.
            entry: Bytes of one ring entry of all rows.
            written: Entries appended in an average step.
        """
        reads = sum(self.filled) / self.period
        folds = sum(self.folds) / self.period
        return Traffic(state_bytes, state_bytes * folds, entry * (reads + written), point.io_bytes)


def decode_cycle(window: int) -> Cycle:
    """Cycle of the kernels whose folding step takes its own token along and appends nothing."""
    return Cycle(tuple(range(window)), tuple(i == window - 1 for i in range(window)))


def block_cycle(length: int, tokens: int, kept: int) -> Cycle:
    """Cycle of the kernels that fold first once a block more would not fit in the ring."""
    filled, folds, at = [], [], kept
    while True:
        is_full = at + 2 * tokens > length
        filled.append(at)
        folds.append(is_full)
        if is_full:
            return Cycle(tuple(filled), tuple(folds))
        at += kept
