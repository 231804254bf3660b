"""The drill passes on a sound engine and fails on one that is not."""

from __future__ import annotations

from typing import Any

import pytest
from serving import PROMPTS

from replayssm.engine import drill, guard
from replayssm.engine.pools import Pools

NAMES = ["precision", "non-finite", "latency", "crash", "swap", "move", "switch"]


def new_drill(model: Any) -> drill.Drill:
    return drill.Drill(model, PROMPTS[:2], impl="reference")


def test_every_fault_is_noticed_and_survived(model: Any) -> None:
    found = list(new_drill(model).run())
    assert [rehearsal.name for rehearsal in found] == NAMES
    assert all(rehearsal.is_passed for rehearsal in found), found


def test_blind_guard_fails_the_drill(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.Guard, "check_gaps", lambda *_: None)
    monkeypatch.setattr(guard.Guard, "check_pace", lambda *_: None)
    assert not new_drill(model)._precision().is_passed
    assert not new_drill(model)._latency().is_passed


def test_swap_that_loses_keys_fails_the_drill(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Pools.import_

    def forgetful(self: Pools, image: Any, kv: Any, position: int) -> Any:
        return take(self, image, [x * 0 for x in kv], position)

    monkeypatch.setattr(Pools, "import_", forgetful)
    assert not new_drill(model)._swap().is_passed
