"""The self-test of ``enable``: every kind of mixer against its own step and chunk functions.

A real mixer of the model is run for a few random tokens on a small cache. Where it calls its step
or chunk function on the live state, the model's function and the adapter answer the same arguments,
both in fp32 whatever the model's dtype, and outputs and new states must agree. So a renamed
argument, another order of operations, a changed layout or a bypassed function shows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replayssm.errors import DriftError, ReplayError
from replayssm.integrations import hooks
from replayssm.integrations.hooks import Call, StateHook
from replayssm.ops import reference
from replayssm.ring import BlockPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from replayssm.models.registry import Mixer
    from replayssm.types import LayerSpec

ROWS = 2
PROMPT = 5
BLOCK = 3
TOLERANCE = 1e-4
SEED = 20


class Probe(StateHook):
    """Stands for a layer's state in one call, answers it with the model's function and compares."""

    def __init__(self, state: Tensor, spec: LayerSpec) -> None:
        self.state, self.spec = state, spec
        self.calls: list[str] = []

    def serve(self, call: Call) -> object:
        """Run both, raise :class:`DriftError` where they differ, return the model's result."""
        self.calls.append(call.site.name)
        arguments = {name: _fp32(value) for name, value in call.arguments.items()}
        if "dt_limit" in arguments:
            # only chunk functions clamp dt; the steps that decode consists of do not
            arguments["dt_limit"] = (0.0, float("inf"))
        own = call.adapter.from_model(self.state).float().contiguous()
        y, after = _serial(call, arguments, own, self.spec)
        mine = _tensors(call.adapter.finish(call.site, arguments, y, call.adapter.to_model(after)))
        state = self.state.to(torch.float32, copy=True)
        theirs = _tensors(call.original(**{**arguments, call.site.state: state}))
        if len(theirs) == 1:
            # a function that returns outputs alone has written its state in place
            theirs, mine = [*theirs, state], [*mine, call.adapter.to_model(after)]
        for what, a, b in zip(("output", "state"), mine, theirs, strict=True):
            error = _relative(a, b)
            if not error <= TOLERANCE:
                raise DriftError(
                    f"{call.site.name}: the {what} of the {call.adapter.family} adapter differs "
                    f"from the model's by {error:.1e} (relative, fp32; at most {TOLERANCE:.0e})"
                )
        return call.run_original(**{call.site.state: self.state})

    def copy_(self, state: object) -> Probe:
        """Ignore what the mixer writes back."""
        return self


def check_adapters(model: nn.Module, mixers: Iterable[Mixer]) -> None:
    """Run one mixer of every kind; nothing of the model and no random state is changed.

    Raises:
        DriftError: A mixer disagrees with its adapter, or never calls the functions it should.
    """
    seen = set()
    keys = hooks.install(mixers := tuple(mixers))
    try:
        for mixer in mixers:
            kind = (type(mixer.module), mixer.spec)
            if kind not in seen:
                seen.add(kind)
                _check(model, mixer)
    finally:
        hooks.uninstall(keys)


def _check(model: nn.Module, mixer: Mixer) -> None:
    from transformers import DynamicCache

    at: Any = model
    generator = torch.Generator().manual_seed(SEED)
    weight: Tensor = mixer.module.conv1d.weight  # type: ignore[union-attr, assignment]
    hidden_size = at.config.get_text_config().hidden_size
    cache: Any = DynamicCache(config=at.config.get_text_config())
    argument = hooks.cache_argument(mixer.module)

    def run(tokens: int) -> None:
        hidden = torch.randn(ROWS, tokens, hidden_size, generator=generator)
        mixer.module(hidden.to(weight.device, weight.dtype), **{argument: cache})

    was_training = mixer.module.training
    mixer.module.eval()
    try:
        with torch.no_grad():
            run(PROMPT)
            _mark_prefilled(cache)
            states = cache.layers[mixer.layer_idx].recurrent_states
            _check_shape(mixer, states[0])
            for tokens, site in ((1, mixer.adapter.step), (BLOCK, mixer.adapter.chunk)):
                probe = Probe(states[0], mixer.spec)
                states[0] = probe
                run(tokens)
                states[0] = probe.state
                _check_calls(mixer, probe.calls, tokens, site.name)
    except ReplayError:
        raise
    except Exception as error:
        raise DriftError(
            f"{type(mixer.module).__name__}: its forward on a small cache failed: {error!r}"
        ) from error
    finally:
        mixer.module.train(was_training)


def _mark_prefilled(cache: Any) -> None:  # noqa: ANN401 - transformers' Cache
    # some mixers ask whether the last recurrent layer has a state; only one layer runs here
    for layer in cache.layers:
        flags = getattr(layer, "has_previous_state", None)
        if isinstance(flags, dict):
            flags.update(dict.fromkeys(flags, True))


def _check_calls(mixer: Mixer, calls: list[str], tokens: int, expected: str) -> None:
    if calls != [expected]:
        raise DriftError(
            f"{type(mixer.module).__name__}: {tokens} tokens on a live cache should call "
            f"{expected} once, but called {calls or 'nothing we know'}"
        )


def _check_shape(mixer: Mixer, state: Tensor) -> None:
    spec = mixer.spec
    expected = (ROWS, spec.value_heads, spec.value_dim, spec.key_dim)
    got = tuple(mixer.adapter.from_model(state).shape)
    if got != expected:
        raise DriftError(f"{type(mixer.module).__name__}: state {got}, expected {expected}")


def _serial(
    call: Call, arguments: dict[str, Any], state: Tensor, spec: LayerSpec
) -> tuple[Tensor, Tensor]:
    block = call.adapter.block(call.site, arguments, spec)
    state, out = state.clone(), torch.empty(block.v.shape, device=state.device)
    slots, zero = np.arange(ROWS, dtype=np.int64), np.zeros(ROWS, np.int64)
    plan = BlockPlan(slots, zero, zero, zero, np.full(ROWS, block.tokens, np.int64))
    reference.standard_(state, plan, block, spec.write, out)
    return out, state


def _fp32(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return value


def _tensors(result: object) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]  # type: ignore[list-item]


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
