"""Driver of the one-pass Gated DeltaNet prototype: check it, try its bits, time it.

PYTHONPATH=src python benchmarks/prototypes/one_pass_gdn.py --json one-pass-h200.json

Needs a Hopper GPU. Processes compile and check first, a state format and block length each:

* outputs against the fp64 recurrence, as ``benchmarks/kernels.py`` does, and where gates are 0 and
  -1000s or keys are equal and writes strong, beside the shipped path, with the rings compared;
* whether the bits of a checkpoint depend on the block length, on rejected tokens or on the batch.

Then both paths are timed in turns. The file is written after every result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from one_pass_gdn_kernel import WARPS, one_pass_kernel

from gpu import timing
from gpu.cases import CASES, Inputs, Point, draw, recurrence
from gpu.check import check, compile_for_batches
from gpu.launches import TritonReplay
from gpu.ours import Choice, OurReplay, filled_store
from gpu.report import environment, save
from replayssm.ops.triton.call import Call, strides
from replayssm.ring import BlockPlan, RingSpec
from replayssm.storage import StorageSpec, allocate
from replayssm.types import Format, ReadDepth

CASE = CASES["gdn-16-64x128x128"]
TOKENS = (4, 8, 1)
BATCH = 256
BATCHES = (8, 32, 64, 128, 512)  # of blocks of four, bf16
# tiles in flight, and the most registers of a thread (0: the compiler's choice)
LAUNCH = {Format.BF16: (2, 0), Format.F32: (1, 168)}
ROBUST_ROWS = 4
BASES = (0, 5, 11)  # of the rows whose bits are compared
STREAM = 64  # tokens that they commit
SHARE = "share "
PROCESS_SECONDS = 150


def one_pass_call(store, plan, block, out, fused, buffers, registers):
    """Return the launch of a step that the kernel can serve."""
    at, ring = store.spec.layer, store.spec.ring
    served = (
        store.spec.format in LAUNCH and fused.gates == "beta" and fused.norm
        and fused.skip is None and fused.z is None and plan.parents is None
        and (at.key_dim, at.value_dim % 64) == (128, 0) and store.k.dtype == torch.bfloat16
        and (ring.window, ring.keep, ring.tiles) == (16, 0, 1) and block.tokens <= 8
    )  # fmt: skip
    if not served:
        raise ValueError(f"the prototype does not serve {store.spec}")
    stores = (store.high, store.k, store.v, store.g, store.w)
    args = (
        plan.counts, block.q, block.k, block.v, block.g, block.w, fused.rate, fused.bias, out,
        *stores, plan.rows, *strides(block.q, block.k, block.v, block.g, block.w, out),
        *(x.stride(0) for x in stores), fused.q_scale, fused.norm_eps,
    )  # fmt: skip
    constants = {
        "T": block.tokens, "H": at.key_heads, "HV": at.value_heads, "K": at.key_dim,
        "V": at.value_dim, "R": ring.ring_len, "BUFFERS": buffers,
    }  # fmt: skip
    return Call(one_pass_kernel, (plan.rows * at.key_heads,), args, constants, WARPS, registers)


class OnePass(TritonReplay):
    """The prototype in the place of the shipped step; ``built`` is what was launched last."""

    built = None

    def step_(self, store, plan, loaded, out, launch):
        call = one_pass_call(store, plan, loaded[0], out, loaded[1], *LAUNCH[store.spec.format])
        limit = {"maxnreg": call.registers} if call.registers else {}
        self.built = call.kernel[call.grid](
            *call.args, **call.constants, num_warps=call.warps, **limit
        )


def arms(fmt):
    """Return the shipped path and the prototype."""
    return (OurReplay(TritonReplay(), fmt, ReadDepth.FULL, Choice("shipped")),
            OurReplay(OnePass(), fmt, ReadDepth.FULL, Choice("one pass")))  # fmt: skip


def inputs_of(point, device, seed, kind=""):
    """Draw inputs: gates of 0 and of -1000s, or one key for all tokens and strong writes."""
    # the interpreter's bf16 products are wrong
    x = draw(point, device, seed, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if kind == "gates":
        a = x.a.clone()
        a[:, ::3], a[:, 1::3] = 3000.0, -3000.0
        return replace(x, a=a)
    if kind == "keys":
        k = x.k[:1, :1].expand_as(x.k).contiguous() if seed % 2 else x.k
        return replace(x, k=k, b=x.b.abs() * 8)
    return x


def beside(fmt, tokens, kind, device, case=CASE):
    """Run both paths over the same steps; return errors and what their stores have in common."""
    point, pair = Point(case, ROBUST_ROWS, tokens), arms(fmt)
    steps, at = 2 * pair[0].period(point) + 2, case.layer
    sets = [arm.prepare(point, device, None, steps) for arm in pair]
    shape = (ROBUST_ROWS, at.value_heads, at.value_dim, at.key_dim)
    state = torch.zeros(shape, dtype=torch.float64, device=device)
    errors, norm = [0.0, 0.0], 0.0
    for step in range(steps):
        x = inputs_of(point, device, 1000 + step, kind)
        want, state = recurrence(point, state, x)
        norm += want.square().sum().item()
        for i, states in enumerate(sets):
            states.load(x)
            errors[i] += (states.launch(step).double() - want).square().sum().item()
    shipped, ours = (s.store for s in sets)
    difference = (shipped.high.float() - ours.high.float()).norm() / shipped.high.float().norm()
    return {
        "inputs": kind, "steps": steps,
        "shipped_error": short((errors[0] / norm) ** 0.5),
        "one_pass_error": short((errors[1] / norm) ** 0.5),
        "rings_equal": all(torch.equal(getattr(shipped, n), getattr(ours, n)) for n in "kvgw"),
        "checkpoint_numbers_equal": round((shipped.high == ours.high).float().mean().item(), 4),
        "checkpoint_difference": short(difference.item()),
    }  # fmt: skip


def short(x):
    """Round to three digits."""
    return float(f"{x:.3g}")


def checked(fmt, tokens, device):
    """Check both paths at one block length, plainly and beside each other; compile for timing."""
    fmt, tokens = Format(fmt), int(tokens)
    found = {"state": fmt.value, "tokens": tokens}
    is_main = fmt is Format.BF16 and tokens == 4
    for word, arm in zip(("shipped", "one_pass"), arms(fmt), strict=True):
        point = Point(CASE, BATCH, tokens)
        try:
            found[f"{word}_error"] = short(check(arm, point, device).error)
            if word == "one_pass":
                built = arm.kernels.built
                found |= {"registers": built.n_regs, "spilled_bytes": 4 * built.n_spills,
                          "shared_bytes": built.metadata.shared}  # fmt: skip
            compile_for_batches(arm, point, (BATCH, *BATCHES) if is_main else (BATCH,), device)
        except Exception as error:
            found[f"{word}_failed"] = told(error)
    found["beside"] = []
    for kind in ("plain", "gates", "keys"):
        try:
            found["beside"].append(beside(fmt, tokens, kind, device))
        except Exception as error:
            found["beside"].append({"inputs": kind, "failed": told(error)})
    return found


def told(error):
    """Return what went wrong in a line."""
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def checkpoints(kernels, fmt, blocks, rows, device, case=CASE):
    """Return the checkpoints of rows of a stream after blocks ``(tokens, kept)`` and a last fold.

    Tokens that are not kept are those of another stream.
    """
    whole = Point(case, len(BASES), STREAM + 8)
    right, wrong = (inputs_of(whole, device, seed) for seed in (1, 2))
    entries = right.k.dtype
    spec = StorageSpec(case.layer, fmt, RingSpec(16, max_block=8), entries)
    store = allocate(spec, len(rows), device)
    store.high.copy_(filled_store(spec, whole, device, seed=7).high[rows])
    base = np.array(BASES)[rows]
    slots, done, folded = np.arange(len(rows)), 0, base
    for tokens, kept in (*blocks, (blocks[-1][0], 0)):
        committed, lengths = base + done, np.full_like(base, tokens)
        is_kept = torch.arange(tokens, device=device) < (kept or tokens)

        def pick(name, at=done, size=tokens, mask=is_kept):
            a, b = (getattr(x, name)[rows, at : at + size] for x in (right, wrong))
            picked = torch.where(mask.view(1, -1, *[1] * (a.ndim - 2)), a, b)
            # a dimension of 1 has its own stride too: kernels are compiled for multiples of 16
            return picked.clone(memory_format=torch.contiguous_format)

        x = Inputs(*map(pick, "qkvab"), right.a_log, right.bias, right.skip)
        plan = BlockPlan(slots, base, folded, committed, lengths)
        out = torch.empty_like(x.v)
        on_device = kernels.plan(store, plan, ReadDepth.FULL, tokens)
        kernels.step_(store, on_device, kernels.load(whole, x), out, None)
        folded, done = committed, done + kept
    return store.high


def same_bits(fmt, path, device, case=CASE):
    """Compare checkpoints of the same tokens: by T = 1, 4 and 8, with rejected tokens, alone."""
    fmt, everyone = Format(fmt), list(range(len(BASES)))
    kernels = {"shipped": TritonReplay, "one pass": OnePass}[path]()
    kept = []
    while sum(kept) < STREAM:
        kept.append(min((1, 4, 2, 3, 1, 2)[len(kept) % 6], STREAM - sum(kept)))
    found = {"state": fmt.value, "path": path, "tokens_committed": STREAM}
    single = checkpoints(kernels, fmt, [(1, 1)] * STREAM, everyone, device, case)
    shorter = checkpoints(kernels, fmt, [(1, 1)] * (STREAM - 16), everyone, device, case)
    found["numbers equal a window earlier"] = round((shorter == single).float().mean().item(), 4)
    ways = {
        "blocks of 4": [(4, 4)] * (STREAM // 4),
        "blocks of 8": [(8, 8)] * (STREAM // 8),
        "blocks of 4, some rejected": [(4, n) for n in kept],
    }
    for name, blocks in ways.items():
        got = checkpoints(kernels, fmt, blocks, everyone, device, case)
        found[f"{name}, as T = 1"] = torch.equal(got, single)
        found[f"{name}, numbers equal"] = round((got == single).float().mean().item(), 4)
    among = checkpoints(kernels, fmt, ways["blocks of 4"], everyone, device, case)
    for row in everyone[1:]:
        alone = checkpoints(kernels, fmt, ways["blocks of 4"], [row], device, case)
        found[f"row {row} alone, as among others"] = torch.equal(alone[0], among[row])
    return found


TASKS = {"checked": checked, "same_bits": same_bits}


def in_process(task):
    """Run a task in a process of its own, so that kernels compile side by side."""
    command = [sys.executable, __file__, "--task", *map(str, task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end in {PROCESS_SECONDS} s"}
    lines = [x for x in done.stdout.splitlines() if x.startswith(SHARE)]
    if lines:
        return json.loads(lines[-1].removeprefix(SHARE))
    return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}


def timed(point, fmt, device):
    """Time both paths in turns."""
    pair = arms(fmt)
    figures = timing.side_by_side(list(pair), point, device)
    row = {"case": point.case.name, "state": fmt.value, "tokens": point.tokens,
           "kept": point.kept, "window": point.window, "batch": point.batch}  # fmt: skip
    for word, arm in zip(("shipped", "one_pass"), pair, strict=True):
        got = figures[arm.name]
        if isinstance(got, str):
            row[f"{word}_failed"] = got
        else:
            row |= {f"{word}_us": got.us, f"{word}_spread": got.spread,
                    f"{word}_replays": got.replays}  # fmt: skip
    if "shipped_us" in row and "one_pass_us" in row:
        row["shipped_over_one_pass"] = round(row["shipped_us"] / row["one_pass_us"], 3)
    return row


def main():
    """Check in processes, then time here; write after every result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing is begun")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device("cuda")
    if args.task:
        print(SHARE + json.dumps(TASKS[args.task[0]](*args.task[1:], device)))
        return
    start = time.monotonic()
    run = {"environment": {}, "results": [], "checks": [], "bits": []}

    def note(where, row):
        run[where].append(row)
        print(f"{time.monotonic() - start:4.0f} s {where}: {json.dumps(row)}", flush=True)
        if args.json:
            save(args.json, run)

    formats = (Format.BF16, Format.F32)
    tasks = [("checked", f.value, t) for f in formats for t in TOKENS]
    tasks += [("same_bits", f.value, path) for f in formats for path in ("one pass", "shipped")]
    with ThreadPoolExecutor(len(tasks)) as pool:
        waiting = {pool.submit(in_process, task): task for task in tasks}
        for one in as_completed(waiting):
            task = waiting[one]
            note("bits" if task[0] == "same_bits" else "checks", {"task": task, **one.result()})
    known = {(c.get("state"), c.get("tokens")): c for c in run["checks"]}
    points = [(f, Point(CASE, BATCH, t)) for f, ts in zip(formats, (TOKENS, (4, 1, 8)), strict=True)
              for t in ts]  # fmt: skip
    points += [(Format.BF16, Point(CASE, batch, 4)) for batch in BATCHES]
    run["environment"] = environment(["benchmarks/prototypes/one_pass_gdn.py"])
    for fmt, point in points:
        if time.monotonic() - start > args.seconds:
            break
        try:
            row = timed(point, fmt, device)
        except Exception as error:
            row = {"state": fmt.value, "tokens": point.tokens, "batch": point.batch,
                   "failed": told(error)}  # fmt: skip
        about = known.get((fmt.value, point.tokens), {})
        names = ("one_pass_error", "shipped_error", "registers", "spilled_bytes", "shared_bytes")
        note("results", row | {n: about[n] for n in names if n in about})
    run["environment"] = environment(["benchmarks/prototypes/one_pass_gdn.py"])
    if args.json:
        save(args.json, run)


if __name__ == "__main__":
    main()
