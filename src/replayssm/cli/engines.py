"""Options of the embedded engine that commands share, and the engines they make."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.errors import ContractError
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replayssm.engine.engine import Engine
    from replayssm.engine.routing import Routing
    from replayssm.evaluate.subject import Subject

DRAFTERS = ("ngram", "model")

RoutingFile = Annotated[
    Path | None,
    typer.Option("--routing", help="routing.json of an evaluation: how cohorts are served."),
]
StatePath = Annotated[str, typer.Option("--path", help="standard or replay, without a routing.")]
State = Annotated[
    Format | None,
    typer.Option(help="State format of the replay path.", show_default="the routing's, or s32"),
]
Read = Annotated[ReadDepth, typer.Option(help="Planes that a step reads, without a routing.")]
Drafter = Annotated[
    str | None,
    typer.Option(help="ngram, or model (bundled models), without a routing.", show_default="none"),
]
DraftTokens = Annotated[int, typer.Option(min=1, max=64, help="Most drafts a round.")]
Slots = Annotated[int, typer.Option(min=1, help="Sequences in memory at once, of each engine.")]
Context = Annotated[int, typer.Option(min=2, help="Most tokens of one sequence.")]


@dataclass(frozen=True, slots=True)
class Service:
    """How commands are told to serve.

    Attributes:
        routing: File with a route for every cohort; without one, all requests get one route:
        path: ``standard`` or ``replay``.
        read: Planes that a step reads.
        drafter: What proposes tokens.
        draft_tokens: Most drafts a round.
        state: State format of the replay path; None takes the routing's, or ``s32``.
        slots: Sequences in memory at once.
        context: Most tokens of one sequence.
    """

    routing: Path | None
    path: str
    read: ReadDepth
    drafter: str | None
    draft_tokens: int
    state: Format | None
    slots: int
    context: int

    def rules(self) -> Routing:
        """Return the router.

        Raises:
            ContractError: The file is no routing, or the options make no route.
            UnsupportedError: The standard path with drafts.
        """
        from replayssm.engine.request import PATHS, Route
        from replayssm.engine.routing import Routing

        if self.routing is not None:
            return Routing.load(self.routing)
        if self.path not in PATHS:
            raise ContractError("--path", f"one of {', '.join(PATHS)}", self.path)
        if self.drafter not in (None, *DRAFTERS):
            raise ContractError("--drafter", f"one of {', '.join(DRAFTERS)}", self.drafter)
        drafts = 0 if self.drafter is None else self.draft_tokens
        return Routing({}, Route(self.path, self.read, drafts, self.drafter))


@contextmanager
def engines(
    subject: Subject, service: Service, count: int = 1, *, shadow_share: float = 0.0
) -> Iterator[list[Engine]]:
    """Give engines on one model, with the drafters that their routes ask for.

    Raises:
        UnsupportedError: A route asks for the draft model, which cannot draft for this model.
    """
    from replayssm.engine.engine import Engine
    from replayssm.engine.guard import Guard
    from replayssm.engine.request import Limits
    from replayssm.evaluate.drafting import engine_drafters

    rules = service.rules()
    with ExitStack() as stack:
        drafters = stack.enter_context(engine_drafters(subject, rules.routes))
        yield [
            stack.enter_context(
                Engine(
                    subject.model,
                    Limits(slots=service.slots, context=service.context),
                    state=service.state or rules.state or Format.S32,
                    ring=rules.ring,
                    router=rules,
                    guard=Guard(shadow_share, by_cohort=rules.tolerances),
                    drafters=drafters,
                )
            )
            for _ in range(count)
        ]
