"""The specification: every operation in plain torch, any dtype up to fp64.

Read beside the algebra in :mod:`replayssm.types`. Functions on one row take heads expanded to HV:

    state ``[HV, V, K]``   k, q ``[n, HV, K]``   v ``[n, HV, V]``
    g ``[n, HV, 1 or K]``   w ``[n, HV]``

with entry 0 the oldest. Decays are products of ``exp`` of single gates or of segment sums, never
differences of prefix sums, so a gate of exactly zero decay is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.formats import FORMATS, Planes, column_amax, column_scale, decode, encode
from replayssm.ring import tile_rows
from replayssm.types import Block, Decay, ReadDepth, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan
    from replayssm.storage import LayerStore


@dataclass(frozen=True, slots=True)
class Entries:
    """n entries of one row, oldest first, heads expanded to HV; see the module docstring."""

    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor

    def __len__(self) -> int:
        return int(self.k.shape[0])

    def select(self, index: slice | list[int]) -> Entries:
        """Return the entries at ``index``, in that order."""
        return Entries(self.k[index], self.v[index], self.g[index], self.w[index])

    def rows(self, rows: range) -> Entries:
        """Return the entries restricted to a tile of value rows."""
        return Entries(self.k, self.v[..., rows.start : rows.stop], self.g, self.w)


def write_entry(state: Tensor, entries: Entries, i: int, write: Write) -> Tensor:
    """Return ``S_t`` after entry ``i``: ``S D + u k^T``."""
    k, v, w = entries.k[i], entries.v[i], entries.w[i].unsqueeze(-1)
    state = state * entries.g[i].exp().unsqueeze(-2)
    if write is Write.DELTA:
        v = v - torch.einsum("hvk,hk->hv", state, k)
    return state + (w * v).unsqueeze(-1) * k.unsqueeze(-2)


def recurrence(state: Tensor, q: Tensor, entries: Entries, write: Write) -> tuple[Tensor, Tensor]:
    """Run the serial recurrence: the oracle of every other path.

    Returns:
        ``(y [n, HV, V], S_n [HV, V, K])``.
    """
    outputs = []
    for i in range(len(entries)):
        state = write_entry(state, entries, i, write)
        outputs.append(torch.einsum("hvk,hk->hv", state, q[i]))
    return torch.stack(outputs), state


def pull_back(x: Tensor, entries: Entries, write: Write) -> tuple[Tensor, Tensor]:
    """Carry a query back through entries, newest first.

    Args:
        x: ``[HV, K]`` key-side vector that acts after the newest entry.
        entries: The entries between the checkpoint and the query.
        write: Additive or delta.

    Returns:
        ``(x [HV, K], y [HV, V])``: the vector that acts on the state before the oldest entry, and
        the entries' own part of the output, ``sum_j c_j v_j``.
    """
    y = entries.v.new_zeros(entries.v.shape[1:])
    for j in reversed(range(len(entries))):
        c = entries.w[j] * (entries.k[j] * x).sum(-1)
        y = y + c.unsqueeze(-1) * entries.v[j]
        if write is Write.DELTA:
            x = x - c.unsqueeze(-1) * entries.k[j]
        x = entries.g[j].exp() * x
    return x, y


def fold_serial(state: Tensor, entries: Entries, write: Write) -> Tensor:
    """Fold entries into a state one at a time, in the standard step's own operation order."""
    for i in range(len(entries)):
        state = write_entry(state, entries, i, write)
    return state


def fold_blocked(state: Tensor, entries: Entries, write: Write) -> Tensor:
    """Fold entries into a state as matrix products.

    Additive: one product. Delta: the UT transform ``U = (I + A)^-1 R`` with A strictly lower,
    ``A_st = w_s k_s . D_{t+1..s} k_t`` and ``R_s = w_s (v_s - S D_{1..s} k_s)``.
    """
    n = len(entries)
    if not n:
        return state
    # after[t] is the decay of everything behind entry t: a segment sum, formed before exp
    after = torch.stack([entries.g[t + 1 :].sum(0) for t in range(n)]).exp()
    values = entries.w.unsqueeze(-1) * entries.v
    if write is Write.DELTA:
        values = _corrected_values(state, entries, values)
    decayed = state * entries.g.sum(0).exp().unsqueeze(-2)
    return decayed + torch.einsum("nhv,nhk->hvk", values, after * entries.k)


def _corrected_values(state: Tensor, entries: Entries, values: Tensor) -> Tensor:
    n, (k, g, w) = len(entries), (entries.k, entries.g, entries.w)
    upto = torch.stack([g[: s + 1].sum(0) for s in range(n)]).exp()
    residual = values - w.unsqueeze(-1) * torch.einsum("hvk,nhk->nhv", state, upto * k)
    lower = torch.zeros(k.shape[1], n, n, dtype=k.dtype, device=k.device)
    for s in range(n):
        for t in range(s):
            between = g[t + 1 : s + 1].sum(0).exp()
            lower[:, s, t] = w[s] * (k[s] * between * k[t]).sum(-1)
    eye = torch.eye(n, dtype=k.dtype, device=k.device)
    solved = torch.linalg.solve_triangular(lower + eye, residual.transpose(0, 1), upper=False)
    corrected: Tensor = solved.transpose(0, 1)
    return corrected


def expand_heads(x: Tensor, value_heads: int, dim: int) -> Tensor:
    """Repeat key heads along ``dim`` so that every value head has its own."""
    return x.repeat_interleave(value_heads // x.shape[dim], dim=dim)


def gather(store: LayerStore, slot: int, start: int, stop: int, dtype: torch.dtype) -> Entries:
    """Return a slot's entries at absolute positions ``start .. stop - 1``, heads expanded."""
    ring_len, hv = store.spec.ring.ring_len, store.spec.layer.value_heads
    index = [p % ring_len for p in range(start, stop)]
    k = expand_heads(store.k[slot][:, index], hv, 0)
    g = store.g[slot][:, index]
    if store.spec.layer.decay is Decay.SCALAR:
        g = g.unsqueeze(-1)
    fields = (k, store.v[slot][:, index], g, store.w[slot][:, index])
    # laid out as a block is: torch's own bits may depend on strides
    return Entries(*(x.transpose(0, 1).contiguous().to(dtype) for x in fields))


def append_(store: LayerStore, plan: BlockPlan, block: Block) -> None:
    """Write each row's entries to the ring positions ``committed .. committed + length - 1``."""
    for row in range(plan.rows):
        slot, first = int(plan.slots[row]), int(plan.committed[row])
        if slot < 0:
            continue
        for t in range(int(plan.lengths[row])):
            at = (first + t) % store.spec.ring.ring_len
            store.k[slot, :, at] = block.k[row, t].to(store.k.dtype)
            store.v[slot, :, at] = block.v[row, t].to(store.v.dtype)
            store.g[slot, :, at] = block.g[row, t].float()
            store.w[slot, :, at] = block.w[row, t].float()


def compact_(store: LayerStore, plan: BlockPlan, paths: Sequence[tuple[int, ...] | None]) -> None:
    """Move each row's kept entries to the front of its block; it loads before it stores."""
    ring_len = store.spec.ring.ring_len
    for row, path in enumerate(paths):
        slot, first = int(plan.slots[row]), int(plan.committed[row])
        if slot < 0 or not path:
            continue
        source = [(first + node) % ring_len for node in path]
        target = [(first + i) % ring_len for i in range(len(path))]
        for ring in (store.k, store.v, store.g, store.w):
            ring[slot][:, target] = ring[slot][:, source]


def fold_(store: LayerStore, plan: BlockPlan) -> None:
    """Bring every row's planes from ``folded`` to ``committed``, boundary by boundary.

    Rewrites the planes and scales of each value tile that reaches a boundary. The fold is serial,
    in fp32, from the raw ring and both planes, so neither the ring nor the read depth leaves a
    trace in the checkpoint.
    """
    ring = store.spec.ring
    for row in range(plan.rows):
        slot = int(plan.slots[row])
        if slot < 0:
            continue
        base, old, new = int(plan.base[row]), int(plan.folded[row]), int(plan.committed[row])
        at = [ring.folded_to(i, base, old) for i in range(ring.tiles)]
        due = [
            (stop, i)
            for i in range(ring.tiles)
            for stop in ring.boundaries(i, at[i], ring.folded_to(i, base, max(old, new)))
        ]
        for stop, tile in sorted(due):
            state = decode_tile(store, slot, tile, ReadDepth.FULL)
            entries = gather(store, slot, at[tile], stop, torch.float32)
            rows = tile_rows(tile, ring.tiles, store.spec.layer.value_dim)
            state = fold_serial(state, entries.rows(rows), store.spec.layer.write)
            _encode_tile_(store, slot, tile, state)
            at[tile] = stop


def _encode_tile_(store: LayerStore, slot: int, tile: int, state: Tensor) -> None:
    """Overwrite a tile's planes and scales with a ``[HV, rows, K]`` fp32 state."""
    rows = tile_rows(tile, store.spec.ring.tiles, store.spec.layer.value_dim)
    columns = None
    if store.columns is not None:
        columns = column_scale(column_amax(state))
        store.columns[slot, :, tile] = columns
    fresh, planes = encode(state, store.spec.format, columns), _tile_planes(store, slot, rows)
    planes.high.copy_(fresh.high)
    if planes.low is not None and fresh.low is not None:
        planes.low.copy_(fresh.low)
    if planes.row_scale is not None and fresh.row_scale is not None:
        planes.row_scale.copy_(fresh.row_scale)


def _tile_planes(store: LayerStore, slot: int, rows: range) -> Planes:
    whole, cut = store.planes(slot), slice(rows.start, rows.stop)
    low = None if whole.low is None else whole.low[:, cut]
    row_scale = None if whole.row_scale is None else whole.row_scale[:, cut]
    return Planes(whole.high[:, cut], low, row_scale)


def decode_tile(store: LayerStore, slot: int, tile: int, depth: ReadDepth) -> Tensor:
    """Return the ``[HV, rows, K]`` fp32 tile as a read of ``depth`` sees it."""
    rows = tile_rows(tile, store.spec.ring.tiles, store.spec.layer.value_dim)
    columns = None if store.columns is None else store.columns[slot, :, tile]
    return decode(_tile_planes(store, slot, rows), store.spec.format, depth, columns)


def step_(
    store: LayerStore,
    plan: BlockPlan,
    block: Block,
    depth: Sequence[ReadDepth],
    out: Tensor,
    compute: torch.dtype = torch.float32,
) -> None:
    """Fold what is due, append the block's entries and write its outputs.

    Rewrites planes that reach a boundary, the ring positions of the block, and ``out``.

    Args:
        store: Layer tensors.
        plan: Rows of this forward.
        block: Inputs, a chain or a tree.
        depth: Read depth of each row.
        out: ``[B, T, HV, V]``; pad rows and tokens past a row's length get 0.
        compute: dtype of the arithmetic after decoding; fp64 gives the oracle of an error budget.
    """
    fold_(store, plan)
    append_(store, plan, block)
    out.zero_()
    for row in range(plan.rows):
        if plan.slots[row] < 0:
            continue
        if store.spec.exact and compute is torch.float32:
            _read_row_exactly(store, plan, block, row, out[row])
        else:
            _read_row(store, plan, block, row, depth[row], out[row], compute)


def _read_row(
    store: LayerStore,
    plan: BlockPlan,
    block: Block,
    row: int,
    depth: ReadDepth,
    out: Tensor,
    compute: torch.dtype,
) -> None:
    ring, layer = store.spec.ring, store.spec.layer
    slot, base, first = (int(x[row]) for x in (plan.slots, plan.base, plan.committed))
    folded = max(int(plan.folded[row]), first)
    q = expand_heads(block.q[row].to(compute), layer.value_heads, 1)
    for tile in range(ring.tiles):
        at = ring.folded_to(tile, base, folded)
        rows = tile_rows(tile, ring.tiles, layer.value_dim)
        state = decode_tile(store, slot, tile, depth).to(compute)
        length = int(plan.lengths[row])
        entries = gather(store, slot, at, first + length, compute).rows(rows)
        for t in range(length):
            path = list(range(first - at)) + [first - at + n for n in plan.ancestors(row, t)]
            x, y = pull_back(q[t], entries.select(path), layer.write)
            y = torch.einsum("hvk,hk->hv", state, x) + y
            out[t, :, rows.start : rows.stop] = y.to(out.dtype)


def _read_row_exactly(
    store: LayerStore, plan: BlockPlan, block: Block, row: int, out: Tensor
) -> None:
    # one tile, fp32 planes: the operations, and the order, of standard_ along every path
    layer, length = store.spec.layer, int(plan.lengths[row])
    slot, base, first = (int(x[row]) for x in (plan.slots, plan.base, plan.committed))
    folded = max(int(plan.folded[row]), first)
    state = materialise(store, slot, base, folded, first)
    entries = gather(store, slot, first, first + length, torch.float32)
    q = expand_heads(block.q[row].float(), layer.value_heads, 1)
    states = {-1: state}
    for t in range(length):
        parent = t - 1 if plan.parents is None else int(plan.parents[row, t])
        states[t] = write_entry(states[parent], entries, t, layer.write)
        out[t] = torch.einsum("hvk,hk->hv", states[t], q[t]).to(out.dtype)


def materialise(store: LayerStore, slot: int, base: int, folded: int, position: int) -> Tensor:
    """Return the ``[HV, V, K]`` fp32 state at ``position``; the slot is untouched.

    Args:
        store: Layer tensors.
        slot: Slot index.
        base: The slot's position at admission.
        folded: Committed count the planes were brought to.
        position: Absolute token count, not before any tile's checkpoint.
    """
    ring, tiles = store.spec.ring, []
    for tile in range(ring.tiles):
        at = ring.folded_to(tile, base, folded)
        rows = tile_rows(tile, ring.tiles, store.spec.layer.value_dim)
        state = decode_tile(store, slot, tile, ReadDepth.FULL)
        entries = gather(store, slot, at, position, torch.float32).rows(rows)
        tiles.append(fold_serial(state, entries, store.spec.layer.write))
    return torch.cat(tiles, dim=1)


def admit_(store: LayerStore, slot: int, state: Tensor) -> None:
    """Overwrite a slot's planes and scales with an encoded ``[HV, V, K]`` state."""
    tiles = store.spec.ring.tiles
    for tile in range(tiles):
        rows = tile_rows(tile, tiles, store.spec.layer.value_dim)
        _encode_tile_(store, slot, tile, state[:, rows.start : rows.stop].float())


def clear_(store: LayerStore, slot: int) -> None:
    """Overwrite a slot's planes and scales with the zero state; bits are those of :func:`admit_`.

    Every element of it is the same, so nothing is encoded but one, on the host.
    """
    one = torch.zeros(1, 1)
    columns = column_scale(column_amax(one)) if FORMATS[store.spec.format].scaled else None
    planes = encode(one, store.spec.format, columns)
    pairs = (
        (store.high, planes.high),
        (store.low, planes.low),
        (store.row_scale, planes.row_scale),
        (store.columns, columns),
    )
    for target, plane in pairs:
        if target is not None and plane is not None:
            target[slot].fill_(plane.item())


def standard_(
    state: Tensor,
    plan: BlockPlan,
    block: Block,
    write: Write,
    out: Tensor,
    targets: NDArray[np.int64] | None = None,
) -> None:
    """Run the standard step: rewrite each row's state ``[S, HV, V, K]`` token by token.

    With ``targets`` ``[B, T]`` the state after token t of row b is written to slot
    ``targets[b, t]`` instead, and the next token continues from there. The state may be fp32 or
    bf16 (rounded after every token, before it is read again); the output is computed from the state
    before that rounding.
    """
    out.zero_()
    hv = state.shape[1]
    for row in range(plan.rows):
        slot, length = int(plan.slots[row]), int(plan.lengths[row])
        if slot < 0:
            continue
        g = block.g[row] if block.g.ndim == 4 else block.g[row].unsqueeze(-1)
        k, q = (expand_heads(x[row].float(), hv, 1) for x in (block.k, block.q))
        entries = Entries(k, block.v[row].float(), g.float(), block.w[row].float())
        for t in range(length):
            fresh = write_entry(state[slot].float(), entries, t, write)
            out[row, t] = torch.einsum("hvk,hk->hv", fresh, q[t]).to(out.dtype)
            slot = slot if targets is None else int(targets[row, t])
            state[slot] = fresh.to(state.dtype)
