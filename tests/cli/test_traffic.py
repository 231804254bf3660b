"""``replayssm trace`` and ``replayssm bench``, from the command line."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("aiohttp")

from replayssm.cli import main as cli
from replayssm.cli.output import ExitCode
from replayssm.traffic.formats import load
from replayssm.traffic.self_check import null_server

MOONCAKE = "".join(
    json.dumps(
        {"timestamp": 100 * i, "input_length": 600, "output_length": 20, "hash_ids": [0, i + 1]}
    )
    + "\n"
    for i in range(12)
)


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["replayssm", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    return path


def last_object(out: str) -> dict:
    return json.loads(out.strip().splitlines()[-1])


def test_info_says_what_a_trace_is_and_warns(run, trace):
    code, out, _ = run("trace", "info", trace)
    assert code == 0
    assert "mooncake.jsonl: mooncake, 12 requests" in out
    assert "a p99 needs 1,000" in out
    found = last_object(run("trace", "info", trace, "--json")[1])
    assert (found["requests"], found["shared_blocks"]) == (12, pytest.approx(11 / 24))
    assert len(found["provenance"]["sha256"]) == 64


def test_convert_does_its_steps_in_order_and_keeps_where_it_came_from(run, trace, tmp_path):
    out = tmp_path / "out.jsonl"
    code, told, _ = run(
        "trace", "convert", trace, out, "--start", 0.2, "--duration", 0.8, "--max-input-len", 100,
        "--max-output-len", 5, "--speedup", 2, "--cancel", 1, "--json",
    )  # fmt: skip
    assert code == 0
    made, _ = load(out)
    assert [r.at for r in made.requests] == pytest.approx([0.05 * i for i in range(8)])
    assert {(r.prompt_tokens, r.output_tokens) for r in made.requests} == {(100, 5)}
    assert all(len(r.prefix_blocks) == 1 for r in made.requests)
    assert all(r.cancel_after is not None for r in made.requests)
    assert (made.provenance.source, made.provenance.format) == ("mooncake.jsonl", "mooncake")
    assert len(made.provenance.conversions) == 5
    assert last_object(told)["cancellations"] == 8
    # a converted trace converts again
    assert run("trace", "convert", out, tmp_path / "again.jsonl", "--jitter", 1)[0] == 0


def test_a_bad_row_is_one_line_with_its_place_and_may_be_skipped(run, trace):
    trace.write_text(MOONCAKE + '{"timestamp": "x"}\n')
    code, out, err = run("trace", "info", trace, "--json")
    assert code == ExitCode.USAGE
    assert err.startswith("replayssm: mooncake.jsonl line 13, column timestamp: expected ")
    assert last_object(out)["exit_code"] == 2
    code, out, _ = run("trace", "info", trace, "--skip-bad")
    assert code == 0
    assert "1 malformed rows left out" in out
    assert "line 13, column timestamp" in " ".join(out.split())


@pytest.mark.parametrize("profile", ["poisson", "gamma", "closed", "offline", "day-night"])
def test_synth_makes_every_profile(run, tmp_path, profile):
    out = tmp_path / "made.jsonl"
    code, _, _ = run("trace", "synth", out, "--profile", profile, "--num-prompts", 50,
                     "--max-concurrency", 3)  # fmt: skip
    assert code == 0
    made, _ = load(out)
    assert len(made.requests) == (74 if profile == "day-night" else 50)
    assert made.concurrency == (3 if profile == "closed" else None)


def test_sharegpt_needs_a_tokenizer_and_bytes_are_one(run, tmp_path):
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"conversations": [{"value": "four"}, {"value": "no"}]}]))
    code, _, err = run("trace", "info", path)
    assert (code, "tokenizer" in err) == (ExitCode.USAGE, True)
    found = last_object(run("trace", "info", path, "--tokenizer", "bytes", "--json")[1])
    assert (found["prompt"]["total"], found["output"]["total"]) == (4, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("trace", "info", "missing.csv"),
        ("trace", "info", __file__),
        ("trace", "info", __file__, "--format", "nope"),
        ("trace", "synth", "x.jsonl", "--profile", "nope"),
        ("trace", "synth", f"{__file__}/x.jsonl"),
        ("trace", "synth", "x.jsonl", "--num-prompts", "0"),
        ("bench", "serve", "missing.csv"),
        ("bench", "serve", "TRACE", "--endpoint", "nope"),
        ("bench", "serve", "TRACE", "--goodput", "ttft"),
        ("bench", "serve", "TRACE", "--header", "secret"),
        ("bench", "serve", "TRACE", "--extra-body", "[]"),
        ("bench", "serve", "TRACE", "--base-url", "host"),
        ("bench", "serve", "TRACE", "--result-dir", f"{__file__}/x"),
        ("bench", "nope"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, arguments, trace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*(trace if a == "TRACE" else a for a in arguments))
    assert code == ExitCode.USAGE
    assert len(err.strip().splitlines()) == 1, err
    assert "secret" not in err


def test_serve_records_every_request_and_writes_its_files(run, trace, tmp_path):
    folder = tmp_path / "out"
    with null_server() as address:
        code, out, _ = run(
            "bench", "serve", trace, "--base-url", address, "--goodput", "ttft:60000",
            "--goodput", "tpot:60000", "--result-dir", folder, "--metadata", "team=us",
            "--header", "Authorization=Bearer key", "--num-warmups", 1, "--json", "--quiet",
        )  # fmt: skip
        told = last_object(out)
        assert code == told["exit_code"]
        assert code in (ExitCode.OK, ExitCode.INCONCLUSIVE)
        assert (told["completed"], told["failed"]) == (12, 0)
        text = (folder / "result.json").read_text()
        result = json.loads(text)
        assert result["slo"]["share"] == 1.0
        assert result["metadata"] == {"team": "us"}
        assert result["config"]["headers"] == ["Authorization"]
        assert "Bearer" not in text
        assert "127.0.0.1" not in text
        assert result["manifest"]["machine"]["cores"] >= 1
        assert len((folder / "requests.jsonl").read_text().splitlines()) == 13
        assert (folder / "telemetry.csv").read_text().startswith("at_s,sent,")
        page = (folder / "report.html").read_bytes()
        assert told["report"] == str(folder / "report.html")
        assert b"Bearer" not in page
        assert b"127.0.0.1" not in page
        (folder / "report.html").unlink()
        code, out, _ = run("report", folder, "--json")
        assert (code, last_object(out)["report"]) == (0, told["report"])
        assert (folder / "report.html").read_bytes() == page
        code, out, _ = run("bench", "serve", trace, "--base-url", address, "--endpoint", "chat",
                           "--result-dir", folder)  # fmt: skip
        assert "12 ok, 0 failed" in out
        assert "TTFT from schedule" in out
        assert f"Report: {folder / 'report.html'}" in out.replace("\n", "")


def test_a_run_without_a_success_is_a_failure(run, trace, tmp_path):
    with null_server() as address:
        pass
    code, out, err = run("bench", "serve", trace, "--base-url", address, "--ready-timeout-s", 0,
                         "--result-dir", tmp_path / "out", "--json")  # fmt: skip
    assert code == ExitCode.FAILURE
    assert "not ready" in last_object(out)["error"]
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_the_client_checks_itself(run):
    code, out, _ = run("bench", "client", "--request-rate", 50, "--duration", 1, "--json", "-q")
    found = last_object(out)
    assert (found["requests"], found["ok"], found["lag_p99_ms"]) == (50, 50, None)
    # 50 requests cannot show a p99
    assert code == ExitCode.INCONCLUSIVE
