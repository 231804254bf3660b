from __future__ import annotations

import pytest

from replayssm.engine.routing import Routing
from replayssm.evaluate.checks import Status
from replayssm.evaluate.decisions import gate
from replayssm.evaluate.decisions.finding import Decision, Finding
from replayssm.evaluate.decisions.plan import parse_plan
from replayssm.evaluate.decisions.routing import parse_routing, write_routing
from replayssm.evaluate.decisions.tables import DECISIONS
from replayssm.evaluate.stats import Estimate

PASS, FAIL, OPEN = Status.PASS, Status.FAIL, Status.OPEN


@pytest.fixture
def plan(table):
    table["variants"].append(
        {"name": "q16-high", "path": "replay", "state": "q16", "read": "high", "window": 4}
    )
    return parse_plan(table)


def findings(plan, statuses, *, gain=None, required=None):
    """Six decisions; ``statuses[cohort, variant]`` is the fifth's, all others pass."""
    made = []
    for name in DECISIONS:
        rows = []
        for cohort in plan.cohorts:
            for variant in plan.candidates:
                key = (cohort.name, variant.name)
                low = (gain or {}).get(key, 1.1)
                status = statuses.get(key, PASS) if name == "precision" else PASS
                rows.append(
                    Finding(
                        cohort.name, variant.name, status, (required or {}).get(name, True), "m",
                        1.0, Estimate(low + 0.1, low, low + 0.2, 8, ""), None,
                        5 if status is OPEN else 0, f"{name} of {variant.name}",
                    )
                )  # fmt: skip
        made.append(Decision(name, "?", "pairs", tuple(rows)))
    return made


def test_a_cohort_gets_the_variant_with_the_best_lower_end(plan):
    gain = {("pool", "s32-drafts"): 1.5, ("night", "s32-full"): 1.3}
    routed = gate.provisional(plan, findings(plan, {}, gain=gain))
    assert {name: v.name for name, v in routed.items()} == {
        "pool": "s32-drafts",
        "night": "s32-full",
    }


def test_all_cohorts_share_one_pool(plan):
    gain = {("pool", "q16-high"): 3.0, ("night", "s32-full"): 1.2, ("pool", "s32-full"): 1.2}
    only = {("night", "q16-high"): FAIL}
    routed = gate.provisional(plan, findings(plan, only, gain=gain))
    assert {name: v.name for name, v in routed.items()} == {"pool": "q16-high", "night": "standard"}


def test_what_failed_is_not_routed_and_the_file_says_why(plan, tmp_path):
    statuses = {("pool", v.name): FAIL for v in plan.candidates}
    decisions = findings(plan, statuses)
    routed = gate.provisional(plan, decisions)
    pool, night = gate.judge(plan, decisions, routed)
    assert (pool.status, pool.variant) == (FAIL, "standard")
    assert (night.status, night.variant) == (PASS, routed["night"].name)
    assert "precision of" in pool.reason
    file = gate.routing(plan, (pool, night), plan.digest, "now")
    path = write_routing(file, tmp_path)
    assert parse_routing(path.read_text()) == file
    assert [row.route.path for row in file.cohorts] == ["standard", "replay"]
    assert file.cohorts[0].guard is None
    assert [r.path for r in file.cohorts[1].fallback][-1] == "standard"


def test_undecided_is_said_with_the_pairs_that_would_decide(plan):
    statuses = {(c.name, v.name): OPEN for c in plan.cohorts for v in plan.candidates}
    decisions = findings(plan, statuses)
    verdicts = gate.judge(plan, decisions, gate.provisional(plan, decisions))
    assert gate.overall(verdicts) is OPEN
    assert [(v.status, v.variant, v.more) for v in verdicts] == [(OPEN, "standard", 5)] * 2


def test_a_decision_that_is_not_required_blocks_nothing(plan):
    statuses = {("pool", v.name): FAIL for v in plan.candidates}
    decisions = findings(plan, statuses, required={"precision": False})
    assert all(v.is_replay for v in gate.provisional(plan, decisions).values())


def test_a_broken_outcome_takes_the_route_back(plan):
    decisions = findings(plan, {})
    routed = gate.provisional(plan, decisions)
    name = routed["pool"].name
    last = decisions[-1]
    broken = tuple(
        f if (f.cohort, f.variant) != ("pool", name)
        else Finding(f.cohort, f.variant, FAIL, True, "m", 1.0, None, None, 0, "slots leaked")
        for f in last.findings
    )  # fmt: skip
    decisions[-1] = Decision(last.name, last.question, last.unit, broken)
    pool, night = gate.judge(plan, decisions, routed)
    assert (pool.status, pool.variant) == (FAIL, "standard")
    assert "slots leaked" in pool.reason
    assert night.status is PASS


def test_the_engine_loads_what_the_gate_writes(plan, tmp_path):
    pytest.importorskip("transformers")
    from replayssm.engine.request import Request

    decisions = findings(plan, {("night", v.name): FAIL for v in plan.candidates},
                         gain={("pool", "s32-drafts"): 2.0})  # fmt: skip
    verdicts = gate.judge(plan, decisions, gate.provisional(plan, decisions))
    write_routing(gate.routing(plan, verdicts, plan.digest, "now"), tmp_path)
    routing = Routing.load(tmp_path / "routing.json")
    by_name = routing(Request("a", (1,), 4, cohort="pool"))
    assert (by_name.path, by_name.drafter, by_name.draft_tokens) == ("replay", "ngram", 2)
    assert routing(Request("b", (1,), 4, cohort="night")).path == "standard"
    assert routing(Request("c", (1,) * 20, 8)) == by_name
    assert routing(Request("d", (1,) * 500, 8)).path == "standard"
    assert (routing.state, routing.ring.window, routing.ring.max_block) == ("s32", 4, 3)
    assert routing.tolerances["pool"].delta_logprob == 0.5
