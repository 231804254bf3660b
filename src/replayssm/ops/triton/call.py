"""What a launch takes: the work fused around a step, and a kernel call that is not made yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fused:
    """What a family does around the recurrence, done inside the kernels.

    Attributes:
        gates: ``"none"`` (g and w are given), ``"dt"`` (Mamba-2: g holds dt before bias and
            softplus, w is not read) or ``"beta"`` (Gated DeltaNet and KDA: g before bias and
            softplus, w before the sigmoid).
        rate: ``[HV]`` exp(A_log).
        bias: ``[HV]`` (``[HV, K]`` for channel decays).
        skip: ``[HV]`` D, added as D v.
        z: ``[B, T, HV, V]``: outputs are multiplied by silu(z).
        norm: Divide q and k by their L2 norm.
        norm_eps: Added to the sum of squares.
        q_scale: Multiplies q, after the norm.
        dt_limit: Bounds of Mamba-2's dt.
    """

    gates: str = "none"
    rate: Tensor | None = None
    bias: Tensor | None = None
    skip: Tensor | None = None
    z: Tensor | None = None
    norm: bool = False
    norm_eps: float = 1e-6
    q_scale: float = 1.0
    dt_limit: tuple[float, float] = (0.0, float("inf"))


PLAIN = Fused()


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel launch, not made yet: so that it can also be compiled for a device not here.

    Attributes:
        kernel: The Triton function.
        grid: Programs.
        args: Run-time arguments, in order.
        constants: Compile-time arguments by name.
        warps: Warps of a program.
        registers: Most registers of a thread; 0 leaves it to the compiler.
        early: Start while the kernel before it still runs (it waits by itself).
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    registers: int = 0
    early: bool = False

    def run(self) -> None:
        """Launch it."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": 1}
        if self.registers:
            options["maxnreg"] = self.registers
        if self.early:
            options["launch_pdl"] = True
        self.kernel[self.grid](*self.args, **self.constants, **options)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the row and token strides of ``[B, T, ...]`` tensors, in elements."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def has_asm(device: torch.device) -> bool:
    """Whether kernels may use instructions of NVIDIA's chips."""
    return device.type == "cuda" and torch.version.cuda is not None


def overlaps(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it still runs (Hopper and newer)."""
    return has_asm(device) and torch.cuda.get_device_capability(device)[0] >= 9


def present(x: Tensor | None, other: Tensor) -> Tensor:
    """Return ``x``, or a tensor that a kernel is given in its place and never reads."""
    return other if x is None else x
