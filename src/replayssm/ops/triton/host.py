"""One layer's step and fold on a device that Triton serves: which launches, and beside which."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from replayssm.errors import UnsupportedError
from replayssm.ops.triton import additive_pass, one_pass, pull_and_read
from replayssm.ops.triton.call import PLAIN, Call, Fused
from replayssm.ops.triton.kernels.whole import whole_kernel
from replayssm.ops.triton.launch import choose_launch, is_parallel
from replayssm.ops.triton.pulled_back import fold_call, rest_call, step_calls

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.ops.triton.launch import Launch
    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore
    from replayssm.types import Block


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
        launch: Block sizes of a step with a pull-back; the device's table decides when None.
    """
    if not plan.rows:
        return
    # made before anything is run: what is refused here has changed nothing
    first, calls = _launches(store, plan, block, out, fused, launch)
    for call in first:
        call.run()
    _run_all(calls, out.device)


def _launches(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused,
    launch: Launch | None,
) -> tuple[list[Call], list[Call]]:
    """Return the launches that run first, in order, and then those of :func:`_run_all`."""
    folds = one_pass.folds(store.spec, store.high.device)
    route = one_pass_calls if folds else pull_and_read_calls
    if calls := route(store, plan, block, out, fused, launch):
        return [], calls
    due = []
    if folds:
        due, plan = [_one_pass_fold(store, plan)], plan.after_folds()
    how = launch or choose_launch(store.spec, plan.rows, block.tokens, out.device)
    calls = step_calls(store, plan, block, out, fused, how)
    # what a pull-back leaves is what the others take
    first = 0 if calls[0].kernel is whole_kernel else 1
    return [*due, *calls[:first]], calls[first:]


def _run_all(calls: list[Call], device: torch.device) -> None:
    """Run the last beside the others, of which it needs nothing, where a device can."""
    *aside, last = calls
    if aside and device.type == "cuda":
        _run_beside(aside, last, device)
    else:
        for call in calls:
            call.run()


def _run_beside(aside: list[Call], call: Call, device: torch.device) -> None:
    """Run launches on two streams, those aside in their order; a graph captures them all."""
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            for other in aside:
                other.run()
        call.run()
    finally:
        # memory of what runs aside goes back to the main stream's, whatever was raised
        main.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # folds take longest: what is read beside them must not fill the chip first
    return torch.cuda.Stream(device, priority=-1)


def fold_(store: LayerStore, plan: DevicePlan, launch: Launch | None = None) -> None:
    """Bring every row's planes to its newest boundary; mutates planes and scales only."""
    if plan.rows and one_pass.folds(store.spec, store.high.device):
        _one_pass_fold(store, plan).run()
    elif plan.rows:
        how = launch or choose_launch(store.spec, plan.rows, 1, store.high.device)
        fold_call(store, plan, how).run()


def one_pass_calls(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused = PLAIN,
    launch: Launch | None = None,
) -> list[Call]:
    """Return the launches of a step in one pass, which need nothing of each other.

    None at all if its kernels cannot read the block. Arguments are those of step_.
    """
    spec = store.spec
    if not is_parallel(spec):
        if not one_pass.reads(block, out, fused):
            return []
        return one_pass.step_calls(store, plan, block, out, fused)
    if not additive_pass.reads(plan, block, out, fused, spec):
        return []
    due, rest = additive_pass.step_calls(store, plan, block, out, fused)
    if block.tokens == 1 and plan.rows < additive_pass.FEW_ROWS:
        sizes = launch or choose_launch(spec, plan.rows, 1, out.device)
        rest = rest_call(store, plan, block, out, fused, sizes)
    return [due, rest]


def pull_and_read_calls(
    store: LayerStore,
    plan: DevicePlan,
    block: Block,
    out: Tensor,
    fused: Fused = PLAIN,
    launch: Launch | None = None,
) -> list[Call]:
    """Return the launches of a step whose read pulls back by itself: rows that fold, the others.

    None at all if the kernel cannot read the block, if there are few rows, or if rows that fold
    have no programs of their own.
    """
    if not pull_and_read.serves(store.spec, out.device):
        return []
    if not pull_and_read.reads(store, plan, block, out, fused):
        return []
    how = launch or choose_launch(store.spec, plan.rows, block.tokens, out.device)
    if not how.fold_programs:
        return []
    pulled, due, _ = step_calls(store, plan, block, out, fused, how, listed=True)
    return [pulled, due, pull_and_read.read_call(store, plan, block, out, fused)]


def _one_pass_fold(store: LayerStore, plan: DevicePlan) -> Call:
    if is_parallel(store.spec):
        return additive_pass.fold_call(store, plan)
    return one_pass.fold_call(store, plan)


def check_served(store: LayerStore) -> None:
    """Refuse a layer that the kernels cannot serve."""
    at, ring = store.spec.layer, store.spec.ring
    if at.value_dim % ring.tiles:
        raise UnsupportedError(
            f"impl=triton: value_dim ({at.value_dim}) must be a multiple of tiles ({ring.tiles})"
        )
    if one_pass.folds(store.spec, store.high.device):
        one_pass.check_strides(store)
