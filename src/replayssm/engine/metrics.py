"""Prometheus metrics of an engine, under vLLM's names where vLLM has them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from replayssm.engine.speculative import AcceptanceStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from replayssm.engine.request import Event
    from replayssm.engine.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
LATENCIES = {
    "vllm:time_to_first_token_seconds": "Submission to first token.",
    "vllm:inter_token_latency_seconds": "Time between two tokens; those of one block share it.",
    "vllm:e2e_request_latency_seconds": "Submission to last token.",
}
ENDS = ("finished", "cancelled", "failed", "moved")


class Histogram:
    """Counts of seconds in fixed buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(EDGES) + 1)
        self._sum = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Mutates the counts: ``times`` more observations of ``seconds`` each."""
        self._counts[bisect_left(EDGES, seconds)] += times
        self._sum += seconds * times

    def samples(self, name: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Yield the samples of the text format: name, labels, value."""
        total = 0
        for edge, count in zip((*EDGES, None), self._counts, strict=True):
            total += count
            yield f"{name}_bucket", {"le": "+Inf" if edge is None else f"{edge:g}"}, total
        yield f"{name}_sum", {}, self._sum
        yield f"{name}_count", {}, total


class Metrics:
    """Collects what events tell and writes it out beside an engine's counts.

    Args:
        model: Value of the label ``model_name``.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._histograms = {name: Histogram() for name in LATENCIES}
        self._asked: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def submitted(self, request_id: str, at: float) -> None:
        """Mutates the state: a request was submitted at ``at`` on the engine's clock."""
        self._asked[request_id] = at

    def record(self, events: Iterable[Event]) -> None:
        """Mutates the histograms: take note of a step's events."""
        first, between, whole = self._histograms.values()
        tokens: dict[str, int] = {}
        for event in events:
            if event.kind == "token":
                tokens[event.request_id] = tokens.get(event.request_id, 0) + 1
                at = event.at
        for request_id, count in tokens.items():
            last, asked = self._last.get(request_id), self._asked.get(request_id)
            if last is not None:
                between.add((at - last) / count, count)
            elif asked is not None:
                first.add(at - asked)
            self._last[request_id] = at
        for event in events:
            if event.kind in ENDS:
                self._last.pop(event.request_id, None)
                asked = self._asked.pop(event.request_id, None)
                if event.kind == "finished" and asked is not None:
                    whole.add(event.at - asked)

    def render(self, stats: EngineStats) -> str:
        """Return everything in Prometheus' text format."""
        lines: list[str] = []
        for name, (kind, text, samples) in _counters(stats).items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [self._line(name, labels, value) for labels, value in samples]
        for name, histogram in self._histograms.items():
            lines += [f"# HELP {name} {LATENCIES[name]}", f"# TYPE {name} histogram"]
            lines += [self._line(*sample) for sample in histogram.samples(name)]
        return "\n".join(lines) + "\n"

    def _line(self, name: str, labels: Mapping[str, str], value: float) -> str:
        pairs = {"model_name": self._model, **labels}
        shown = ",".join(f'{key}="{_escape(text)}"' for key, text in pairs.items())
        return f"{name}{{{shown}}} {value:.10g}"


Samples = list[tuple[dict[str, str], float]]


def _counters(stats: EngineStats) -> dict[str, tuple[str, str, Samples]]:
    drafts = AcceptanceStats()
    for own in stats.acceptance.values():
        drafts.merge_(own)

    def one(value: float) -> Samples:
        return [({}, value)]

    def by(label: str, table: Mapping[str, int]) -> Samples:
        return [({label: key}, value) for key, value in table.items()]

    reached = int(np.count_nonzero(drafts.drafted_at))
    positions = {str(i): int(drafts.accepted_at[i]) for i in range(reached)}
    slots = {"live": stats.running + stats.live_shadows, "waiting": stats.waiting}
    counter, gauge = "counter", "gauge"
    return {
        "vllm:num_requests_running": (gauge, "Requests with a seat.", one(stats.running)),
        "vllm:num_requests_waiting": (gauge, "Requests without one.", one(stats.waiting)),
        "vllm:kv_cache_usage_perc": (gauge, "Budget taken, 0 to 1.", one(stats.used)),
        "vllm:num_preemptions_total": (counter, "Swaps out.", one(stats.preemptions)),
        "vllm:prompt_tokens_total": (counter, "Prompt tokens read.", one(stats.prompt_tokens)),
        "vllm:generation_tokens_total": (counter, "Tokens emitted.", one(stats.output_tokens)),
        "vllm:request_success_total": (
            counter,
            "Requests finished.",
            by("finished_reason", stats.finished),
        ),
        "vllm:spec_decode_num_drafts_total": (counter, "Verifies.", one(drafts.verifies)),
        "vllm:spec_decode_num_draft_tokens_total": (
            counter,
            "Drafts verified.",
            one(drafts.drafted),
        ),
        "vllm:spec_decode_num_accepted_tokens_total": (
            counter,
            "Drafts accepted.",
            one(drafts.accepted),
        ),
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": (
            counter,
            "Drafts accepted by position.",
            by("position", positions),
        ),
        "replayssm:sequences": (gauge, "Sequences, shadows included.", by("state", slots)),
        **{
            f"replayssm:{name}": (kind, text, one(getattr(stats, name.removesuffix("_total"))))
            for name, (kind, text) in _OWN.items()
        },
        "replayssm:fallbacks_total": (
            counter,
            "Routes a guard took down.",
            by("cohort", stats.fallbacks),
        ),
    }


_OWN = {
    "flushes_total": ("counter", "Folds, one a value tile of a row."),
    "rollbacks_total": ("counter", "Verified blocks of which some draft was dropped."),
    "restarts_total": ("counter", "Sequences rebuilt from their tokens."),
    "faults_total": ("counter", "Forwards that raised."),
    "non_finite_total": ("counter", "Rows whose logits were not finite."),
    "cancelled_total": ("counter", "Requests cancelled."),
    "failed_total": ("counter", "Requests given up."),
    "moved_out_total": ("counter", "Requests exported."),
    "moved_in_total": ("counter", "Requests imported."),
    "shadows_total": ("counter", "Requests that got a shadow."),
    "swapped_bytes_total": ("counter", "Bytes of all images swapped out."),
    "steps_total": ("counter", "Steps that ran a forward."),
    "step_seconds_total": ("counter", "Time in steps."),
    "forward_seconds_total": ("counter", "Time in forwards of the model."),
    "decode_forwards_total": ("counter", "Decode forwards."),
    "decode_rows_total": ("counter", "Rows of all decode forwards."),
    "decode_seconds_total": ("counter", "Time in decode forwards."),
    "flushing_forwards_total": ("counter", "Decode forwards in which some fold was due."),
    "flushing_seconds_total": ("counter", "Time in those."),
    "used_bytes": ("gauge", "Bytes of the seats that are taken."),
    "allocated_bytes": ("gauge", "Bytes allocated for seats."),
}


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
