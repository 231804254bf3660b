"""The drill passes on a sound engine and fails on one that is not."""

from __future__ import annotations

from typing import Any

import pytest
from serving import PROMPTS

from replayssm.engine import drill, guard
from replayssm.engine.pools import Pools

NAMES = ["precision", "non-finite", "latency", "crash", "swap", "move", "switch"]


def rehearse(model: Any) -> dict[str, drill.Rehearsal]:
    found = drill.Drill(model, PROMPTS[:2], impl="reference").run()
    return {rehearsal.name: rehearsal for rehearsal in found}


def test_every_fault_is_noticed_and_survived(model: Any) -> None:
    found = rehearse(model)
    assert list(found) == NAMES
    assert all(rehearsal.is_passed for rehearsal in found.values()), found


def test_blind_guard_fails_the_drill(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.Guard, "check_gaps", lambda *_: None)
    monkeypatch.setattr(guard.Guard, "check_pace", lambda *_: None)
    found = rehearse(model)
    failed = {name for name, rehearsal in found.items() if not rehearsal.is_passed}
    assert failed == {"precision", "latency"}


def test_swap_that_loses_keys_fails_the_drill(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Pools.import_

    def forgetful(self: Pools, image: Any, kv: Any, position: int) -> Any:
        return take(self, image, [x * 0 for x in kv], position)

    monkeypatch.setattr(Pools, "import_", forgetful)
    found = rehearse(model)
    assert not found["swap"].is_passed
    assert found["switch"].is_passed
