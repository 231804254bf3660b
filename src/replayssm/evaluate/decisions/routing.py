"""``routing.json``: which path serves which cohort, what guards it and what it falls back to.

It is what the gate writes; :class:`replayssm.engine.routing.Routing` loads it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, ValidationError

from replayssm.errors import ContractError
from replayssm.evaluate.checks import Status
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from pathlib import Path

    from replayssm.evaluate.decisions.tables import Variant

Span = tuple[int, int]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pool(_Table):
    """What one engine's pool is built with; every route of a file shares it.

    Attributes:
        state: State format of the replay path.
        window: Tokens between two folds.
    """

    state: Format
    window: Annotated[int, Field(ge=1)]


class RouteRow(_Table):
    """How a request is served; the fields of the engine's ``Route``.

    Attributes:
        path: ``standard`` or ``replay``.
        depth: Planes that a step reads.
        drafter: None, ``ngram`` or ``model``.
        draft_tokens: Most drafts a round.
    """

    path: Literal["standard", "replay"]
    depth: ReadDepth = ReadDepth.FULL
    drafter: Literal["ngram", "model"] | None = None
    draft_tokens: NonNegativeInt = 0


class Guard(_Table):
    """When a cohort is taken off its route.

    Attributes:
        tolerance: Largest |delta logprob| of a served token against the standard path.
    """

    tolerance: PositiveFloat


class Match(_Table):
    """Which requests belong to a cohort when they do not name it.

    Attributes:
        prompt_tokens: Least and most prompt tokens.
        output_tokens: Least and most tokens asked for.
    """

    prompt_tokens: Span
    output_tokens: Span


class CohortRoute(_Table):
    """One row.

    Attributes:
        cohort: Name.
        match: Which requests belong to it.
        route: How they are served.
        guard: None on the standard path, which needs none.
        fallback: Where a trip of the guard leads, first step first.
        verdict: What the gate said of the change for this cohort.
        reason: Why, in one sentence.
    """

    cohort: str
    match: Match
    route: RouteRow
    guard: Guard | None
    fallback: tuple[RouteRow, ...]
    verdict: Status
    reason: str


class RoutingFile(_Table):
    """The file.

    Attributes:
        format: Always ``replayssm-routing``.
        version: Always 1.
        plan: SHA-256 of the plan it follows from.
        model: What it was measured on.
        created: UTC time.
        pool: What the engine's pool is built with; None where every route is standard.
        default: For requests of no cohort.
        cohorts: One row per cohort.
    """

    format: Literal["replayssm-routing"] = "replayssm-routing"
    version: Literal[1] = 1
    plan: str
    model: str
    created: str
    pool: Pool | None
    default: RouteRow
    cohorts: tuple[CohortRoute, ...]


STANDARD = RouteRow(path="standard")


def route_of(variant: Variant) -> RouteRow:
    """Return the route that a variant of the plan stands for."""
    return RouteRow(
        path=variant.path,
        depth=variant.read,
        drafter=variant.drafter,
        draft_tokens=variant.draft_tokens,
    )


def fallbacks(route: RouteRow) -> tuple[RouteRow, ...]:
    """Return where a route falls back to: full reads without drafts first, then standard."""
    if route.path == "standard":
        return ()
    full = RouteRow(path="replay", depth=ReadDepth.FULL)
    return (STANDARD,) if route == full else (full, STANDARD)


def parse_routing(text: str) -> RoutingFile:
    """Read a routing file's text.

    Raises:
        ContractError: It is not one.
    """
    try:
        return RoutingFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ContractError("routing", "a routing file", f"{where}: {first['msg']}") from error


def write_routing(file: RoutingFile, folder: Path) -> Path:
    """Write ``routing.json`` into a folder and return its path."""
    path = folder / "routing.json"
    text = json.dumps(file.model_dump(mode="json"), indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path
