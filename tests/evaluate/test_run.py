from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from replayssm.errors import ContractError
from replayssm.evaluate import compatibility, run
from replayssm.evaluate.bottleneck import amdahl
from replayssm.evaluate.plan import Plan
from replayssm.evaluate.report import advice, plots, render, render_overview, tables, write
from replayssm.evaluate.report.tables import section_seconds
from replayssm.evaluate.report.theme import drawing, figure
from replayssm.evaluate.result import dump, parse, schema
from replayssm.evaluate.session import twin


def test_every_section_has_numbers(result):
    arms = [arm.name for arm in result.plan.arms]
    assert result.compatibility.served == 2
    assert [a.arm for a in result.precision.arms] == arms
    assert {t.arm for c in result.window.cells for t in c.timings} == set(arms)
    assert [p.batch for p in result.bottleneck.profiles][:2] == [1, 2]
    assert set(section_seconds(result)) >= set(run.SECTIONS)


def test_fp32_arms_agree_step_by_step(result):
    for found in result.compatibility.agreements:
        assert found.logit_error < 1e-4, found
        assert found.state_error < 1e-5, found


def test_timed_cells_fold_once_a_window(result):
    for cell in result.window.cells:
        for timing in cell.timings:
            replay = not timing.arm.startswith("standard")
            assert timing.folds_per_row_step == (1 / cell.window if replay else 0)
            assert timing.valid


def test_full_reads_of_exact_formats_leave_the_distribution_alone(result):
    worst = max(b.mean_kl.value for b in result.precision.arm("s32 full").buckets)
    assert worst < 1e-6
    for bucket in result.precision.arm("standard bf16").buckets:
        assert bucket.mean_kl.value > worst


def test_result_survives_json(result):
    assert parse(dump(result)) == result
    assert "properties" in schema()


def test_a_result_whose_margins_were_changed_is_refused(result):
    fields = json.loads(dump(result))
    fields["plan"]["margins"]["mean_kl"] = 1.0
    with pytest.raises(ContractError, match="plan_digest"):
        parse(json.dumps(fields))
    with pytest.raises(ContractError, match="result"):
        parse("{}")


def test_the_plan_is_hashed_before_anything_runs(subject, small_scope, monkeypatch):
    seen = []

    class Stop(Exception):
        pass

    class Watched(Plan):
        @property
        def digest(self):
            seen.append("hashed")
            return super().digest

    def first(*_args):
        seen.append("ran")
        raise Stop

    monkeypatch.setattr(compatibility, "run", first)
    with pytest.raises(Stop):
        run.evaluate(subject, Watched("random-gdn", scope=small_scope))
    assert seen == ["hashed", "ran"]


def test_report_is_one_file_without_addresses(result, tmp_path):
    html = write(result, tmp_path).read_text(encoding="utf-8")
    assert not re.findall(r"https?://|//cdn|@import|url\((?!#)", html)
    assert re.findall(r"<link|<img|src=", html) == []
    assert html.count("<svg") == 7
    assert "prefers-color-scheme: dark" in html


def test_report_says_the_verdict_first_and_the_manifest_last(result):
    html = render(result)
    places = [
        html.index(text)
        for text in ('class="verdict', "Routing table", "1. Compatibility", "2. Bottleneck",
                     "3. Window", "4. Precision", "5. Speculation", "Margins and definitions",
                     "<h2>Manifest")
    ]  # fmt: skip
    assert places == sorted(places)


def test_both_questions_are_answered_in_one_block(result):
    html = render(result)
    block = html[html.index('<section class="verdict') :].split("</section>")[0]
    plain, drafts = advice.headlines(result)
    assert f"Plain decode: {plain.verdict.value}" in block
    assert f"Speculative decoding: {drafts.verdict.value}" in block
    assert f"For speculation: {drafts.verdict.value}" in html[html.index("5. Speculation") :]


def test_the_summary_fits_a_terminal_and_its_reasons_the_page(result):
    found = tables.summary(result)
    columns = zip(found.columns, *found.rows, strict=True)
    width = sum(max(map(len, cells)) for cells in columns) + 2 * (len(found.columns) - 1)
    assert width <= 100
    reasons = [row[-1] for row in advice.reasons(result).rows]
    assert reasons == [arm.reason for arm in result.judgement.arms]


def test_a_panel_without_numbers_says_so(result):
    arms = tuple(
        replace(arm, buckets=tuple(replace(b, p99_kl=None) for b in arm.buckets))
        for arm in result.precision.arms
    )
    empty = replace(result, precision=replace(result.precision, arms=arms))
    assert plots.divergence(empty).count("too few tokens") == 1


def test_no_interval_leaves_the_axes_unmarked(estimate):
    with drawing("limits"):
        _, (ax, *_) = figure()
        shown = [estimate(1, 0.9, 1.1), estimate(1.2, 0.5, 9.0), estimate(1, 0.8, 2.2)]
        plots.with_interval(ax, [0, 1, 2], shown, "#000000", "arm")
        before = len(ax.lines)
        plots.limit_ratio(ax, shown)
    top = ax.get_ylim()[1]
    marked = [tuple(line.get_xdata()) for line in ax.lines[before:]]
    assert 2.2 < top < 9
    assert marked == [(1,)]


def test_report_holds_the_result(result):
    data = re.search(r'id="result">(.*?)</script>', render(result), re.DOTALL)
    assert parse(data.group(1).replace("<\\/", "</")) == result


def test_manifest_names_no_machine_and_no_folder(result):
    import getpass
    import socket

    text = dump(result)
    assert socket.gethostname() not in text
    assert "/home/" not in text
    if getpass.getuser() != "root":
        assert getpass.getuser() not in text


def test_a_twin_shares_every_parameter(subject):
    other = twin(subject.model)
    assert other is not subject.model
    pairs = zip(subject.model.parameters(), other.parameters(), strict=True)
    assert all(a is b for a, b in pairs)


def test_amdahl_carries_the_interval(estimate):
    found = amdahl(estimate(0.5, 0.4, 0.6))
    assert (found.low, found.value, found.high) == pytest.approx((1 / 0.6, 2.0, 2.5))


def test_overview_links_to_every_model(result):
    html = render_overview([result, result])
    assert html.count('href="random-gdn/report.html"') == 2
    assert not re.findall(r"https?://|src=", html)
