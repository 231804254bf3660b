from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from replayssm.evaluate.ahead import _Ready, compiled_ahead
from replayssm.evaluate.arms import STANDARD, TODAY
from replayssm.evaluate.plan import Plan


def other(code: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)


def test_an_arm_is_ready_when_the_other_process_names_it():
    with other(
        "import sys; sys.stdin.buffer.read(); print('standard f32'); print('standard bf16')"
    ) as child:
        ready = _Ready(child, ())
        ready(STANDARD)
        assert ready._done == {STANDARD.name}


def test_nobody_waits_for_a_process_that_has_ended():
    with other("import sys; sys.stdin.buffer.read(); print('standard f32')") as child:
        ready = _Ready(child, ())
        ready(TODAY)
        assert ready._done == {STANDARD.name}


@pytest.mark.slow
def test_the_other_processes_leave_compiled_kernels(subject, tmp_path, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with compiled_ahead(subject, Plan("random-gdn", arms=(STANDARD,))) as ready:
        ready(STANDARD)
    kernels = {path.name.partition("-")[0] for path in tmp_path.rglob("*.nbi")}
    assert kernels == {"standard.standard_share", "standard.standard_shares"}
