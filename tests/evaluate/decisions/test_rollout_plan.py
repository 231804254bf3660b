from __future__ import annotations

import pytest

from replayssm.errors import ContractError
from replayssm.evaluate.decisions.plan import parse_plan, read_plan
from replayssm.evaluate.decisions.result import stamp
from replayssm.evaluate.manifest import collect


def refused(table) -> str:
    with pytest.raises(ContractError) as error:
        parse_plan(table)
    return str(error.value)


def test_lists_in_a_variant_make_one_variant_each(table):
    table["variants"][1:] = [
        {"name": "r", "path": "replay", "state": ["s32", "q16"], "window": [8, 16]}
    ]
    plan = parse_plan(table)
    assert [v.name for v in plan.candidates] == ["r-s32-8", "r-s32-16", "r-q16-8", "r-q16-16"]
    assert len({v.pool for v in plan.candidates}) == 4


def test_the_digest_is_that_of_every_value(table):
    first = parse_plan(table)
    assert parse_plan(table).digest == first.digest
    table["decisions"]["outcome"]["margin"] = 1.01
    assert parse_plan(table).digest != first.digest


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.update(modle="x"), ("modle: expected a key that the plan knows", "'x'")),
        (lambda t: t.pop("cost"), ("cost: expected a value, got nothing",)),
        (lambda t: t["design"].update(pairs=7), ("design.pairs: expected", "8", "got 7")),
        (lambda t: t["design"].update(max_pairs=8, pairs=9), ("design: expected max_pairs",)),
        (lambda t: t["cohorts"][1].update(prompt_tokens=[9, 2]),
         ("cohorts[1].prompt_tokens: expected the least before the most",)),
        (lambda t: t["cohorts"][0].update(mode="fast"), ("cohorts[0].mode", "'fast'")),
        (lambda t: t["cohorts"][0].update(margins={"speed": 2.0}),
         ("cohorts[0].margins: expected names out of bottleneck",)),
        (lambda t: t["cohorts"][1].update(name="pool"), ("cohorts with names of their own",)),
        (lambda t: t["variants"][1].update(drafter="ngram"),
         ("variants[1]: expected a drafter and draft_tokens",)),
        (lambda t: t["variants"][0].update(state="q16"), ("variants[0]: expected", "f32")),
        (lambda t: t["variants"].reverse(), ("the first variant on the standard path",)),
        (lambda t: t["hardware"].update(context=64), ("hardware.context of at least 80",)),
        (lambda t: t["cost"].update(per_kwh=0.3, watts=700.0), ("cost: expected either",)),
        (lambda t: t["decisions"]["outcome"].update(metric="vibes"),
         ("decisions.outcome.metric", "'vibes'")),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_by_key(table, change, told):
    change(table)
    message = refused(table)
    for words in told:
        assert words in message


def test_a_wrong_file_is_refused(tmp_path):
    with pytest.raises(ContractError, match="a TOML file that exists"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "plan.toml").write_text("name = ")
    with pytest.raises(ContractError, match="valid TOML"):
        read_plan(tmp_path / "plan.toml")


def test_the_change_pays_for_its_upkeep(table):
    table["cost"] = {"per_gpu_hour": 2.0, "machines": 10, "monthly": {"fork": 730.0, "eyes": 1460}}
    cost = parse_plan(table).cost
    assert cost.per_hour(changed=False) == 2.0
    assert cost.per_hour(changed=True) == pytest.approx(2.3)
    table["cost"] = {"per_kwh": 0.5, "watts": 600}
    assert parse_plan(table).cost.per_hour(changed=True) == pytest.approx(0.3)


def test_margins_may_differ_by_cohort(table):
    table["cohorts"][1]["margins"] = {"precision": 0.5}
    plan = parse_plan(table)
    assert plan.margin("precision", plan.cohort("night")) == 0.5
    assert plan.margin("precision", plan.cohort("pool")) == 0.01


def test_a_plan_changed_after_its_results_is_refused(table, tmp_path):
    plan, manifest = parse_plan(table), collect(seed=0)
    assert stamp(plan, manifest, tmp_path).attempt == 1
    table["decisions"]["outcome"]["margin"] = 0.5
    looser = parse_plan(table)
    # nothing was measured yet: a plan may be mended
    assert stamp(looser, manifest, tmp_path).attempt == 1
    stamp(plan, manifest, tmp_path)
    (tmp_path / "result.json").write_text("{}")
    before = (tmp_path / "manifest.json").read_text()
    with pytest.raises(ContractError, match="margins are not changed after the results"):
        stamp(looser, manifest, tmp_path)
    assert (tmp_path / "manifest.json").read_text() == before
    assert stamp(plan, manifest, tmp_path).attempt == 2
