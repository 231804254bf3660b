"""Which implementation serves a device; an explicit choice that cannot be served raises."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from replayssm.errors import UnsupportedError
from replayssm.types import Impl

if TYPE_CHECKING:
    import torch


def unavailable(
    impl: Impl, device: torch.device, *, tiles: int = 1, exact: bool = False
) -> str | None:
    """Return why ``impl`` cannot serve the request on ``device``, or None when it can."""
    if impl is Impl.CPU:
        if device.type != "cpu":
            return f"the cpu implementation needs CPU tensors, not {device}"
        if tiles != 1:
            return f"the cpu implementation folds whole slots (tiles=1), not tiles={tiles}"
        if find_spec("numba") is None:
            return "numba is not installed; pip install 'replayssm[cpu]'"
    if impl is Impl.TRITON:
        if device.type != "cuda" and not _is_interpreted():
            return f"the triton implementation needs a GPU's tensors, not {device}"
        if find_spec("triton") is None:
            return "triton is not installed; pip install 'replayssm[gpu]'"
        if exact:
            return "the triton implementation does not rebuild states exactly (exact=True)"
    return None


def choose(impl: Impl, device: torch.device, *, tiles: int = 1, exact: bool = False) -> Impl:
    """Resolve ``impl`` to the implementation that will run.

    ``AUTO`` is the compiled one of the device, CPU or Triton, where it can run and the reference
    elsewhere; callers keep the answer, so that a result can say what served it.
    """
    impl = Impl(impl)
    if impl is Impl.AUTO:
        compiled = Impl.TRITON if device.type == "cuda" else Impl.CPU
        reason = unavailable(compiled, device, tiles=tiles, exact=exact)
        return compiled if reason is None else Impl.REFERENCE
    reason = unavailable(impl, device, tiles=tiles, exact=exact)
    if reason is not None:
        raise UnsupportedError(f"impl={impl.value}: {reason}")
    return impl


def _is_interpreted() -> bool:
    # Triton runs kernels on CPU tensors, one element at a time, when it was told to
    return os.environ.get("TRITON_INTERPRET") == "1"
