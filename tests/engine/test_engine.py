"""The engine emits what ``generate()`` emits, whatever happens to a request on the way."""

from __future__ import annotations

from typing import Any

import pytest
from serving import NEW, PROMPTS, SPECULATIVE, ask, drive, engine, load, plain, tokens

from replayssm.engine.engine import Engine
from replayssm.engine.request import STANDARD, Limits, Request, Route, Sampling
from replayssm.errors import CapacityError, ContractError, UnsupportedError

REPLAY = Route()


@pytest.mark.parametrize("name", ["gdn-tiny", "mamba2-tiny", "kda-tiny"])
def test_mixed_batch_emits_what_generate_emits(name: str) -> None:
    expected = plain(name)
    with engine(load(name), prefill_chunk=17) as served:
        for i, route in enumerate((REPLAY, STANDARD, SPECULATIVE, REPLAY)):
            served.submit(ask(str(i), PROMPTS[i], NEW, route))
        found = tokens(drive(served))
    assert found == {str(i): own for i, own in enumerate(expected)}


@pytest.mark.parametrize("chunk", [1, len(PROMPTS[0]) - 1, 7])
@pytest.mark.parametrize("route", [REPLAY, STANDARD])
def test_prompt_may_be_read_in_any_chunks(model: Any, chunk: int, route: Route) -> None:
    with engine(model, prefill_chunk=chunk) as served:
        served.submit(ask("a", PROMPTS[0], 8, route))
        assert tokens(drive(served))["a"] == plain("gdn-tiny")[0][:8]


def test_more_requests_than_seats_take_turns(model: Any) -> None:
    with engine(model, slots=2, quantum=4) as served:
        for i, prompt in enumerate(PROMPTS):
            served.submit(ask(str(i), prompt, 16))
        events = drive(served)
        assert served.stats().preemptions > 0
    assert tokens(events) == {str(i): own[:16] for i, own in enumerate(plain("gdn-tiny"))}


def test_live_requests_change_paths_in_mid_stream(model: Any) -> None:
    with engine(model) as served:
        for i, prompt in enumerate(PROMPTS):
            served.submit(ask(str(i), prompt, NEW))

        def switch(route: Route) -> None:
            for request_id in served.live():
                served.reroute(request_id, route)

        events = drive(served, {5: lambda: switch(STANDARD), 19: lambda: switch(REPLAY)})
    assert tokens(events) == {str(i): own for i, own in enumerate(plain("gdn-tiny"))}


def test_cancelled_requests_leave_nothing_behind(model: Any) -> None:
    with engine(model, slots=2) as served:
        for i, prompt in enumerate(PROMPTS):
            served.submit(ask(str(i), prompt, NEW))
        served.step()
        for request_id in ("0", "3"):  # one that runs, one that waits
            served.cancel(request_id)
        events = drive(served)
        assert served.pools.taken == 0
    kinds = {(e.request_id, e.kind) for e in events}
    assert {("0", "cancelled"), ("3", "cancelled"), ("1", "finished"), ("2", "finished")} <= kinds


def test_stop_token_ends_a_request_inside_a_block(model: Any) -> None:
    expected = plain("gdn-tiny")[2]
    stop = expected[10]
    first = expected.index(stop)
    with engine(model) as served:
        request = Request("a", PROMPTS[2], NEW, route=SPECULATIVE, stop_tokens=(stop,))
        served.submit(request)
        events = drive(served)
    assert tokens(events)["a"] == expected[: first + 1]
    assert events[-1].reason == "stop"


@pytest.mark.parametrize("route", [REPLAY, SPECULATIVE, STANDARD])
def test_sampling_depends_on_the_seed_alone(model: Any, route: Route) -> None:
    """Plain decode and drafts from a lookup draw the same numbers, so the same tokens."""
    found = []
    for own, others in ((REPLAY, 0), (route, 2)):
        with engine(model) as served:
            sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
            served.submit(Request("a", PROMPTS[2], 24, route=own, sampling=sampling))
            for i in range(others):
                served.submit(ask(str(i), PROMPTS[i], 24))
            found.append(tokens(drive(served))["a"])
    assert found[0] == found[1]


def test_canary_has_the_same_bits_before_and_after_other_traffic(model: Any) -> None:
    def canary() -> Any:
        served.submit(ask("canary", PROMPTS[0], 24))
        for _ in range(19):
            served.step()
        return served.export("canary")

    with engine(model, slots=3) as served:
        before = canary()
        served.run()
        for i, prompt in enumerate(PROMPTS):
            served.submit(ask(str(i), prompt, 12, (REPLAY, STANDARD, SPECULATIVE, REPLAY)[i]))
        drive(served, {3: lambda: served.preempt("0"), 5: lambda: served.cancel("1")})
        after = canary()
    assert before.to_bytes() == after.to_bytes()


def test_memory_is_counted_in_bytes_of_each_path(model: Any) -> None:
    with engine(model) as served:
        sizes = served.pools.seat_nbytes
    limits = Limits(memory_bytes=2 * sizes["replay"] + sizes["standard"] // 2, context=256)
    with engine(model) as probe:
        assert sizes == probe.pools.seat_nbytes
    with Engine(model, limits, impl="reference") as served:
        for i in range(3):
            served.submit(ask(str(i), PROMPTS[i], 4))
        served.step()
        assert served.stats().running == 2
        assert served.stats().used_bytes == 2 * sizes["replay"]
        drive(served)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt": (256,)}, ContractError),
        ({"prompt": (1,) * 256}, ContractError),
        ({"route": Route(draft_tokens=9, drafter="ngram")}, ContractError),
        ({"route": Route(draft_tokens=2, drafter="oracle")}, ContractError),
    ],
)
def test_what_can_never_be_served_is_refused(model: Any, change: Any, error: Any) -> None:
    fields = {"id": "a", "prompt": (1, 2), "max_new_tokens": 4, **change}
    with engine(model) as served:
        with pytest.raises(error):
            served.submit(Request(**fields))
        assert served.is_idle


def test_one_sequence_must_fit_the_budget(model: Any) -> None:
    with (
        Engine(model, Limits(memory_bytes=1000), impl="reference") as served,
        pytest.raises(CapacityError, match="bytes"),
    ):
        served.submit(ask("a", PROMPTS[0], 4))


def test_routes_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UnsupportedError):
        Route("standard", draft_tokens=2, drafter="ngram")
    with pytest.raises(ContractError):
        Route(draft_tokens=2)
    with pytest.raises(ContractError):
        Route("standard", depth="high")
    with pytest.raises(ContractError):
        Route.from_dict({"path": "replay", "window": 3})
    assert Route.from_dict(SPECULATIVE.to_dict()) == SPECULATIVE


def test_model_is_disabled_with_its_last_engine(model: Any) -> None:
    first, second = engine(model), engine(model)
    first.close()
    second.submit(ask("a", PROMPTS[0], 4))
    assert tokens(drive(second))["a"] == plain("gdn-tiny")[0][:4]
    second.close()
    assert not hasattr(model, "_replayssm_enabled")
