"""The document of a run: vLLM's flat keys on top, and what they lack in blocks of its own.

Flat latencies are milliseconds and say so in their names. Shares are fractions.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from replayssm.traffic import files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from replayssm.traffic.energy import Energy
    from replayssm.traffic.record import Record
    from replayssm.traffic.run import Run, Sample
    from replayssm.traffic.summary import Summary
    from replayssm.traffic.trace import Trace

SCHEMA_VERSION = 1
RESULT = "result.json"
FLAT = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class About:
    """What a run was made with, as the caller knows it.

    Attributes:
        backend: Kind of target: ``openai``, ``openai-chat`` or ``replayssm``.
        model: Name of the model.
        label: Name of the run.
        config: Every setting of the run.
        metadata: What the user wants to be kept with it.
        manifest: What ran where.
    """

    backend: str
    model: str
    label: str | None = None
    config: dict[str, object] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    manifest: dict[str, object] = field(default_factory=dict)


def document(
    run: Run, summary: Summary, trace: Trace, energy: Energy, about: About
) -> dict[str, Any]:
    """Return the document of a run as JSON values."""
    nested = files.as_json(summary)
    return {
        **_flat(run, summary, trace, about),
        "schema_version": SCHEMA_VERSION,
        "manifest": about.manifest,
        "config": about.config,
        "metadata": about.metadata,
        "trace": {
            **asdict(trace.provenance),
            "block_size": trace.block_size,
            "concurrency": trace.concurrency,
        },
        "schedule": {"zero_ns": run.zero_ns, **nested["schedule"]},
        "slo": {"limits": nested["limits"], **nested["total"]["slo"]},
        "summary": nested,
        "energy": _energy(energy, summary),
        "target": _counters(run.samples),
        "warnings": nested["warnings"],
    }


def dump(result: dict[str, Any]) -> str:
    """Return the document of a run as the text of ``result.json``."""
    return json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write(folder: Path, run: Run, result: dict[str, Any]) -> None:
    """Write ``result.json``, ``requests.jsonl`` and ``telemetry.csv`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(dump(result), encoding="utf-8")
    files.write_records(run.records, folder)
    files.write_samples(run.samples, folder)


def _flat(run: Run, summary: Summary, trace: Trace, about: About) -> dict[str, Any]:
    total, tokens = summary.total, summary.total.tokens
    started = datetime.fromtimestamp(run.zero_unix_s, UTC)
    flat: dict[str, Any] = {
        "date": started.isoformat(timespec="seconds"),
        "backend": about.backend,
        "label": about.label,
        "model_id": about.model,
        "num_prompts": len(trace.requests),
        "request_rate": summary.schedule.offered_rate,
        "max_concurrency": trace.concurrency or about.config.get("max_concurrency"),
        "duration": summary.span_s,
        "completed": total.requests["ok"],
        "failed": total.requests["failed"],
        "total_input_tokens": tokens.input,
        "total_output_tokens": tokens.output,
        "request_throughput": total.request_throughput,
        "request_goodput": total.slo.goodput if summary.limits else None,
        "output_throughput": total.output_throughput,
        "total_token_throughput": total.total_throughput,
        "max_output_tokens_per_s": _peak(run.records),
        "max_concurrent_requests": summary.most_running,
    }
    for name in FLAT:
        found = total.latencies[name]
        flat |= {
            f"mean_{name}_ms": found.mean,
            f"median_{name}_ms": found.p50,
            f"std_{name}_ms": found.std,
            f"p50_{name}_ms": found.p50,
            f"p95_{name}_ms": found.p95,
            f"p99_{name}_ms": found.p99,
        }
    if tokens.drafted is not None:
        flat["spec_decode_draft_tokens"] = tokens.drafted
        flat["spec_decode_accepted_tokens"] = tokens.accepted
    return flat


def _peak(records: Sequence[Record]) -> int:
    seconds = Counter(int(t // 1) for r in records if not r.warmup for t in r.token_times_s)
    return max(seconds.values(), default=0)


def _energy(energy: Energy, summary: Summary) -> dict[str, Any]:
    tokens = summary.total.tokens

    def per(count: int | None) -> float | None:
        return energy.joules / count if energy.joules is not None and count else None

    return {
        **asdict(energy),
        "idle_subtracted": False,
        "j_per_output_token": per(tokens.output),
        "j_per_request": per(summary.total.requests["ok"]),
        "j_per_good_request": per(summary.total.slo.met) if summary.limits else None,
    }


def _counters(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the target's own numbers: at the first and the last sample, mean and largest."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.counters.items():
            found.setdefault(name, []).append(value)
    return {
        name: {
            "first": values[0],
            "last": values[-1],
            "mean": sum(values) / len(values),
            "max": max(values),
        }
        for name, values in sorted(found.items())
    }
