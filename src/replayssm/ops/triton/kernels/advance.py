"""The commit of a forward on the device: counts move and the next forward's due tiles are listed.

One program for all rows: a graph that holds a step can then be launched again and again, whatever
mix of rows folds, and the host is asked nothing.
"""

import triton
import triton.language as tl

from replayssm.ops.triton.kernels.common import BASE, COMMITTED, FOLDED, SLOT, folded_to


@triton.jit
def advance_kernel(
    plan, due, accepted, rows,
    WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move every row's count by ``accepted`` and list the tiles that its next forward folds."""
    at = tl.arange(0, BLOCK)
    row, tile = at // TILES, at % TILES
    live = row < rows
    slot = tl.load(plan + SLOT * rows + row, live, -1)
    base = tl.load(plan + BASE * rows + row, live, 0)
    before = tl.load(plan + FOLDED * rows + row, live, 0)
    committed = tl.load(plan + COMMITTED * rows + row, live, 0)
    kept = tl.load(accepted + row, live & (slot >= 0), 0)
    folded = tl.maximum(before, committed)
    after = committed + kept
    reached = folded_to(tile, base, folded, WINDOW, KEEP, TILES)
    wanted = folded_to(tile, base, tl.maximum(folded, after), WINDOW, KEEP, TILES)
    is_due = (live & (slot >= 0) & (reached < wanted)).to(tl.int32)
    place = tl.cumsum(is_due, 0)
    # lanes share a row's counts: all of them have read before any writes
    tl.debug_barrier()
    tl.store(plan + FOLDED * rows + row, folded, live & (tile == 0))
    tl.store(plan + COMMITTED * rows + row, after, live & (tile == 0))
    tl.store(due, tl.sum(is_due))
    tl.store(due + place, at, is_due == 1)
