"""A pool and one serial oracle per request and layer, driven together.

Every forward is checked against the oracles of its rows. Rows and lanes that nothing may read are
NaN, ring entries that left the window are poisoned after every commit, and a released slot is
poisoned whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from replayssm.testing.factories import (
    Regime,
    make_block,
    make_inputs,
    make_state,
    make_taps,
    pad_tokens,
)
from replayssm.testing.guard import bystander_digests, guard_pool_, poison_dead_, poison_slot_
from replayssm.testing.oracle import ConvOracle, SerialOracle
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.slots import SlotRef
    from replayssm.state import StatePool
    from replayssm.ticket import Ticket
    from replayssm.types import Block, LayerSpec

# error of short sequences relative to state and output together; a wrong entry costs 1e-1 or more.
# a fold rounds relative to the rows of its time, of which later gates may leave little
TOLERANCE: dict[tuple[Format, ReadDepth], float] = {
    (Format.F32, ReadDepth.HIGH): 1e-5,
    (Format.F32, ReadDepth.FULL): 1e-5,
    (Format.S32, ReadDepth.HIGH): 1e-2,
    (Format.S32, ReadDepth.FULL): 1e-5,
    (Format.Q24, ReadDepth.HIGH): 5e-2,
    (Format.Q24, ReadDepth.FULL): 1e-4,
    (Format.Q16, ReadDepth.HIGH): 5e-2,
    (Format.Q16, ReadDepth.FULL): 5e-3,
    (Format.BF16, ReadDepth.HIGH): 2e-2,
    (Format.BF16, ReadDepth.FULL): 2e-2,
}


# a handful of products in fp32
CONV_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a forward: its index, request, tokens and tree."""

    row: int
    ref: SlotRef | None
    length: int
    parents: Sequence[int] | None


class Driver:
    """Drives an empty pool; see the module docstring.

    Args:
        pool: The pool. Its tensors are replaced with guarded, poisoned ones.
        regime: Gates and write strengths of every block.
    """

    def __init__(self, pool: StatePool, regime: Regime = Regime.TYPICAL) -> None:
        self.pool, self.regime = pool, regime
        self.guarded = guard_pool_(pool)
        self._guards = [g.guard_digest() for g in self.guarded]
        self.oracles: dict[SlotRef, list[SerialOracle]] = {}
        convs = [spec.layer.conv for spec in pool.specs]
        self.taps = [None if c is None else make_taps(c, seed=i) for i, c in enumerate(convs)]
        self._seed = 0

    @property
    def live(self) -> list[SlotRef]:
        """Requests in the pool, oldest first."""
        return list(self.oracles)

    def admit(self, position: int = 0, *, is_zero: bool = False) -> SlotRef:
        """Admit a request with a random prefill state, or the zero state."""
        layers = [spec.layer for spec in self.pool.specs]
        states = [make_state(layer, seed=self._next_seed()) for layer in layers]
        windows = [None if is_zero else self._window(layer) for layer in layers]
        has_conv = any(window is not None for window in windows)
        given = None if is_zero else states
        ref = self.pool.admit_(given, position, windows if has_conv else None)
        dtype, oracles = self.pool.specs[0].ring_dtype, []
        for layer, state, window, taps in zip(layers, states, windows, self.taps, strict=True):
            conv = None if taps is None else ConvOracle(*taps, window, dtype)
            first = None if is_zero else state
            oracles.append(SerialOracle(layer, first, position, dtype, conv))
        self.oracles[ref] = oracles
        return ref

    def forward(
        self,
        refs: Sequence[SlotRef | None],
        lengths: Sequence[int],
        accepted: Sequence[int | Sequence[int]],
        *,
        depth: ReadDepth | Sequence[ReadDepth] = ReadDepth.FULL,
        parents: Sequence[Sequence[int]] | None = None,
        lanes: int = 1,
        departing: Sequence[int] = (),
    ) -> list[Tensor]:
        """Run, check and commit one forward.

        Args:
            refs: Request of each row, None for a pad row.
            lengths: Tokens of each row's block.
            accepted: Entries that each row keeps, or the path of nodes in its tree.
            depth: Read depth, for all rows or per row.
            parents: Trees of drafts, one per row.
            lanes: Tokens that the block is wider than the longest row.
            departing: Rows whose request is released after the last layer and before the commit;
                another one takes its slot at once.

        Returns:
            Every layer's ``[B, T, HV, V]`` outputs.
        """
        ticket = self.pool.begin(refs, lengths, parents)
        inputs = [self._inputs(spec.layer, refs, lengths, lanes) for spec in self.pool.specs]
        depths = [ReadDepth(depth)] * len(refs) if isinstance(depth, str) else list(depth)
        outputs = []
        for layer, (block, x) in enumerate(inputs):
            store = self.pool.stores[layer]
            before = bystander_digests(store, ticket.plan.slots.tolist())
            mixed = self._convolve(ticket, layer, x)
            outputs.append(self.pool.step_(ticket, layer, block, depth=depth))
            if bystander_digests(store, ticket.plan.slots.tolist()) != before:
                raise AssertionError(f"layer {layer}: a slot outside the batch changed")
            for row, (ref, length) in enumerate(zip(refs, lengths, strict=True)):
                tree = None if parents is None else parents[row]
                at = _Row(row, ref, 0 if ref is None else length, tree)
                self._check_outputs(at, depths[row], layer, block, outputs[-1])
                if mixed is not None:
                    self._check_convolution(at, layer, x, mixed)
        kept = [range(n) if isinstance(n, int) else n for n in accepted]
        paths = [None if row in departing else path for row, path in enumerate(kept)]
        for row in departing:
            self._replace(refs[row])
        if parents is None:
            self.pool.commit_(ticket, [None if path is None else len(path) for path in paths])
        else:
            self.pool.commit_paths_(ticket, paths)
        self._committed(refs, inputs, paths)
        return outputs

    def release(self, ref: SlotRef) -> None:
        """Release a request and poison what it leaves behind."""
        self.pool.release_(ref)
        del self.oracles[ref]
        for store in self.pool.stores:
            poison_slot_(store, ref.slot)

    def fork(self, ref: SlotRef) -> SlotRef:
        """Fork a request and its oracles."""
        copy = self.pool.fork_(ref)
        self.oracles[copy] = [oracle.fork() for oracle in self.oracles[ref]]
        return copy

    def reorder(self, refs: Sequence[SlotRef], index: Sequence[int]) -> list[SlotRef]:
        """Give row i the request of row ``index[i]``, oracles too."""
        old = {ref: self.oracles.pop(ref) for ref in refs}
        new = self.pool.reorder_(refs, index)
        for ref, i in zip(new, index, strict=True):
            self.oracles[ref] = [oracle.fork() for oracle in old[refs[i]]]
        for slot in {ref.slot for ref in refs} - {ref.slot for ref in new}:
            for store in self.pool.stores:
                poison_slot_(store, slot)
        return new

    def poison(self, ref: SlotRef) -> None:
        """Poison the ring entries of a request that no fold and no read needs any more."""
        base, folded, committed = self.pool._slots.counts(ref.slot)
        oldest = self.pool.ring.oldest_needed(base, folded)
        for store in self.pool.stores:
            poison_dead_(store, ref.slot, range(oldest, committed))

    def check_state(self, ref: SlotRef, position: int | None = None) -> None:
        """Check a materialised state against the oracles."""
        states = self.pool.materialise(ref, position)
        tolerance = TOLERANCE[self.pool.format, ReadDepth.FULL]
        for layer, (state, oracle) in enumerate(zip(states, self.oracles[ref], strict=True)):
            if self.pool.committed(ref) != oracle.committed:
                raise AssertionError(f"slot {ref.slot} is at {self.pool.committed(ref)} tokens")
            exact = oracle.state(position)
            _check(state, exact, float(exact.norm()), tolerance, f"layer {layer} state of {ref}")
        self.check_windows(ref, position)

    def check_windows(self, ref: SlotRef, position: int | None = None) -> None:
        """Check the inputs that a convolution sees next, bit for bit, against the oracles."""
        back = 0 if position is None else self.pool.committed(ref) - position
        for layer, window in enumerate(self.pool.conv_windows(ref, position)):
            conv = self.oracles[ref][layer].conv
            exact = None if conv is None else conv.window(back)
            is_equal = exact is window
            if exact is not None and window is not None:
                is_equal = torch.equal(window.double(), exact)
            if not is_equal:
                raise AssertionError(f"layer {layer}: wrong convolution window of {ref}")

    def crop(self, ref: SlotRef, tokens: int) -> None:
        """Take back the newest entries of a request, in its oracles too."""
        self.pool.crop_([ref], tokens)
        for oracle in self.oracles[ref]:
            oracle.rewind(tokens)

    def check_guards(self) -> None:
        """Check that no byte between slots has changed."""
        if [g.guard_digest() for g in self.guarded] != self._guards:
            raise AssertionError("bytes between slots changed")

    def _replace(self, ref: SlotRef | None) -> None:
        """Release a request in the middle of its forward and admit another one in its slot."""
        if ref is not None:
            self.release(ref)
            self.admit(position=self._seed % 20)

    def _window(self, layer: LayerSpec) -> Tensor | None:
        if layer.conv is None:
            return None
        # a window is a few inputs, transposed
        x = make_inputs(layer.conv, 1, layer.conv.width - 1, seed=self._next_seed())
        return x[0].T

    def _inputs(
        self,
        layer: LayerSpec,
        refs: Sequence[SlotRef | None],
        lengths: Sequence[int],
        lanes: int,
    ) -> tuple[Block, Tensor]:
        """Return a block and the convolution's inputs, NaN wherever nothing may read."""
        rows, tokens = len(refs), max(lengths, default=1)
        block = make_block(layer, rows, tokens, seed=self._next_seed(), regime=self.regime)
        x = torch.zeros(rows, tokens + lanes, 0)
        if layer.conv is not None:
            x = make_inputs(layer.conv, rows, tokens + lanes, seed=self._next_seed())
        block = pad_tokens(block, tokens + lanes)
        for row, (ref, length) in enumerate(zip(refs, lengths, strict=True)):
            for given in (block.q, block.k, block.v, block.g, block.w, x):
                given[row, 0 if ref is None else length :] = torch.nan
        return block, x

    def _convolve(self, ticket: Ticket, layer: int, x: Tensor) -> Tensor | None:
        taps = self.taps[layer]
        return None if taps is None else self.pool.conv_(ticket, layer, x, *taps)

    def _committed(
        self,
        refs: Sequence[SlotRef | None],
        inputs: Sequence[tuple[Block, Tensor]],
        paths: Sequence[Sequence[int] | None],
    ) -> None:
        """Let the oracles follow a commit, and poison what nothing needs any more."""
        for row, (ref, path) in enumerate(zip(refs, paths, strict=True)):
            if ref is None or path is None:
                continue
            for oracle, (block, x) in zip(self.oracles[ref], inputs, strict=True):
                oracle.commit(block, row, path)
                if oracle.conv is not None:
                    oracle.conv.commit(x, row, path)
            self.poison(ref)
        self.check_guards()

    def _check_outputs(
        self, at: _Row, depth: ReadDepth, layer: int, block: Block, out: Tensor
    ) -> None:
        where = f"layer {layer} row {at.row}"
        if bool((out[at.row, at.length :] != 0).any()):
            raise AssertionError(f"{where}: outputs that nothing asked for are not 0")
        if at.ref is None:
            return
        oracle = self.oracles[at.ref][layer]
        exact = oracle.outputs(block, at.row, at.length, at.parents)
        scale = float(oracle.state().norm() + exact.norm())
        tolerance = TOLERANCE[self.pool.format, depth]
        got = out[at.row, : at.length]
        _check(got, exact, scale, tolerance, f"{where} outputs of {at.ref}")

    def _check_convolution(self, at: _Row, layer: int, x: Tensor, out: Tensor) -> None:
        where = f"layer {layer} row {at.row} convolution"
        if bool((out[at.row, at.length :] != 0).any()):
            raise AssertionError(f"{where}: outputs that nothing asked for are not 0")
        conv = None if at.ref is None else self.oracles[at.ref][layer].conv
        if conv is not None:
            exact = conv.outputs(x, at.row, at.length, at.parents)
            got = out[at.row, : at.length]
            _check(got, exact, float(exact.norm()) + 1, CONV_TOLERANCE, where)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _check(got: Tensor, exact: Tensor, scale: float, tolerance: float, where: str) -> None:
    error = float((got.double() - exact).norm())
    if not error <= tolerance * scale:
        raise AssertionError(f"{where}: error {error:.3g}, allowed {tolerance * scale:.3g}")
