"""The step's kernels: fold what is due, then read, by row, value head and chunk of value rows.

A fold wants several times the registers of a read, and rows fold at different times. At small
batches ``step_kernel`` does both in one launch. At large ones ``read_kernel`` serves the tiles that
fold nothing in this step, with a program each, beside ``due_kernel``, whose small grid walks the
list of those that do and reads each from the registers it was folded in. It may start while the
pull-back runs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replayssm.ops.triton.kernels.common import (
    BASE,
    COMMITTED,
    FOLDED,
    FULL,
    LENGTH,
    SLOT,
    folded_to,
    oldest_needed,
)
from replayssm.ops.triton.kernels.fold import fold_chunk
from replayssm.ops.triton.kernels.read import read_chunk

# what a fold that reads nothing is compiled with
HIGH = tl.constexpr("high")


@triton.jit
def fold_part(
    plan, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, rows,
    high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
    row, head, part, reading,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr,
    CHUNK: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    T: tl.constexpr = 1, NE: tl.constexpr = 16, DEPTH: tl.constexpr = HIGH,
    SHARED_X: tl.constexpr = False, HAS_Z: tl.constexpr = False, WAITS: tl.constexpr = False,
):  # fmt: skip
    """Bring chunk ``part`` of a row's value head to its newest boundary.

    ``reading``: write its outputs too, as :func:`.fold.fold_chunk`; what comes after ``BK`` is for
    them alone.
    """
    per_tile: tl.constexpr = V // TILES
    chunks: tl.constexpr = (per_tile + CHUNK - 1) // CHUNK
    EVEN: tl.constexpr = per_tile % CHUNK == 0 and CHUNK % (BF if BF > 16 else 16) == 0
    tile = part // chunks
    row0 = tile * per_tile + part % chunks * CHUNK
    row_end = tl.minimum(row0 + CHUNK, (tile + 1) * per_tile)
    slot = tl.load(plan + SLOT * rows + row)
    base = tl.load(plan + BASE * rows + row)
    before = tl.load(plan + FOLDED * rows + row)
    folded = tl.maximum(before, tl.load(plan + COMMITTED * rows + row))
    position = folded_to(tile, base, before, WINDOW, KEEP, TILES)
    stop = folded_to(tile, base, folded, WINDOW, KEEP, TILES)
    stop = tl.where(slot < 0, position, stop)
    high += slot * high_slot + head * V * K
    if FORMAT != "f32" and FORMAT != "bf16":
        low += slot * low_slot + head * V * K
    if FORMAT == "q24" or FORMAT == "q16":
        scales += slot * scales_slot + head * V
        columns += slot * columns_slot + (head * TILES + tile) * K
    ring_k += slot * k_slot + head // (HV // H) * R * K
    ring_v += slot * v_slot + head * R * V
    ring_g += slot * g_slot + head * R * (K if CHANNEL else 1)
    ring_w += slot * w_slot + head * R
    while position < stop:
        # the planes at a boundary are a function of positions alone: encode at each of them;
        # outputs of the last one stay
        count = WINDOW - (position - tile * WINDOW // TILES + WINDOW) % WINDOW
        fold_chunk(
            high, low, scales, columns, ring_k, ring_v, ring_g, ring_w,
            (position % R).to(tl.int32), count.to(tl.int32), row0, row_end,
            reading, K, V, R, WINDOW, FORMAT, DELTA, CHANNEL, ASM, BF, BC, BK, EVEN,
            T, NE, TILES, DEPTH, SHARED_X, HAS_Z, WAITS,
        )  # fmt: skip
        # what follows reads what other lanes have just written
        tl.debug_barrier()
        position += count


@triton.jit
def _reading(
    plan, out, x, scale, coef, gate_z, rows, out_row, out_token, z_row, z_token,
    x_row, x_head, x_tile, x_token, row, head, tile,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr,
    SHARED_X: tl.constexpr,
):  # fmt: skip
    """Return what the outputs of a row's value head and tile take, as ``read_chunk`` has it.

    ``SHARED_X``: ``x`` is the block's query, one a key head, and takes ``scale``.
    """
    length = tl.load(plan + LENGTH * rows + row)
    base = tl.load(plan + BASE * rows + row)
    first = tl.load(plan + COMMITTED * rows + row)
    before = tl.load(plan + FOLDED * rows + row)
    full = tl.load(plan + FULL * rows + row) != 0
    folded = tl.maximum(before, first)
    stands = folded_to(tile, base, folded, WINDOW, KEEP, TILES)
    oldest = oldest_needed(base, folded, WINDOW, KEEP, TILES)
    begin, total = (stands - oldest).to(tl.int32), (first + length - oldest).to(tl.int32)
    e = tl.arange(0, NE)
    at = (oldest % R).to(tl.int32) + e
    at = tl.where(at >= R, at - R, at)
    if SHARED_X:
        x += row * x_row + head // (HV // H) * x_head
    else:
        x += row * x_row + head * x_head + tile * x_tile
    line = (row * HV + head) * T
    return (
        out + row * out_row + head * V, x, scale + line * TILES + tile, coef + line * NE,
        gate_z + row * z_row + head * V, out_token, z_token, x_token,
        at, (e >= begin) & (e < total), length.to(tl.int32), full,
    )  # fmt: skip


@triton.jit
def _read_part(
    plan, out, x, scale, coef, gate_z, high, low, scales, columns, ring_v,
    rows, out_row, out_token, z_row, z_token, x_row, x_head, x_tile, x_token,
    high_slot, low_slot, scales_slot, columns_slot, v_slot,
    row, head, part, WHICH: tl.constexpr,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, SHARED_X: tl.constexpr,
    DIGITS: tl.constexpr, HAS_Z: tl.constexpr, ASM: tl.constexpr, WAITS: tl.constexpr,
    CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write ``out[row, :, head, chunk]``; with ``WHICH = "rest"`` only if the chunk does not fold.

    Chunks of a row without a slot are 0.
    """
    per_tile: tl.constexpr = V // TILES
    chunks: tl.constexpr = (per_tile + CHUNK - 1) // CHUNK
    tile = part // chunks
    row0 = tile * per_tile + part % chunks * CHUNK
    row_end = tl.minimum(row0 + CHUNK, (tile + 1) * per_tile)
    slot = tl.load(plan + SLOT * rows + row)
    is_ours = slot >= 0
    if WHICH == "rest":
        base = tl.load(plan + BASE * rows + row)
        before = tl.load(plan + FOLDED * rows + row)
        folded = tl.maximum(before, tl.load(plan + COMMITTED * rows + row))
        stands = folded_to(tile, base, folded, WINDOW, KEEP, TILES)
        is_ours &= stands == folded_to(tile, base, before, WINDOW, KEEP, TILES)
    if is_ours:
        high += slot * high_slot + head * V * K
        ring_v += slot * v_slot + head * R * V
        if FORMAT != "f32" and FORMAT != "bf16":
            low += slot * low_slot + head * V * K
        if FORMAT == "q24" or FORMAT == "q16":
            scales += slot * scales_slot + head * V
            columns += slot * columns_slot + (head * TILES + tile) * K
        reading = _reading(
            plan, out, x, scale, coef, gate_z, rows, out_row, out_token, z_row, z_token,
            x_row, x_head, x_tile, x_token, row, head, tile,
            T, H, HV, V, R, NE, WINDOW, KEEP, TILES, SHARED_X,
        )  # fmt: skip
        read_chunk(
            high, low, scales, columns, ring_v, row0, row_end, reading,
            T, K, V, NE, TILES, FORMAT, DEPTH, SHARED_X, DIGITS, HAS_Z, ASM, WAITS, CHUNK, BR, BK,
        )  # fmt: skip
    elif slot < 0:
        every = row0 + tl.arange(0, BC)
        for t in range(T):
            at = out + row * out_row + head * V + t * out_token + every
            tl.store(at, 0.0, every < row_end)


@triton.jit
def step_kernel(
    plan, out, x, scale, coef, gate_z, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w,
    rows, out_row, out_token, z_row, z_token, x_row, x_head, x_tile, x_token,
    high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, SHARED_X: tl.constexpr, DIGITS: tl.constexpr, HAS_Z: tl.constexpr,
    ASM: tl.constexpr, CHUNK: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr,
    BK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Fold and read; the grid is rows x value heads, chunks."""
    row, head = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    part = tl.program_id(1)
    fold_part(
        plan, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, rows,
        high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
        row, head, part, None,
        H, HV, K, V, R,
        WINDOW, KEEP, TILES, FORMAT,
        DELTA, CHANNEL, ASM,
        CHUNK, BF, BC, BK,
    )  # fmt: skip
    _read_part(
        plan, out, x, scale, coef, gate_z, high, low, scales, columns, ring_v,
        rows, out_row, out_token, z_row, z_token, x_row, x_head, x_tile, x_token,
        high_slot, low_slot, scales_slot, columns_slot, v_slot,
        row, head, part, "all",
        T, H, HV, K, V,
        R, NE, WINDOW, KEEP,
        TILES, FORMAT, DEPTH, SHARED_X,
        DIGITS, HAS_Z, ASM, WAITS, CHUNK,
        BR, BC, BK,
    )  # fmt: skip
    if WAITS:
        # whoever waits for this kernel may rely on the pull-back too
        gdc_wait()


@triton.jit
def read_kernel(
    plan, out, x, scale, coef, gate_z, high, low, scales, columns, ring_v,
    rows, out_row, out_token, z_row, z_token, x_row, x_head, x_tile, x_token,
    high_slot, low_slot, scales_slot, columns_slot, v_slot,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, SHARED_X: tl.constexpr,
    DIGITS: tl.constexpr, HAS_Z: tl.constexpr, ASM: tl.constexpr, WAITS: tl.constexpr,
    CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Read the chunks that fold nothing in this step; the grid is the step kernel's."""
    row, head = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    part = tl.program_id(1)
    _read_part(
        plan, out, x, scale, coef, gate_z, high, low, scales, columns, ring_v,
        rows, out_row, out_token, z_row, z_token, x_row, x_head, x_tile, x_token,
        high_slot, low_slot, scales_slot, columns_slot, v_slot,
        row, head, part, "rest",
        T, H, HV, K, V,
        R, NE, WINDOW, KEEP,
        TILES, FORMAT, DEPTH, SHARED_X,
        DIGITS, HAS_Z, ASM, WAITS, CHUNK,
        BR, BC, BK,
    )  # fmt: skip
    if WAITS:
        # whoever waits for this kernel may rely on the pull-back too
        gdc_wait()


@triton.jit
def due_kernel(
    due, stride,
    plan, out, x, scale, coef, gate_z, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w,
    rows, out_row, out_token, z_row, z_token, x_row, x_head, x_tile, x_token,
    high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, NE: tl.constexpr, WINDOW: tl.constexpr, KEEP: tl.constexpr,
    TILES: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, SHARED_X: tl.constexpr, HAS_Z: tl.constexpr, ASM: tl.constexpr,
    CHUNK: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Fold and read the tiles on the list ``due``: their number, then ``row * TILES + tile``.

    ``WAITS``: the pull-back may still run while a program prepares its first fold.
    """
    chunks: tl.constexpr = (V // TILES + CHUNK - 1) // CHUNK
    items = tl.load(due) * HV * chunks
    for item in range(tl.program_id(0), items, stride):
        entry = tl.load(due + 1 + item // (HV * chunks))
        row, head = (entry // TILES).to(tl.int64), item // chunks % HV
        part = entry % TILES * chunks + item % chunks
        reading = _reading(
            plan, out, x, scale, coef, gate_z, rows, out_row, out_token, z_row, z_token,
            x_row, x_head, x_tile, x_token, row, head, entry % TILES,
            T, H, HV, V, R, NE, WINDOW, KEEP, TILES, SHARED_X,
        )  # fmt: skip
        fold_part(
            plan, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, rows,
            high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
            row, head, part, reading,
            H, HV, K, V, R,
            WINDOW, KEEP, TILES, FORMAT,
            DELTA, CHANNEL, ASM,
            CHUNK, BF, BC, BK,
            T, NE, DEPTH, SHARED_X, HAS_Z, WAITS,
        )  # fmt: skip
    if WAITS:
        # whoever waits for this kernel may rely on the pull-back too
        gdc_wait()


@triton.jit
def fold_kernel(
    plan, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, rows,
    high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    WINDOW: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr, FORMAT: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, ASM: tl.constexpr,
    CHUNK: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Fold what is due of every row and nothing else; the grid is the step kernel's."""
    row, head = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    part = tl.program_id(1)
    fold_part(
        plan, high, low, scales, columns, ring_k, ring_v, ring_g, ring_w, rows,
        high_slot, low_slot, scales_slot, columns_slot, k_slot, v_slot, g_slot, w_slot,
        row, head, part, None,
        H, HV, K, V, R,
        WINDOW, KEEP, TILES, FORMAT,
        DELTA, CHANNEL, ASM,
        CHUNK, BF, BC, BK,
    )  # fmt: skip
