from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

import torch

from replayssm.cli import evaluate
from replayssm.cli import main as cli
from replayssm.cli.output import ExitCode
from replayssm.evaluate import (
    arms,
    plan,
    result,  # noqa: F401 - schemas are built before sizes change
)
from replayssm.evaluate.verdict import Verdict


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "random-gdn"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["replayssm", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


def last_object(out: str) -> dict:
    lines = out.strip().splitlines()
    found = json.loads(lines[-1])
    for line in lines[:-1]:
        with pytest.raises(json.JSONDecodeError):
            json.loads(line)
    return found


def test_version(run):
    code, out, _ = run("--version")
    assert (code, out.split()[0]) == (0, "replayssm")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nope",),
        ("plan-memory", "--window", "x"),
        ("plan-memory", "--gib", "-1"),
        ("evaluate", "--threads", "0"),
        ("evaluate", "--margins", "missing.toml"),
        ("evaluate", "--model", "./no-such-folder"),
        ("evaluate", "--out", f"{__file__}/report"),
        ("generate",),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, arguments, model_folder):
    if arguments[:2] == ("plan-memory", "--gib"):
        arguments = (*arguments, "--model", model_folder)
    code, out, err = run(*arguments, "--json")
    assert code == ExitCode.USAGE
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("replayssm: ")
    assert last_object(out)["exit_code"] == 2


def test_no_arguments_print_help(run):
    code, out, err = run()
    assert code == ExitCode.USAGE
    assert "plan-memory" in out + err


def test_env_says_what_is_missing_and_why(run):
    code, out, _ = run("env", "--json")
    found = last_object(out)
    assert code == 0
    assert found["available"]["impl reference"]
    assert set(found["why_not"]) == {n for n, there in found["available"].items() if not there}
    assert all(found["why_not"].values())
    assert run("env")[0] == 0


def test_plan_memory_counts_without_weights(run, model_folder):
    code, out, _ = run("plan-memory", "--model", model_folder, "--gib", "0.5", "--json")
    found = last_object(out)
    assert code == 0
    assert found["formats"]["q24"]["slots"] > 0
    code, out, _ = run("plan-memory", "--model", model_folder)
    assert code == 0
    assert "replay q16" in out


def test_both_paths_generate_the_same_text(run, model_folder):
    texts = {}
    for path in ("standard", "replay"):
        code, out, _ = run("generate", "def f(", "--model", model_folder, "--path", path,
                           "--max-new-tokens", "20", "--json")  # fmt: skip
        assert code == 0
        found = last_object(out)
        assert (found["path"], found["new_tokens"]) == (path, 20)
        texts[path] = found["text"]
    assert texts["standard"] == texts["replay"]


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafts_do_not_change_the_text(run, draft):
    texts, prompt = [], "def f(a):\n    return a\n\n\ndef f("
    for options in ((), ("--draft", draft)):
        code, out, _ = run("generate", prompt, "--max-new-tokens", "24", "--json", *options)
        assert code == 0
        texts.append(last_object(out)["text"])
    assert texts[0] == texts[1]


def test_drafts_that_cannot_be_served_are_refused(run, model_folder):
    code, out, _ = run("generate", "def f(", "--draft", "ngram", "--path", "standard", "--json")
    assert code == ExitCode.USAGE
    assert "rollback" in last_object(out)["error"]
    code, out, _ = run("generate", "def f(", "--draft", "model", "--model", model_folder, "--json")
    assert code == ExitCode.USAGE
    assert "bundled" in last_object(out)["error"]


def test_evaluate_writes_a_report_and_says_how_it_went(run, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "Scope", tiny_scope)
    out_folder = tmp_path / "out"
    code, out, err = run("evaluate", "--model", model_folder, "--out", str(out_folder), "--json",
                         "--seed", "3")  # fmt: skip
    found = last_object(out)
    assert code == found["exit_code"]
    assert code in (ExitCode.OK, ExitCode.GATE_FAILED, ExitCode.INCONCLUSIVE)
    verdict = Verdict(found["models"][0]["verdict"])
    assert (verdict is Verdict.ENABLE) == (code == 0)
    assert (out_folder / "report.html").is_file()
    assert json.loads((out_folder / "result.json").read_text())["plan"]["seed"] == 3
    assert "precision: done" in err


@pytest.mark.long
def test_a_full_run_reports_every_model_and_says_which_one_runs(
    run, model_folder, tmp_path, monkeypatch
):
    other = tmp_path / "random-two"
    shutil.copytree(model_folder, other)
    monkeypatch.setattr(evaluate, "ALL_MODELS", (model_folder, str(other)))
    monkeypatch.setattr(arms, "FULL", arms.DEFAULT[:3])
    monkeypatch.setattr(plan, "FULL_SCOPE", tiny_scope())
    code, out, err = run("evaluate", "--full", "--out", str(tmp_path / "out"), "--json")
    found = last_object(out)
    names = [model["model"] for model in found["models"]]
    assert (code, names) == (found["exit_code"], ["random-gdn", "random-two"])
    for i, name in enumerate(names, start=1):
        assert (tmp_path / "out" / name / "report.html").is_file()
        assert f"{name} ({i} of 2), speculation: done" in err
    assert (tmp_path / "out" / "report.html").is_file()


def tiny_scope() -> plan.Scope:
    return replace(
        plan.FULL_SCOPE, window=4, steps=6, prefills=(4,), decode_batches=(1,), decode_samples=3,
        batches=(1,), windows=(4,), rounds=3, working_set=1, budget_bytes=16 << 10,
        buckets=(64, 320), text_rows=2, probes=((320, 1),), block=4,
        drafts=(1,), draft_rows=2, draft_prompt=32, draft_tokens=33, verify_batch=2, rollbacks=60,
    )  # fmt: skip


def test_tune_says_what_it_lacks(run, tmp_path, monkeypatch):
    from replayssm.ops import dispatch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run("tune", "--out", str(tmp_path))
    assert (code, out) == (ExitCode.FAILURE, "")
    assert "no GPU here" in err
    monkeypatch.setattr(dispatch, "_is_interpreted", lambda: False)
    code, _, err = run("tune", "--out", str(tmp_path), "--device", "cpu")
    assert code == ExitCode.FAILURE
    assert "needs a GPU's tensors, not cpu" in err
    code, _, err = run("tune", "--out", str(tmp_path / "none"))
    assert code == ExitCode.USAGE
    assert "a folder that exists" in err
    assert not list(tmp_path.iterdir())
