"""ReplaySSM: checkpoint-and-ring state for hybrid language models.

Public names are imported on first use, so ``import replayssm`` needs neither numba, Triton nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replayssm.integrations.support import support as support
    from replayssm.integrations.transformers import disable as disable
    from replayssm.integrations.transformers import enable as enable
    from replayssm.memory import plan_memory as plan_memory
    from replayssm.ring import RingSpec as RingSpec
    from replayssm.state import StatePool as StatePool
    from replayssm.types import Block as Block
    from replayssm.types import ConvSpec as ConvSpec
    from replayssm.types import Decay as Decay
    from replayssm.types import Format as Format
    from replayssm.types import Impl as Impl
    from replayssm.types import LayerSpec as LayerSpec
    from replayssm.types import ReadDepth as ReadDepth
    from replayssm.types import Write as Write

__version__ = "0.1.0"

_HOMES = {
    "Block": "replayssm.types",
    "ConvSpec": "replayssm.types",
    "Decay": "replayssm.types",
    "Format": "replayssm.types",
    "Impl": "replayssm.types",
    "LayerSpec": "replayssm.types",
    "ReadDepth": "replayssm.types",
    "Write": "replayssm.types",
    "RingSpec": "replayssm.ring",
    "StatePool": "replayssm.state",
    "plan_memory": "replayssm.memory",
    "disable": "replayssm.integrations.transformers",
    "enable": "replayssm.integrations.transformers",
    "support": "replayssm.integrations.support",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'replayssm' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
