"""``replayssm env``: versions, device, what is available and why not."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

from replayssm.cli.output import JSON_OPTION, console, print_json, print_table

EXTRAS = {
    "numba": "compiled CPU kernels; pip install 'replayssm[cpu]'",
    "triton": "GPU kernels; pip install 'replayssm[gpu]'",
    "transformers": "models; pip install 'replayssm[transformers]'",
    "matplotlib": "reports; pip install 'replayssm[evaluate]'",
}


def env(as_json: Annotated[bool, JSON_OPTION] = False) -> None:
    """Print versions, the device, and what is available here and why not."""
    import torch

    from replayssm.evaluate import manifest
    from replayssm.evaluate.report.words import size
    from replayssm.ops.dispatch import choose
    from replayssm.types import Impl

    machine, versions = manifest.machine(), manifest.versions()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = _available()
    auto = choose(Impl.AUTO, device).value
    if as_json:
        print_json(
            {
                "versions": versions,
                "machine": asdict(machine),
                "threads": torch.get_num_threads(),
                "device": str(device),
                "auto_impl": auto,
                "available": {name: why is None for name, why in available.items()},
                "why_not": {name: why for name, why in available.items() if why is not None},
            }
        )
        return
    out = console()
    print_table(("package", "version"), list(versions.items()))
    out.print()
    gpus = ", ".join(machine.gpus) or "none"
    out.print(f"cpu      {machine.cpu}, {machine.cores} cores, {torch.get_num_threads()} threads")
    out.print(
        f"memory   {size(machine.memory_bytes)}, last-level cache {size(machine.cache_bytes)}"
    )
    out.print(f"gpu      {gpus}")
    out.print(f"system   {machine.system}")
    out.print()
    rows = [(name, "yes" if why is None else "no", why or "") for name, why in available.items()]
    print_table(("what", "available", "why not"), rows)
    out.print()
    out.print(f"impl=auto on {device} is {auto}")


def _available() -> dict[str, str | None]:
    """Return everything optional with the reason why it is missing, None where it is there."""
    import torch

    from replayssm.models import tiny
    from replayssm.ops.dispatch import unavailable
    from replayssm.types import Impl

    found: dict[str, str | None] = {}
    device = torch.device("cpu")
    for impl in Impl:
        if impl is not Impl.AUTO:
            found[f"impl {impl.value}"] = unavailable(impl, device)
    for package, use in EXTRAS.items():
        found[package] = None if find_spec(package) else f"not installed ({use})"
    found["cuda"] = None if torch.cuda.is_available() else "torch sees no CUDA device"
    for name in tiny.NAMES:
        try:
            tiny.weights_path(name)
        except FileNotFoundError:
            found[f"model {name}"] = "its weights are not part of this installation"
        else:
            found[f"model {name}"] = None
    return found
