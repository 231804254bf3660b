"""Section 5, speculation: what drafts bring, and whether a rollback leaves a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import optimize

from replayssm.errors import ContractError
from replayssm.evaluate import drafting, verifying
from replayssm.evaluate.checks import Status
from replayssm.evaluate.session import enabled, one_thread
from replayssm.evaluate.stats import Estimate, ratio_of_sums
from replayssm.evaluate.subject import held_out, one_geometry
from replayssm.evaluate.verdict import Verdict, faster, times
from replayssm.models.registry import find_mixers
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.testing.driver import TOLERANCE
from replayssm.testing.rollback import check_rollback
from replayssm.types import ConvSpec, LayerSpec, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.drafting import Loop
    from replayssm.evaluate.plan import Plan
    from replayssm.evaluate.subject import Subject

CHUNK = 32
TORTURE_BLOCK, TORTURE_KEEP = 5, 2


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafter at one draft length, in a real loop over whole sequences.

    Attributes:
        drafter: Name.
        drafts: Most drafts a round, as a chain or a tree.
        rate: Accepted over drafted tokens; None where nothing was drafted.
        kept: Entries kept per verify: 1 + accepted drafts.
        counts: ``counts[n]``: verifies that kept n entries.
        plain: Rounds without a draft.
        equal: Sequences whose tokens are those of plain decode.
        sequences: Sequences decoded.
        ms_per_token: Time per token, drafting included.
        speedup: Against plain decode on the standard path, time of the same tokens.
        break_even: Entries a verify has to keep so that its round takes plain decode's time.
        break_even_rate: The acceptance rate that keeps as many on average, were every draft
            accepted with the same chance; None where not even all drafts would do.
    """

    drafter: str
    drafts: int
    rate: Estimate | None
    kept: Estimate | None
    counts: tuple[int, ...]
    plain: int
    equal: int
    sequences: int
    ms_per_token: float
    speedup: Estimate
    break_even: float
    break_even_rate: float | None


@dataclass(frozen=True, slots=True)
class Torture:
    """The rollback torture of one arm; see :mod:`replayssm.testing.rollback`.

    Attributes:
        arm: Name.
        rounds: Verifies with their commits.
        partial: Row commits that kept some entries and rejected others.
        trees: Rounds with trees.
        cropped: Committed entries taken back.
        departures: Requests replaced between a verify and its commit.
        states: Requests whose states and windows were compared, all layers at a time.
        phases: Positions modulo the window that were compared.
        worst_output: Largest error of a surviving token's output, relative to output and state.
        worst_state: Largest relative error of a state; 0 is bit for bit.
        failure: What disagreed; None when nothing did.
    """

    arm: str
    rounds: int
    partial: int
    trees: int
    cropped: int
    departures: int
    states: int
    phases: int
    worst_output: float
    worst_state: float
    failure: str | None


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Outcome of the section.

    Attributes:
        arm: The arm that the loops ran on.
        drafted: Every drafter and draft length.
        verified: Every way at layer level.
        torture: Rollbacks without a trace.
        state_bytes: Bytes of one fp32 state, one sequence in one layer.
        model_layers: Recurrent layers of the model.
        batch: Batch of the layer-level timings.
        verdict: What to do.
        advice: One sentence.
        seconds: Time the section took.
    """

    arm: str
    drafted: tuple[Drafted, ...]
    verified: tuple[verifying.Verified, ...]
    torture: Torture
    state_bytes: int
    model_layers: int
    batch: int
    verdict: Verdict
    advice: str
    seconds: float = 0.0


def count_steps(subject: Subject, plan: Plan) -> int:
    """Return how often :func:`run` ticks."""
    return 2 + 2 * len(drafting.drafters(subject)) * len(plan.scope.drafts)


def run(subject: Subject, plan: Plan, tick: Callable[[str], None]) -> SpeculationResult:
    """Decode with drafts, time the three ways to roll back, and torture the rollback.

    Args:
        subject: Model and text.
        plan: Arms and sizes.
        tick: Called after each step with its name.
    """
    arm = speculating_arm(plan)
    specs = tuple(mixer.spec for mixer in find_mixers(subject.model)[0])
    spec = one_geometry(specs)
    torture = _torture(arm, spec, plan)
    tick("rollback torture")
    loops = _decode(subject, plan, arm, tick)
    drafted = tuple(
        _drafted(name, drafts, loops[name, drafts], loops["", 0], plan)
        for name, drafts in loops
        if name
    )
    verified = []
    for found in drafted:
        # the other ways verify chains only
        if found.drafter != drafting.TREE and any(found.counts):
            verified += verifying.measure(
                found.drafter, found.drafts, found.counts, spec, len(specs), plan
            )
        tick(f"verify, {found.drafter}, {found.drafts} drafts")
    verdict, advice = judge(drafted, torture, plan.margins.speedup)
    return SpeculationResult(
        arm=arm.name,
        drafted=drafted,
        verified=tuple(verified),
        torture=torture,
        state_bytes=spec.state_elements * 4,
        model_layers=len(specs),
        batch=plan.scope.verify_batch,
        verdict=verdict,
        advice=advice,
    )


def speculating_arm(plan: Plan) -> Arm:
    """Return the first candidate with full reads, which promises plain decode's tokens."""
    full = (arm for arm in plan.candidates if arm.read is ReadDepth.FULL)
    return next(full, plan.candidates[0])


def judge(drafted: Sequence[Drafted], torture: Torture, margin: float) -> tuple[Verdict, str]:
    """Say whether to speculate, and how."""
    if torture.failure is not None:
        return Verdict.REFUSE, f"Do not speculate: a rollback left a trace ({torture.failure})."
    best = max(drafted, key=lambda d: d.speedup.low)
    told = (
        f"{best.drafter}, {best.drafts} drafts: {times(best.speedup)} against plain decode at "
        "batch 1, drafting included"
    )
    if best.equal < best.sequences:
        lost = best.sequences - best.equal
        return (
            Verdict.OPEN,
            f"{lost} of {best.sequences} sequences differ from plain decode: {told}.",
        )
    status = faster(best.speedup, margin)
    if status is Status.PASS:
        return Verdict.ENABLE, f"Speculate with {told}."
    if status is Status.OPEN:
        return Verdict.OPEN, f"This run cannot decide. The best is {told}."
    return Verdict.REFUSE, f"Do not speculate at batch 1. The best is {told}."


def break_even_rate(kept: float, drafts: int) -> float | None:
    """Return the chance p per draft with 1 + p + .. + p^drafts = kept, None where none has."""
    if kept <= 1:
        return 0.0
    if kept > drafts + 1:
        return None
    powers = np.arange(drafts + 1)
    return float(optimize.brentq(lambda p: float((p**powers).sum()) - kept, 0, 1))


def _decode(
    subject: Subject, plan: Plan, arm: Arm, tick: Callable[[str], None]
) -> dict[tuple[str, int], list[Loop]]:
    """Decode every sequence in every way; ``("", 0)`` is plain decode on the standard path."""
    scope, model = plan.scope, subject.model
    prompts = held_out(subject, scope.draft_rows, scope.draft_prompt, plan.seed).ids.tolist()
    found: dict[tuple[str, int], list[Loop]] = {}
    with one_thread():
        with enabled(model, plan.arms[0], window=scope.window):
            drafting.decode(model, prompts[0], 4)
            found["", 0] = [drafting.decode(model, p, scope.draft_tokens) for p in prompts]
        tick("plain decode")
        for name in drafting.drafters(subject):
            for n in scope.drafts:
                with (
                    drafting.drafting(name, n, scope.window) as make,
                    enabled(model, arm, window=scope.window) as handle,
                ):
                    drafting.speculate(handle, prompts[0], 4, make(), n)
                    found[name, n] = [
                        drafting.speculate(handle, p, scope.draft_tokens, make(), n)
                        for p in prompts
                    ]
                tick(f"{name}, {n} drafts")
    return found


def _drafted(
    name: str, drafts: int, loops: Sequence[Loop], plain: Sequence[Loop], plan: Plan
) -> Drafted:
    rounds = [r for loop in loops for r in loop.rounds]
    counts = np.bincount([1 + kept for n, kept in rounds if n], minlength=drafts + 2)
    units = [_units(loop) for loop in loops]
    verifies, given, taken = (np.concatenate([u[i] for u in units]) for i in range(3))
    tokens = plan.scope.draft_tokens - 1
    size = min(CHUNK, tokens)
    mine, other = (
        np.concatenate([loop.spans(tokens, size) for loop in group]) for group in (loops, plain)
    )
    speedup = ratio_of_sums(other.tolist(), mine.tolist(), seed=plan.seed)
    if speedup is None:
        raise ContractError("scope.draft_rows", "at least 2 stretches of tokens", len(mine))
    equal = sum(a.emitted[: len(b.emitted)] == b.emitted for a, b in zip(loops, plain, strict=True))
    round_time = sum(loop.marks[-1] for loop in loops) / len(rounds)
    break_even = round_time / float(other.sum() / (len(other) * size))
    kept = ratio_of_sums((verifies + taken).tolist(), verifies.tolist(), seed=plan.seed)
    return Drafted(
        drafter=name,
        drafts=drafts,
        rate=ratio_of_sums(taken.tolist(), given.tolist(), seed=plan.seed),
        kept=kept,
        counts=tuple(counts.tolist()),
        plain=sum(n == 0 for n, _ in rounds),
        equal=equal,
        sequences=len(loops),
        ms_per_token=float(mine.sum()) / (len(mine) * size) * 1e3,
        speedup=speedup,
        break_even=break_even,
        break_even_rate=break_even_rate(break_even, drafts),
    )


def _units(loop: Loop) -> NDArray[np.float64]:
    """Return verifies, drafted and accepted nodes of every stretch of ``CHUNK`` tokens."""
    emitted = np.cumsum([1 + kept for _, kept in loop.rounds])
    at = (emitted - 1) // CHUNK
    found = np.zeros((3, int(at.max(initial=0)) + 1))
    for unit, (given, kept) in zip(at, loop.rounds, strict=True):
        found[:, unit] += (given > 0, given, kept)
    return found


def _torture(arm: Arm, spec: LayerSpec, plan: Plan) -> Torture:
    # the model's algebra on states small enough for thousands of rounds
    layer = LayerSpec(spec.write, spec.decay, 1, 2, 8, 6, ConvSpec(4, 4))
    window = plan.scope.window

    def make(max_block: int, keep: int) -> StatePool:
        ring = RingSpec(window=window, max_block=max_block, keep=keep)
        return StatePool([layer], 3, state=arm.state, ring=ring)

    try:
        with one_thread(), torch.inference_mode():
            report = check_rollback(
                [layer],
                make,
                rounds=plan.scope.rollbacks,
                max_block=TORTURE_BLOCK,
                keep=TORTURE_KEEP,
                period=window,
                tolerance=TOLERANCE[arm.state, ReadDepth.FULL],
                seed=plan.seed,
            )
    except AssertionError as error:
        nothing = (0,) * 7
        return Torture(arm.name, *nothing, 0.0, 0.0, str(error))
    return Torture(
        arm=arm.name,
        rounds=report.rounds,
        partial=report.partial,
        trees=report.trees,
        cropped=report.cropped,
        departures=report.departures,
        states=report.states,
        phases=len(report.phases),
        worst_output=report.worst_output,
        worst_state=report.worst_state,
        failure=None,
    )
