"""Load single modules of an installed package without running the package's own start-up.

An engine's package imports its server, its compiled extensions and dozens of dependencies. Its
kernel files need Triton and a few helpers. Parent packages are entered into ``sys.modules`` as bare
ones with the real search path, so siblings resolve to the package's own files, and the helpers that
would pull in the rest are replaced by stand-ins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def bare(package: str, *parents: str, **attributes: str) -> None:
    """Register a package and the given subpackages without running their ``__init__``.

    Args:
        package: A top-level package.
        parents: Subpackages, outer ones first.
        attributes: What its own modules ask of the package.

    Raises:
        ImportError: The package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    roots = [Path(x) for x in spec.submodule_search_locations]
    for name in (package, *parents):
        parts = name.split(".")[1:]
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*parts)) for root in roots]
        _enter(name, module)
    vars(sys.modules[package]).update(attributes)


def stand_in(name: str, **attributes: Any) -> None:  # noqa: ANN401 - whatever the module holds
    """Register a module of that name with these attributes, and any parent that is missing."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        parent = ".".join(parts[:i])
        if parent not in sys.modules:
            module = ModuleType(parent)
            module.__path__ = []
            _enter(parent, module)
    module = ModuleType(name)
    vars(module).update(attributes)
    _enter(name, module)


def load(name: str) -> Any:  # noqa: ANN401 - a foreign module
    """Import a module below packages that were registered with :func:`bare`."""
    return importlib.import_module(name)


def select_no_device() -> None:
    """Make the packages' device guards do nothing, for checks under Triton's interpreter."""
    for module, name in (
        (torch.cuda, "device"),
        (torch.cpu, "device"),
        (torch.accelerator, "device_index"),
    ):
        setattr(module, name, lambda index: nullcontext())


def _enter(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
