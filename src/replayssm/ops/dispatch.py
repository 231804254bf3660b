"""Which implementation serves a device; an explicit choice that cannot be served raises."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from replayssm.errors import UnsupportedError
from replayssm.types import Impl

if TYPE_CHECKING:
    import torch


def unavailable(impl: Impl, device: torch.device, *, tiles: int = 1) -> str | None:
    """Return why ``impl`` cannot serve the request on ``device``, or None when it can."""
    if impl is Impl.CPU:
        if device.type != "cpu":
            return f"the cpu implementation needs CPU tensors, not {device}"
        if tiles != 1:
            return f"the cpu implementation folds whole slots (tiles=1), not tiles={tiles}"
        if find_spec("numba") is None:
            return "numba is not installed; pip install 'replayssm[cpu]'"
    return None


def choose(impl: Impl, device: torch.device, *, tiles: int = 1) -> Impl:
    """Resolve ``impl`` to the implementation that will run.

    ``AUTO`` is CPU where it can run and the reference elsewhere; callers keep the answer, so that a
    result can say what served it.
    """
    impl = Impl(impl)
    if impl is Impl.AUTO:
        reason = unavailable(Impl.CPU, device, tiles=tiles)
        return Impl.CPU if reason is None else Impl.REFERENCE
    reason = unavailable(impl, device, tiles=tiles)
    if reason is not None:
        raise UnsupportedError(f"impl={impl.value}: {reason}")
    return impl
