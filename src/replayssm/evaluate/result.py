"""The result of an evaluation, and its JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from replayssm.errors import ContractError
from replayssm.evaluate.bottleneck import BottleneckResult
from replayssm.evaluate.compatibility import CompatibilityResult
from replayssm.evaluate.document import Document
from replayssm.evaluate.manifest import Manifest
from replayssm.evaluate.plan import Plan
from replayssm.evaluate.precision import PrecisionResult
from replayssm.evaluate.speculation import SpeculationResult
from replayssm.evaluate.verdict import Judgement
from replayssm.evaluate.window import WindowResult

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that one evaluation found.

    Attributes:
        schema_version: Version of this shape.
        plan_digest: SHA-256 of the plan, taken before anything ran.
        plan: Margins, arms and sizes.
        manifest: What ran where.
        parameters: Parameters of the model.
        compatibility: Section 1.
        bottleneck: Section 2.
        window: Section 3.
        precision: Section 4.
        speculation: Section 5.
        judgement: What follows from them.
        seconds: Time of the whole run.
        warnings: What a reader should know before trusting a number.
    """

    schema_version: int
    plan_digest: str
    plan: Plan
    manifest: Manifest
    parameters: int
    compatibility: CompatibilityResult
    bottleneck: BottleneckResult
    window: WindowResult
    precision: PrecisionResult
    speculation: SpeculationResult
    judgement: Judgement
    seconds: float
    warnings: tuple[str, ...] = ()


_DOCUMENT = Document(Result, SCHEMA_VERSION, "a result file")


def dump(result: Result) -> str:
    """Return a result as JSON."""
    return _DOCUMENT.dump(result)


def parse(text: str) -> Result:
    """Read a result back.

    Raises:
        ContractError: The text is not a result, or its plan does not match the digest.
    """
    result = _DOCUMENT.parse(text)
    if result.plan.digest != result.plan_digest:
        raise ContractError("plan_digest", result.plan.digest, result.plan_digest)
    return result


def schema() -> dict[str, object]:
    """Return the JSON schema of a result file."""
    return _DOCUMENT.schema()


def write(result: Result, folder: Path) -> Path:
    """Write ``result.json`` into a folder and return its path."""
    path = folder / "result.json"
    path.write_text(dump(result) + "\n", encoding="utf-8")
    return path
