"""``evaluate --plan``, ``compare`` and ``report`` from plan to exit code, on a random model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import torch

from replayssm.cli import main as cli
from replayssm.cli.output import ExitCode

PLAN = """
name = "desk"
model = "{model}"
[hardware]
threads = 1
context = 64
max_batch = 4
[design]
max_pairs = 8
[cost]
per_gpu_hour = 2.0
[traffic]
trace = "trace.jsonl"
[[cohorts]]
name = "pool"
mode = "batch"
concurrency = 2
prompt_tokens = [4, 40]
output_tokens = [1, 8]
requests = 2
graded = 4
[[variants]]
name = "standard"
path = "standard"
state = "f32"
[[variants]]
name = "s32"
path = "replay"
window = 4
drafter = "ngram"
draft_tokens = 2
[decisions.compatibility]
steps = 8
[decisions.concurrency]
metric = "memory_per_sequence"
margin = 0.1
[decisions.speculation]
metric = "memory_per_sequence"
margin = 0.1
[decisions.precision]
adversarial = 4
buckets = [64]
[decisions.outcome]
metric = "memory_per_sequence"
margin = 0.1
drill = false
[surface]
batches = [1]
prompts = [8]
output = 4
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("desk")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rows = [
        {"timestamp": 10 * i, "input_length": 12, "output_length": 6, "cohort": "pool",
         "prompt": f"ticket {i:04d}\n"}
        for i in range(6)
    ]  # fmt: skip
    header = {"format": "replayssm-trace", "version": 1, "time_unit": "ms", "block_size": 512}
    lines = [json.dumps(x) for x in (header, *rows)]
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "plan.toml").write_text(PLAN.format(model=folder / "model"))
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["replayssm", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


@pytest.mark.long
def test_a_plan_is_evaluated_compared_and_reported(run, desk):
    out = desk / "out"
    code, text, _ = run("evaluate", "--plan", desk / "plan.toml", "--out", out, "--json", "-q")
    found = json.loads(text.strip().splitlines()[-1])
    # the metric is memory, which does not depend on the machine's mood
    assert (code, found["exit_code"]) == (ExitCode.OK, 0), found["cohorts"]
    assert found["cohorts"][0]["variant"] == "s32"
    assert set(found["cohorts"][0]["decisions"].values()) == {"pass"} | (
        {found["cohorts"][0]["decisions"]["bottleneck"]}
    )
    names = {p.name for p in out.iterdir()}
    assert names == {
        "manifest.json", "result.json", "routing.json", "report.html", "findings.csv", "runs.csv",
        "requests",
    }  # fmt: skip
    from replayssm.engine.routing import Routing

    assert Routing.load(out / "routing.json").cohorts["pool"].route.path == "replay"

    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert run("report", out)[0] == 0
    assert (out / "report.html").read_text() == before
    code, text, _ = run("compare", out, out, "--json")
    changes = json.loads(text.strip().splitlines()[-1])
    assert (code, changes["conditions"], changes["missing"]) == (0, [], [])

    changed = (desk / "plan.toml").read_text().replace("margin = 0.1", "margin = 0.05")
    (desk / "looser.toml").write_text(changed)
    code, _, err = run("evaluate", "--plan", desk / "looser.toml", "--out", out, "-q")
    assert code == ExitCode.USAGE
    assert "margins are not changed after the results" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("evaluate", "--plan", "none.toml"), "--plan: expected a TOML file that exists"),
        (("evaluate", "--plan", "plan.toml", "--seed", "3"), "--seed: expected not to be given"),
        (("report", "."), "a folder with a result.json"),
        (("compare", ".", "."), "a folder with a result.json"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, desk, monkeypatch, arguments, told, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == ExitCode.USAGE
    assert told in err
    assert len(err.strip().splitlines()) == 1
