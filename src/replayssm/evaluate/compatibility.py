"""Section 1, compatibility: which layers qualify, and step-by-step agreement over long runs.

Agreement is measured against transformers' own step functions, untouched, on the same tokens:
logits at every step and states at the end, not tokens alone. 512 steps, since errors that feed back
have been seen to stay hidden for 180.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.evaluate.session import Session, enabled, one_thread, recurrent_states
from replayssm.evaluate.subject import Subject, held_out
from replayssm.evaluate.window import describe
from replayssm.models.registry import find_mixers
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.plan import Plan

EXACT = (Format.F32, Format.S32, Format.Q24)
POINTS = 128


@dataclass(frozen=True, slots=True)
class LayerLine:
    """One recurrent layer, or several alike.

    Attributes:
        kind: Class name of the mixer.
        layers: Layer indices.
        qualifies: Whether an adapter serves it.
        note: Its geometry, or why it is refused.
    """

    kind: str
    layers: tuple[int, ...]
    qualifies: bool
    note: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """One arm against transformers' own path, from one prompt length.

    Attributes:
        arm: Name of the arm.
        block: Tokens per forward (1 = single steps).
        prefill: Prompt length.
        steps: Tokens compared.
        logit_error: Largest difference of a logit over the standard deviation of the logits.
        state_error: Largest relative difference of a layer's state after the last step.
        flips: Steps whose most likely token differs.
        ties: Those of them where the top two logits were closer than twice the difference.
        curve: Largest error within each of up to 128 equal stretches of steps, for the plot.
    """

    arm: str
    block: int
    prefill: int
    steps: int
    logit_error: float
    state_error: float
    flips: int
    ties: int
    curve: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CompatibilityResult:
    """Outcome of the section.

    Attributes:
        layers: Every recurrent layer of the model.
        agreements: Per arm and prompt length.
        seconds: Time the section took.
    """

    layers: tuple[LayerLine, ...]
    agreements: tuple[Agreement, ...]
    seconds: float = 0.0

    @property
    def served(self) -> int:
        """Recurrent layers that qualify."""
        return sum(len(line.layers) for line in self.layers if line.qualifies)

    @property
    def refused(self) -> int:
        """Recurrent layers that do not."""
        return sum(len(line.layers) for line in self.layers if not line.qualifies)


def is_exact(arm: Arm) -> bool:
    """Tell whether an arm promises the standard fp32 path's results."""
    return arm.read is ReadDepth.FULL and arm.state in EXACT


def run(
    subject: Subject,
    plan: Plan,
    tick: Callable[[str], None],
    ready: Callable[[Arm], None] = lambda _: None,
) -> CompatibilityResult:
    """List the layers, then compare every arm that promises fp32 results.

    Args:
        subject: Model and text.
        plan: Arms and sizes.
        tick: Called after each comparison with its name.
        ready: Called before each arm runs; may wait for its kernels.
    """
    # nothing is timed here, and steps of one row are too small to share between threads
    with one_thread():
        agreements = _agreements(subject, plan, tick, ready)
    return CompatibilityResult(layer_lines(subject), tuple(agreements))


def _agreements(
    subject: Subject, plan: Plan, tick: Callable[[str], None], ready: Callable[[Arm], None]
) -> list[Agreement]:
    scope, agreements = plan.scope, []
    arms = [arm for arm in plan.arms if is_exact(arm)]
    candidates = [arm for arm in arms if arm.is_replay]
    known = {}
    # transformers first: it needs none of the kernels that the arms may have to wait for
    for prefill in scope.prefills:
        texts = held_out(subject, 1, prefill + scope.steps, plan.seed + prefill)
        ids = torch.from_numpy(texts.ids)
        known[prefill] = ids, _decode(subject, None, ids, prefill, 1, scope.window)
        tick(f"transformers, prompt {prefill}")
    for prefill, (ids, expected) in known.items():
        # the standard arm is checked once: it is the baseline elsewhere, not a candidate
        for arm in arms if prefill == scope.prefills[0] else candidates:
            ready(arm)
            blocks = (1, scope.block) if arm.is_replay else (1,)
            for block in blocks:
                found = _decode(subject, arm, ids, prefill, block, scope.window)
                agreements.append(_compare(arm, block, prefill, expected, found))
            tick(f"{arm.name}, prompt {prefill}")
    return agreements


def count_steps(plan: Plan) -> int:
    """Return how often :func:`run` will call its ``tick``."""
    candidates = sum(is_exact(arm) for arm in plan.candidates)
    standard = sum(is_exact(arm) for arm in plan.arms) - candidates
    return len(plan.scope.prefills) * (1 + candidates) + standard


def layer_lines(subject: Subject) -> tuple[LayerLine, ...]:
    """Return the model's recurrent layers, alike ones together."""
    mixers, refused = find_mixers(subject.model)
    groups: dict[tuple[str, bool, str], list[int]] = {}
    for mixer in mixers:
        key = (type(mixer.module).__name__, True, describe(mixer.spec))
        groups.setdefault(key, []).append(mixer.layer_idx)
    for layer in refused:
        groups.setdefault((layer.kind, False, layer.reason), []).append(layer.layer_idx)
    return tuple(
        LayerLine(kind, tuple(layers), ok, note) for (kind, ok, note), layers in groups.items()
    )


def _decode(
    subject: Subject, arm: Arm | None, ids: Tensor, prefill: int, block: int, window: int
) -> tuple[Tensor, list[Tensor]]:
    """Return ``[steps, vocabulary]`` logits and the final states."""
    with enabled(subject.model, arm, window=window, max_block=block):
        session, device = Session(subject.model), subject.model.device
        session.feed(ids[:, :prefill].to(device), last_only=True)
        logits = [
            session.feed(ids[:, at : at + block].to(device)).cpu()
            for at in range(prefill, ids.shape[1], block)
        ]
    # the cache is plain again: while it was bound, each layer would have cost all states
    return torch.cat(logits, 1)[0], recurrent_states(session, subject.model)


def _compare(
    arm: Arm,
    block: int,
    prefill: int,
    expected: tuple[Tensor, list[Tensor]],
    found: tuple[Tensor, list[Tensor]],
) -> Agreement:
    difference = (found[0] - expected[0]).abs().amax(-1)
    curve = difference / expected[0].std()
    flipped = found[0].argmax(-1) != expected[0].argmax(-1)
    top = expected[0].topk(2, dim=-1).values
    tied = flipped & (top[:, 0] - top[:, 1] < 2 * difference)
    state = max(
        float((b - a).norm() / a.norm().clamp(min=1e-30))
        for a, b in zip(expected[1], found[1], strict=True)
    )
    steps = len(curve)
    stretches = torch.tensor_split(curve, min(POINTS, steps))
    return Agreement(
        arm=arm.name,
        block=block,
        prefill=prefill,
        steps=steps,
        logit_error=float(curve.max()),
        state_error=state,
        flips=int(flipped.sum()),
        ties=int(tied.sum()),
        curve=tuple(float(s.max()) for s in stretches),
    )
