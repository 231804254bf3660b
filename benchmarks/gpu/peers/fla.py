"""flash-linear-attention's fused recurrent kernels, launched in place.

The public functions allocate a new fp32 final state for every call; here the kernel is handed the
same tensor as initial and final state, value rows first, as an engine would want it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from gpu.arms import STATES, Kind, new_states, standard_traffic
from gpu.peers.loading import bare, load

if TYPE_CHECKING:
    from torch import Tensor

    from gpu.arms import Arm, Traffic
    from gpu.cases import Inputs, Point

PARENTS = ("fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.utils")


class InPlace:
    """One state set of either kernel."""

    def __init__(self, kernel: Any, point: Point, state: Tensor) -> None:  # noqa: ANN401
        self.kernel, self.point, self.state = kernel, point, state

    def load(self, inputs: Inputs) -> None:
        """Take inputs; the kernel forms gates, strengths and norms itself."""
        self.inputs = inputs
        self.out = torch.full_like(inputs.v, torch.nan)

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        x, at = self.inputs, self.point.case.layer
        is_kda = self.point.case.family == "kda"
        tile, warps = (32, 4) if is_kda else (8, 1)
        grid = (-(-at.value_dim // tile) * self.point.batch * at.value_heads,)
        shared = {
            "q": x.q, "k": x.k, "v": x.v, "g": x.a, "beta": x.b, "A_log": x.a_log,
            "dt_bias": x.bias, "o": self.out, "h0": self.state, "ht": self.state,
            "cu_seqlens": None, "scale": at.key_dim**-0.5, "T": 1, "H": at.key_heads,
            "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim, "BK": at.key_dim,
            "BV": tile, "USE_QK_L2NORM_IN_KERNEL": True, "IS_BETA_HEADWISE": not is_kda,
            "STATE_V_FIRST": True, "APPLY_BETA_SIGMOID": True, "ALLOW_NEG_EIGVAL": False,
            "num_warps": warps,
        }  # fmt: skip
        if is_kda:
            self.kernel[grid](
                **shared, ssm_state_indices=None, num_accepted_tokens=None, lower_bound=None,
                N=self.point.batch, stride_init_state_token=1, stride_final_state_token=1,
                stride_indices_seq=1, stride_indices_tok=1, INPLACE_FINAL_STATE=True,
                USE_GATE_IN_KERNEL=True, num_stages=2,
            )  # fmt: skip
        else:
            self.kernel[grid](**shared, gk=None, gv=None, num_stages=3)
        return self.out


@dataclass(frozen=True)
class Recurrent:
    """The arm."""

    kernels: dict[str, Any]
    state: str
    kind: Kind = Kind.STANDARD
    depth: str = "full"
    tolerance: float = 1e-2

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"fla recurrent {self.state}"

    def refuses(self, point: Point) -> str:
        """Delta families, one token."""
        if point.case.family not in self.kernels:
            return "serves gdn and kda"
        return "" if point.tokens == 1 else "serves one token"

    def period(self, point: Point) -> int:
        """Every step is alike."""
        return 1

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> InPlace:
        """Allocate one state set."""
        state = new_states(point, point.batch, STATES[self.state], device, seed)
        return InPlace(self.kernels[point.case.family], point, state)

    def traffic(self, point: Point) -> Traffic:
        """Read once, written once."""
        return standard_traffic(point, self.state)


def arms() -> list[Arm]:
    """Return the arms.

    Raises:
        ImportError: The package is not installed.
    """
    bare("fla", *PARENTS, __version__=version("fla-core"))
    gdn = load("fla.ops.gated_delta_rule.fused_recurrent")
    kda = load("fla.ops.kda.fused_recurrent")
    kernels = {
        "gdn": gdn.fused_recurrent_gated_delta_rule_fwd_kernel,
        "kda": kda.fused_recurrent_kda_fwd_kernel,
    }
    return [Recurrent(kernels, state) for state in STATES]
