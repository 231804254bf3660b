"""A pool and one serial oracle per request and layer, driven together.

Every forward is checked against the oracles of its rows. Rows and lanes that nothing may read are
NaN, ring entries that left the window are poisoned after every commit, and a released slot is
poisoned whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from replayssm.testing.factories import Regime, make_block, make_state, pad_tokens
from replayssm.testing.guard import bystander_digests, guard_pool_, poison_dead_, poison_slot_
from replayssm.testing.oracle import SerialOracle
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.slots import SlotRef
    from replayssm.state import StatePool
    from replayssm.types import Block

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
        self._seed = 0

    @property
    def live(self) -> list[SlotRef]:
        """Requests in the pool, oldest first."""
        return list(self.oracles)

    def admit(self, position: int = 0, *, is_zero: bool = False) -> SlotRef:
        """Admit a request with a random prefill state, or the zero state."""
        layers = [spec.layer for spec in self.pool.specs]
        states = [make_state(layer, seed=self._next_seed()) for layer in layers]
        ref = self.pool.admit_(None if is_zero else states, position)
        dtype = self.pool.specs[0].ring_dtype
        self.oracles[ref] = [
            SerialOracle(layer, None if is_zero else state, position, dtype)
            for layer, state in zip(layers, states, strict=True)
        ]
        return ref

    def forward(
        self,
        refs: Sequence[SlotRef | None],
        lengths: Sequence[int],
        accepted: Sequence[int],
        *,
        depth: ReadDepth | Sequence[ReadDepth] = ReadDepth.FULL,
        parents: Sequence[Sequence[int]] | None = None,
        lanes: int = 1,
    ) -> list[Tensor]:
        """Run, check and commit one forward.

        Args:
            refs: Request of each row, None for a pad row.
            lengths: Tokens of each row's block.
            accepted: Entries that each row keeps.
            depth: Read depth, for all rows or per row.
            parents: Trees of drafts, one per row.
            lanes: Tokens that the block is wider than the longest row.

        Returns:
            Every layer's ``[B, T, HV, V]`` outputs.
        """
        ticket = self.pool.begin(refs, lengths, parents)
        blocks, outputs = self._blocks(refs, lengths, lanes), []
        depths = [ReadDepth(depth)] * len(refs) if isinstance(depth, str) else list(depth)
        for layer, block in enumerate(blocks):
            store = self.pool.stores[layer]
            before = bystander_digests(store, ticket.plan.slots.tolist())
            outputs.append(self.pool.step_(ticket, layer, block, depth=depth))
            if bystander_digests(store, ticket.plan.slots.tolist()) != before:
                raise AssertionError(f"layer {layer}: a slot outside the batch changed")
            self._check_outputs(refs, lengths, depths, parents, layer, block, outputs[-1])
        self.pool.commit_(ticket, accepted)
        for row, (ref, count) in enumerate(zip(refs, accepted, strict=True)):
            if ref is not None:
                for oracle, block in zip(self.oracles[ref], blocks, strict=True):
                    oracle.commit(block, row, count)
                self.poison(ref)
        self.check_guards()
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

    def check_guards(self) -> None:
        """Check that no byte between slots has changed."""
        if [g.guard_digest() for g in self.guarded] != self._guards:
            raise AssertionError("bytes between slots changed")

    def _blocks(
        self, refs: Sequence[SlotRef | None], lengths: Sequence[int], lanes: int
    ) -> list[Block]:
        blocks, tokens = [], max(lengths, default=1)
        for spec in self.pool.specs:
            seed = self._next_seed()
            block = make_block(spec.layer, len(refs), tokens, seed=seed, regime=self.regime)
            for row, (ref, length) in enumerate(zip(refs, lengths, strict=True)):
                for x in (block.q, block.k, block.v, block.g, block.w):
                    x[row, 0 if ref is None else length :] = torch.nan
            blocks.append(pad_tokens(block, tokens + lanes))
        return blocks

    def _check_outputs(
        self,
        refs: Sequence[SlotRef | None],
        lengths: Sequence[int],
        depths: Sequence[ReadDepth],
        parents: Sequence[Sequence[int]] | None,
        layer: int,
        block: Block,
        out: Tensor,
    ) -> None:
        for row, (ref, length) in enumerate(zip(refs, lengths, strict=True)):
            where = f"layer {layer} row {row}"
            count = 0 if ref is None else length
            if bool((out[row, count:] != 0).any()):
                raise AssertionError(f"{where}: outputs that nothing asked for are not 0")
            if ref is None:
                continue
            oracle = self.oracles[ref][layer]
            tree = None if parents is None else parents[row]
            exact = oracle.outputs(block, row, length, tree)
            scale = float(oracle.state().norm() + exact.norm())
            tolerance = TOLERANCE[self.pool.format, depths[row]]
            _check(out[row, :length], exact, scale, tolerance, f"{where} outputs of {ref}")

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _check(got: Tensor, exact: Tensor, scale: float, tolerance: float, where: str) -> None:
    error = float((got.double() - exact).norm())
    if not error <= tolerance * scale:
        raise AssertionError(f"{where}: error {error:.3g}, allowed {tolerance * scale:.3g}")
