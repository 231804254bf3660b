"""Launches of a step with a pull-back, and of the fold that goes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.ops.triton.call import (
    PLAIN,
    Call,
    Fused,
    has_asm,
    overlaps,
    power_of_two,
    present,
    strides,
)
from replayssm.ops.triton.kernels.products import products_kernel
from replayssm.ops.triton.kernels.pullback import chain_kernel
from replayssm.ops.triton.kernels.step import due_kernel, fold_kernel, read_kernel, step_kernel
from replayssm.ops.triton.kernels.whole import whole_kernel
from replayssm.ops.triton.launch import Launch, choose_launch, is_parallel
from replayssm.types import Decay, ReadDepth, Write

if TYPE_CHECKING:
    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore, StorageSpec
    from replayssm.types import Block


# of a warp of the pull-back of additive writes: each carries a token of a value head
LANES = 32


@dataclass(frozen=True, slots=True)
class _Pulled:
    """What the pull-back left: entry weights and the vectors that the read takes."""

    call: Call
    coef: Tensor
    x: Tensor
    strides: tuple[int, int, int, int]
    scale: Tensor | None


def step_calls(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused = PLAIN,
    launch: Launch | None = None,
    listed: bool = False,
) -> list[Call]:
    """Return the launches of a step with a pull-back, in order; arguments are those of host.step_.

    ``listed``: the pull-back is that of the rows which are due alone.
    """
    spec = store.spec
    how = launch or choose_launch(spec, plan.rows, block.tokens, store.high.device)
    if how.whole and block.tokens == 1 and is_parallel(spec):
        return _whole_calls(store, plan, block, out, fused, how)
    pulled = _pull_back(store, plan, block, fused, how, listed)
    none = store.high
    z = fused.z
    tensors = (
        plan.counts, out, pulled.x, present(pulled.scale, none), pulled.coef, present(z, none),
        *_planes(store),
    )  # fmt: skip
    numbers = (
        plan.rows, *strides(out, present(z, out)), *pulled.strides,
    )  # fmt: skip
    slots = _slot_strides(store)
    args = (*tensors, store.k, store.v, store.g, store.w, *numbers, *slots)
    constants = {
        "T": block.tokens, "NE": pulled.coef.shape[-1], "DEPTH": plan.depth,
        "SHARED_X": pulled.scale is not None, "DIGITS": _takes_digits(store, out),
        "HAS_Z": z is not None, "BR": _rows_read(store, plan, how), **_geometry(store),
        **_fold_blocks(store, how, how.chunk),
    }  # fmt: skip
    early = overlaps(out.device)
    reads_early = early and how.early_read
    constants["WAITS"] = reads_early
    if not how.fold_programs:
        grid = _grid(store, plan.rows, constants["CHUNK"])
        step = Call(step_kernel, grid, args, constants, how.warps, early=reads_early)
        return [pulled.call, step]
    folding = {**constants, **_fold_blocks(store, how, how.fold_chunk), "WAITS": early}
    folding = {n: v for n, v in folding.items() if n not in ("DIGITS", "BR")}
    reading = {n: v for n, v in constants.items() if n not in ("DELTA", "CHANNEL", "BF")}
    reading |= {"CHUNK": how.chunk, "BC": power_of_two(how.chunk)}
    grid = _grid(store, plan.rows, how.chunk)
    read_args = (*tensors, store.v, *numbers, *slots[:4], slots[5])
    return [
        pulled.call,
        Call(due_kernel, (how.fold_programs,), (plan.due, how.fold_programs, *args), folding,
             how.fold_warps, how.fold_registers, early),
        Call(read_kernel, grid, read_args, reading, how.warps, early=reads_early),
    ]  # fmt: skip


def fold_call(store: LayerStore, plan: DevicePlan, launch: Launch | None = None) -> Call:
    """Return the launch of a fold that is no one pass."""
    spec = store.spec
    how = launch or choose_launch(spec, plan.rows, 1, store.high.device)
    args = (
        plan.counts, *_planes(store), store.k, store.v, store.g, store.w, plan.rows,
        *_slot_strides(store),
    )  # fmt: skip
    constants = {**_geometry(store), **_fold_blocks(store, how, how.chunk)}
    grid = _grid(store, plan.rows, constants["CHUNK"])
    warps = how.fold_warps if how.fold_programs else how.warps
    return Call(fold_kernel, grid, args, constants, warps)


def _pull_back(
    store: LayerStore, plan: DevicePlan, block: Block, fused: Fused, how: Launch, listed: bool
) -> _Pulled:
    spec, at, ring = store.spec, store.spec.layer, store.spec.ring
    rows, tokens = plan.rows, block.tokens
    entries = _padded_entries(spec, tokens)
    device = store.high.device
    coef = torch.empty(rows, at.value_heads, tokens, entries, device=device)
    is_scalar = at.decay is Decay.SCALAR
    none = store.high
    x, scale = none, none
    if is_parallel(spec):
        scale = torch.empty(rows, at.value_heads, tokens, ring.tiles, device=device)
        x_strides = (block.q.stride(0), at.key_dim, 0, block.q.stride(1))
    else:
        x = torch.empty(rows, at.value_heads, ring.tiles, tokens, at.key_dim, device=device)
        x_strides = (x.stride(0), x.stride(1), x.stride(2), x.stride(3))
    args = (
        plan.counts, plan.ancestors, block.q, block.k, block.v, block.g, block.w,
        present(fused.rate, none), present(fused.bias, none), present(fused.skip, none),
        store.k, store.v, store.g, store.w, coef, scale, x,
        rows, *strides(block.q, block.k, block.v, block.g, block.w),
        store.k.stride(0), store.v.stride(0), store.g.stride(0), store.w.stride(0),
        fused.q_scale, *fused.dt_limit, fused.norm_eps,
    )  # fmt: skip
    constants = {
        "T": tokens, "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim,
        "R": ring.ring_len, "NE": entries, "WINDOW": ring.window, "KEEP": ring.keep,
        "TILES": ring.tiles, "GATES": fused.gates, "SKIP": fused.skip is not None,
        "NORM": fused.norm, "DELTA": at.write is Write.DELTA, "CHANNEL": not is_scalar,
        "ASM": has_asm(device), "EARLY": overlaps(device),
        "BK": power_of_two(at.key_dim), "BV": power_of_two(at.value_dim),
    }  # fmt: skip
    if is_parallel(spec):
        lanes = max(LANES * how.pull_warps, power_of_two(tokens))
        # a token needs what its program appended of those before it: value heads stay whole
        held = lanes // tokens
        grid = (rows, at.key_heads, -(-at.heads_per_key // held))
        products = torch.empty(math.prod(grid) * tokens * (entries + 1), device=device)
        args = (*args[:16], products, *args[17:])
        constants = {n: x for n, x in constants.items() if n not in ("DELTA", "CHANNEL")}
        kernel, constants["LINES"], constants["BL"] = products_kernel, held * tokens, lanes
    else:
        heads = at.heads_per_key if is_scalar else 1
        constants["BL"] = power_of_two(heads * tokens)
        kernel, grid = chain_kernel, (rows, at.value_heads // heads, 1)
        args, constants["LISTED"] = (plan.due, *args), listed
    call = Call(kernel, grid, args, constants, how.pull_warps, how.pull_registers)
    shared = is_parallel(spec)
    return _Pulled(call, coef, block.q if shared else x, x_strides, scale if shared else None)


def _whole_calls(
    store: LayerStore, plan: DevicePlan, block: Block, out: Tensor, fused: Fused, how: Launch
) -> list[Call]:
    """Return the launches of a step of one token, which need nothing of each other."""
    args, constants = _whole_step(store, plan, block, out, fused, how)
    if not how.fold_programs:
        grid = _grid(store, plan.rows, constants["CHUNK"])
        return [Call(whole_kernel, grid, args, {**constants, "WHICH": "all"}, how.warps)]
    due = {**constants, **_fold_blocks(store, how, how.fold_chunk), "WHICH": "due"}
    grid = _grid(store, plan.rows, due["CHUNK"])
    return [
        Call(whole_kernel, grid, args, due, how.fold_warps),
        rest_call(store, plan, block, out, fused, how),
    ]


def rest_call(
    store: LayerStore, plan: DevicePlan, block: Block, out: Tensor, fused: Fused, how: Launch
) -> Call:
    """Return the launch of a step of one token for the rows that fold nothing."""
    args, constants = _whole_step(store, plan, block, out, fused, how)
    chunk = min(how.chunk, _rows_read(store, plan, how))
    rest = {**constants, "CHUNK": chunk, "BC": power_of_two(chunk), "WHICH": "rest"}
    return Call(whole_kernel, _grid(store, plan.rows, chunk), args, rest, how.warps)


def _whole_step(
    store: LayerStore, plan: DevicePlan, block: Block, out: Tensor, fused: Fused, how: Launch
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what every launch of a step of one token takes."""
    none, z = store.high, fused.z
    args = (
        plan.counts, out, block.q, block.k, block.v, block.g, block.w,
        present(fused.rate, none), present(fused.bias, none), present(fused.skip, none),
        present(z, none), *_planes(store), store.k, store.v, store.g, store.w,
        plan.rows, out.stride(0), present(z, out).stride(0),
        *(x.stride(0) for x in (block.q, block.k, block.v, block.g, block.w)),
        *_slot_strides(store), fused.q_scale, *fused.dt_limit, fused.norm_eps,
    )  # fmt: skip
    constants = {
        "NE": _padded_entries(store.spec, 1), "DEPTH": plan.depth, "GATES": fused.gates,
        "SKIP": fused.skip is not None, "NORM": fused.norm, "DIGITS": _takes_digits(store, out),
        "HAS_Z": z is not None, **_geometry(store), **_fold_blocks(store, how, how.chunk),
    }  # fmt: skip
    return args, {n: x for n, x in constants.items() if n not in ("DELTA", "CHANNEL")}


def _padded_entries(spec: StorageSpec, tokens: int) -> int:
    """Return a power of two of entries that holds all that a block's token can see."""
    return max(16, power_of_two(spec.ring.window - 1 + spec.ring.keep + tokens))


def _planes(store: LayerStore) -> tuple[Tensor, ...]:
    none = store.high
    return (
        none,
        present(store.low, none),
        present(store.row_scale, none),
        present(store.columns, none),
    )


def _slot_strides(store: LayerStore) -> tuple[int, ...]:
    tensors = (*_planes(store), store.k, store.v, store.g, store.w)
    return tuple(x.stride(0) for x in tensors)


def _geometry(store: LayerStore) -> dict[str, Any]:
    at, ring = store.spec.layer, store.spec.ring
    return {
        "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim,
        "R": ring.ring_len, "WINDOW": ring.window, "KEEP": ring.keep, "TILES": ring.tiles,
        "FORMAT": store.spec.format.value, "DELTA": at.write is Write.DELTA,
        "CHANNEL": at.decay is Decay.CHANNEL, "ASM": has_asm(store.high.device),
    }  # fmt: skip


def _fold_blocks(store: LayerStore, how: Launch, chunk: int) -> dict[str, int]:
    spec = store.spec
    if store.columns is not None:
        # the rows of a tile share its column scales: one program folds them all
        chunk = spec.layer.value_dim // spec.ring.tiles
    return {
        "CHUNK": chunk, "BF": how.fold_rows, "BC": power_of_two(chunk),
        "BK": power_of_two(spec.layer.key_dim),
    }  # fmt: skip


def _grid(store: LayerStore, rows: int, chunk: int) -> tuple[int, int]:
    """Return the programs of rows x value heads, chunks of value rows."""
    at, ring = store.spec.layer, store.spec.ring
    return rows * at.value_heads, ring.tiles * -(-(at.value_dim // ring.tiles) // chunk)


def _rows_read(store: LayerStore, plan: DevicePlan, how: Launch) -> int:
    """Return how many value rows a read takes at a time."""
    joins = store.low is not None and plan.depth != ReadDepth.HIGH
    return min(how.read_rows, how.full_rows) if joins else how.read_rows


def _takes_digits(store: LayerStore, out: Tensor) -> bool:
    # 15 bits of x are far under the rounding of a 16-bit output, and too few for fp32 ones
    words = store.spec.layer.key_dim % 4 == 0
    return store.columns is not None and out.dtype.itemsize == 2 and words
