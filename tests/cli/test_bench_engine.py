"""``replayssm bench engine``: a trace on the embedded engine."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from replayssm.cli import main as cli
from replayssm.cli.output import ExitCode
from replayssm.traffic import convert, synth
from replayssm.traffic.formats import canonical


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    load = synth.closed_loop(6, 3, synth.Lengths(12, 6))
    canonical.write(convert.interrupt(load, cancel=0.3, move=0.6, seed=1), tmp_path / "t.jsonl")

    def call(*options) -> tuple[int, dict]:
        arguments = ("bench", "engine", tmp_path / "t.jsonl", "--slots", 3, "--context", 64,
                     "--result-dir", tmp_path / "out", "--json", *options)  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["replayssm", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        out = capsys.readouterr().out.strip().splitlines()
        return int(exit_info.value.code or 0), json.loads(out[-1])

    return call


@pytest.mark.slow
def test_requests_are_served_cancelled_and_moved(run, tmp_path):
    code, found = run("--engines", 2, "--num-warmups", 1)
    assert code in (ExitCode.OK, ExitCode.INCONCLUSIVE)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    total = result["summary"]["total"]
    assert total["requests"]["failed"] == total["requests"]["cut"] == 0
    assert total["requests"]["cancelled"] > 0
    assert found["completed"] == total["requests"]["ok"] > 0
    assert result["target"]["moved_in"]["last"] == result["target"]["moved_out"]["last"] > 0
    assert result["target"]["running"]["last"] == 0
    assert (result["backend"], result["model_id"]) == ("replayssm", "gdn-tiny")


def test_moves_need_a_second_engine(run):
    code, found = run()
    assert code == ExitCode.FAILURE
    assert "cannot" in found["error"]


def test_the_bundled_model_drafts_and_changes_no_token(run, tmp_path):
    texts = []
    for options in ((), ("--drafter", "model", "--draft-tokens", 3)):
        code, _ = run("--engines", 2, *options)
        assert code in (ExitCode.OK, ExitCode.INCONCLUSIVE)
        texts.append(json.loads((tmp_path / "out" / "result.json").read_text()))
        page = (tmp_path / "out" / "report.html").read_text()
        assert 'aria-label="Decode forwards over time"' in page
    plain, drafted = texts
    assert plain["summary"]["use"]["acceptance_rate"] is None
    assert 0 < drafted["summary"]["use"]["acceptance_rate"] <= 1
    assert plain["total_output_tokens"] == drafted["total_output_tokens"]


@pytest.mark.parametrize(
    "wrong", [("--path", "nope"), ("--routing", "missing.json"), ("--drafter", "oracle")]
)
def test_wrong_options_are_refused(run, wrong):
    code, found = run(*wrong)
    assert (code, found["exit_code"]) == (ExitCode.USAGE, 2)
