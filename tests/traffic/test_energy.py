from __future__ import annotations

import pytest

from replayssm.traffic import energy
from replayssm.traffic.energy import EnergyMeter, MeterError, Rapl


@pytest.fixture
def packages(tmp_path):
    for i in (0, 1):
        zone = tmp_path / f"intel-rapl:{i}"
        zone.mkdir()
        (zone / "energy_uj").write_text("1000000\n")
        (zone / "max_energy_range_uj").write_text("10000000\n")
        part = tmp_path / f"intel-rapl:{i}:0"
        part.mkdir()
        (part / "energy_uj").write_text("77\n")
    return tmp_path


def test_packages_are_summed_and_their_parts_are_not(packages):
    meter = Rapl(packages)
    before = meter.read()
    (packages / "intel-rapl:0" / "energy_uj").write_text("3500000\n")
    assert before == [1.0, 1.0]
    assert meter.used(before, meter.read()) == pytest.approx(2.5)


def test_a_counter_that_starts_again_goes_on(packages):
    meter = Rapl(packages)
    before = meter.read()
    (packages / "intel-rapl:1" / "energy_uj").write_text("500000\n")
    assert meter.used(before, meter.read()) == pytest.approx(9.5)


def test_counters_that_cannot_be_read_say_so(packages, tmp_path_factory):
    with pytest.raises(MeterError, match="no RAPL counters"):
        Rapl(tmp_path_factory.mktemp("none"))
    (packages / "intel-rapl:0" / "energy_uj").unlink()
    with pytest.raises(MeterError, match="cannot be read"):
        Rapl(packages)


def test_no_counters_give_no_figure_and_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(energy, "NVML", "libno-such-library.so.1")
    monkeypatch.setattr(energy.Rapl.__init__, "__defaults__", (tmp_path,))
    found = EnergyMeter().stop()
    assert (found.joules, found.source, found.devices) == (None, None, 0)
    assert found.why_not == "no NVML library; no RAPL counters"


def test_the_best_counters_that_there_are_measure(monkeypatch, packages):
    monkeypatch.setattr(energy, "NVML", "libno-such-library.so.1")
    monkeypatch.setattr(energy.Rapl.__init__, "__defaults__", (packages,))
    meter = EnergyMeter()
    (packages / "intel-rapl:0" / "energy_uj").write_text("1250000\n")
    found = meter.stop()
    assert (found.joules, found.source, found.devices) == (pytest.approx(0.25), "rapl", 2)
    assert found.why_not is None
