"""One request on its way through an engine: what it has, where it stands, what it draws next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayssm.engine.speculative import (
    Accepted,
    Draft,
    accept_greedy,
    accept_residual,
    accept_sampled,
    softmax,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from replayssm.engine.image import RequestImage
    from replayssm.engine.request import Request, Route
    from replayssm.engine.speculative import Drafter
    from replayssm.integrations.batch import Seat

NO_DRAFT = Draft.empty()


class Shadow:
    """A copy of a sequence on the standard path, fed the tokens that were served.

    Attributes:
        seat: Its seat.
        position: Tokens in its state.
    """

    __slots__ = ("position", "seat")

    def __init__(self, seat: Seat) -> None:
        self.seat, self.position = seat, 0


class Sequence:
    """A live request.

    Attributes:
        request: What was asked for.
        asked: How it is to be served.
        route: How it is served now: what a guard has left of that.
        tokens: Prompt and emitted tokens; the last emitted one is pending, it is in no state yet.
        position: Tokens in the state.
        seat: What it holds in memory; None while it waits.
        image: Where it was swapped out to; None otherwise.
        shadow: Its shadow, if it was sampled for one.
        drafter: What proposes tokens; made when the first drafts are wanted.
        resident: Tokens emitted since it got its seat.
        retries: Forwards of it that failed.
        started: Whether it has been admitted before.
        last_at: When it last emitted something; None before that, and without a seat.
    """

    __slots__ = (
        "asked",
        "drafter",
        "image",
        "last_at",
        "position",
        "request",
        "resident",
        "retries",
        "rng",
        "route",
        "seat",
        "shadow",
        "started",
        "tokens",
    )

    def __init__(self, request: Request, route: Route) -> None:
        self.request, self.asked, self.route = request, route, route
        self.tokens = list(request.prompt)
        self.rng: np.random.Generator | None = None
        if request.sampling.temperature > 0:
            self.rng = np.random.default_rng(request.sampling.seed)
        self.position = self.resident = self.retries = 0
        self.seat: Seat | None = None
        self.image: RequestImage | None = None
        self.shadow: Shadow | None = None
        self.drafter: Drafter | None = None
        self.started = False
        self.last_at: float | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def emitted(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unread(self) -> int:
        """Tokens that a prefill still has to bring into the state.

        All of the prompt; after a restart also what was emitted, but for the pending token.
        """
        return len(self.tokens) - (self.emitted > 0) - self.position

    @property
    def finish_reason(self) -> str:
        """Why nothing more is to be emitted, or nothing."""
        if self.emitted and self.tokens[-1] in self.request.stop_tokens:
            return "stop"
        return "length" if self.emitted >= self.request.max_new_tokens else ""

    def restart(self) -> None:
        """Mutates the sequence: forget its state; a prefill rebuilds it from the tokens."""
        self.position, self.image, self.drafter = 0, None, None

    def propose(self) -> Draft:
        """Return the draft of the next round, empty where there is no drafter or no room."""
        left = self.request.max_new_tokens - self.emitted - 1
        if self.drafter is None or left <= 0:
            return NO_DRAFT
        return self.drafter.propose(self.tokens, min(self.route.draft_tokens, left))

    def accept(self, logits: Tensor, draft: Draft) -> Accepted:
        """Return what ``[N + 1, vocab]`` logits of a block accept."""
        rows: NDArray[Any] = logits.float().cpu().numpy()
        sampling = self.request.sampling
        if self.rng is None:
            return accept_greedy(rows, draft)
        law = nucleus(softmax(rows, sampling.temperature), sampling.top_p)
        if draft.q is not None:
            return accept_residual(law, draft, self.rng)
        return accept_sampled(law, draft, self.rng)

    def take(self, emitted: list[int]) -> list[int]:
        """Mutates the tokens: append what may still be emitted of ``emitted``; return that."""
        taken = []
        for token in emitted:
            if self.finish_reason:
                break
            self.tokens.append(int(token))
            taken.append(int(token))
        self.resident += len(taken)
        return taken


def nucleus(law: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Return ``[..., vocab]`` probabilities cut to the smallest set of at least ``top_p`` mass.

    Tokens as likely as the least likely one of the set stay, so that ties have no order.
    """
    if top_p >= 1:
        return law
    ordered = np.sort(law, axis=-1)[..., ::-1]
    before = np.cumsum(ordered, axis=-1) - ordered
    last = np.maximum((before < top_p).sum(axis=-1, keepdims=True) - 1, 0)
    kept = np.where(law >= np.take_along_axis(ordered, last, axis=-1), law, 0.0)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))
