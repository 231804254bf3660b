"""The result of a rollout evaluation, its JSON form, and the folder that holds it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from replayssm.errors import ContractError
from replayssm.evaluate.bottleneck import Profile
from replayssm.evaluate.decisions.concurrency import SurfaceCell
from replayssm.evaluate.decisions.experiment import Experiment
from replayssm.evaluate.decisions.finding import Decision
from replayssm.evaluate.decisions.gate import CohortVerdict
from replayssm.evaluate.decisions.maturity import Maturity
from replayssm.evaluate.decisions.outcome import Outcome
from replayssm.evaluate.decisions.plan import RolloutPlan
from replayssm.evaluate.decisions.quality import Quality
from replayssm.evaluate.decisions.routing import RoutingFile
from replayssm.evaluate.decisions.speculation import Acceptance
from replayssm.evaluate.document import Document
from replayssm.evaluate.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Stamp:
    """``manifest.json``: what is fixed before anything runs.

    Attributes:
        schema_version: Version of this shape.
        plan_digest: SHA-256 of the plan.
        plan: The plan.
        manifest: What runs where.
        attempt: How many times this plan has been run in this folder, this time included.
    """

    schema_version: int
    plan_digest: str
    plan: RolloutPlan
    manifest: Manifest
    attempt: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Everything that one evaluation of a plan found.

    Attributes:
        schema_version: Version of this shape.
        stamp: Plan and manifest, written before anything ran.
        parameters: Parameters of the model.
        verdicts: The gate's word on every cohort.
        decisions: The six, in order.
        profiles: Evidence of the first.
        maturity: Evidence of the second.
        experiments: Paired runs of every cohort: evidence of the third and fourth.
        surface: The speed-up surface.
        acceptances: Drafts.
        qualities: Evidence of the fifth.
        outcome: Evidence of the sixth; None where no cohort had a candidate left.
        routing: What the verdicts amount to.
        seconds: Time of every part.
        warnings: What a reader should know before trusting a number.
    """

    schema_version: int
    stamp: Stamp
    parameters: int
    verdicts: tuple[CohortVerdict, ...]
    decisions: tuple[Decision, ...]
    profiles: tuple[Profile, ...]
    maturity: Maturity
    experiments: tuple[Experiment, ...]
    surface: tuple[SurfaceCell, ...]
    acceptances: tuple[Acceptance, ...]
    qualities: tuple[Quality, ...]
    outcome: Outcome | None
    routing: RoutingFile
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> RolloutPlan:
        """The plan."""
        return self.stamp.plan

    def decision(self, name: str) -> Decision:
        """Return one decision."""
        return next(d for d in self.decisions if d.name == name)


_DOCUMENT = Document(Rollout, SCHEMA_VERSION, "a result of a plan")
_STAMP = Document(Stamp, SCHEMA_VERSION, "the manifest of an evaluation")


def dump(result: Rollout) -> str:
    """Return a result as JSON."""
    return _DOCUMENT.dump(result)


def parse(text: str) -> Rollout:
    """Read a result back.

    Raises:
        ContractError: The text is not a result, or its plan does not match the digest.
    """
    result = _DOCUMENT.parse(text)
    if result.plan.digest != result.stamp.plan_digest:
        raise ContractError("plan_digest", result.plan.digest, result.stamp.plan_digest)
    return result


def read(folder: Path) -> Rollout:
    """Read the result in a folder.

    Raises:
        ContractError: There is none, or it is not one.
    """
    path = folder / "result.json" if folder.is_dir() else folder
    if not path.is_file():
        raise ContractError("result", "a folder with a result.json", folder.name)
    return parse(path.read_text(encoding="utf-8"))


def stamp(plan: RolloutPlan, manifest: Manifest, folder: Path) -> Stamp:
    """Fix a plan in a folder before anything runs, and return what was fixed.

    Mutates the folder: writes ``manifest.json``.

    Raises:
        ContractError: The folder holds results of another plan.
    """
    path, attempt = folder / "manifest.json", 1
    if path.is_file():
        held = _STAMP.parse(path.read_text(encoding="utf-8"))
        if held.plan_digest != plan.digest and (folder / "result.json").exists():
            raise ContractError(
                "--plan",
                f"the plan whose results are in {folder.name} ({held.plan_digest[:12]})",
                plan.digest[:12],
                "margins are not changed after the results; take another folder",
            )
        attempt = held.attempt + 1 if held.plan_digest == plan.digest else 1
    made = Stamp(SCHEMA_VERSION, plan.digest, plan, manifest, attempt)
    path.write_text(_STAMP.dump(made) + "\n", encoding="utf-8")
    return made


def write(result: Rollout, folder: Path) -> None:
    """Write ``result.json``, ``findings.csv`` and ``runs.csv`` into a folder."""
    (folder / "result.json").write_text(dump(result) + "\n", encoding="utf-8")
    _write_csv(folder / "findings.csv", _finding_rows(result))
    _write_csv(folder / "runs.csv", _run_rows(result))


def schemas() -> dict[str, dict[str, object]]:
    """Return the JSON Schemas of everything that is read or written, by file name."""
    found = {
        "plan": RolloutPlan.model_json_schema(),
        "routing": RoutingFile.model_json_schema(),
        "manifest": _STAMP.schema(),
        "result": _DOCUMENT.schema(),
    }
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {f"{name}.schema.json": {"$schema": draft, **text} for name, text in found.items()}


def _finding_rows(result: Rollout) -> Iterable[dict[str, object]]:
    for decision in result.decisions:
        for f in decision.findings:
            e = f.estimate
            yield {
                "decision": decision.name,
                "cohort": f.cohort,
                "variant": f.variant,
                "status": f.status.value,
                "required": f.required,
                "metric": f.metric,
                "margin": f.margin,
                "value": None if e is None else e.value,
                "low": None if e is None else e.low,
                "high": None if e is None else e.high,
                "n": None if e is None else e.n,
                "more": f.more,
                "unit": decision.unit,
                "reason": f.reason,
            }


def _run_rows(result: Rollout) -> Iterable[dict[str, object]]:
    whole = () if result.outcome is None else result.outcome.experiments
    for kind, experiments in (("cohort", result.experiments), ("whole", whole)):
        for experiment in experiments:
            for s in experiment.samples:
                yield {
                    "load": kind,
                    "cohort": experiment.cohort,
                    "variant": s.variant,
                    "round": s.round,
                    **s.metrics,
                }


def _write_csv(path: Path, rows: Iterable[dict[str, object]]) -> None:
    listed = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(listed[0]) if listed else [])
        writer.writeheader()
        writer.writerows(listed)


def write_schemas(folder: Path) -> None:
    """Write every schema into a folder."""
    for name, schema in schemas().items():
        text = json.dumps(schema, indent=1, sort_keys=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")
