"""Forwards over sequences: chunks of prompts, a block a row, and the shadows behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from replayssm.engine.clock import Work
from replayssm.engine.sequence import NO_DRAFT
from replayssm.engine.speculative import AcceptanceStats
from replayssm.engine.stats import count
from replayssm.state import StatePool
from replayssm.types import ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from torch import Tensor

    from replayssm.engine.clock import Clock
    from replayssm.engine.pools import Pools
    from replayssm.engine.sequence import Sequence
    from replayssm.engine.speculative import Draft
    from replayssm.engine.stats import EngineStats
    from replayssm.ring import BlockPlan, RingSpec


@dataclass(slots=True)
class Outcome:
    """What one forward made of one sequence.

    Attributes:
        sequence: The sequence; its tokens and position are up to date.
        emitted: Tokens it emitted.
        is_finite: Whether its logits were; if not, nothing was kept of them.
        gaps: ``|log p served - log p shadow|`` of the tokens that its shadow has seen, in nats.
    """

    sequence: Sequence
    emitted: list[int] = field(default_factory=list)
    is_finite: bool = True
    gaps: list[float] = field(default_factory=list)


class Runner:
    """Runs sequences that hold seats.

    Args:
        pools: Where they sit.
        clock: Told of every forward.
        stats: Counts to add to.
    """

    def __init__(self, pools: Pools, clock: Clock, stats: EngineStats) -> None:
        self._pools, self._model = pools, pools.model
        self._clock, self._stats = clock, stats

    def prefill(self, sequence: Sequence, size: int) -> list[Outcome]:
        """Bring ``size`` unread tokens into the state; the last one of a prompt emits a token."""
        is_last = size == sequence.unread
        chunk = sequence.tokens[sequence.position : sequence.position + size]
        logits = self._chunk(sequence, chunk, is_shadow=False)
        self._stats.prompt_tokens += size
        outcome = Outcome(sequence)
        shadow = sequence.shadow
        beside = None if shadow is None else self._chunk(sequence, chunk, is_shadow=True)
        sequence.position += size
        if shadow is not None:
            shadow.position = sequence.position
        if not is_last or sequence.emitted:
            return [outcome]
        if not bool(torch.isfinite(logits.max())):
            outcome.is_finite = False
            return [outcome]
        outcome.emitted = sequence.take([sequence.accept(logits[None], NO_DRAFT).bonus])
        self._stats.output_tokens += 1
        if beside is not None:
            outcome.gaps = _gaps(logits[None], beside[None], outcome.emitted)
        return [outcome]

    def decode(self, sequences: Rows[Sequence], drafts: Rows[Draft]) -> list[Outcome]:
        """Run one block a row, accept and commit, then let the shadows follow.

        Args:
            sequences: Rows with everything read but their pending token.
            drafts: Of each row; empty ones decode plainly.
        """
        blocks = [
            draft.block_tokens(sequence.tokens[-1]).tolist()
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]
        logits = self._block("decode", sequences, blocks)
        top, best = logits.max(-1)
        finite, greedy = torch.isfinite(top).tolist(), best.tolist()
        outcomes, kept = [], []
        for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            size = len(blocks[row])
            if not all(finite[row][:size]):
                outcomes.append(Outcome(sequence, is_finite=False))
                # the standard path has rewritten its state already
                kept.append(size if sequence.route.path == "standard" else 0)
            elif size == 1 and sequence.rng is None:
                outcomes.append(Outcome(sequence, sequence.take([greedy[row][0]])))
                kept.append(1)
            else:
                emitted, count_kept = self._accept(sequence, draft, logits[row, :size])
                outcomes.append(Outcome(sequence, emitted))
                kept.append(count_kept)
        self._model.commit(kept)
        for outcome, number in zip(outcomes, kept, strict=True):
            outcome.sequence.position += number
            self._stats.output_tokens += len(outcome.emitted)
        self._follow(outcomes, logits)
        return outcomes

    def _accept(self, sequence: Sequence, draft: Draft, logits: Tensor) -> tuple[list[int], int]:
        """Return what a block emits, and how many of its tokens stay."""
        accepted = sequence.accept(logits, draft)
        emitted = accepted.emitted(draft)
        if sequence.drafter is not None:
            sequence.drafter.observe(emitted)
        if len(draft):
            own = self._stats.acceptance.setdefault(sequence.request.cohort, AcceptanceStats())
            own.record_(draft, accepted)
            self._stats.rollbacks += accepted.num_accepted <= len(draft)
        return sequence.take(emitted), accepted.num_accepted

    def _follow(self, outcomes: Rows[Outcome], logits: Tensor) -> None:
        """Feed what was kept to the shadows, in one forward, and compare."""
        rows = [
            (row, outcome, outcome.sequence.shadow)
            for row, outcome in enumerate(outcomes)
            if outcome.sequence.shadow is not None and outcome.emitted
        ]
        if not rows:
            return
        blocks = [
            outcome.sequence.tokens[shadow.position : shadow.position + len(outcome.emitted)]
            for _, outcome, shadow in rows
            if shadow is not None
        ]
        beside = self._block("shadow", [outcome.sequence for _, outcome, _ in rows], blocks)
        self._model.commit([len(block) for block in blocks])
        for place, (row, outcome, shadow) in enumerate(rows):
            if shadow is not None:
                shadow.position += len(outcome.emitted)
                outcome.gaps = _gaps(logits[row], beside[place], outcome.emitted)

    def _chunk(self, sequence: Sequence, chunk: list[int], *, is_shadow: bool) -> Tensor:
        shadow = sequence.shadow if is_shadow else None
        seat = sequence.seat if shadow is None else shadow.seat
        if seat is None:
            raise RuntimeError(f"{sequence.id} holds no seat")
        depth = ReadDepth.FULL if is_shadow else sequence.route.depth
        started = self._clock.now()
        logits = self._model.chunk(seat, chunk, sequence.position, depth)
        kind = "shadow" if is_shadow else "prefill"
        self._spend(started, kind, [sequence], len(chunk), 0)
        return logits

    def _block(self, kind: str, sequences: Rows[Sequence], blocks: list[list[int]]) -> Tensor:
        """Run a block of every row, or of the rows' shadows; the commit is the caller's."""
        seats, positions, depths = [], [], []
        for sequence in sequences:
            follower = sequence.shadow if kind == "shadow" else sequence
            if follower is None or follower.seat is None:
                raise RuntimeError(f"{sequence.id} holds no seat")
            seats.append(follower.seat)
            positions.append(follower.position)
            depths.append(ReadDepth.FULL if kind == "shadow" else sequence.route.depth)
        started = self._clock.now()
        logits = self._model.block(seats, blocks, positions, depths)
        flushes = sum(
            due_folds(plan, pool.ring)
            for pool, plan in self._model.plans
            if isinstance(pool, StatePool)
        )
        self._stats.flushes += flushes
        self._spend(started, kind, sequences, sum(len(block) for block in blocks), flushes)
        return logits

    def _spend(
        self, started: float, kind: str, sequences: Rows[Sequence], tokens: int, flushes: int
    ) -> None:
        routes = [] if kind == "shadow" else [sequence.route for sequence in sequences]
        self._clock.spend(
            Work(
                kind=kind,
                rows=len(sequences),
                tokens=tokens,
                replay_rows=sum(route.path == "replay" for route in routes),
                high_rows=sum(route.depth is ReadDepth.HIGH for route in routes),
                flushes=flushes,
                cohorts=tuple(sequence.request.cohort for sequence in sequences),
            )
        )
        stats, seconds = self._stats, self._clock.now() - started
        count(stats.forwards, kind)
        stats.forward_seconds += seconds
        if kind == "decode":
            stats.decode_rows += len(sequences)
            stats.decode_seconds += seconds
            stats.flushing_forwards += flushes > 0
            stats.flushing_seconds += seconds if flushes else 0.0


def due_folds(plan: BlockPlan, ring: RingSpec) -> int:
    """Return how many folds of one value tile a forward's rows do before they read."""
    total = 0
    for tile in range(ring.tiles):
        phase = ring.phase(tile)
        before, after = (
            np.maximum(plan.base, (at - ring.keep - phase) // ring.window * ring.window + phase)
            for at in (plan.folded, plan.committed)
        )
        total += int(np.ceil(np.maximum(after - before, 0) / ring.window).sum())
    return total


def _gaps(served: Tensor, shadow: Tensor, emitted: list[int]) -> list[float]:
    """Return ``|log p served - log p shadow|`` of the emitted tokens, one a row of logits."""
    size = len(emitted)
    ids = torch.tensor(emitted, device=served.device)[:, None]
    laws = [x[:size].float().log_softmax(-1).gather(-1, ids) for x in (served, shadow)]
    gaps: list[float] = (laws[0] - laws[1]).abs()[:, 0].tolist()
    return gaps
