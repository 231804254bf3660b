"""Verify and commit at layer level: state replay, a snapshot per entry, recomputation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replayssm.baselines import RecomputePool, SnapshotPool
from replayssm.evaluate.stats import Estimate, paired_ratio
from replayssm.evaluate.window import layer_copies, tolerance
from replayssm.evaluate.workload import make_blocks
from replayssm.memory import moved_bytes
from replayssm.ops import standard_
from replayssm.ring import BlockPlan, RingSpec
from replayssm.state import StatePool
from replayssm.types import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.plan import Plan
    from replayssm.types import LayerSpec, ReadDepth

PLAIN, SNAPSHOT, RECOMPUTE = "plain decode", "snapshot", "recompute"
BLOCKS = 4
ROUNDS = 4
LAYERS = 4
# leaves three quarters of a section's working set to the snapshots
SHARE = 4


@dataclass(frozen=True, slots=True)
class Verified:
    """One way to verify and commit at layer level, with the counts that a drafter gave.

    Attributes:
        drafter: Whose counts.
        drafts: Drafts a round; a block has one token more.
        way: A replay arm, ``snapshot`` or ``recompute``.
        us_per_token: Time per committed token and layer.
        versus_plain: Speed-up against one standard step a token.
        versus_snapshot: Speed-up against snapshots; None for those themselves.
        versus_recompute: Speed-up against recomputation; None for that itself.
        moved_bytes: Bytes one row moves per verify and commit in one layer, from shapes.
        slot_bytes: Bytes of one sequence in one layer at the peak: states, snapshots, rings.
        error: Relative error of outputs against the snapshots', checked before timing.
    """

    drafter: str
    drafts: int
    way: str
    us_per_token: float
    versus_plain: Estimate
    versus_snapshot: Estimate | None
    versus_recompute: Estimate | None
    moved_bytes: float
    slot_bytes: int
    error: float


class Verifier:
    """One way to verify and commit, over a batch whose rows stand at different positions.

    Args:
        way: A replay arm, ``snapshot`` or ``recompute``.
        spec: Geometry of every layer.
        layers: Layers, one after the other.
        kept: ``[rounds, B]`` entries that each row keeps, round by round.
        tokens: T.
        window: Window of a replay arm.
        blocks: T-token inputs, in turns.
    """

    def __init__(
        self,
        way: Arm | str,
        spec: LayerSpec,
        layers: int,
        kept: NDArray[np.int64],
        tokens: int,
        window: int,
        blocks: list[Block],
    ) -> None:
        self.kept, self.tokens, self.blocks, self.turn = kept, tokens, blocks, 0
        rows = kept.shape[1]
        self.pool: Any
        self._options: dict[str, ReadDepth] = {}
        if isinstance(way, str):
            kind = SnapshotPool if way == SNAPSHOT else RecomputePool
            self.pool = kind([spec] * layers, rows, max_block=tokens)
        else:
            ring = RingSpec(window=window, max_block=tokens)
            self.pool = StatePool([spec] * layers, rows, state=way.state, ring=ring)
            self._options["depth"] = way.read
        self._refs = [self.pool.admit_(position=row * window // rows) for row in range(rows)]
        self.out = torch.empty_like(blocks[0].v)

    def round(self) -> int:
        """Verify a block in every layer and commit; return the tokens committed."""
        block, kept = self.blocks[self.turn % BLOCKS], self.kept[self.turn % len(self.kept)]
        self.turn += 1
        ticket = self.pool.begin(self._refs, self.tokens)
        for layer in range(self.pool.num_layers):
            self.pool.step_(ticket, layer, block, out=self.out, **self._options)
        self.pool.commit_(ticket, kept.tolist())
        return int(kept.sum())

    def slot_bytes(self) -> int:
        """Return the bytes of one sequence in one layer: states, rings and snapshots."""
        pool = self.pool
        return int(pool.nbytes() // (pool.num_layers * len(self._refs)))

    def moved(self) -> float:
        """Return the bytes one row moves per verify and commit in one layer, from shapes."""
        if isinstance(self.pool, StatePool):
            spec, depth = self.pool.specs[0], self._options["depth"]
            return moved_bytes(spec, self.tokens, float(self.kept.mean()), depth)
        every = [self.pool.moved_bytes(self.tokens, int(n)) for n in self.kept.flat]
        return float(np.mean(every) / self.pool.num_layers)


class PlainDecode:
    """The standard step in place, one token for every row a round."""

    def __init__(self, spec: LayerSpec, layers: int, blocks: list[Block]) -> None:
        rows = blocks[0].rows
        shape = (rows, spec.value_heads, spec.value_dim, spec.key_dim)
        self._states = [torch.zeros(shape) for _ in range(layers)]
        self._spec, self._blocks, self._turn = spec, blocks, 0
        zeros = np.zeros(rows, np.int64)
        self._plan = BlockPlan(np.arange(rows), zeros, zeros, zeros, zeros + 1)
        self.out = torch.empty_like(blocks[0].v)

    def round(self) -> int:
        """Decode one token for every row; return their number."""
        block = self._blocks[self._turn % BLOCKS]
        self._turn += 1
        for state in self._states:
            standard_(state, self._spec, self._plan, block, out=self.out)
        return len(self._plan.slots)


def wide_blocks(spec: LayerSpec, batch: int, tokens: int, seed: int) -> list[Block]:
    """Return T-token inputs with the statistics of a trained layer."""
    ones = make_blocks(spec, batch, seed, tokens * BLOCKS)
    names = ("q", "k", "v", "g", "w")
    return [
        Block(*(torch.cat([getattr(b, n) for b in ones[i::BLOCKS]], 1) for n in names))
        for i in range(BLOCKS)
    ]


def measure(
    drafter: str,
    drafts: int,
    counts: Sequence[int],
    spec: LayerSpec,
    model_layers: int,
    plan: Plan,
) -> list[Verified]:
    """Time every way at one draft length, with kept entries drawn from what a drafter's were.

    Args:
        drafter: Its name.
        drafts: Drafts a round.
        counts: ``counts[n]``: verifies that kept n entries.
        spec: Geometry of every layer.
        model_layers: How many of them the model has.
        plan: Arms and sizes.
    """
    scope, tokens = plan.scope, drafts + 1
    batch, target = scope.verify_batch, scope.working_set // SHARE
    layers = layer_copies(spec, batch, min(model_layers, LAYERS), target)
    kept = schedule(counts, batch, 16, plan.seed)
    blocks = wide_blocks(spec, batch, tokens, plan.seed)
    names: list[Arm | str] = [*plan.candidates, SNAPSHOT, RECOMPUTE]
    ways = {
        way if isinstance(way, str) else way.name: Verifier(
            way, spec, layers, kept, tokens, scope.window, blocks
        )
        for way in names
    }
    errors = _errors(ways)
    for arm in plan.candidates:
        # two blocks of outputs, each with the format's own error
        if not errors[arm.name] <= 3 * tolerance(arm):
            del ways[arm.name]
    plain = PlainDecode(spec, layers, wide_blocks(spec, batch, 1, plan.seed))
    plain.round()
    limit = scope.cell_seconds / 2
    seconds = per_token({**ways, PLAIN: plain}, rounds=ROUNDS, samples=scope.rounds, limit_s=limit)

    def against(other: str, name: str) -> Estimate | None:
        return None if name == other else paired_ratio(seconds[other], seconds[name])

    return [
        Verified(
            drafter=drafter,
            drafts=drafts,
            way=name,
            us_per_token=float(np.median(seconds[name])) / layers * 1e6,
            versus_plain=paired_ratio(seconds[PLAIN], seconds[name]),
            versus_snapshot=against(SNAPSHOT, name),
            versus_recompute=against(RECOMPUTE, name),
            moved_bytes=way.moved(),
            slot_bytes=way.slot_bytes(),
            error=errors[name],
        )
        for name, way in ways.items()
    ]


def _errors(ways: dict[str, Verifier]) -> dict[str, float]:
    """Run two rounds of every way and compare the outputs of the second with the snapshots'."""
    for _ in range(2):
        for way in ways.values():
            way.round()
    exact = ways[SNAPSHOT].out.double()
    return {
        name: float((way.out.double() - exact).norm() / exact.norm()) for name, way in ways.items()
    }


def per_token(
    ways: dict[str, Verifier | PlainDecode], *, rounds: int, samples: int, limit_s: float
) -> dict[str, list[float]]:
    """Return seconds per committed token and layer row, the ways taking turns.

    Args:
        ways: What to time; each has run before.
        rounds: Verifies of one sample.
        samples: Samples per way, at most; never under 3.
        limit_s: Time after which no further turn begins.
    """
    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    begun = time.perf_counter()
    for turn in range(samples):
        if turn >= 3 and time.perf_counter() - begun > limit_s:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            tokens = sum(ways[name].round() for _ in range(rounds))
            found[name].append((time.perf_counter() - start) / tokens)
    return found


def schedule(counts: Sequence[int], batch: int, rounds: int, seed: int) -> NDArray[np.int64]:
    """Draw ``[rounds, B]`` kept entries from a histogram; ``counts[n]`` verifies kept n."""
    weights = np.asarray(counts, float)
    rng = np.random.default_rng(seed)
    return rng.choice(len(weights), size=(rounds, batch), p=weights / weights.sum())
