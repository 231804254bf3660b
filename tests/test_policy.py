"""The faster path by measured times; a device that was not measured is judged by sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from gpu import report
from replayssm import policy
from replayssm.policy import Measured, choose_path, read_table, write_table
from replayssm.ring import RingSpec
from replayssm.storage import StorageSpec
from replayssm.types import Decay, Format, LayerSpec, ReadDepth, Write

LAYER = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 8, 128, key_dim=128, value_dim=64)
GDN = LayerSpec(Write.DELTA, Decay.SCALAR, 16, 64, key_dim=128, value_dim=128)
CPU, HIGH, FULL = torch.device("cpu"), ReadDepth.HIGH, ReadDepth.FULL
ROW = Measured(LAYER, Format.Q24, HIGH, 1, 16, (1, 8, 64), (4.0, 20.0, 140.0), (7.0, 14.0, 37.0))


def spec(layer=LAYER, fmt=Format.Q24, window=16) -> StorageSpec:
    return StorageSpec(layer, fmt, RingSpec(window), torch.bfloat16)


def choose(rows, *, layer=LAYER, fmt=Format.Q24, depth=HIGH, tokens=1, window=16):
    given = [spec(layer, fmt, window)]
    return choose_path(given, rows, depth=depth, device=CPU, tokens=tokens)


@pytest.fixture
def measured(monkeypatch):
    rows = [ROW]
    monkeypatch.setattr(policy, "measured_on", lambda name: tuple(rows))
    return rows


def test_the_faster_path_is_chosen_at_every_measured_batch(measured):
    for rows, slow, fast in zip(ROW.batches, ROW.standard_us, ROW.replay_us, strict=True):
        chosen = choose(rows)
        assert chosen.path == ("replay" if fast < slow else "standard")
        assert chosen.gain == pytest.approx(slow / fast)
        assert "measured" in chosen.why


def test_times_between_batches_are_straight_lines_of_logarithms(measured):
    slow, fast = ROW.at(8**0.5)
    assert slow == pytest.approx((4.0 * 20.0) ** 0.5)
    assert fast == pytest.approx((7.0 * 14.0) ** 0.5)
    assert ROW.at(128) == (pytest.approx(280.0), pytest.approx(74.0))
    assert ROW.at(0.5) == ROW.at(1)


def test_a_narrower_layer_counts_as_a_smaller_batch(measured):
    half = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 8, 64, key_dim=128, value_dim=64)
    assert choose(16, layer=half).gain == pytest.approx(choose(8).gain)


def test_a_model_of_two_kinds_of_layers_counts_their_times_together(measured):
    measured.append(Measured(GDN, Format.Q24, HIGH, 1, 16, (1, 8), (5.0, 40.0), (100.0, 100.0)))
    found = choose_path([spec(), spec(GDN)], 8, depth=HIGH, device=CPU)
    assert found.gain == pytest.approx(60 / 114)
    assert found.path == "standard"


@pytest.mark.parametrize(
    "change",
    [{"layer": GDN}, {"fmt": Format.S32}, {"depth": FULL}, {"tokens": 4}, {"rows": 257}],
    ids=str,
)
def test_what_was_not_measured_is_judged_by_size_and_says_so(measured, change):
    chosen = choose(**{"rows": 64, **change})
    assert chosen.gain is None
    assert "nothing like it was measured on cpu" in chosen.why


def test_of_several_windows_the_nearest_counts(measured):
    measured.append(Measured(LAYER, Format.Q24, HIGH, 1, 64, (1,), (1.0,), (2.0,)))
    assert choose(1, window=32).gain == pytest.approx(4 / 7)
    assert choose(1, window=48).gain == 0.5


@pytest.mark.parametrize(
    ("rows", "path"), [(1, "standard"), (15, "standard"), (16, "replay"), (256, "replay")]
)
def test_a_gpu_without_a_table_goes_by_the_elements_of_a_batch(monkeypatch, rows, path):
    monkeypatch.setattr(policy, "device_name", lambda device: "some-chip")
    found = choose_path([spec()], rows, depth=HIGH, device=torch.device("meta"))
    assert (found.path, found.gain) == (path, None)
    assert "some-chip" in found.why


def test_a_cpu_goes_by_the_bytes_of_a_read(monkeypatch):
    monkeypatch.setattr(policy, "measured_on", lambda name: ())
    assert choose(64).path == "replay"
    assert choose(64, depth=FULL).path == "standard"
    assert choose(64, fmt=Format.F32, depth=FULL).path == "standard"


def test_a_table_is_read_as_it_was_written(tmp_path):
    write_table(tmp_path / "t.json", [ROW, ROW], {"device": "here"})
    assert read_table(tmp_path / "t.json") == (ROW, ROW)
    (tmp_path / "t.json").write_text('{"format": "else"}')
    with pytest.raises(policy.ContractError):
        read_table(tmp_path / "t.json")


def figures():
    """Yield our own figures of every committed sweep: point, and microseconds of either path."""
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    for file in sorted(results.glob("kernels-*.json")):
        run = json.loads(file.read_text())
        name = run["environment"]["device"].lower().replace(" ", "-")
        for row in report.policy_rows(run):
            yield from (
                pytest.param(name, row, *at, id=f"{name}-{i}-{at[0]}")
                for i, at in enumerate(
                    zip(row.batches, row.standard_us, row.replay_us, strict=True)
                )
            )


@pytest.mark.parametrize(("name", "row", "rows", "slow", "fast"), list(figures()))
def test_auto_loses_two_percent_nowhere_in_a_committed_sweep(
    monkeypatch, name, row, rows, slow, fast
):
    monkeypatch.setattr(policy, "device_name", lambda device: name)
    ring = RingSpec(row.window, max_block=row.tokens)
    given = [StorageSpec(row.layer, row.format, ring, torch.bfloat16)]
    meta = torch.device("meta")
    found = choose_path(given, rows, depth=row.depth, device=meta, tokens=row.tokens)
    taken = fast if found.path == "replay" else slow
    assert taken <= 1.02 * min(slow, fast), found.why
