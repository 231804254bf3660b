"""A load run as its folder tells it: ``result.json``, one record a request, samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replayssm.errors import ContractError
from replayssm.evaluate.document import Document
from replayssm.evaluate.manifest import Manifest
from replayssm.traffic import files
from replayssm.traffic.energy import Energy
from replayssm.traffic.result import RESULT, SCHEMA_VERSION
from replayssm.traffic.summary import Summary
from replayssm.traffic.trace import Provenance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from replayssm.traffic.record import Record
    from replayssm.traffic.run import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBlock(Provenance):
    """``trace``: where the requests came from, and how they arrive.

    Attributes:
        block_size: Tokens of a prefix block.
        concurrency: Sequences that a closed loop keeps in flight; None for open arrivals.
    """

    block_size: int
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class EnergyBlock(Energy):
    """``energy``: joules over the whole run, and by what was served.

    Attributes:
        j_per_output_token: Joules an output token of requests that succeeded.
        j_per_request: Joules a request that succeeded.
        j_per_good_request: Joules a request that kept every limit; None without limits.
    """

    j_per_output_token: float | None
    j_per_request: float | None
    j_per_good_request: float | None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a reader needs of ``result.json``; its flat keys say the same once more.

    Attributes:
        schema_version: Version of its shape.
        date: When the schedule began.
        backend: Kind of target: ``openai``, ``openai-chat`` or ``replayssm``.
        model_id: Name of the model.
        label: Name of the run.
        num_prompts: Requests of the trace.
        max_concurrency: Most requests that were allowed in flight; None without a limit.
        manifest: What ran where; for a server, where the client ran.
        config: Every setting.
        metadata: What the user wanted to be kept.
        trace: Where the requests came from.
        summary: What the records amount to.
        energy: Joules.
    """

    schema_version: int
    date: str
    backend: str
    model_id: str
    label: str | None
    num_prompts: int
    max_concurrency: int | None
    manifest: Manifest
    config: dict[str, Any]
    metadata: dict[str, str]
    trace: TraceBlock
    summary: Summary
    energy: EnergyBlock


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A load run.

    Attributes:
        text: ``result.json`` as it is.
        result: What a reader needs of it.
        records: One a request, warm-ups first.
        samples: The run over time.
    """

    text: str
    result: LoadResult
    records: tuple[Record, ...]
    samples: tuple[Sample, ...]


_DOCUMENT = Document(LoadResult, SCHEMA_VERSION, "the result of a load run")


def is_load_run(fields: object) -> bool:
    """Tell the JSON values of a load run's ``result.json`` from those of an evaluation."""
    return isinstance(fields, dict) and {"schedule", "summary"} <= fields.keys()


def parse(text: str, records: Sequence[Record], samples: Sequence[Sample]) -> LoadRun:
    """Return a run out of the text of its ``result.json`` and what else it gave.

    Raises:
        ContractError: The text is not the result of a load run.
    """
    return LoadRun(text, _DOCUMENT.parse(text), tuple(records), tuple(samples))


def read(folder: Path) -> LoadRun:
    """Read a run back from its folder.

    Raises:
        ContractError: A file is missing, or is not what it should be.
    """
    paths = [folder / name for name in (RESULT, files.RECORDS, files.TELEMETRY)]
    for path in paths:
        if not path.is_file():
            raise ContractError("FOLDER", f"a folder with a {path.name}", folder.name)
    result, records, telemetry = paths
    text = result.read_text(encoding="utf-8")
    return parse(text, files.read_records(records), files.read_samples(telemetry))
