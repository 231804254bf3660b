from __future__ import annotations

import pytest

from replayssm.errors import ContractError
from replayssm.evaluate.decisions import graders
from replayssm.evaluate.decisions.graders import Ticket
from replayssm.evaluate.decisions.quality import grade
from replayssm.evaluate.decisions.serving import Job

PROMPT = "# The key is 4711.\nsome history\n# What is the key? The key is "


@pytest.mark.parametrize(
    ("reply", "passes"), [("4711.\n", True), ("4712.\n", False), ("", False), ("471", False)]
)
def test_a_fact_has_to_stand_in_the_ticket(reply, passes):
    assert graders.facts(Ticket(PROMPT, reply, "")) is passes


def test_a_ticket_without_a_question_is_not_graded_for_facts():
    assert graders.facts(Ticket("Hello.", "4711", "")) is None
    assert graders.facts(Ticket("The code is ", "4711", "")) is None


def test_no_action_is_promised_that_the_ticket_does_not_speak_of():
    assert graders.actions(Ticket("Where is it?", "We will refund you.", "")) is False
    assert graders.actions(Ticket("I want a refund.", "We will refund you.", "")) is True


@pytest.mark.parametrize(
    ("reply", "passes"),
    [("fine", True), ("", False), ("a\N{REPLACEMENT CHARACTER}", False), ("x" * 40, False),
     ("x\0", False), ("\n" * 40, False)],
)  # fmt: skip
def test_a_reply_is_text(reply, passes):
    assert graders.form(Ticket("", reply, "")) is passes


def test_a_reply_says_what_the_baseline_said():
    assert graders.consistency(Ticket("", "4711 a", "4711 b"))
    assert graders.consistency(Ticket("", "4712 a", "4711 b")) is False
    assert graders.consistency(Ticket("", "4711", " \n")) is None


def test_graders_are_added_by_name(monkeypatch):
    monkeypatch.setattr(graders, "_KNOWN", dict(graders._KNOWN))
    graders.register("polite", lambda t: "please" in t.reply)
    assert list(graders.find(("polite", "facts"))) == ["polite", "facts"]
    with pytest.raises(ContractError, match="a name that no grader has"):
        graders.register("facts", graders.facts)
    with pytest.raises(ContractError, match="polite"):
        graders.find(("rude",))


def test_graders_of_installed_packages_are_found(monkeypatch):
    class Entry:
        name = "house-style"

        def load(self):
            return graders.form

    monkeypatch.setattr(graders, "entry_points", lambda group: [Entry()])
    assert graders.find(("house-style",)) == {"house-style": graders.form}


def test_replies_are_counted_in_pairs():
    jobs = [Job(str(i), 0.0, (1,), 1, "c", PROMPT) for i in range(20)]
    good = {job.id: "4711." for job in jobs}
    worse = {**good, "3": "4712.", "4": "no"}
    (score,) = grade(("facts",), jobs, worse, good, (1, 8))
    assert (score.graded, score.baseline, score.variant) == (20, 20, 18)
    assert score.drop.value == pytest.approx(0.1)
    assert score.drop.low < 0.1 < score.drop.high
    (only,) = score.lengths
    assert (only.stop, only.graded, only.baseline, only.variant) == (8, 20, 20, 18)
