"""Launches of the standard step, of the convolution, and of commits on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.ops.triton.call import PLAIN, Call, Fused, power_of_two, present, strides
from replayssm.ops.triton.kernels.advance import advance_kernel
from replayssm.ops.triton.kernels.compact import compact_kernel
from replayssm.ops.triton.kernels.conv import conv_kernel
from replayssm.ops.triton.kernels.standard import standard_kernel
from replayssm.ops.triton.launch import StandardLaunch, choose_standard
from replayssm.types import Decay, LayerSpec, Write

if TYPE_CHECKING:
    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.ring import RingSpec
    from replayssm.storage import LayerStore
    from replayssm.types import Block

CONV_CHANNELS = 256


def standard_call(
    state: Tensor,
    layer: LayerSpec,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    targets: Tensor | None = None,
    fused: Fused = PLAIN,
    launch: StandardLaunch | None = None,
) -> Call:
    """Return the launch of the standard step.

    Args:
        state: ``[S, HV, V, K]``, dense but for the slots' stride.
        layer: Geometry.
        plan: Rows; slots and lengths are read.
        block: ``[B, T, ...]`` inputs, a chain; the last two dimensions of q, k, v contiguous.
        out: ``[B, T, HV, V]``.
        targets: ``[B, T]`` int64 slots that get the state after each token.
        fused: Gates, norms, skip and output gate to do inside.
        launch: Block sizes; the device's table decides when None.
    """
    how = launch or choose_standard(layer, state.dtype, plan.rows, block.tokens, state.device)
    args = (
        plan.counts, present(targets, plan.counts), out, state,
        block.q, block.k, block.v, block.g, block.w,
        present(fused.rate, out), present(fused.bias, out), present(fused.skip, out),
        present(fused.z, out), plan.rows, state.stride(0), *strides(out, present(fused.z, out)),
        *strides(block.q, block.k, block.v, block.g, block.w),
        fused.q_scale, *fused.dt_limit, fused.norm_eps,
    )  # fmt: skip
    constants = {
        "T": block.tokens, "H": layer.key_heads, "HV": layer.value_heads, "K": layer.key_dim,
        "V": layer.value_dim, "GATES": fused.gates, "SKIP": fused.skip is not None,
        "NORM": fused.norm, "DELTA": layer.write is Write.DELTA,
        "CHANNEL": layer.decay is Decay.CHANNEL, "HAS_Z": fused.z is not None,
        "SNAPSHOTS": targets is not None, "BR": how.rows, "BK": power_of_two(layer.key_dim),
    }  # fmt: skip
    grid = (plan.rows * layer.value_heads * -(-layer.value_dim // how.rows),)
    return Call(standard_kernel, grid, args, constants, how.warps)


def conv_call(
    ring: Tensor,
    plan: DevicePlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> Call:
    """Return the launch of a layer's convolution.

    Args:
        ring: ``[S, Rc, C]`` raw inputs; mutated.
        plan: Rows; slots, counts, lengths and parents are read.
        x: ``[B, T, C]`` raw inputs, channels contiguous.
        weight: ``[C, width]``, taps contiguous.
        bias: ``[C]`` or None.
        out: ``[B, T, C]``; mutated.
    """
    tokens, channels = x.shape[1:]
    args = (
        plan.counts, present(plan.parents, plan.counts), out, x, weight, present(bias, weight),
        ring, plan.rows, ring.stride(0), *strides(out, x), weight.stride(0),
    )  # fmt: skip
    constants = {
        "T": tokens, "C": channels, "RC": ring.shape[1], "WIDTH": weight.shape[1],
        "BIAS": bias is not None, "TREE": plan.parents is not None, "BC": CONV_CHANNELS,
    }  # fmt: skip
    return Call(conv_kernel, (plan.rows, -(-channels // CONV_CHANNELS)), args, constants, 2)


def advance_call(plan: DevicePlan, ring: RingSpec, accepted: Tensor) -> Call:
    """Return the launch that commits a forward and makes the plan that of the next one.

    Args:
        plan: Rows; counts and due tiles are mutated.
        ring: Ring sizes.
        accepted: ``[B]`` int64 entries to keep; that of a pad row is not read.
    """
    block = power_of_two(max(1, plan.rows * ring.tiles))
    constants = {"WINDOW": ring.window, "KEEP": ring.keep, "TILES": ring.tiles, "BLOCK": block}
    args = (plan.counts, plan.due, accepted, plan.rows)
    return Call(advance_kernel, (1,), args, constants, min(8, max(1, block // 128)))


def compact_call(store: LayerStore, plan: DevicePlan, paths: Tensor) -> Call:
    """Return the launch that moves kept entries of trees to the front of their blocks.

    Args:
        store: Layer tensors; rings are mutated at the block's positions.
        plan: Rows; slots and counts are read.
        paths: ``[B, T]`` int64 kept nodes of every row, oldest first, then -1.
    """
    at, ring, conv = store.spec.layer, store.spec.ring, store.conv
    channels, length = (0, 1) if conv is None else (conv.shape[2], conv.shape[1])
    tensors = (store.k, store.v, store.g, store.w, present(conv, store.k))
    args = (plan.counts, paths, *tensors, plan.rows, *(x.stride(0) for x in tensors))
    gates = 1 if at.decay is Decay.SCALAR else at.key_dim
    constants = {
        "T": paths.shape[1], "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim,
        "V": at.value_dim, "GATES": gates, "R": ring.ring_len, "C": channels, "RC": length,
        "BC": CONV_CHANNELS,
    }  # fmt: skip
    units = at.key_heads + at.value_heads + -(-channels // CONV_CHANNELS)
    return Call(compact_kernel, (plan.rows, units), args, constants, 2)


def inner_dense(x: Tensor) -> Tensor:
    """Return ``x [B, T, ...]`` with everything after the tokens contiguous; copies if need be."""
    dense = 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size != 1 and stride != dense:
            return x.contiguous()
        dense *= size
    return x


def dense_weight(x: Tensor) -> Tensor:
    """Return taps ``[C, width]`` with each channel's taps contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def empty_like_dense(x: Tensor) -> Tensor:
    """Return an uninitialised dense tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
