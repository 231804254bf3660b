"""Compiled CPU path (numba): thin launchers over the kernels of this package.

A kernel is compiled on first use and cached on disk. Work is spread over numba's threads; a small
call stays in the calling thread. Every row's numbers depend on that row alone, so neither the
number of threads nor the batch shows in a result.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch

from replayssm.errors import ContractError
from replayssm.ops.cpu import layout
from replayssm.ops.cpu.layout import BlockAt
from replayssm.ops.cpu.spread import launch
from replayssm.ops.cpu.standard import standard_share, standard_shares
from replayssm.ops.cpu.step import run_share, run_shares
from replayssm.types import ReadDepth

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from replayssm.ops.cpu.layout import Geometry
    from replayssm.ring import BlockPlan
    from replayssm.storage import LayerStore
    from replayssm.types import Block, Write

__all__ = ["fold_", "standard_", "step_"]

# below this much state, starting threads costs more than they save
PARALLEL_BYTES = 1 << 18
ALIGN = 64
NO_BLOCK = BlockAt._make([0] * len(BlockAt._fields))


class _Workspace(threading.local):
    """Scratch of one calling thread; grows to the largest call and is then reused."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def address(self, nbytes: int) -> int:
        if self.memory.nbytes < nbytes + ALIGN:
            self.memory = np.zeros(nbytes + ALIGN, np.uint8)
        start = self.memory.ctypes.data
        return int(start + -start % ALIGN)


_workspace = _Workspace()


def step_(
    store: LayerStore, plan: BlockPlan, block: Block, depths: list[ReadDepth], out: Tensor
) -> None:
    """Fold what is due, append the block's entries and write its outputs.

    Mutates planes that reach a boundary, the rings at the block's positions, and ``out``.

    Args:
        store: Layer tensors; slots, heads and entries may be strided.
        plan: Rows of this forward.
        block: Inputs, a chain or a tree.
        depths: Read depth of each row.
        out: ``[B, T, HV, V]``; pad rows and tokens past a row's length get 0.
    """
    target = out if _is_writable(out) else torch.empty(out.shape, dtype=torch.float32)
    where, alive = layout.block_at(block, target)
    is_full = [d is ReadDepth.FULL for d in depths]
    _run(store, plan, where, is_full, has_block=True)
    if target is not out:
        out.copy_(target)
    del alive


def fold_(store: LayerStore, plan: BlockPlan) -> None:
    """Bring every row's planes to its newest boundary; mutates planes and scales only."""
    _run(store, plan, NO_BLOCK, [False] * plan.rows, has_block=False)


def _is_writable(out: Tensor) -> bool:
    return out.dtype in layout.KIND and (out.stride(-1) == 1 or out.shape[-1] == 1)


def _run(
    store: LayerStore, plan: BlockPlan, where: BlockAt, is_full: list[bool], *, has_block: bool
) -> None:
    at = layout.geometry_of(store.spec)
    own, extra = layout.exact_at(at) if store.spec.exact else (None, 0)
    scratch, size = layout.scratch_of(at, max(where.tokens, 1), extra)
    fields = (plan.slots, plan.base, plan.folded, plan.committed, plan.lengths)
    counts = np.array([*fields, is_full], np.int64)
    parents = _parents(plan, where.tokens)
    _check_span(at, plan, has_block=has_block)
    shares = _shares(plan.rows * store.spec.layer.state_elements * store.high.element_size())
    base = _workspace.address(shares * size)
    tensors = (at, layout.planes_at(store), layout.rings_at(store), where, scratch)
    args = (*tensors, counts, parents, own, int(has_block))
    launch(run_share, run_shares, args, base, size, shares)


def _parents(plan: BlockPlan, tokens: int) -> NDArray[np.int64]:
    # a chain is a tree with one leaf; one form of it is compiled
    if plan.parents is not None:
        return np.ascontiguousarray(plan.parents, np.int64)
    return _chains(plan.rows, tokens)


@lru_cache(maxsize=64)
def _chains(rows: int, tokens: int) -> NDArray[np.int64]:
    return np.tile(np.arange(-1, tokens - 1), (rows, 1))


def _check_span(at: Geometry, plan: BlockPlan, *, has_block: bool) -> None:
    # scratch holds one ring of entries: a plan that spans more would write behind it
    folded_to = np.maximum(plan.base, (plan.folded - at.keep) // at.window * at.window)
    span = plan.committed - folded_to + (plan.lengths if has_block else 0)
    if int(span.max(initial=0)) > at.ring_len:
        expected = f"at most {at.ring_len} unfolded entries a row, the length of the ring"
        raise ContractError("plan", expected, int(span.max()))


def _shares(nbytes: int) -> int:
    return 1 if nbytes < PARALLEL_BYTES else int(numba.get_num_threads())


def standard_(
    state: Tensor,
    plan: BlockPlan,
    block: Block,
    write: Write,
    out: Tensor,
    targets: NDArray[np.int64] | None = None,
) -> None:
    """Run the standard step; mutates ``state`` at the plan's slots, or at targets, and ``out``.

    Args:
        state: ``[S, HV, V, K]`` fp32 or bf16 (rounded after every token, outputs before that).
        plan: Rows; ``slots`` and ``lengths`` are read.
        block: Inputs, a chain.
        write: Additive or delta.
        out: ``[B, T, HV, V]``; pad rows and tokens past a row's length get 0.
        targets: ``[B, T]`` slots that get the state after each token; None rewrites in place.
    """
    if state.dtype not in layout.KIND:
        raise ContractError("state", f"one of {tuple(layout.KIND)}", state.dtype)
    if state.stride(-1) != 1 and state.shape[-1] > 1:
        raise ContractError("state", "a contiguous last dimension", f"stride {state.stride(-1)}")
    target = out if _is_writable(out) else torch.empty(out.shape, dtype=torch.float32)
    where, alive = layout.block_at(block, target)
    at, size = layout.standard_at(state, block, write)
    to = np.broadcast_to(plan.slots[:, None], (plan.rows, block.tokens))
    counts = np.array((plan.slots, plan.lengths, *(to if targets is None else targets).T), np.int64)
    shares = _shares(plan.rows * state[0].numel() * state.element_size())
    base = _workspace.address(shares * size)
    launch(standard_share, standard_shares, (at, where, counts), base, size, shares)
    if target is not out:
        out.copy_(target)
    del alive
