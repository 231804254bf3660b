"""This library's own kernels as arms: stores, positions and bytes; the launches come from outside.

:class:`Replay` and :class:`Standard` are all that the benchmark asks of the Triton kernels.
``gpu/launches.py`` binds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from gpu.arms import (
    STATES,
    Kind,
    Traffic,
    new_states,
    snapshot_traffic,
    standard_traffic,
)
from replayssm.formats import FORMATS, column_amax, column_scale, encode
from replayssm.ring import BlockPlan, RingSpec
from replayssm.storage import LayerStore, StorageSpec, allocate
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.arms import Arm, StateSet
    from gpu.cases import Inputs, Point

# read depths that a format is timed with
DEPTHS = {
    Format.F32: (ReadDepth.FULL,),
    Format.S32: (ReadDepth.HIGH, ReadDepth.FULL),
    Format.Q24: (ReadDepth.HIGH, ReadDepth.FULL),
    Format.Q16: (ReadDepth.HIGH, ReadDepth.FULL),
    Format.BF16: (ReadDepth.FULL,),
}
ROWS = 32  # encoded at once
# a fixed-point high read is 6e-3 of an output by itself, of bf16 the state is rounded once a window
TOLERANCE = {Format.F32: 5e-3, Format.S32: 5e-3, Format.Q24: 2e-2, Format.Q16: 2e-2,
             Format.BF16: 1e-2}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """One way to launch: value tiles of the store, and whatever the binding makes of ``launch``."""

    label: str = ""
    tiles: int = 1
    launch: Any = None


class Replay(Protocol):
    """The kernels that keep a checkpoint and a ring.

    Inputs are raw: the kernels form gates and strengths, normalise q and k of the delta families
    and scale q by ``K ** -0.5``, and add ``skip`` times v for Mamba-2.
    """

    def choices(self, fmt: Format, depth: ReadDepth) -> list[Choice]:
        """Return the launches to time, one arm each."""

    def load(self, point: Point, inputs: Inputs) -> Any:  # noqa: ANN401
        """Arrange inputs; never timed."""

    def plan(self, store: LayerStore, rows: BlockPlan, depth: ReadDepth, tokens: int) -> Any:  # noqa: ANN401
        """Bring a step's plan to the device; made for every step before any is captured."""

    def step_(self, store: LayerStore, plan: Any, loaded: Any, out: Tensor, launch: Any) -> None:  # noqa: ANN401
        """Launch all of one layer-step: fold what is due, read, append T entries; captured.

        Args:
            store: One slot for every row; mutated.
            plan: Of :meth:`plan`.
            loaded: Of :meth:`load`.
            out: ``[B, T, HV, V]`` bf16; mutated.
            launch: Of the choice.
        """


class Standard(Protocol):
    """The kernels that read and write the state; inputs are as raw."""

    def load(self, point: Point, inputs: Inputs) -> Any:  # noqa: ANN401
        """Arrange inputs; never timed."""

    def step_(self, state: Tensor, loaded: Any, out: Tensor) -> None:  # noqa: ANN401
        """Run one token: ``state`` ``[B, HV, V, K]`` fp32 or bf16 and ``out`` are mutated."""

    def snapshots_(self, states: Tensor, kept: Tensor, loaded: Any, out: Tensor) -> None:  # noqa: ANN401
        """Run T tokens from ``states[b, kept[b] - 1]`` and write the state after each.

        Args:
            states: ``[B, T, HV, V, K]`` fp32 or bf16; mutated.
            kept: ``[B]`` int32.
            loaded: Of :meth:`load`.
            out: ``[B, T, HV, V]`` bf16; mutated.
        """


@lru_cache(maxsize=8)
def plans(point: Point, steps: int) -> list[BlockPlan]:
    """Return where every row stands at each step, all admitted at position 0.

    Made once for all state sets: a plan keeps its copy on the device.

    A window and b tokens came before row b's first step; in a zeroed ring they write nothing. A
    graph of one period can be replayed: at its start rows fold as they do at its end.
    """
    rows = np.arange(point.batch)
    lengths, found = np.full_like(rows, point.tokens), []
    for step in range(steps):
        committed = point.window + rows % point.window + step * point.kept
        found.append(BlockPlan(rows, 0 * rows, committed - point.kept, committed, lengths))
    return found


class Stored:
    """One state set of checkpoint and ring."""

    def __init__(
        self, kernels: Replay, store: LayerStore, point: Point, depth: ReadDepth, steps: int,
        launch: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        self.kernels, self.store, self.point, self.choice = kernels, store, point, launch
        self.plans = [kernels.plan(store, p, depth, point.tokens) for p in plans(point, steps)]

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        self.loaded = self.kernels.load(self.point, inputs)
        self.out = torch.full_like(inputs.v, torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        self.kernels.step_(self.store, self.plans[step], self.loaded, self.out, self.choice)
        return self.out


class Plain:
    """One state set of the standard kernel, or of snapshots."""

    def __init__(self, kernels: Standard, point: Point, states: Tensor) -> None:
        self.kernels, self.point, self.states = kernels, point, states
        self.kept = torch.full((point.batch,), point.kept, dtype=torch.int32, device=states.device)

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        self.loaded = self.kernels.load(self.point, inputs)
        self.out = torch.full_like(inputs.v, torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        if self.point.tokens == 1:
            self.kernels.step_(self.states, self.loaded, self.out)
        else:
            self.kernels.snapshots_(self.states, self.kept, self.loaded, self.out)
        return self.out


def filled_store(
    spec: StorageSpec, point: Point, device: torch.device, seed: int | None
) -> LayerStore:
    """Allocate a store and encode states into it, some rows at a time to spare memory.

    All tiles of a head start with the same column scales.
    """
    store, scaled = allocate(spec, point.batch, device), FORMATS[spec.format].scaled
    for start in range(0, point.batch, ROWS):
        rows = slice(start, min(start + ROWS, point.batch))
        count, fresh = rows.stop - start, None if seed is None else seed + start
        states = new_states(point, count, torch.float32, device, fresh)
        columns = column_scale(column_amax(states)) if scaled else None
        planes = encode(states, spec.format, columns)
        store.high[rows] = planes.high
        if store.low is not None and planes.low is not None:
            store.low[rows] = planes.low
        if store.row_scale is not None and planes.row_scale is not None:
            store.row_scale[rows] = planes.row_scale
        if store.columns is not None and columns is not None:
            store.columns[rows] = columns[:, :, None]
    return store


@dataclass(frozen=True)
class OurReplay:
    """A format read at a depth, launched one way."""

    kernels: Replay
    format: Format
    read: ReadDepth
    choice: Choice = Choice()
    kind: Kind = Kind.REPLAY

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"ours replay {self.format.value} {self.read.value} {self.choice.label}".rstrip()

    @property
    def state(self) -> str:
        """The format."""
        return self.format.value

    @property
    def depth(self) -> str:
        """The read depth."""
        return self.read.value

    @property
    def tolerance(self) -> float:
        """The format's own error and bf16 outputs."""
        return TOLERANCE[self.format]

    def refuses(self, point: Point) -> str:
        """Nothing: what a kernel cannot serve it says when it is prepared."""
        return ""

    def period(self, point: Point) -> int:
        """Steps after which positions repeat modulo the window."""
        steps, at = 1, point.kept
        while at % point.window:
            steps, at = steps + 1, at + point.kept
        return steps

    def _spec(self, point: Point, device: torch.device) -> StorageSpec:
        ring = RingSpec(point.window, max_block=point.tokens, tiles=self.choice.tiles)
        # inputs are fp32 where Triton's interpreter checks, and fit no bf16 ring
        entries = torch.float32 if device.type == "cpu" else torch.bfloat16
        return StorageSpec(point.case.layer, self.format, ring, entries)

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> StateSet:
        """Allocate one state set."""
        store = filled_store(self._spec(point, device), point, device, seed)
        return Stored(self.kernels, store, point, self.read, steps, self.choice.launch)

    def traffic(self, point: Point) -> Traffic:
        """Planes and scales read every step, all of them read and written once a window."""
        fmt, at, rows = FORMATS[self.format], point.case.layer, point.batch
        share = point.kept / point.window
        high, stored = fmt.read_bytes[self.read], fmt.stored_bytes
        scales = 0.0
        if fmt.scaled:
            scales = rows * at.value_heads * (4 * at.value_dim + 2 * self.choice.tiles * at.key_dim)
        # a step that folds reads both planes; the other tiles and rows read what the depth asks for
        read = point.state_elements * (high + (stored - high) * share) + scales
        written = (point.state_elements * stored + scales) * share
        keys, values, gates = point.entry_elements
        entry = 2 * keys + 2 * values + 4 * (gates + rows * at.value_heads)
        # a step reads what is not folded, its fold what it folds, and T entries are appended
        moved = (point.window - 1) / 2 + point.kept + point.tokens
        return Traffic(read, written, entry * moved, point.io_bytes)


@dataclass(frozen=True)
class OurStandard:
    """The standard kernel, and the one that writes a snapshot after every token of a block."""

    kernels: Standard
    state: str
    kind: Kind
    depth: str = "full"
    tolerance: float = 1e-2

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"ours {self.kind.value} {self.state}"

    def refuses(self, point: Point) -> str:
        """Blocks are for snapshots."""
        if (point.tokens > 1) != (self.kind is Kind.SNAPSHOT):
            return "serves blocks" if self.kind is Kind.SNAPSHOT else "serves one token"
        return ""

    def period(self, point: Point) -> int:
        """Every step is alike."""
        return 1

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> StateSet:
        """Allocate one state set."""
        rows = point.batch * (point.tokens if self.kind is Kind.SNAPSHOT else 1)
        states = new_states(point, rows, STATES[self.state], device, seed)
        if self.kind is Kind.SNAPSHOT:
            states = states.view(point.batch, point.tokens, *states.shape[1:])
        return Plain(self.kernels, point, states)

    def traffic(self, point: Point) -> Traffic:
        """Return the bytes of a layer-step."""
        count = snapshot_traffic if self.kind is Kind.SNAPSHOT else standard_traffic
        return count(point, self.state)


def arms_of(replay: Replay, standard: Standard) -> list[Arm]:
    """Return every arm of an implementation."""
    found: list[Arm] = []
    for fmt, depths in DEPTHS.items():
        for depth in depths:
            found += [OurReplay(replay, fmt, depth, c) for c in replay.choices(fmt, depth)]
    for state in STATES:
        found.append(OurStandard(standard, state, Kind.STANDARD))
        found.append(OurStandard(standard, state, Kind.SNAPSHOT))
    return found
