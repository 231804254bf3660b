"""mamba-ssm's Triton kernel; the package itself would need its CUDA extensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu.arms import STATES, Kind, new_states, standard_traffic
from gpu.peers.common import mamba
from gpu.peers.loading import bare, load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpu.arms import Arm, Traffic
    from gpu.cases import Inputs, Point


class Update:
    """One state set."""

    def __init__(self, update: Any, point: Point, state: Tensor) -> None:  # noqa: ANN401
        self.update, self.point, self.state = update, point, state

    def load(self, inputs: Inputs) -> None:
        """Take inputs."""
        x = mamba(self.point, inputs)
        token = (x.x[:, 0], x.dt[:, 0], x.decay, x.b[:, 0], x.c[:, 0])
        self.arguments = (token, {"D": x.skip, "dt_bias": x.bias, "dt_softplus": True})

    def launch(self, step: int) -> Tensor:
        """Launch one step; the package allocates the outputs."""
        token, weights = self.arguments
        out: Tensor = self.update(self.state, *token, **weights)
        return out.unsqueeze(1)


@dataclass(frozen=True)
class Standard:
    """The arm."""

    update: Any
    state: str
    kind: Kind = Kind.STANDARD
    depth: str = "full"
    tolerance: float = 1e-2

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"mamba-ssm standard {self.state}"

    def refuses(self, point: Point) -> str:
        """Mamba-2, one token."""
        if point.case.family != "mamba2":
            return "serves mamba2"
        return "" if point.tokens == 1 else "serves one token"

    def period(self, point: Point) -> int:
        """Every step is alike."""
        return 1

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> Update:
        """Allocate one state set."""
        state = new_states(point, point.batch, STATES[self.state], device, seed)
        return Update(self.update, point, state)

    def traffic(self, point: Point) -> Traffic:
        """Read once, written once."""
        return standard_traffic(point, self.state)


def arms() -> list[Arm]:
    """Return the arms.

    Raises:
        ImportError: The package is not installed.
    """
    bare("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    module = load("mamba_ssm.ops.triton.selective_state_update")
    return [Standard(module.selective_state_update, state) for state in STATES]
