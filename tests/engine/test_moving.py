"""A request that moves goes on with the same bits: planes, rings, counts, convolutions, keys."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from serving import HIGH, PROMPTS, SPECULATIVE, ask, engine, tokens

from replayssm.engine.image import RequestImage
from replayssm.engine.request import STANDARD, Request, Route, Sampling
from replayssm.errors import ContractError
from replayssm.ring import RingSpec

ROUTES = {"replay": Route(), "high": HIGH, "standard": STANDARD, "drafts": SPECULATIVE}


def same(a: RequestImage, b: RequestImage) -> bool:
    return a.to_bytes() == b.to_bytes()


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("at", [1, 2, 9, 18])
def test_move_at_any_phase_changes_no_bit(model: Any, name: str, at: int) -> None:
    """One is moved and one stays; both end with the same tokens and the same state."""
    sampling = Sampling(temperature=0.7, seed=1)
    request = Request("a", PROMPTS[2], 120, route=ROUTES[name], sampling=sampling)
    state = "q24" if name == "high" else "s32"
    ring = RingSpec(window=16, max_block=5)
    options = {"prefill_chunk": 30, "state": state, "ring": ring}
    with engine(model, **options) as home, engine(model, **options) as other:
        home.submit(request)
        moved = [event for _ in range(at) for event in home.step()]
        stayed = list(moved)
        image = home.export("a")
        home.import_(image)
        other.import_(pickle.loads(pickle.dumps(image)))
        for _ in range(22):
            stayed += home.step()
            moved += other.step()
        if home.live():
            assert same(home.export("a"), other.export("a"))
    assert tokens(moved) == tokens(stayed)
    assert len(tokens(moved)["a"]) > 10


def test_swap_changes_no_bit_whatever_lands_in_the_slot_meanwhile(model: Any) -> None:
    images = []
    for swaps in (False, True):
        with engine(model, slots=1, state="q24") as served:
            served.submit(ask("a", PROMPTS[0], 40))
            for step in range(24):
                if swaps and step == 13:
                    served.preempt("a")
                    served._roster.waiting.appendleft(served._roster.waiting.pop())
                    served.submit(ask("b", PROMPTS[1], 4))
                    served._roster.waiting.rotate(1)
                    while "b" in served.live():
                        served.step()
                    continue
                served.step()
            if swaps:
                served.step()
            images.append(served.export("a"))
    assert images[0].tokens == images[1].tokens
    assert same(*images)


def test_image_of_another_geometry_is_refused(model: Any) -> None:
    with engine(model) as home, engine(model, ring=RingSpec(window=8, max_block=9)) as other:
        home.submit(ask("a", PROMPTS[0], 8))
        home.step()
        image = home.export("a")
        with pytest.raises(ContractError, match="window"):
            other.import_(image)
        assert other.is_idle


def test_kv_of_another_shape_is_refused(model: Any) -> None:
    with engine(model) as home, engine(model) as other:
        home.submit(ask("a", PROMPTS[0], 8))
        home.step()
        image = home.export("a")
        object.__setattr__(image, "kv", tuple(x[:, 1:] for x in image.kv))
        with pytest.raises(ContractError, match="kv"):
            other.import_(image)
        assert other.is_idle
        other.pools.check_whole()


def test_images_are_read_without_running_code(model: Any) -> None:
    with pytest.raises((ContractError, RuntimeError, pickle.UnpicklingError)):
        RequestImage.from_bytes(pickle.dumps(torch.nn.Linear(1, 1)))
