"""The report of a load run: what it says first, what it draws, and what it reads back."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
from records import record, steady_load

from replayssm.errors import ContractError
from replayssm.evaluate import load_run
from replayssm.evaluate.manifest import collect
from replayssm.evaluate.report import render_load, write_load
from replayssm.traffic import result, synth
from replayssm.traffic.energy import Energy
from replayssm.traffic.record import Status
from replayssm.traffic.run import Run, Sample
from replayssm.traffic.slo import parse
from replayssm.traffic.summary import summarise

NO_ENERGY = Energy(None, None, 0, "no counters here")
ENGINE = tuple(
    Sample(
        float(i), i, 2, 0, 3 * i, 100.0,
        {
            "steps": 5.0 * i, "step_seconds": 0.1 * i, "forwards.decode": 10.0 * i,
            "decode_seconds": 0.06 * i, "flushing_forwards": 2.0 * i, "flushing_seconds": 0.02 * i,
            "used_bytes": 1000.0, "allocated_bytes": 9000.0, "running": 2.0, "waiting": 0.0,
        },
    )
    for i in range(6)
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Return a function that makes a run of records by hand, out of files as a command does."""

    def make(records, goodput=(), samples=(), energy=NO_ENERGY, trace=None, **about):
        limits = parse(goodput)
        config = {"sample_s": 1.0, "slots": 4, "engines": 1}
        manifest = json.loads(json.dumps(asdict(collect(seed=0))))
        told = result.About("replayssm", "tiny", config=config, manifest=manifest, **about)
        made = Run(tuple(records), 0, 1.7e9, tuple(samples))
        trace = trace or synth.offline(len(records), synth.Lengths(8, 3))
        summary = summarise(records, limits, samples)
        document = result.document(made, summary, trace, energy, told)
        result.write(tmp_path, made, document)
        return load_run.parse(result.dump(document), made.records, made.samples)

    return make


def headline(html: str) -> str:
    return html[html.index('<section class="verdict') :].split("</section>")[0]


def figures(html: str) -> list[str]:
    return re.findall(r'<svg[^>]*aria-label="([^"]*)"', html)


OVER_TIME = ["Requests in flight", "Arrivals against completions", "Output tokens", "Schedule lag"]


def test_the_page_is_one_file_without_addresses(run, tmp_path):
    made = run(steady_load(9), ["ttft:150"], ENGINE, Energy(30.0, "rapl", 1, None))
    html = write_load(made, tmp_path / "page").read_text(encoding="utf-8")
    assert not re.findall(r"https?://|//cdn|@import|url\((?!#)|<link|<img|src=", html)
    assert "prefers-color-scheme: dark" in html
    parts = ("Load", "Target", "Energy", "Trace", "Definitions", "Manifest")
    marks = ('class="verdict', '<h2 id="latencies"', *(f"<h2>{part}" for part in parts))
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)
    data = re.search(r'id="result">(.*?)</script>', html, re.DOTALL)
    assert data.group(1).replace("<\\/", "</").strip() == made.text.strip()


@pytest.mark.slow
def test_a_page_is_the_same_from_the_files(run, tmp_path):
    cohorts = steady_load(5, cohort="a") + steady_load(5, cohort="b", rate=0.5)
    failed = record(20, status=Status.FAILED, times=(), end_s=1.0, scheduled_s=0.3)
    made = run([record(-1, warmup=True), *cohorts, failed], ["ttft:150", "tpot:10"], ENGINE)
    assert load_run.read(tmp_path).samples == made.samples
    assert render_load(load_run.read(tmp_path)) == render_load(made)


def test_the_headline_counts_rates_limits_and_failures(run):
    late = steady_load(4, ttft=0.9)
    failed = [record(9 + i, status=Status.FAILED, times=(), scheduled_s=4.0 + i) for i in range(2)]
    told = headline(render_load(run(steady_load(4) + late + failed, ["ttft:150"])))
    # sent at 0 to 3 s twice, then at 4 s and at 5 s
    assert "10 requests at 1.80 a second" in told
    assert "4 of 10 (40.0 %) stayed within TTFT 150 ms" in told
    assert "2 failed (2 x http 500)" in told
    assert 'class="verdict bad"' in told
    none = headline(render_load(run(steady_load(4))))
    assert "None failed" in none
    assert "no limit was set" in none


def test_a_closed_loop_is_told_by_what_it_holds_in_flight(run):
    trace = synth.closed_loop(4, 2, synth.Lengths(8, 3))
    assert "4 requests, 2 at a time" in headline(render_load(run(steady_load(4), trace=trace)))


def test_a_degraded_schedule_is_said_first(run):
    slow = [replace(r, send_s=r.send_s + 0.07) for r in steady_load(20)]
    told = headline(render_load(run(slow)))
    assert 'class="verdict open"' in told
    assert told.index("Degraded") < told.index("20 requests")
    assert "100.0 % of the requests more than 50 ms late" in told
    assert "Degraded" not in render_load(run(steady_load(20)))


def test_a_p99_needs_a_thousand_requests(run):
    def cells(n):
        html = render_load(run(steady_load(n, rate=10)))
        row = re.search(r"<tr><td>TTFT</td>(.*?)</tr>", html, re.DOTALL).group(1)
        return re.findall(r"<td>(.*?)</td>", row)

    assert cells(999) == ["100.0", "100.0", "100.0", "—", "100.0", "999"]
    assert cells(1000) == ["100.0", "100.0", "100.0", "100.0", "100.0", "1,000"]


@pytest.mark.slow
def test_a_limit_is_drawn_where_there_is_one(run):
    def shown(*goodput):
        html = render_load(run(steady_load(9), goodput))
        drawn = re.findall(r'<svg.*?aria-label="Share of requests by ([^"]*)".*?</svg>', html, re.S)
        lines = re.findall(r"<svg.*?</svg>", html, re.S)[: len(drawn)]
        return {n: re.findall(r">(SLO[^<]*)<", svg) for n, svg in zip(drawn, lines, strict=True)}

    assert shown() == {"TTFT": [], "TPOT": [], "E2EL": []}
    assert shown("ttft:150", "tpot:5000") == {
        "TTFT": ["SLO"],
        "TPOT": ["SLO 5,000 ms →"],
        "E2EL": [],
    }
    assert shown("e2el_scheduled:210")["E2EL from schedule"] == ["SLO"]


@pytest.mark.slow
def test_cohorts_are_drawn_and_listed_only_where_there_are_several(run):
    one = render_load(run(steady_load(5, cohort="desk")))
    assert "By cohort" not in one
    assert ">desk<" not in re.search(r"<svg.*?</svg>", one, re.S).group(0)
    both = run(steady_load(5, cohort="desk") + steady_load(2, cohort="night"))
    html = render_load(both)
    first = re.search(r"<svg.*?</svg>", html, re.S).group(0)
    for name in ("desk", "night"):
        assert f">{name}<" in first
        assert f"<td>{name}</td>" in html
    many = [r for i in range(9) for r in steady_load(1 + i, cohort=f"c{i}")]
    html = render_load(run(many))
    assert "the 6 largest of 9" in html
    drawn = re.search(r"<svg.*?</svg>", html, re.S).group(0)
    assert [f">c{i}<" in drawn for i in range(9)] == [False] * 3 + [True] * 6


@pytest.mark.slow
def test_the_target_is_drawn_as_far_as_it_tells(run):
    always = figures(render_load(run(steady_load(5))))
    assert always[-4:] == [f"{title} over time" for title in OVER_TIME]
    assert "tells nothing" in render_load(run(steady_load(5)))
    engine = figures(render_load(run(steady_load(5), samples=ENGINE)))[len(always) :]
    assert engine == [
        "Steps, prefills included over time",
        "Decode forwards over time",
        "States, rings and attention caches over time",
        "Sequences at the target over time",
    ]
    server = [replace(s, counters={"vllm:num_requests_running": 3.0}) for s in ENGINE]
    told = figures(render_load(run(steady_load(5), samples=server)))[len(always) :]
    assert told == ["Sequences at the target over time"]


@pytest.mark.slow
def test_energy_is_told_or_why_not(run):
    assert "Not measured (no counters here)" in render_load(run(steady_load(5)))
    html = render_load(run(steady_load(5), energy=Energy(30.0, "rapl", 1, None)))
    assert "<td>2.00 J</td>" in html
    assert "Not measured" not in html


def test_a_run_without_a_success_has_a_page(run):
    failed = [record(i, status=Status.FAILED, times=(), scheduled_s=float(i)) for i in range(3)]
    html = render_load(run(failed, ["ttft:100"]))
    assert "No request succeeded" in html
    assert "0 of 3 (0.0 %)" in headline(html)
    assert figures(html) == [f"{title} over time" for title in OVER_TIME]


def test_names_are_text_whatever_they_hold(run):
    hostile = ("</script><b>x", "$a_b$", "_quiet")
    records = [r for name in hostile for r in steady_load(2, cohort=name)]
    html = render_load(run(records, label="<i>run</i>", metadata={"<u>": "</script>"}))
    assert not re.findall(r"<b>|<i>|<u>", html.split('<script type="application/json"')[0])
    assert html.count("</script>") == 2
    first = re.search(r"<svg.*?</svg>", html, re.S).group(0)
    assert ">$a_b$<" in first
    assert "_quiet<" in first


def test_what_is_no_load_run_is_refused(run, tmp_path):
    made = run(steady_load(2))
    assert load_run.is_load_run(json.loads(made.text))
    assert not load_run.is_load_run({"stamp": {}})
    fields = json.loads(made.text)
    with pytest.raises(ContractError, match=r"result of a load run.*manifest"):
        load_run.parse(json.dumps({**fields, "manifest": {}}), (), ())
    with pytest.raises(ContractError, match="schema_version"):
        load_run.parse(json.dumps({**fields, "schema_version": 9}), (), ())
    (tmp_path / "telemetry.csv").unlink()
    with pytest.raises(ContractError, match=r"telemetry\.csv"):
        load_run.read(tmp_path)
