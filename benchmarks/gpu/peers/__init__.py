"""Kernels of other packages, each called the way its own engine calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu.peers import fla, flashinfer, mamba_ssm, sglang, vllm

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu.arms import Arm

# a package that is not there raises when its arms are asked for
PACKAGES: dict[str, Callable[[], list[Arm]]] = {
    "fla-core": fla.arms,
    "mamba-ssm": mamba_ssm.arms,
    "vllm": vllm.arms,
    "sglang": sglang.arms,
    "flashinfer-python": flashinfer.arms,
}
