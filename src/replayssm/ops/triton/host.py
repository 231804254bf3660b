"""Launches: one layer's step, fold and standard step on a device that Triton serves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.errors import UnsupportedError
from replayssm.ops.triton.launch import Launch, choose_launch, is_parallel, power_of_two
from replayssm.ops.triton.pullback import chain_kernel, products_kernel
from replayssm.ops.triton.step import due_kernel, fold_kernel, read_kernel, step_kernel
from replayssm.types import Decay, Write

if TYPE_CHECKING:
    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore
    from replayssm.types import Block


@dataclass(frozen=True, slots=True)
class Fused:
    """What a family does around the recurrence, done inside the kernels.

    Attributes:
        gates: ``"none"`` (g and w are given), ``"dt"`` (Mamba-2: g holds dt before bias and
            softplus, w is not read) or ``"beta"`` (Gated DeltaNet and KDA: g before bias and
            softplus, w before the sigmoid).
        rate: ``[HV]`` exp(A_log).
        bias: ``[HV]`` (``[HV, K]`` for channel decays).
        skip: ``[HV]`` D, added as D v.
        z: ``[B, T, HV, V]``: outputs are multiplied by silu(z).
        norm: Divide q and k by their L2 norm.
        norm_eps: Added to the sum of squares.
        q_scale: Multiplies q, after the norm.
        dt_limit: Bounds of Mamba-2's dt.
    """

    gates: str = "none"
    rate: Tensor | None = None
    bias: Tensor | None = None
    skip: Tensor | None = None
    z: Tensor | None = None
    norm: bool = False
    norm_eps: float = 1e-6
    q_scale: float = 1.0
    dt_limit: tuple[float, float] = (0.0, float("inf"))


PLAIN = Fused()
# value heads and tokens that a warp of the pull-back carries: a matrix unit's rows
LINES = 16


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel launch, not made yet: so that it can also be compiled for a device not here.

    Attributes:
        kernel: The Triton function.
        grid: Programs.
        args: Run-time arguments, in order.
        constants: Compile-time arguments by name.
        warps: Warps of a program.
        registers: Most registers of a thread; 0 leaves it to the compiler.
        early: Start while the kernel before it still runs (it waits by itself).
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    registers: int = 0
    early: bool = False

    def run(self) -> None:
        """Launch it."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": 1}
        if self.registers:
            options["maxnreg"] = self.registers
        if self.early:
            options["launch_pdl"] = True
        self.kernel[self.grid](*self.args, **self.constants, **options)


@dataclass(frozen=True, slots=True)
class _Pulled:
    """What the pull-back left: entry weights and the vectors that the read takes."""

    call: Call
    coef: Tensor
    x: Tensor
    strides: tuple[int, int, int, int]
    scale: Tensor | None


def step_(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused = PLAIN,
    launch: Launch | None = None,
) -> None:
    """Fold what is due, append the block's entries and write its outputs.

    Mutates planes that reach a boundary, the rings at the block's positions, and ``out``.

    Args:
        store: Layer tensors.
        plan: Rows, on the layer's device.
        block: ``[B, T, ...]`` inputs; the last two dimensions of q, k and v contiguous.
        out: ``[B, T, HV, V]``, the last two dimensions contiguous.
        fused: Gates, norms, skip and output gate to do inside the kernels.
        launch: Block sizes; the device's table decides when None.
    """
    if plan.rows:
        calls = step_calls(store, plan, block, out, fused, launch)
        if len(calls) > 2 and out.is_cuda:
            _run_beside(*calls)
            return
        for call in calls:
            call.run()


def _run_beside(pull: Call, due: Call, read: Call) -> None:
    """Run the due tiles' kernel beside the read, on a stream of its own."""
    main = torch.cuda.current_stream()
    side = _side_stream(main.device)
    pull.run()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        due.run()
    read.run()
    main.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def step_calls(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused = PLAIN,
    launch: Launch | None = None,
) -> list[Call]:
    """Return the launches of :func:`step_`, in order; arguments are its own."""
    spec = store.spec
    how = launch or choose_launch(spec, plan.rows, block.tokens, store.high.device)
    pulled = _pull_back(store, plan, block, fused, how)
    at, ring = spec.layer, spec.ring
    chunks = at.value_dim // ring.tiles
    grid = (plan.rows * at.value_heads, ring.tiles * -(-chunks // how.chunk))
    none = store.high
    z = fused.z
    tensors = (
        plan.counts, out, pulled.x, _or(pulled.scale, none), pulled.coef, _or(z, none),
        *_planes(store),
    )  # fmt: skip
    numbers = (
        plan.rows, *out.stride()[:2], *((0, 0) if z is None else z.stride()[:2]), *pulled.strides,
    )  # fmt: skip
    strides = _slot_strides(store)
    args = (*tensors, store.k, store.v, store.g, store.w, *numbers, *strides)
    constants = {
        "T": block.tokens, "NE": pulled.coef.shape[-1], "DEPTH": plan.depth,
        "SHARED_X": pulled.scale is not None, "DIGITS": _takes_digits(store, out),
        "HAS_Z": z is not None, "BR": how.read_rows, **_geometry(store), **_fold_blocks(store, how),
    }  # fmt: skip
    if not how.fold_programs:
        return [pulled.call, Call(step_kernel, grid, args, constants, how.warps)]
    # the rows of a tile share its column scales: one program folds them all
    fold_chunk = chunks if store.columns is not None else how.fold_chunk
    folding = {**constants, "CHUNK": fold_chunk, "BC": power_of_two(fold_chunk)}
    folding["BR"] = min(how.read_rows, folding["BC"])
    early = _has_asm(out.device)
    folding["WAITS"] = early
    reading = {n: v for n, v in constants.items() if n not in ("DELTA", "CHANNEL", "BF")}
    read_args = (*tensors, store.v, *numbers, *strides[:4], strides[5])
    return [
        pulled.call,
        Call(due_kernel, (how.fold_programs,), (plan.due, how.fold_programs, *args), folding,
             how.fold_warps, how.fold_registers, early),
        Call(read_kernel, grid, read_args, reading, how.warps),
    ]  # fmt: skip


def fold_(store: LayerStore, plan: DevicePlan, launch: Launch | None = None) -> None:
    """Bring every row's planes to its newest boundary; mutates planes and scales only."""
    if plan.rows:
        fold_call(store, plan, launch).run()


def fold_call(store: LayerStore, plan: DevicePlan, launch: Launch | None = None) -> Call:
    """Return the launch of :func:`fold_`."""
    spec = store.spec
    how = launch or choose_launch(spec, plan.rows, 1, store.high.device)
    chunks = spec.layer.value_dim // spec.ring.tiles
    grid = (plan.rows * spec.layer.value_heads, spec.ring.tiles * -(-chunks // how.chunk))
    args = (
        plan.counts, *_planes(store), store.k, store.v, store.g, store.w, plan.rows,
        *_slot_strides(store),
    )  # fmt: skip
    constants = {**_geometry(store), **_fold_blocks(store, how)}
    return Call(fold_kernel, grid, args, constants, how.warps)


def check_served(store: LayerStore) -> None:
    """Refuse a layer that the kernels cannot serve."""
    at, ring = store.spec.layer, store.spec.ring
    if at.value_dim % ring.tiles:
        raise UnsupportedError(
            f"impl=triton: value_dim ({at.value_dim}) must be a multiple of tiles ({ring.tiles})"
        )
    if store.spec.exact:
        raise UnsupportedError("impl=triton: exact=True is served by the CPU and the reference")


def _pull_back(
    store: LayerStore, plan: DevicePlan, block: Block, fused: Fused, how: Launch
) -> _Pulled:
    spec, at, ring = store.spec, store.spec.layer, store.spec.ring
    rows, tokens = plan.rows, block.tokens
    entries = max(16, power_of_two(ring.window - 1 + ring.keep + tokens))
    device = store.high.device
    coef = torch.empty(rows, at.value_heads, tokens, entries, device=device)
    is_scalar = at.decay is Decay.SCALAR
    none = store.high
    x, scale = none, none
    if is_parallel(spec):
        scale = torch.empty(rows, at.value_heads, tokens, ring.tiles, device=device)
        strides = (block.q.stride(0), at.key_dim, 0, block.q.stride(1))
    else:
        x = torch.empty(rows, at.value_heads, ring.tiles, tokens, at.key_dim, device=device)
        strides = (x.stride(0), x.stride(1), x.stride(2), x.stride(3))
    args = (
        plan.counts, _or(plan.ancestors, none), block.q, block.k, block.v, block.g, block.w,
        _or(fused.rate, none), _or(fused.bias, none), _or(fused.skip, none),
        store.k, store.v, store.g, store.w, coef, scale, x,
        rows, *block.q.stride()[:2], *block.k.stride()[:2], *block.v.stride()[:2],
        *block.g.stride()[:2], *block.w.stride()[:2],
        store.k.stride(0), store.v.stride(0), store.g.stride(0), store.w.stride(0),
        fused.q_scale, *fused.dt_limit, fused.norm_eps,
    )  # fmt: skip
    constants = {
        "T": tokens, "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim,
        "R": ring.ring_len, "NE": entries, "WINDOW": ring.window, "KEEP": ring.keep,
        "TILES": ring.tiles, "GATES": fused.gates, "SKIP": fused.skip is not None,
        "NORM": fused.norm, "DELTA": at.write is Write.DELTA, "CHANNEL": not is_scalar,
        "ASM": _has_asm(device),
        "BK": power_of_two(at.key_dim), "BV": power_of_two(at.value_dim),
    }  # fmt: skip
    # one query of a delta layer is carried back faster than its products of keys are made
    if is_parallel(spec) or (is_scalar and tokens > 1):
        lines = at.heads_per_key * tokens
        constants["BL"] = min(max(power_of_two(lines), LINES), LINES if tokens == 1 else 4 * LINES)
        kernel, grid = products_kernel, (rows, at.key_heads, -(-lines // constants["BL"]))
    else:
        heads = at.heads_per_key if is_scalar else 1
        constants["BL"] = power_of_two(heads * tokens)
        kernel, grid = chain_kernel, (rows, at.value_heads // heads)
    call = Call(kernel, grid, args, constants, how.pull_warps, how.pull_registers)
    shared = is_parallel(spec)
    return _Pulled(call, coef, block.q if shared else x, strides, scale if shared else None)


def _planes(store: LayerStore) -> tuple[Tensor, ...]:
    none = store.high
    return (none, _or(store.low, none), _or(store.row_scale, none), _or(store.columns, none))


def _slot_strides(store: LayerStore) -> tuple[int, ...]:
    tensors = (*_planes(store), store.k, store.v, store.g, store.w)
    return tuple(x.stride(0) for x in tensors)


def _geometry(store: LayerStore) -> dict[str, Any]:
    at, ring = store.spec.layer, store.spec.ring
    return {
        "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim, "V": at.value_dim,
        "R": ring.ring_len, "WINDOW": ring.window, "KEEP": ring.keep, "TILES": ring.tiles,
        "FORMAT": store.spec.format.value, "DELTA": at.write is Write.DELTA,
        "CHANNEL": at.decay is Decay.CHANNEL, "ASM": _has_asm(store.high.device),
    }  # fmt: skip


def _fold_blocks(store: LayerStore, how: Launch) -> dict[str, int]:
    return {
        "CHUNK": how.chunk, "BF": how.fold_rows, "BC": power_of_two(how.chunk),
        "BK": power_of_two(store.spec.layer.key_dim),
    }  # fmt: skip


def _takes_digits(store: LayerStore, out: Tensor) -> bool:
    # 15 bits of x are far under the rounding of a 16-bit output, and too few for fp32 ones
    words = store.spec.layer.key_dim % 4 == 0
    return store.columns is not None and out.dtype.itemsize == 2 and words


def _has_asm(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x
