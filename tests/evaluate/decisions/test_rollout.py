"""One whole evaluation: a tiny model, virtual time, everything else as it is."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from replayssm.errors import ContractError
from replayssm.evaluate.checks import Status
from replayssm.evaluate.decisions import gate, quality, result
from replayssm.evaluate.decisions.compare import compare_results
from replayssm.evaluate.decisions.plan import parse_plan
from replayssm.evaluate.decisions.run import Rollouts
from replayssm.evaluate.decisions.serving import Job
from replayssm.evaluate.decisions.tables import DECISIONS
from replayssm.evaluate.decisions.workload import Workload, assign
from replayssm.evaluate.manifest import collect
from replayssm.evaluate.report import render_rollout
from replayssm.evaluate.session import Session
from replayssm.state import StatePool
from replayssm.types import Block

SCHEMAS = Path(result.__file__).parents[1] / "schemas"


def cost(variants, prefills):
    """Replay is slower alone and faster in company; drafts help by what they emit."""
    rows = len(variants)
    per_row = 0.6e-4 if variants and variants[0].is_replay else 1e-4
    return (
        1e-3
        + (1e-4 if variants and variants[0].is_replay else 0)
        + per_row * rows
        + 2e-3 * prefills
    )


def make_jobs(subject):
    text = subject.text
    sizes = [("pool", 40), ("night", 100), ("pool", 30)] * 8
    return [
        Job(f"r{i}", i * 0.02, tuple(text[50 * i : 50 * i + n]), 8, cohort,
            text[50 * i : 50 * i + n].decode("ascii", "replace"))
        for i, (cohort, n) in enumerate(sizes)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def speak(subject):
    @lru_cache(None)
    def greedy(prompt, count):
        session = Session(subject.model)
        tokens = [int(session.feed(torch.tensor([prompt]), last_only=True)[0, -1].argmax())]
        while len(tokens) < count:
            tokens.append(int(session.feed(torch.tensor([tokens[-1:]]))[0, -1].argmax()))
        return tokens

    return lambda request: greedy(request.prompt, request.output_tokens)


@pytest.fixture
def evaluate(subject, speak, fake, tmp_path):
    def run(table, **options):
        plan = parse_plan(table)
        stamped = result.stamp(plan, collect(seed=plan.seed), tmp_path)
        workload = Workload(plan, make_jobs(subject), list(subject.text[:4000]))
        return Rollouts(subject, stamped, fake(cost, speak, **options), workload).run()

    return run


@pytest.mark.slow
def test_a_plan_ends_in_six_decisions_a_verdict_and_a_routing(evaluate, table, tmp_path):
    found = evaluate(table)
    assert tuple(d.name for d in found.decisions) == DECISIONS
    for decision in found.decisions:
        assert all(f.reason and f.status in Status for f in decision.findings)
    assert {v.cohort for v in found.verdicts} == {"pool", "night"}
    for verdict in found.verdicts:
        row = next(r for r in found.routing.cohorts if r.cohort == verdict.cohort)
        assert (row.route.path == "replay") == (verdict.status is Status.PASS)
    assert result.parse(result.dump(found)) == found
    result.write(found, tmp_path)
    assert result.read(tmp_path) == found
    lines = (tmp_path / "findings.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(len(d.findings) for d in found.decisions)


@pytest.mark.long
def test_the_report_is_one_file_with_the_verdicts_first(evaluate, table):
    html = render_rollout(evaluate(table))
    assert not re.findall(r"https?://|//cdn|@import|url\((?!#)|<link|<img|src=", html)
    places = [
        html.index(x) for x in ('class="verdict', 'id="decisions"', ">Definitions<", ">Manifest<")
    ]
    assert places == sorted(places)
    for name in DECISIONS:
        assert f'<section class="card" id="{name}"' in html
    # shares, a surface, acceptance, two cohorts of precision and latency, steps, memory
    assert html.count("<svg") == 9
    data = re.search(r'id="result">(.*?)</script>', html, re.DOTALL)
    assert result.parse(data.group(1).replace("<\\/", "</")).verdicts


@pytest.mark.long
def test_nothing_is_replayed_when_nothing_is_left(evaluate, table):
    table["decisions"]["concurrency"] = {"metric": "throughput", "margin": 50.0}
    found = evaluate(table)
    assert found.outcome is None
    assert gate.overall(found.verdicts) is Status.FAIL
    assert {r.route.path for r in found.routing.cohorts} == {"standard"}
    assert "50x" in found.verdicts[0].reason
    assert render_rollout(found).count("<svg") == 5


@pytest.mark.long
def test_a_leak_fails_every_routed_cohort(evaluate, table):
    found = evaluate(table, leak=1)
    assert all(v.status is Status.FAIL for v in found.verdicts)
    assert "63 of 64 slots free" in found.verdicts[0].reason


@pytest.mark.long
def test_a_cohort_beside_it_must_not_pay_for_the_change(evaluate, table):
    # the pool stays on standard, and asks of its company what nobody can give
    table["cohorts"][0]["margins"] = {"concurrency": 50.0, "outcome": 50.0}
    night = next(v for v in evaluate(table).verdicts if v.cohort == "night")
    assert night.decisions["outcome"] is Status.FAIL
    assert "pool beside it" in night.reason


@pytest.mark.long
def test_an_evaluation_equals_itself_and_not_a_slower_one(evaluate, table):
    found = evaluate(table)
    assert compare_results(found, found).status is Status.PASS
    fields = json.loads(result.dump(found))
    for sample in fields["experiments"][0]["samples"]:
        if sample["variant"] == "s32-full":
            sample["metrics"]["throughput"] *= 0.8
    slower = result.parse(json.dumps(fields))
    changes = compare_results(found, slower)
    assert changes.status is Status.FAIL
    assert [m.variant for m in changes.metrics if m.ratio.high < 1] == ["s32-full"]


@pytest.mark.long
def test_a_result_with_another_plan_is_refused(evaluate, table):
    fields = json.loads(result.dump(evaluate(table)))
    fields["stamp"]["plan"]["decisions"]["outcome"]["margin"] = 0.1
    with pytest.raises(ContractError, match="plan_digest"):
        result.parse(json.dumps(fields))


@pytest.fixture
def faulty(monkeypatch):
    """Plant a fault in what every step and block hands to the pool."""
    honest = StatePool.step_

    def plant(change):
        def step_(self, ticket, layer, block, **options):
            return honest(self, ticket, layer, change(block), **options)

        monkeypatch.setattr(StatePool, "step_", step_)

    return plant


def moved(subject, plan, length, seed=0):
    rows = [(ids[:16], ids[16:]) for ids in quality.adversarial(subject, length, 4, seed)]
    variant = plan.candidates[0]
    return quality.drifts(subject.model, rows, plan.baseline, [variant])[variant.name]


def test_a_planted_precision_fault_is_caught(subject, plan, faulty):
    honest = quality.buckets(moved(subject, plan, 128), (128,), "adversarial", 0.95, 0)
    faulty(lambda b: Block(b.q, b.k, b.v, b.g, b.w * 1.5))
    broken = quality.buckets(moved(subject, plan, 128), (128,), "adversarial", 0.95, 0)
    assert honest[0].mean_kl.high < 1e-12
    assert broken[0].mean_kl.low > 1e6 * honest[0].mean_kl.high


def test_a_planted_drift_is_caught_where_it_has_grown(subject, plan, faulty):
    # a decay that is a little too weak shows once the state has forgotten too little
    faulty(lambda b: Block(b.q, b.k, b.v, b.g * 0.3, b.w))
    (found,) = moved(subject, plan, 256)[:1]
    early, late = found.kl[:16].mean(), found.kl[-64:].mean()
    assert late > 2 * early > 0


def test_requests_go_to_the_cohort_they_name_or_fit(plan):
    assert assign(plan, "night", 1, 1) == "night"
    assert assign(plan, "default", 40, 8) == "pool"
    assert assign(plan, "default", 100, 8) == "night"
    assert assign(plan, "default", 500, 8) == "other"


def test_a_cohort_without_requests_is_refused(subject, plan):
    with pytest.raises(ContractError, match="cohort night"):
        Workload(plan, [j for j in make_jobs(subject) if j.cohort == "pool"], [1] * 100)


def test_rounds_draw_other_requests_and_variants_the_same(subject, plan):
    workload = Workload(plan, make_jobs(subject), list(subject.text[:4000]))
    pool = plan.cohort("pool")
    assert workload.cohort(pool, 3) == workload.cohort(pool, 3)
    assert {j.prompt for j in workload.cohort(pool, 3)} != {
        j.prompt for j in workload.cohort(pool, 4)
    }
    assert len({j.id for n in (-1, 0, 1) for j in workload.cohort(pool, n)}) == 3 * pool.requests


def test_published_schemas_are_those_of_the_code():
    for name, schema in result.schemas().items():
        published = json.loads((SCHEMAS / name).read_text(encoding="utf-8"))
        assert published == json.loads(json.dumps(schema)), f"{name}: run write_schemas"


@pytest.mark.long
def test_what_is_written_fits_its_schema(evaluate, table, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    found = evaluate(table)
    result.write(found, tmp_path)
    written = {
        "manifest": json.loads((tmp_path / "manifest.json").read_text()),
        "result": json.loads((tmp_path / "result.json").read_text()),
        "routing": found.routing.model_dump(mode="json"),
        "plan": found.plan.model_dump(mode="json"),
    }
    for name, fields in written.items():
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
        jsonschema.validate(fields, schema)
