from __future__ import annotations

from dataclasses import replace

import pytest

from replayssm.errors import ContractError
from replayssm.evaluate.plan import Margins, Plan, Scope, read_margins


def test_digest_depends_on_every_part():
    plan = Plan("a")
    others = [
        replace(plan, model="b"),
        replace(plan, seed=1),
        replace(plan, margins=replace(plan.margins, mean_kl=0.003)),
        replace(plan, scope=replace(plan.scope, steps=513)),
        replace(plan, arms=plan.arms[:-1]),
    ]
    assert len({p.digest for p in [plan, *others]}) == 6
    assert Plan("a").digest == plan.digest


def test_margins_file_overrides_only_what_it_names(tmp_path):
    path = tmp_path / "margins.toml"
    path.write_text("[margins]\nspeedup = 1.2\n")
    assert read_margins(path) == replace(Margins(), speedup=1.2)


@pytest.mark.parametrize(
    "text",
    ["[margins]\nspeed = 2", "[other]\nspeedup = 1.2", "not toml", "[margins]\nmean_kl = -1",
     "[margins]\nspeedup = 0.5", "[margins]\nmean_kl = 'small'", "[margins]\nmean_kl = nan",
     "[margins]\nspeedup = inf", "\xff"],
)  # fmt: skip
def test_a_bad_margins_file_is_refused(tmp_path, text):
    path = tmp_path / "margins.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ContractError):
        read_margins(path)


def test_a_missing_margins_file_is_refused(tmp_path):
    with pytest.raises(ContractError):
        read_margins(tmp_path / "none.toml")


def test_blocks_divide_the_window():
    with pytest.raises(ContractError, match=r"scope\.block"):
        Scope(window=16, block=5)
