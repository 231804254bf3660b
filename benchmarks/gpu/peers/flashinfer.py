"""FlashInfer's CUDA kernels: the standard Mamba-2 step, and ``checkpointing_ssu``.

Modules are loaded from the folder that the environment variable ``FLASHINFER_MODULES`` names (see
``build_flashinfer.py``), or compiled by the installed package, which takes minutes each. Launch
tactics of ``checkpointing_ssu`` are the ones that won on an H200, and the package's default.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu.arms import (
    STATES,
    Cycle,
    Kind,
    block_cycle,
    new_states,
    standard_traffic,
    steps_of_rows,
)
from gpu.peers.common import mamba

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.arms import Arm, StateSet, Traffic
    from gpu.cases import Inputs, Point

FOLDER = "FLASHINFER_MODULES"
# the geometry that modules are compiled for
GEOMETRY = {"key_heads": 8, "value_heads": 128, "key_dim": 128, "value_dim": 64}
WINDOW = 16


@dataclass(frozen=True)
class Tactic:
    """Pipeline stages and programs per multiprocessor, or ``split`` of the one-kernel path."""

    label: str
    stages: int = 0
    programs: int = 0
    split: int = 0


TACTICS = (
    Tactic("one", split=1),
    Tactic("one/2", split=2),
    Tactic("two"),
    Tactic("two 1x32", 1, 32),
    Tactic("two 2x4", 2, 4),
    Tactic("two 2x6", 2, 6),
)


@cache
def module(kernel: str, state: str, tokens: int) -> Any:  # noqa: ANN401
    """Return the function of a compiled module.

    Raises:
        ImportError: There is neither a compiled module nor the package.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return getattr(_compiled_by_package(kernel, state, tokens), kernel)
    path = Path(folder) / f"{kernel}_{state}_t{tokens}.so"
    if not path.exists():
        raise ImportError(f"{path.name} was not compiled")
    ffi = importlib.import_module("tvm_ffi")
    # the module needs the driver's symbols when it is loaded
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    return ffi.load_module(str(path))[kernel]


def _compiled_by_package(kernel: str, state: str, tokens: int) -> Any:  # noqa: ANN401
    jit = importlib.import_module(f"flashinfer.jit.mamba.{kernel}")
    half, dtype, at = torch.bfloat16, STATES[state], GEOMETRY
    if kernel == "selective_state_update":
        make = jit.gen_selective_state_update_sm90_module
        spec = make(dtype, half, half, torch.float32, torch.int32, None, at["value_dim"],
                    at["key_dim"], tokens, torch.int32, torch.int32)  # fmt: skip
    else:
        group = at["value_heads"] // at["key_heads"]
        spec = jit.gen_checkpointing_ssu_module(
            dtype, half, half, half, torch.float32, torch.int32, None, at["value_dim"],
            at["key_dim"], tokens, WINDOW, group, at["key_heads"],
        )  # fmt: skip
    return spec.build_and_load()


class Update:
    """A standard step."""

    def __init__(self, update: Any, point: Point, state: Tensor) -> None:  # noqa: ANN401
        self.update, self.point, self.state = update, point, state
        self.index = torch.arange(point.batch, dtype=torch.int32, device=state.device)

    def load(self, inputs: Inputs) -> None:
        """Take inputs; D and the bias have the dtype of dt."""
        x = mamba(self.point, inputs, torch.bfloat16)
        self.out = torch.full_like(x.x[:, 0], torch.nan)
        self.arguments = (
            self.state, x.x[:, 0], x.dt[:, 0], x.decay, x.b[:, 0], x.c[:, 0], x.skip, None, x.bias,
            True, self.index, None, -1, None, self.out, False, None, None, None, None, 0, None,
            None, 0,
        )  # fmt: skip

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        self.update(*self.arguments)
        return self.out.unsqueeze(1)


class Replay:
    """A step or a block that folds its ring first once another block would not fit."""

    def __init__(
        self, update: Any, point: Point, state: Tensor, steps: int, tactic: Tactic  # noqa: ANN401
    ) -> None:  # fmt: skip
        self.update, self.point, self.state, self.tactic = update, point, state, tactic
        at, rows, on = point.case.layer, point.batch, state.device
        length, cycle, half = WINDOW + point.tokens, replay_cycle(point), torch.bfloat16
        hv, h = at.value_heads, at.key_heads
        self.rings = (
            torch.zeros(rows, hv, length, at.value_dim, dtype=half, device=on),
            torch.zeros(rows, h, length, at.key_dim, dtype=half, device=on),
            torch.zeros(rows, hv, length, device=on),
        )
        self.scratch: tuple[Tensor | None, ...] = (None, None, None)
        if tactic.split == 0:
            self.scratch = (
                torch.empty(rows, hv, 32, 8, dtype=half, device=on),
                torch.empty(rows, hv, 16, device=on),
                torch.empty(rows, hv, 32, WINDOW // 2, dtype=half, device=on),
            )
        self.index = torch.arange(rows, dtype=torch.int32, device=on)
        where = steps_of_rows(rows, steps, cycle.period)
        filled, folds = torch.tensor(cycle.filled)[where], torch.tensor(cycle.folds)[where]
        folded = (filled * folds).cumsum(0) - filled * folds
        self.filled, self.start = filled.int().to(on), (folded % length).int().to(on)

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        x = mamba(self.point, inputs, torch.bfloat16)
        self.out = torch.full_like(x.x, torch.nan)
        self.tokens = (x.x, x.dt, x.decay, x.b, x.c, self.out)
        self.weights = (x.skip, None, x.bias, True)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        self.update(
            self.state, *self.tokens, *self.rings, self.start[step], self.filled[step],
            *self.weights, self.index, -1, None, None, self.tactic.split or 1, None, *self.scratch,
            0, self.tactic.stages, self.tactic.programs,
        )  # fmt: skip
        return self.out


def replay_cycle(point: Point) -> Cycle:
    """Return how full the ring is at every step of the steady cycle."""
    return block_cycle(WINDOW + point.tokens, point.tokens, point.kept)


def _geometry(point: Point) -> str:
    at = point.case.layer
    if point.case.family != "mamba2" or any(getattr(at, n) != x for n, x in GEOMETRY.items()):
        return "compiled for mamba2 128x64x128 with 8 groups"
    return ""


@dataclass(frozen=True)
class Standard:
    """The arm of the standard step."""

    state: str
    kind: Kind = Kind.STANDARD
    depth: str = "full"
    tolerance: float = 1e-2

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"flashinfer standard {self.state}"

    def refuses(self, point: Point) -> str:
        """One token of the compiled geometry."""
        return _geometry(point) or ("" if point.tokens == 1 else "serves one token")

    def period(self, point: Point) -> int:
        """Every step is alike."""
        return 1

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> StateSet:
        """Allocate one state set."""
        state = new_states(point, point.batch, STATES[self.state], device, seed)
        return Update(module("selective_state_update", self.state, 1), point, state)

    def traffic(self, point: Point) -> Traffic:
        """Read once, written once."""
        return standard_traffic(point, self.state)


@dataclass(frozen=True)
class Checkpointing:
    """The arm of ``checkpointing_ssu`` with one launch tactic."""

    state: str
    tactic: Tactic
    kind: Kind = Kind.REPLAY
    depth: str = "full"
    tolerance: float = 1e-2

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"flashinfer replay {self.state} ({self.tactic.label})"

    def refuses(self, point: Point) -> str:
        """The compiled geometry and window."""
        return _geometry(point) or ("" if point.window == WINDOW else f"window {WINDOW} only")

    def period(self, point: Point) -> int:
        """Steps of a fold cycle."""
        return replay_cycle(point).period

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> StateSet:
        """Allocate one state set."""
        state = new_states(point, point.batch, STATES[self.state], device, seed)
        update = module("checkpointing_ssu", self.state, point.tokens)
        return Replay(update, point, state, steps, self.tactic)

    def traffic(self, point: Point) -> Traffic:
        """Return the bytes of an average layer-step."""
        keys, values, gate = point.entry_elements
        size = point.state_elements * STATES[self.state].itemsize
        entry = 2 * keys + 2 * values + 4 * gate
        return replay_cycle(point).traffic(point, size, entry, point.tokens)


def arms() -> list[Arm]:
    """Return the arms.

    Raises:
        ImportError: There is neither a folder of compiled modules nor the package.
    """
    if FOLDER not in os.environ:
        importlib.import_module("flashinfer.jit.mamba.checkpointing_ssu")
    found: list[Arm] = []
    for state in STATES:
        found.append(Standard(state))
        found += [Checkpointing(state, tactic) for tactic in TACTICS]
    return found
