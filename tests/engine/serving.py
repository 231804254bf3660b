"""Bundled models, short prompts, what ``generate()`` makes of them, and engines to serve them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from replayssm.models import tiny

pytest.importorskip("transformers")

from replayssm.engine.engine import Engine
from replayssm.engine.request import Limits, Request, Route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replayssm.engine.request import Event

SPECULATIVE = Route(draft_tokens=4, drafter="ngram")
HIGH = Route(depth="high")
TEXTS = (
    "def is_valid(x):\n    return x",
    "import os\nimport sys\n\nclass A:\n",
    "for i in range(10):\n    print(i)\n" * 3,
    "x",
)
PROMPTS = tuple(tuple(tiny.encode(text)) for text in TEXTS)
NEW = 24


@cache
def load(name: str) -> Any:
    try:
        return tiny.load(name)
    except FileNotFoundError:
        pytest.skip("no bundled weights in this installation")


@cache
def plain(name: str) -> tuple[list[int], ...]:
    """What ``generate()`` of transformers emits after every prompt."""
    model = load(name)
    found = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return tuple(found)


def engine(model: Any, slots: int = 8, **options: Any) -> Engine:
    """An engine on plain torch, which needs no compilation."""
    context = options.pop("context", 256)
    limits = {name: options.pop(name) for name in ("prefill_chunk", "quantum") if name in options}
    options.setdefault("impl", "reference")
    return Engine(model, Limits(slots=slots, context=context, **limits), **options)


def ask(name: str, prompt: Sequence[int], new: int, route: Route | None = None) -> Request:
    return Request(name, tuple(prompt), new, route=route)


def tokens(events: Sequence[Event]) -> dict[str, list[int]]:
    """The tokens that every request emitted."""
    found: dict[str, list[int]] = {}
    for event in events:
        if event.kind == "token" and event.token is not None:
            found.setdefault(event.request_id, []).append(event.token)
    return found


def drive(served: Engine, at: dict[int, Callable[[], None]] | None = None) -> list[Event]:
    """Step until idle, balance the books after every step, and act before some of them."""
    events: list[Event] = []
    step = 0
    while not served.is_idle:
        for_now = (at or {}).get(step)
        if for_now is not None:
            for_now()
        events += served.step()
        served.pools.check_whole()
        step += 1
    return events
