"""Rollback torture: thousands of partly accepted blocks against an execution that never speculated.

    from replayssm.testing.rollback import check_rollback
    report = check_rollback(layers, lambda max_block, keep: MyPool(layers, 4, max_block, keep))

Two pools serve the same requests. One verifies blocks and trees of random size, keeps a random part
of each, takes committed entries back, and sees requests come and go between a verify and its
commit, in rows that change from round to round. The other one gets the tokens that survived, one at
a time. Every surviving token's output, and again and again the state and the convolution's window,
have to agree. So a rollback that leaves a trace shows in the state at once, and in the outputs of
all later tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from replayssm.testing.factories import (
    make_block,
    make_inputs,
    make_state,
    make_taps,
    make_tree,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replayssm.slots import SlotRef
    from replayssm.ticket import Ticket
    from replayssm.types import Block, LayerSpec

# how often a round brings each event
TREE, LEAVE, CROP = 0.3, 0.05, 0.3


class RollbackPool(Protocol):
    """What the torture drives, in the words of :class:`~replayssm.state.StatePool`.

    ``commit_paths_`` and ``parents`` are used with ``trees`` only, ``crop_`` with ``keep`` only,
    ``fold_`` with ``settle`` only; positions are given with ``keep`` only.
    """

    def admit_(
        self,
        states: Sequence[Tensor] | None = None,
        position: int = 0,
        windows: Sequence[Tensor | None] | None = None,
    ) -> SlotRef:
        """Take a free slot."""
        ...

    def begin(
        self,
        refs: Sequence[SlotRef | None],
        lengths: Sequence[int] | int = 1,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Ticket:
        """Open a forward."""
        ...

    def conv_(
        self, ticket: Ticket, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Run one layer's convolution."""
        ...

    def step_(self, ticket: Ticket, layer: int, block: Block) -> Tensor:
        """Run one layer."""
        ...

    def commit_(self, ticket: Ticket, num_accepted: Sequence[int | None] | int) -> None:
        """Keep the first entries of every row."""
        ...

    def commit_paths_(self, ticket: Ticket, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep one path of every row's tree."""
        ...

    def crop_(self, refs: Sequence[SlotRef], tokens: Sequence[int] | int) -> None:
        """Take back committed entries."""
        ...

    def fold_(self, refs: Sequence[SlotRef]) -> None:
        """Do now what the next forward would do first."""
        ...

    def materialise(self, ref: SlotRef, position: int | None = None) -> list[Tensor]:
        """Return every layer's state."""
        ...

    def conv_windows(self, ref: SlotRef, position: int | None = None) -> list[Tensor | None]:
        """Return every layer's convolution window."""
        ...

    def release_(self, ref: SlotRef) -> None:
        """Give a slot back."""
        ...


@dataclass
class RollbackReport:
    """What a torture did; whoever gets one knows that all of it agreed.

    Attributes:
        rounds: Verifies with their commits.
        drafted: Tokens that were verified.
        kept: Tokens that were committed and not taken back.
        partial: Row commits that kept some entries and rejected others.
        trees: Rounds with a tree in every row.
        cropped: Committed entries that were taken back.
        departures: Requests released between a verify and its commit, their slot reused at once.
        states: States compared, all layers of a request at a time.
        phases: Positions modulo ``period`` at which states were compared.
        worst_output: Largest error of an output, relative to output and state together.
        worst_state: Largest relative error of a state; 0 is bit for bit.
    """

    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    partial: int = 0
    trees: int = 0
    cropped: int = 0
    departures: int = 0
    states: int = 0
    phases: set[int] = field(default_factory=set)
    worst_output: float = 0.0
    worst_state: float = 0.0


def check_rollback(
    layers: Sequence[LayerSpec],
    make_pool: Callable[[int, int], RollbackPool],
    *,
    rounds: int = 2000,
    requests: int = 3,
    max_block: int = 5,
    keep: int = 2,
    period: int = 8,
    trees: bool = True,
    settle: bool = True,
    exact: bool = True,
    tolerance: float = 1e-5,
    seed: int = 0,
) -> RollbackReport:
    """Torture a pool's rollback; see the module docstring.

    Args:
        layers: Geometry of the layers.
        make_pool: Makes an empty pool with room for ``requests`` from ``(max_block, keep)``; called
            once for the pool that speculates and once, with (1, 0), for the one that does not.
        rounds: Verifies with their commits.
        requests: Requests served at once.
        max_block: Largest block or tree.
        keep: Committed entries that may be taken back; 0 leaves ``crop_`` out.
        period: Every phase of it has to be seen, normally the window.
        trees: Verify trees too.
        settle: Call ``fold_`` before states are compared, so that both pools stand at the same
            boundary.
        exact: States and windows must agree bit for bit, not within ``tolerance``.
        tolerance: Allowed relative error of an output, and of a state when not ``exact``.
        seed: Equal seeds give equal tortures.

    Raises:
        AssertionError: Something disagrees, or a phase was never compared.
    """
    pools = make_pool(max_block, keep), make_pool(1, 0)
    torture = _Torture(layers, *pools, keep, seed, settle, exact, tolerance)
    for _ in range(requests):
        torture.admit()
    for _ in range(rounds):
        torture.round(max_block, is_tree=trees and torture.draw.random() < TREE, period=period)
    missing = set(range(period)) - torture.report.phases
    if missing:
        raise AssertionError(f"{rounds} rounds never compared phases {sorted(missing)}")
    return torture.report


@dataclass
class _Token:
    """One token's inputs in every layer, and what the speculating pool made of them."""

    inputs: list[tuple[Block, Tensor]]
    outputs: list[tuple[Tensor, Tensor | None]]


@dataclass(eq=False)
class _Request:
    """A request in both pools, and its newest tokens, which may still be taken back."""

    drafted: SlotRef
    plain: SlotRef
    scale: list[float]
    position: int
    pending: list[_Token] = field(default_factory=list)


class _Torture:
    def __init__(
        self,
        layers: Sequence[LayerSpec],
        pool: RollbackPool,
        plain: RollbackPool,
        keep: int,
        seed: int,
        settle: bool,
        exact: bool,
        tolerance: float,
    ) -> None:
        self.layers, self.pool, self.plain, self.keep = layers, pool, plain, keep
        self.settle, self.exact, self.tolerance = settle, exact, tolerance
        convs = [layer.conv for layer in layers]
        self.taps = [None if c is None else make_taps(c, seed=i) for i, c in enumerate(convs)]
        self.draw, self.report = random.Random(seed), RollbackReport()
        self.live: list[_Request] = []

    def admit(self) -> None:
        """Admit one more request, the same one in both pools."""
        states = [make_state(layer, seed=self._seed()) for layer in self.layers]
        windows = [
            None
            if layer.conv is None
            else make_inputs(layer.conv, 1, layer.conv.width - 1, seed=self._seed())[0].T
            for layer in self.layers
        ]
        position = self.draw.randrange(20)
        own, other = (pool.admit_(states, position, windows) for pool in (self.pool, self.plain))
        scale = [float(state.norm()) for state in states]
        self.live.append(_Request(own, other, scale, position))

    def round(self, max_block: int, *, is_tree: bool, period: int) -> None:
        """Verify, perhaps lose a request, commit, perhaps take back, and compare."""
        rows = self.draw.sample(self.live, self.draw.randint(1, len(self.live)))
        lengths = [self.draw.randint(1, max_block) for _ in rows]
        parents = [make_tree(n, seed=self._seed()) for n in lengths] if is_tree else None
        refs = [row.drafted for row in rows]
        ticket = self.pool.begin(refs, lengths, parents) if is_tree else None
        ticket = ticket or self.pool.begin(refs, lengths)
        inputs = [self._inputs(layer, len(rows), max(lengths)) for layer in self.layers]
        outputs = self._run(self.pool, ticket, inputs)
        gone = self._depart(rows)
        paths = [
            None if row is gone else self._path(ticket, i, length)
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]
        if is_tree:
            self.pool.commit_paths_(ticket, paths)
        else:
            self.pool.commit_(ticket, [None if path is None else len(path) for path in paths])
        self._count(lengths, paths, is_tree)
        for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
            if path is not None:
                row.pending += [_token(inputs, outputs, i, t) for t in path]
                self._crop(row)
                self._follow(row)
        chosen = self.draw.choice(self.live)
        self._compare(chosen, period)

    def _seed(self) -> int:
        return self.draw.randrange(1 << 30)

    def _inputs(self, layer: LayerSpec, rows: int, tokens: int) -> tuple[Block, Tensor]:
        block = make_block(layer, rows, tokens, seed=self._seed())
        if layer.conv is None:
            return block, torch.zeros(rows, tokens, 0)
        return block, make_inputs(layer.conv, rows, tokens, seed=self._seed())

    def _run(
        self, pool: RollbackPool, ticket: Ticket, inputs: Sequence[tuple[Block, Tensor]]
    ) -> list[tuple[Tensor, Tensor | None]]:
        outputs = []
        for layer, ((block, x), taps) in enumerate(zip(inputs, self.taps, strict=True)):
            mixed = None if taps is None else pool.conv_(ticket, layer, x, *taps)
            outputs.append((pool.step_(ticket, layer, block), mixed))
        return outputs

    def _depart(self, rows: Sequence[_Request]) -> _Request | None:
        """Perhaps release a row's request now, and give its slot to another one."""
        if self.draw.random() >= LEAVE:
            return None
        gone = self.draw.choice(rows)
        self.pool.release_(gone.drafted)
        self.plain.release_(gone.plain)
        self.live.remove(gone)
        self.admit()
        self.report.departures += 1
        return gone

    def _path(self, ticket: Ticket, row: int, length: int) -> list[int]:
        """Return which of a row's tokens are kept: a root-to-node path, perhaps empty."""
        last = self.draw.randint(-1, length - 1)
        return ticket.plan.ancestors(row, last) if last >= 0 else []

    def _count(
        self, lengths: Sequence[int], paths: Sequence[list[int] | None], is_tree: bool
    ) -> None:
        report = self.report
        report.rounds += 1
        report.trees += is_tree
        report.drafted += sum(lengths)
        for length, path in zip(lengths, paths, strict=True):
            report.kept += len(path or [])
            report.partial += path is not None and 0 < len(path) < length

    def _crop(self, row: _Request) -> None:
        most = min(self.keep, len(row.pending))
        if most and self.draw.random() < CROP:
            count = self.draw.randint(0, most)
            self.pool.crop_([row.drafted], count)
            del row.pending[len(row.pending) - count :]
            self.report.cropped += count
            self.report.kept -= count

    def _follow(self, row: _Request) -> None:
        """Give the other pool every token that cannot be taken back any more."""
        while len(row.pending) > self.keep:
            token = row.pending.pop(0)
            ticket = self.plain.begin([row.plain], 1)
            outputs = self._run(self.plain, ticket, token.inputs)
            self.plain.commit_(ticket, 1)
            row.position += 1
            for layer, (own, other) in enumerate(zip(token.outputs, outputs, strict=True)):
                where = f"round {self.report.rounds}, position {row.position}, layer {layer}"
                self._compare_outputs(own[0], other[0][0, 0], row.scale[layer], where)
                if own[1] is not None and other[1] is not None:
                    self._compare_outputs(own[1], other[1][0, 0], 0.0, f"{where} convolution")

    def _compare_outputs(self, own: Tensor, other: Tensor, scale: float, where: str) -> None:
        error = float((own.double() - other.double()).norm()) / (scale + float(other.norm()))
        self.report.worst_output = max(self.report.worst_output, error)
        if not error <= self.tolerance:
            raise AssertionError(f"{where}: an output is off by {error:.2g} of output and state")

    def _compare(self, row: _Request, period: int) -> None:
        """Compare state and window where both pools stand."""
        if self.settle:
            self.pool.fold_([row.drafted])
            self.plain.fold_([row.plain])
        at = () if self.keep == 0 else (row.position,)
        own, other = self.pool.materialise(row.drafted, *at), self.plain.materialise(row.plain)
        where = f"round {self.report.rounds}, position {row.position}"
        for layer, (x, y) in enumerate(zip(own, other, strict=True)):
            error = float((x.double() - y.double()).norm() / y.norm())
            self.report.worst_state = max(self.report.worst_state, error)
            if not torch.equal(x, y) and (self.exact or not error <= self.tolerance):
                raise AssertionError(f"{where}, layer {layer}: the state is off by {error:.2g}")
            row.scale[layer] = float(y.norm())
        windows = self.pool.conv_windows(row.drafted, *at), self.plain.conv_windows(row.plain)
        for layer, (a, b) in enumerate(zip(*windows, strict=True)):
            is_equal = a is b if a is None or b is None else torch.equal(a, b)
            if not is_equal:
                raise AssertionError(f"{where}, layer {layer}: wrong convolution window")
        self.report.states += 1
        self.report.phases.add(row.position % period)


def _token(
    inputs: Sequence[tuple[Block, Tensor]],
    outputs: Sequence[tuple[Tensor, Tensor | None]],
    row: int,
    t: int,
) -> _Token:
    own = [(take(block, [row], [t]), x[row : row + 1, t : t + 1]) for block, x in inputs]
    made = [
        (y[row, t].clone(), None if mixed is None else mixed[row, t].clone())
        for y, mixed in outputs
    ]
    return _Token(own, made)
