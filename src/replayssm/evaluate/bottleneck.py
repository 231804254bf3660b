"""Section 2, bottleneck: what share of a decode step the recurrent state is, and the ceiling."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from replayssm.evaluate.session import Session, enabled, twin
from replayssm.evaluate.stats import Estimate, mean_t, paired_ratio
from replayssm.evaluate.subject import Subject, held_out, one_geometry
from replayssm.evaluate.timing import interleave
from replayssm.evaluate.workload import Runner, Shape, make_blocks
from replayssm.memory import GIB, plan_memory
from replayssm.models.registry import find_mixers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from replayssm.evaluate.plan import Plan

PREFILL = 32
MAX_BATCH = 256
WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The whole decode step of the model under one arm.

    Attributes:
        arm: Name.
        step_ms: Median time of a decode step, whole fold cycles averaged in.
        speedup: Against ``standard f32``; None for that arm itself.
    """

    arm: str
    step_ms: float
    speedup: Estimate | None


@dataclass(frozen=True, slots=True)
class Profile:
    """One batch.

    Attributes:
        batch: B.
        step_ms: Median time of a decode step on the standard fp32 path.
        mixer_share: Share of it inside recurrent mixers, projections and convolution included.
        update_share: Share of it that the state updates alone take, timed at layer level.
        ceiling: 1 / (1 - update_share): what a free state update would give.
        arms: The whole model under every arm, interleaved.
    """

    batch: int
    step_ms: float
    mixer_share: Estimate
    update_share: Estimate
    ceiling: Estimate
    arms: tuple[WholeModel, ...]


@dataclass(frozen=True, slots=True)
class BottleneckResult:
    """Outcome of the section.

    Attributes:
        profiles: By ascending batch.
        largest: The largest batch that fits, and why it is the largest.
        context: Tokens in the context when timing began.
        seconds: Time the section took.
    """

    profiles: tuple[Profile, ...]
    largest: str
    context: int
    seconds: float = 0.0

    def nearest(self, batch: int) -> Profile:
        """Return the profile whose batch is nearest in ratio."""
        return min(self.profiles, key=lambda p: abs(np.log(p.batch / batch)))


def run(subject: Subject, plan: Plan, tick: Callable[[str], None]) -> BottleneckResult:
    """Profile the model at every batch of the plan and at the largest that fits.

    Args:
        subject: Model and text.
        plan: Arms and sizes.
        tick: Called after each batch with its name.
    """
    largest, why = largest_batch(subject, plan)
    batches = sorted({*(b for b in plan.scope.decode_batches if b <= largest), largest})
    profiles = []
    for batch in batches:
        profiles.append(_profile(subject, plan, batch))
        tick(f"batch {batch}")
    return BottleneckResult(tuple(profiles), why, PREFILL)


def largest_batch(subject: Subject, plan: Plan) -> tuple[int, str]:
    """Return the largest batch on the standard path within the memory limit, and why."""
    specs = [mixer.spec for mixer in find_mixers(subject.model)[0]]
    fits = plan_memory(specs, plan.scope.budget_bytes / GIB).standard_slots
    size = f"{plan.scope.budget_bytes / (1 << 20):.0f} MiB of fp32 states hold {fits} sequences"
    if fits > MAX_BATCH:
        return MAX_BATCH, f"{size}; capped at {MAX_BATCH} to bound the run"
    return max(1, fits), size


class _MixerClock:
    """Adds up the time spent inside recurrent mixers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.seconds = 0.0
        self._start = 0.0
        for mixer in find_mixers(model)[0]:
            mixer.module.register_forward_pre_hook(self._enter)
            mixer.module.register_forward_hook(self._leave)

    def _enter(self, _module: nn.Module, _args: object) -> None:
        self._start = time.perf_counter()

    def _leave(self, _module: nn.Module, _args: object, _out: object) -> None:
        self.seconds += time.perf_counter() - self._start


class _Decoder:
    """A twin of the model under one arm, decoding one token a row at a time behind a prompt."""

    def __init__(self, model: PreTrainedModel, prompt: Session, ids: Tensor, window: int) -> None:
        self.model, self.ids, self.window = model, ids, window
        self.session = prompt.fork(model)

    def cycle(self, steps: int | None = None) -> None:
        for _ in range(steps or self.window):
            at = self.session.position % self.ids.shape[1]
            self.session.feed(self.ids[:, at : at + 1])


def _profile(subject: Subject, plan: Plan, batch: int) -> Profile:
    scope = plan.scope
    texts = held_out(subject, 1, PREFILL + 256, plan.seed)
    row = torch.from_numpy(texts.ids).to(subject.model.device)
    ids = torch.cat([row.roll(-i, 1) for i in range(batch)])
    prompt = Session(subject.model)
    prompt.feed(ids[:, :PREFILL], last_only=True)
    with ExitStack() as stack:
        decoders = {}
        for arm in plan.arms:
            model = twin(subject.model)
            stack.enter_context(enabled(model, arm, window=scope.window))
            decoders[arm.name] = _Decoder(model, prompt, ids, scope.window)
            stack.callback(decoders[arm.name].session.close)
        calls: dict[str, Callable[[], None]] = {n: d.cycle for n, d in decoders.items()}
        reference = plan.arms[0].name
        for decoder in decoders.values():
            decoder.cycle(WARM_STEPS)
        clock, shares = _MixerClock(decoders[reference].model), []

        def timed_reference() -> None:
            before, start = clock.seconds, time.perf_counter()
            decoders[reference].cycle()
            shares.append((clock.seconds - before) / (time.perf_counter() - start))

        calls[reference] = timed_reference
        update = _updates(subject, plan, batch)
        update.cycle()
        calls["update"] = update.cycle
        samples = interleave(calls, rounds=scope.decode_samples, limit_s=scope.cell_seconds)
    whole = samples[reference]
    update_share = mean_t(
        [u / w for u, w in zip(samples["update"].seconds, whole.seconds, strict=True)]
    )
    arms = tuple(
        WholeModel(
            name,
            samples[name].median / scope.window * 1e3,
            None if name == reference else paired_ratio(whole.seconds, samples[name].seconds),
        )
        for name in decoders
    )
    return Profile(
        batch=batch,
        step_ms=whole.median / scope.window * 1e3,
        mixer_share=mean_t(shares),
        update_share=update_share,
        ceiling=amdahl(update_share),
        arms=arms,
    )


def amdahl(share: Estimate) -> Estimate:
    """Return the ceiling 1 / (1 - share) with the share's interval carried through."""

    def ceiling(x: float) -> float:
        return 1 / (1 - min(max(x, 0.0), 0.99))

    low, value, high = (ceiling(x) for x in (share.low, share.value, share.high))
    return Estimate(value, low, high, share.n, f"1 / (1 - share), {share.method}", share.level)


def _updates(subject: Subject, plan: Plan, batch: int) -> Runner:
    specs = tuple(mixer.spec for mixer in find_mixers(subject.model)[0])
    spec = one_geometry(specs)
    shape = Shape(spec, len(specs), batch, plan.scope.window)
    return Runner(plan.arms[0], shape, make_blocks(spec, batch, plan.seed))
