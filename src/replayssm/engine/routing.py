"""Reading ``routing.json``: the router, the tolerances and the pool of an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayssm.engine.guard import Tolerance
from replayssm.engine.request import Route
from replayssm.errors import ContractError
from replayssm.ring import RingSpec
from replayssm.types import Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replayssm.engine.request import Request

FORMAT, VERSION = "replayssm-routing", 1
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CohortRoute:
    """One row of the file.

    Attributes:
        route: How the cohort is served.
        prompt_tokens: Least and most prompt tokens of a request that names no known cohort.
        output_tokens: Least and most tokens that it asks for.
        tolerance: What the cohort promises; None where the file says nothing.
    """

    route: Route
    prompt_tokens: Span
    output_tokens: Span
    tolerance: Tolerance | None

    def holds(self, request: Request) -> bool:
        """Whether a request belongs here by its lengths."""
        pairs = (
            (len(request.prompt), self.prompt_tokens),
            (request.max_new_tokens, self.output_tokens),
        )
        return all(low <= size <= high for size, (low, high) in pairs)


class Routing:
    """Tells every request its route: by its cohort's name, else by its lengths.

    Args:
        cohorts: Rows by cohort, in order.
        default: For requests of no cohort.
        state: State format of the replay path; None where the file leaves it open.
        window: Tokens between two folds; likewise.
    """

    def __init__(
        self,
        cohorts: Mapping[str, CohortRoute],
        default: Route,
        *,
        state: Format | None = None,
        window: int | None = None,
    ) -> None:
        self.cohorts, self.default = dict(cohorts), default
        self.state, self._window = state, window

    def __call__(self, request: Request) -> Route:
        """Return a request's route."""
        row = self.cohorts.get(request.cohort)
        if row is None:
            row = next((own for own in self.cohorts.values() if own.holds(request)), None)
        return self.default if row is None else row.route

    @property
    def tolerances(self) -> dict[str, Tolerance]:
        """What single cohorts promise; for a :class:`~replayssm.engine.guard.Guard`."""
        rows = self.cohorts.items()
        return {name: row.tolerance for name, row in rows if row.tolerance is not None}

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that a request can get."""
        return (self.default, *(row.route for row in self.cohorts.values()))

    @property
    def ring(self) -> RingSpec:
        """Ring sizes that serve every route of the file."""
        most = max(route.draft_tokens for route in self.routes)
        window = RingSpec().window if self._window is None else self._window
        return RingSpec(window=window, max_block=most + 1)

    @classmethod
    def load(cls, path: Path | str) -> Routing:
        """Read a file.

        Raises:
            ContractError: It is missing, or is no routing file.
        """
        file = Path(path)
        if not file.is_file():
            raise ContractError("routing", "a file that exists", file.name)
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            return cls._read(fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ContractError):
                raise
            got = f"{type(error).__name__}: {error}"
            raise ContractError("routing", "a routing file", got) from error

    @classmethod
    def _read(cls, fields: dict[str, Any]) -> Routing:
        if (fields.get("format"), fields.get("version")) != (FORMAT, VERSION):
            got = (fields.get("format"), fields.get("version"))
            raise ContractError("routing", f"{FORMAT} version {VERSION}", got)
        pool = fields.get("pool") or {}
        state = pool.get("state")
        return cls(
            {row["cohort"]: _read_row(row) for row in fields["cohorts"]},
            Route.from_dict(fields["default"]),
            state=None if state is None else Format(state),
            window=pool.get("window"),
        )


def _read_row(row: dict[str, Any]) -> CohortRoute:
    prompt, output = row["match"]["prompt_tokens"], row["match"]["output_tokens"]
    guard = row.get("guard")
    return CohortRoute(
        route=Route.from_dict(row["route"]),
        prompt_tokens=(int(prompt[0]), int(prompt[1])),
        output_tokens=(int(output[0]), int(output[1])),
        tolerance=None if guard is None else Tolerance(delta_logprob=guard["tolerance"]),
    )
