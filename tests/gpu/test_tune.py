"""Tuning works on scratch copies, keeps only launches that compute the same, and writes tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayssm.errors import ContractError
from replayssm.ring import RingSpec
from replayssm.storage import StorageSpec
from replayssm.types import Decay, Format, LayerSpec, ReadDepth, Write

LAYER = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 1, 2, key_dim=16, value_dim=16)


@pytest.fixture
def point(device: torch.device):
    from replayssm.ops.triton.tune import Point

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Point(StorageSpec(LAYER, Format.Q24, RingSpec(2), dtype), 2, 1, ReadDepth.HIGH)


def test_tables_are_those_that_the_launches_are_read_from(
    device: torch.device, point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replayssm import policy
    from replayssm.ops.triton import launch, tune

    monkeypatch.setattr(tune, "ALTERNATIVES", {"fold_rows": (8, 16), "pull_warps": (1, 2)})
    monkeypatch.setattr(tune, "STANDARD_ROWS", (8, 16))
    monkeypatch.setattr(tune, "STANDARD_WARPS", (1,))
    path, said = tmp_path / "chip.json", []
    tuning = tune.Tuning(device, path, said.append)
    tuning.tune_standard(point)
    tuning.tune_replay(point, passes=1)
    tuning.tune_replay(replace(point, depth=ReadDepth.FULL), passes=1)
    table = json.loads(path.read_text())
    assert len(table["rules"]) == len(table["standard"]) == 1
    monkeypatch.setattr(launch, "table_of", lambda device: table)
    chosen = launch.choose_launch(point.spec, 2, 1, device)
    assert chosen == tuning._replay_of[point]
    standard = launch.choose_standard(LAYER, torch.float32, 2, 1, device)
    assert standard == tuning._standard_of[point]
    row = tuning.measure([point])
    policy.write_table(tmp_path / "chip.policy.json", [row], {"device": "chip"})
    assert policy.read_table(tmp_path / "chip.policy.json") == (row,)


def test_a_launch_that_computes_something_else_is_passed_over(device: torch.device, point) -> None:
    from replayssm.ops.triton import tune
    from replayssm.ops.triton.launch import choose_launch
    from replayssm.ops.triton.scratch import Replayed, outputs

    work = Replayed(point.spec, point.rows, point.tokens, point.depth, device)
    start = choose_launch(point.spec, point.rows, point.tokens, device)
    want = outputs(work, start)
    assert torch.isfinite(want).all()
    assert tune._time(work, start, want, device) is not None
    assert tune._time(work, start, want + want.norm(), device) is None
    assert tune._time(work, replace(start, warps=3), want, device) is None or device.type == "cpu"


def test_more_rows_and_tokens_come_before_fewer(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from replayssm.ops.triton.tune import write_launches

    rules = [{"when": {"rows": n, "tokens": t}, "launch": {}} for n in (1, 8, 64) for t in (1, 4)]
    write_launches(tmp_path / "t.json", {"rules": rules, "standard": []})
    read = json.loads((tmp_path / "t.json").read_text())["rules"]
    order = [(r["when"]["tokens"], r["when"]["rows"]) for r in read]
    assert order == [(4, 64), (4, 8), (4, 1), (1, 64), (1, 8), (1, 1)]


def test_a_folder_of_tables_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm.policy import find_table

    monkeypatch.setenv("REPLAYSSM_TABLES", "/nowhere/at/all")
    with pytest.raises(ContractError):
        find_table("chip.json")
