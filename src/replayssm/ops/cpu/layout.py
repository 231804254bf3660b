"""Where the tensors of one call are: addresses and strides in bytes, and where scratch is.

Plain integers in named tuples, so that a kernel compiles once for every dtype, stride and format.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from replayssm.ops.cpu.common import (
    FMT_BF16,
    FMT_F32,
    FMT_Q16,
    FMT_Q24,
    FMT_S32,
    IS_BF16,
    IS_F16,
    IS_F32,
)
from replayssm.ops.cpu.vector import LANES
from replayssm.types import Decay, Format, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from replayssm.storage import LayerStore, StorageSpec
    from replayssm.types import Block

KIND = {torch.float32: IS_F32, torch.bfloat16: IS_BF16, torch.float16: IS_F16}
CODE = {
    Format.F32: FMT_F32,
    Format.S32: FMT_S32,
    Format.Q24: FMT_Q24,
    Format.Q16: FMT_Q16,
    Format.BF16: FMT_BF16,
}
# value heads of one key head that share a work item: their keys are gathered once
HEADS_PER_ITEM = 8
# queries that are pulled back together: an entry is loaded once for all of them
GROUP = 4


class Geometry(NamedTuple):
    """Shape and kind of a layer; ``*_row`` are bytes of one fp32 row of scratch, in whole lanes."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    key_row: int
    value_row: int
    entry_row: int
    window_row: int
    is_delta: int
    per_channel: int
    format: int
    is_scaled: int
    window: int
    keep: int
    ring_len: int


class PlanesAt(NamedTuple):
    """Planes and scales; strides over slots, heads, rows (columns: slots, heads)."""

    high: int
    high_slot: int
    high_head: int
    high_row: int
    low: int
    low_slot: int
    low_head: int
    low_row: int
    scale: int
    scale_slot: int
    scale_head: int
    columns: int
    columns_slot: int
    columns_head: int


class RingsAt(NamedTuple):
    """Rings; strides over slots, heads and entries. ``kind`` is the element type of k and v."""

    k: int
    k_slot: int
    k_head: int
    k_entry: int
    v: int
    v_slot: int
    v_head: int
    v_entry: int
    g: int
    g_slot: int
    g_head: int
    g_entry: int
    w: int
    w_slot: int
    w_head: int
    w_entry: int
    kind: int


class BlockAt(NamedTuple):
    """Inputs and outputs of a block; strides over rows, tokens and heads, and element types."""

    q: int
    q_row: int
    q_token: int
    q_head: int
    q_kind: int
    k: int
    k_row: int
    k_token: int
    k_head: int
    k_kind: int
    v: int
    v_row: int
    v_token: int
    v_head: int
    v_kind: int
    g: int
    g_row: int
    g_token: int
    g_head: int
    g_kind: int
    w: int
    w_row: int
    w_token: int
    w_head: int
    w_kind: int
    out: int
    out_row: int
    out_token: int
    out_head: int
    out_kind: int
    tokens: int


class HeadAt(NamedTuple):
    """One value head of one slot, made inside kernels; strides over rows or entries."""

    high: int
    high_row: int
    low: int
    low_row: int
    scale: int
    columns: int
    v: int
    v_entry: int
    g: int
    g_entry: int
    w: int
    w_entry: int
    kind: int


class NextAt(NamedTuple):
    """Ring entries of the head that follows in the same row, made inside kernels; 0 where none."""

    k: int
    k_entry: int
    v: int
    g: int


class Scratch(NamedTuple):
    """One thread's scratch: byte offsets in the launcher, addresses inside kernels.

    N entries are at most the ring's length, W a window, T tokens of a block, in whole groups of
    queries for x, c and y; all fp32, rows in whole lanes. Where a head has one decay, ``decay``,
    ``before`` and ``after`` hold one an entry.
    """

    keys: int  # [N, K] keys of the entries, oldest first
    decay: int  # [N, K] exp(g)
    strength: int  # [N] w
    queries: int  # [T, K]
    x: int  # [T, K] pulled-back queries
    matches: int  # [T, N] k_j . q_t
    c: int  # [T, N] coefficient of every entry
    y: int  # [T, V] the entries' part of the output
    sums: int  # [T, V] the checkpoint's part of the output
    before: int  # [W, K] k_s decayed by the entries up to s
    after: int  # [W, K] k_s decayed by the entries behind s
    lower: int  # [W, W] row t: what every entry s > t sees of entry t
    values: int  # [W, 16] written values of 16 rows
    block: int  # [16, K] 16 decoded rows; [V, K] where column scales wait for all of them
    total: int  # [K] decay of the whole window
    column: int  # [K] column scales that are read
    inverse: int  # [K] reciprocals of the column scales that are written
    amax: int  # [K] column amax of the rows so far
    spare: int  # [K] takes what a query that does not see an entry would have got
    exact: int  # exact mode: as StandardAt, for N tokens


class StandardAt(NamedTuple):
    """State and scratch of a standard step; strides in bytes, then as :class:`Scratch`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    key_row: int
    value_row: int
    is_delta: int
    per_channel: int
    state: int
    state_slot: int
    state_head: int
    state_row: int
    kind: int
    key: int  # [T, K] k
    query: int  # [T, K] D q
    seen: int  # [T, K] D k
    decay: int  # [T, K] D
    value: int  # [T, V] v
    strength: int  # [T, 2] w and k . q
    y: int  # [T, V] outputs
    sums: int  # [8] row sums


def row_bytes(n: int) -> int:
    """Return the bytes of n fp32 numbers in whole lanes."""
    return -(-n // LANES) * LANES * 4


@lru_cache
def geometry_of(spec: StorageSpec) -> Geometry:
    """Return the geometry of a layer's store."""
    layer, ring = spec.layer, spec.ring
    return Geometry(
        key_heads=layer.key_heads,
        value_heads=layer.value_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        key_row=row_bytes(layer.key_dim),
        value_row=row_bytes(layer.value_dim),
        entry_row=row_bytes(ring.ring_len),
        window_row=row_bytes(ring.window),
        is_delta=int(layer.write is Write.DELTA),
        per_channel=int(layer.decay is Decay.CHANNEL),
        format=CODE[spec.format],
        is_scaled=int(spec.format in (Format.Q24, Format.Q16)),
        window=ring.window,
        keep=ring.keep,
        ring_len=ring.ring_len,
    )


@lru_cache
def scratch_of(at: Geometry, tokens: int, exact: int = 0) -> tuple[Scratch, int]:
    """Lay out one thread's scratch; return the offsets and the bytes in all.

    ``exact`` is what exact mode adds, in bytes.
    """
    entries, window, key = at.ring_len, at.window, at.key_row
    gates = (entries * key, window * key, window * key)
    if not at.per_channel:
        gates = (at.entry_row, at.window_row, at.window_row)
    rows = -(-at.value_dim // LANES) * LANES if at.is_scaled else LANES
    grouped = -(-tokens // GROUP) * GROUP
    sizes = (
        entries * key,
        gates[0],
        at.entry_row,
        tokens * key,
        grouped * key,
        tokens * at.entry_row,
        grouped * at.entry_row,
        grouped * at.value_row,
        tokens * at.value_row,
        *gates[1:],
        window * at.window_row,
        window * 4 * LANES,
        rows * key,
        *[key] * 5,
        exact,
    )
    *offsets, end = _offsets(sizes)
    return Scratch._make(offsets), end


def _offsets(sizes: Sequence[int]) -> list[int]:
    # starts of consecutive arrays, then the end of the last
    offsets = [0]
    for n in sizes:
        offsets.append(offsets[-1] + n)
    return offsets


def _at(x: Tensor | None, dims: int) -> tuple[int, ...]:
    if x is None:
        return (0,) * (dims + 1)
    size = x.element_size()
    return (x.data_ptr(), *[s * size for s in x.stride()[:dims]])


def planes_at(store: LayerStore) -> PlanesAt:
    """Locate a store's planes and scales."""
    return PlanesAt._make(
        (*_at(store.high, 3), *_at(store.low, 3), *_at(store.row_scale, 2), *_at(store.columns, 2))
    )


def rings_at(store: LayerStore) -> RingsAt:
    """Locate a store's rings."""
    k, v, g, w = (_at(x, 3) for x in (store.k, store.v, store.g, store.w))
    return RingsAt._make((*k, *v, *g, *w, KIND[store.spec.ring_dtype]))


def readable(x: Tensor, dims: int) -> Tensor:
    """Return x itself, or a copy where a kernel could not read it: fp64, or a strided last dim.

    A negated view counts as one: torch negates it when it is read.
    """
    x = x.resolve_neg() if x.dtype in KIND else x.float()
    return x.contiguous() if x.ndim > dims and x.stride(-1) != 1 else x


def block_at(block: Block, out: Tensor) -> tuple[BlockAt, list[Tensor]]:
    """Locate a block and its output; the list keeps converted inputs alive during the call."""
    fields = [readable(x, 3) for x in (block.q, block.k, block.v, block.g, block.w)]
    numbers = [n for x in (*fields, out) for n in (*_at(x, 3), KIND[x.dtype])]
    return BlockAt._make((*numbers, block.tokens)), fields


def standard_at(state: Tensor, block: Block, write: Write) -> tuple[StandardAt, int]:
    """Locate a standard state and lay out one thread's scratch; also return its bytes."""
    _, value_heads, value_dim, key_dim = state.shape
    heads = (block.q.shape[2], value_heads, key_dim, value_dim)
    rows = (row_bytes(key_dim), row_bytes(value_dim))
    kinds = (int(write is Write.DELTA), int(block.g.ndim == 4))
    offsets, size = _token_offsets(block.tokens, *rows)
    return StandardAt._make(
        (*heads, *rows, *kinds, *_at(state, 3), KIND[state.dtype], *offsets)
    ), size


@lru_cache
def exact_at(at: Geometry) -> tuple[StandardAt, int]:
    """Lay out exact mode's scratch for one head whose rows are decoded; also return its bytes."""
    rows, kinds = (at.key_row, at.value_row), (at.is_delta, at.per_channel)
    state = (0, 0, 0, at.key_row, IS_F32)
    offsets, size = _token_offsets(at.ring_len, *rows)
    return StandardAt._make((1, 1, at.key_dim, at.value_dim, *rows, *kinds, *state, *offsets)), size


def _token_offsets(tokens: int, key: int, value: int) -> tuple[list[int], int]:
    sizes = (*[tokens * key] * 4, tokens * value, row_bytes(2 * tokens), tokens * value, 4 * LANES)
    *offsets, end = _offsets(sizes)
    return offsets, end
