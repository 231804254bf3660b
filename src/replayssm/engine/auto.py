"""The path of requests by what was measured, for the number of sequences that an engine expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.engine.request import STANDARD
from replayssm.policy import Choice, choose_path
from replayssm.storage import StorageSpec
from replayssm.types import Format

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.engine.request import Request, Route
    from replayssm.integrations.transformers import Enabled
    from replayssm.ring import RingSpec
    from replayssm.types import ReadDepth


class AutoRouter:
    """A router that sends plain replay routes to the standard path where that is faster.

    A request keeps its path from admission on, because carrying a state over rewrites it whole. So
    what decides is not the batch of one step but the number of sequences the engine is going to
    run. Routes with drafts stay on replay, and standard routes are never lifted: whoever wrote them
    had a reason that speed does not outweigh.

    Args:
        router: Says what a request asks for.
        handle: The enabled model.
        state: State format of the replay path.
        ring: Ring sizes of the replay path.
        rows: Sequences expected at once.
    """

    def __init__(
        self,
        router: Callable[[Request], Route],
        handle: Enabled,
        *,
        state: Format | str,
        ring: RingSpec,
        rows: int,
    ) -> None:
        self._router, self._rows = router, rows
        dtype, fmt = handle.ring_dtype, Format(state)
        self._specs = [StorageSpec(layer, fmt, ring, dtype) for layer in handle.specs]
        self._device = next(handle.mixers[0].module.parameters()).device
        self._choices: dict[ReadDepth, Choice] = {}

    def __call__(self, request: Request) -> Route:
        """Return a request's route."""
        route = self._router(request)
        if route.path == "standard" or route.draft_tokens:
            return route
        return route if self.choice(route.depth).path == "replay" else STANDARD

    def choice(self, depth: ReadDepth) -> Choice:
        """Return what routes of a read depth get, and why."""
        if depth not in self._choices:
            self._choices[depth] = choose_path(
                self._specs, self._rows, depth=depth, device=self._device
            )
        return self._choices[depth]
