"""Energy of a run from the machine's own counters: NVML for GPUs, RAPL for CPU packages.

Where neither can be read, the result says why. Idle power is not subtracted.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NVML = "libnvidia-ml.so.1"
RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules between two readings.

    Attributes:
        joules: Sum over the devices; None where there is no counter.
        source: ``nvml`` or ``rapl``.
        devices: Devices that were counted.
        why_not: Why there is no figure.
    """

    joules: float | None
    source: str | None
    devices: int
    why_not: str | None


class Meter(Protocol):
    """A set of energy counters."""

    @property
    def source(self) -> str:
        """``nvml`` or ``rapl``."""
        ...

    def read(self) -> list[float]:
        """Return the joules counted so far, one a device."""
        ...

    def used(self, before: list[float], after: list[float]) -> float:
        """Return the joules between two readings."""
        ...


class MeterError(RuntimeError):
    """There are no such counters, or they cannot be read."""


class Nvml:
    """Total energy counters of NVIDIA GPUs."""

    source = "nvml"

    def __init__(self) -> None:
        try:
            self._nvml = ctypes.CDLL(NVML)
        except OSError:
            raise MeterError("no NVML library") from None
        self._check(self._nvml.nvmlInit_v2(), "nvmlInit")
        count = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
        self._devices = []
        for i in range(count.value):
            device = ctypes.c_void_p()
            self._check(self._nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)), "handle")
            self._devices.append(device)
        if not self._devices:
            raise MeterError("NVML sees no GPU")
        self.read()

    def read(self) -> list[float]:
        """Return the joules of each GPU since its driver was loaded."""
        found = []
        for device in self._devices:
            millijoules = ctypes.c_ulonglong()
            code = self._nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
            self._check(code, "nvmlDeviceGetTotalEnergyConsumption")
            found.append(millijoules.value / 1e3)
        return found

    def used(self, before: list[float], after: list[float]) -> float:
        """Return the joules between two readings."""
        return sum(after) - sum(before)

    def _check(self, code: int, what: str) -> None:
        if code:
            raise MeterError(f"{what} of NVML failed with code {code}")


class Rapl:
    """Energy counters of CPU packages.

    Args:
        root: Where the system shows them.
    """

    source = "rapl"

    def __init__(self, root: Path = RAPL) -> None:
        # intel-rapl:0 is a package; intel-rapl:0:0 is a part of it
        self._zones = sorted(p for p in root.glob("intel-rapl:*") if p.name.count(":") == 1)
        if not self._zones:
            raise MeterError("no RAPL counters")
        self._ranges = [self._value(zone / "max_energy_range_uj") for zone in self._zones]
        self.read()

    def read(self) -> list[float]:
        """Return the joules of each package since its counter was last at 0."""
        return [self._value(zone / "energy_uj") for zone in self._zones]

    def used(self, before: list[float], after: list[float]) -> float:
        """Return the joules between two readings; a counter may have started again once."""
        spans = zip(before, after, self._ranges, strict=True)
        return sum(b - a if b >= a else b - a + limit for a, b, limit in spans)

    def _value(self, path: Path) -> float:
        try:
            return int(path.read_text()) / 1e6
        except (OSError, ValueError) as error:
            raise MeterError(f"RAPL counters cannot be read ({error})") from None


class EnergyMeter:
    """Measures from its construction to :meth:`stop`, with the best counters there are."""

    def __init__(self) -> None:
        self._meter: Meter | None = None
        reasons = []
        for kind in (Nvml, Rapl):
            try:
                self._meter = kind()
                break
            except MeterError as error:
                reasons.append(str(error))
        self._why_not = "; ".join(reasons)
        self._before = [] if self._meter is None else self._meter.read()

    def stop(self) -> Energy:
        """Return the energy since the start."""
        if self._meter is None:
            return Energy(None, None, 0, self._why_not)
        try:
            used = self._meter.used(self._before, self._meter.read())
        except MeterError as error:
            return Energy(None, self._meter.source, 0, str(error))
        return Energy(used, self._meter.source, len(self._before), None)
