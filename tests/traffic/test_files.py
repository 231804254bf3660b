from __future__ import annotations

import csv
import json

import pytest
from records import record, steady_load

pytest.importorskip("pydantic")

from replayssm.errors import ContractError
from replayssm.traffic import files, result, synth
from replayssm.traffic.energy import Energy
from replayssm.traffic.record import Status
from replayssm.traffic.run import Run, Sample
from replayssm.traffic.slo import parse
from replayssm.traffic.summary import summarise

SAMPLES = (
    Sample(-0.2, 0, 0, 0, 0, None, {"steps": 1.0}),
    Sample(1.5, 4, 2, 1, 30, 100.0, {"steps": 5.0, "late": 2.0}),
)


@pytest.fixture
def records():
    return [
        record(-1, warmup=True, scheduled_s=-9.0, times=(-8.0,)),
        *steady_load(5, draft_tokens=4, accepted_tokens=1),
        record(9, status=Status.FAILED, times=(), scheduled_s=9.0),
    ]


@pytest.mark.parametrize("kind", files.KINDS)
def test_published_schemas_are_those_of_the_code(kind):
    """After a change: write ``files.schema(kind)`` to the file, and raise the version."""
    assert files.published(kind) == files.schema(kind)


@pytest.mark.parametrize("kind", files.KINDS)
def test_schemas_describe_every_field(kind, records):
    schema = files.published(kind)
    sample = records[1] if kind == "record" else summarise(records)
    document = json.loads(files.adapter(kind).dump_json(sample))
    assert set(schema["properties"]) == set(schema["required"]) == set(document)


def test_records_come_back_as_they_were(records, tmp_path):
    path = files.write_records(records, tmp_path)
    assert len(path.read_text().splitlines()) == len(records)
    assert files.read_records(path) == records


@pytest.mark.parametrize(
    ("line", "place"),
    [("{", "line 2, column 1"), ('{"request_id": 5}', "line 2, column request_id")],
)
def test_a_line_that_is_no_record_is_refused_with_its_place(records, tmp_path, line, place):
    path = files.write_records(records[:1], tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ContractError, match=place):
        files.read_records(path)


def test_a_summary_is_the_same_from_the_file(records, tmp_path):
    path = files.write_records(records, tmp_path)
    limits = parse(["ttft:150"])
    assert summarise(files.read_records(path), limits) == summarise(records, limits)


def test_telemetry_has_a_row_a_sample_and_gaps_where_nothing_was_told(tmp_path):
    path = files.write_samples(SAMPLES, tmp_path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["steps"] for row in rows] == ["1.0", "5.0"]
    assert [row["late"] for row in rows] == ["", "2.0"]
    assert rows[1]["tokens"] == "30"


def test_samples_come_back_though_the_target_counts_under_our_names(tmp_path):
    samples = (*SAMPLES, Sample(2.5, 6, 1, 1, 40, 90.5, {"failed": 3.0, "running": 0.25}))
    assert tuple(files.read_samples(files.write_samples(samples, tmp_path))) == samples


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "line 1"),
        ("at_s,sent\n1,2\n", "line 1"),
        (f"{','.join(files.OWN)},x\n0,0,0,0,0,,1\n0,0,0,0,many,,1\n", "line 3"),
        (f"{','.join(files.OWN)},x\n0,0,0,0,0,\n", "line 2"),
        (f"{','.join(files.OWN)}\n0,0\n", "line 2"),
    ],
)
def test_a_file_that_is_no_telemetry_is_refused_with_its_place(tmp_path, text, place):
    path = tmp_path / files.TELEMETRY
    path.write_text(text)
    with pytest.raises(ContractError, match=place):
        files.read_samples(path)


@pytest.fixture
def document(records, tmp_path):
    run = Run(tuple(records), 123, 1.7e9, SAMPLES)
    trace = synth.offline(6, synth.Lengths(8, 3))
    about = result.About("openai", "m", "a run", {"max_concurrency": 4}, {"note": "x"}, {"cpu": 1})
    found = summarise(records, parse(["ttft:150"]))
    made = result.document(run, found, trace, Energy(30.0, "rapl", 1, None), about)
    result.write(tmp_path / "out", run, made)
    return json.loads((tmp_path / "out" / "result.json").read_text())


def test_a_result_has_flat_keys_and_blocks(document):
    assert document["completed"] == 5
    assert document["failed"] == 1
    assert document["mean_ttft_ms"] == pytest.approx(100.0)
    assert document["p50_ttft_ms"] == document["median_ttft_ms"] == pytest.approx(100.0)
    assert document["p99_ttft_ms"] is None
    assert document["max_output_tokens_per_s"] == 3
    assert document["request_goodput"] == document["slo"]["goodput"]
    assert document["metadata"] == {"note": "x"}
    assert document["max_concurrency"] == 4
    assert document["schedule"]["zero_ns"] == 123
    assert document["target"]["steps"] == {"first": 1.0, "last": 5.0, "mean": 3.0, "max": 5.0}
    assert document["spec_decode_draft_tokens"] == 20
    assert document["trace"]["source"] == "synthetic"


def test_energy_is_told_per_token_and_request(document):
    assert document["energy"]["j_per_output_token"] == pytest.approx(2.0)
    assert document["energy"]["j_per_request"] == pytest.approx(6.0)
    assert document["energy"]["idle_subtracted"] is False
