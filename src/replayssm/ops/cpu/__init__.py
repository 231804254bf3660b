"""CPU path: until the compiled kernels land, the same verbs served by the reference."""

from __future__ import annotations

from replayssm.ops.reference import fold_, standard_, step_

__all__ = ["fold_", "standard_", "step_"]
