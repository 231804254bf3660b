"""Manifest: what ran where. Never host names, user names or paths."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import replayssm

PACKAGES = (
    "replayssm",
    "torch",
    "numpy",
    "numba",
    "triton",
    "transformers",
    "scipy",
    "safetensors",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and operating system.

    Attributes:
        cpu: CPU model name.
        cores: Cores this process may use.
        memory_bytes: Physical memory.
        cache_bytes: Last-level cache as the system reports it; a virtual machine may see its
            host's. 0 when unknown.
        gpus: Names of GPUs.
        system: Operating system and architecture.
    """

    cpu: str
    cores: int
    memory_bytes: int
    cache_bytes: int
    gpus: tuple[str, ...]
    system: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to read a result later, and to run it again.

    Attributes:
        created: UTC time the run began.
        argv: Command line, file arguments cut to their names.
        versions: Package and Python versions.
        machine: Hardware.
        threads: Threads that torch and the compiled kernels use.
        seed: Seed of every random choice.
        commit: Git commit of the package, or None when it is not a checkout.
        dirty: Whether that checkout had changes.
        choices: What every ``auto`` resolved to.
    """

    created: str
    argv: tuple[str, ...]
    versions: dict[str, str]
    machine: Machine
    threads: int
    seed: int
    commit: str | None
    dirty: bool | None
    choices: dict[str, str] = field(default_factory=dict)


def collect(*, seed: int, choices: dict[str, str] | None = None) -> Manifest:
    """Describe this process and machine."""
    commit, dirty = _commit()
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(_bare(a) for a in sys.argv),
        versions=versions(),
        machine=machine(),
        threads=torch.get_num_threads(),
        seed=seed,
        commit=commit,
        dirty=dirty,
        choices=dict(choices or {}),
    )


def versions() -> dict[str, str]:
    """Return versions of Python and of the packages that matter and are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> Machine:
    """Describe the hardware."""
    gpus: tuple[str, ...] = ()
    if torch.cuda.is_available():
        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Machine(
        cpu=_cpu_name(),
        cores=usable_cores(),
        memory_bytes=physical_memory(),
        cache_bytes=_last_level_cache(),
        gpus=gpus,
        system=f"{platform.system()} {platform.machine()}",
    )


def usable_cores() -> int:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _bare(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if equals:
        return f"{name}={Path(value).name if os.sep in value else value}"
    return Path(argument).name if os.sep in argument else argument


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def physical_memory() -> int:
    """Return the bytes of physical memory, 0 where the system does not say."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _last_level_cache() -> int:
    sizes = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = index / "level", index / "size"
        if level.is_file() and size.is_file():
            sizes[int(level.read_text())] = size.read_text().strip()
    if not sizes:
        return 0
    largest = sizes[max(sizes)]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(largest[-1])
    return int(largest[:-1]) * unit if unit else int(largest)


def _commit() -> tuple[str | None, bool | None]:
    root = Path(replayssm.__file__).resolve().parents[2]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None, None
    commit = _git(git, root, "rev-parse", "HEAD")
    status = _git(git, root, "status", "--porcelain", "--untracked-files=no")
    return commit or None, None if status is None else bool(status)


def _git(git: str, root: Path, *arguments: str) -> str | None:
    command = [git, "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
