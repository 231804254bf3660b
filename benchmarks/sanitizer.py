"""Run a small case of every Triton kernel under compute-sanitizer: memory accesses and races.

    python benchmarks/sanitizer.py --json benchmarks/results/sanitizer-h200.json

Needs a GPU and compute-sanitizer. Every tensor is an allocation of its own, so that an access
beyond it is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from gpu.report import environment
from replayssm.ops import conv_
from replayssm.ops.triton import additive_pass, one_pass, pull_and_read
from replayssm.ops.triton.host import fold_, pull_and_read_calls
from replayssm.ops.triton.host import step_ as launch_
from replayssm.ops.triton.launch import Launch, default_launch
from replayssm.ops.triton.others import advance_call, compact_call, standard_call
from replayssm.ops.triton.plan import device_plan
from replayssm.ops.triton.pulled_back import step_calls
from replayssm.ring import BlockPlan, RingSpec
from replayssm.state import StatePool
from replayssm.testing.factories import make_block, make_inputs, make_state, make_taps
from replayssm.types import Block, ConvSpec, Decay, Format, LayerSpec, ReadDepth, Write

if TYPE_CHECKING:
    from replayssm.ops.triton.call import Call
    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.storage import LayerStore, StorageSpec

TOOLS = ("memcheck", "racecheck")
LAYERS = {
    "mamba2": LayerSpec(Write.ADDITIVE, Decay.SCALAR, 2, 6, 64, 48, ConvSpec(300, 4)),
    "gdn": LayerSpec(Write.DELTA, Decay.SCALAR, 2, 4, 64, 48),
    "kda": LayerSpec(Write.DELTA, Decay.CHANNEL, 2, 2, 40, 48),
    "one-pass": LayerSpec(Write.DELTA, Decay.SCALAR, 2, 4, 128, 128),
    "additive-pass": LayerSpec(Write.ADDITIVE, Decay.SCALAR, 2, 8, 128, 64),
}
ROWS, WINDOW = 3, 4


def launches(spec: StorageSpec) -> list[Launch]:
    """Return one way of launching for every set of kernels that can make a step."""
    at = default_launch(spec)
    ways = [at, replace(at, early_read=True), replace(at, fold_programs=5)]
    if spec.layer.write is Write.ADDITIVE:
        ways += [replace(at, whole=True), replace(at, whole=True, fold_programs=1)]
    return ways


def block_of(layer: LayerSpec, tokens: int, seed: int, device: torch.device) -> Block:
    """Return a block of bf16 inputs."""
    block = make_block(layer, ROWS, tokens, seed=seed)
    q, k, v = (x.to(device, torch.bfloat16) for x in (block.q, block.k, block.v))
    return Block(q, k, v, block.g.to(device), block.w.to(device))


def drive(layer: LayerSpec, fmt: Format, tokens: int, way: int, device: torch.device) -> set[str]:
    """Drive three sequences over two windows; return the kernels that ran."""
    ring = RingSpec(WINDOW, max_block=tokens, tiles=2)
    pool = StatePool([layer], ROWS, state=fmt, ring=ring, ring_dtype=torch.bfloat16, device=device)
    refs = [pool.admit_([make_state(layer, seed=i).to(device)], position=i) for i in range(ROWS)]
    store, names = pool.stores[0], set()
    how = launches(store.spec)[way]
    for step in range(2 * WINDOW):
        ticket = pool.begin(refs, tokens)
        depth = [ReadDepth.HIGH, ReadDepth.FULL, ReadDepth.HIGH]
        plan = device_plan(ticket.plan, ring, depth, tokens, device)
        block = block_of(layer, tokens, step, device)
        if not step:
            calls = step_calls(store, plan, block, torch.empty_like(block.v), launch=how)
            names |= {call.kernel.fn.__name__ for call in calls}
        launch_(store, plan, block, torch.empty_like(block.v), launch=how)
        ticket.stepped.add(0)
        if layer.conv is not None:
            x = make_inputs(layer.conv, ROWS, tokens, seed=step)
            weight, bias = make_taps(layer.conv, seed=0)
            conv_(store, ticket.plan, x.to(device), weight.to(device), bias.to(device))
            ticket.convolved.add(0)
            names.add("conv_kernel")
        pool.commit_(ticket, 1)
    plan = device_plan(ticket.plan, ring, depth, tokens, device)
    fold_(store, plan, how)
    paths = torch.tensor([[0, 2, -1][:tokens]] * ROWS, device=device)
    compact_call(store, plan, paths).run()
    advance_call(plan, ring, torch.ones(ROWS, dtype=torch.int64, device=device)).run()
    return names | {"fold_kernel", "compact_kernel", "advance_kernel"}


def drive_one_pass(layer: LayerSpec, fmt: Format, tokens: int, device: torch.device) -> set[str]:
    """Drive three sequences over two windows on Hopper's own kernels, pads and trees among them."""
    ring = RingSpec(WINDOW, max_block=tokens)
    pool = StatePool([layer], ROWS, state=fmt, ring=ring, ring_dtype=torch.bfloat16, device=device)
    refs = [pool.admit_([make_state(layer, seed=i).to(device)], position=i) for i in range(ROWS)]
    for step in range(2 * WINDOW):
        rows = [*refs[:2], None if step % 2 else refs[2]]
        trees = [[-1, 0, 0][:tokens]] * ROWS if step % 3 == 0 else None
        ticket = pool.begin(rows, tokens, trees)
        plan = device_plan(ticket.plan, ring, [ReadDepth.HIGH] * ROWS, tokens, device)
        block = block_of(layer, tokens, step, device)
        out = torch.empty_like(block.v)
        for call in (calls := hopper_calls(pool.stores[0], plan, block, out)):
            call.run()
        ticket.stepped.add(0)
        pool.commit_(ticket, 1)
    fold_(pool.stores[0], plan)
    return {call.kernel.fn.__name__ for call in calls}


def hopper_calls(
    store: LayerStore, plan: DevicePlan, block: Block, out: torch.Tensor
) -> list[Call]:
    """Return the launches that a store has on Hopper alone, of few rows too."""
    if store.spec.layer.write is Write.ADDITIVE:
        return additive_pass.step_calls(store, plan, block, out)
    how = replace(default_launch(store.spec), fold_programs=5)
    with patch.object(pull_and_read, "LEAST_ROWS", 1):
        pulled = pull_and_read_calls(store, plan, block, out, launch=how)
    return pulled or one_pass.step_calls(store, plan, block, out)


def standard(layer: LayerSpec, device: torch.device) -> set[str]:
    """Run a block of the standard step."""
    zero = np.zeros(ROWS, np.int64)
    host = BlockPlan(np.arange(ROWS), zero, zero, zero, zero + 2)
    plan = device_plan(host, RingSpec(), [ReadDepth.FULL] * ROWS, 2, device)
    states = torch.stack([make_state(layer, seed=i) for i in range(ROWS)]).to(device)
    block = block_of(layer, 2, 0, device)
    standard_call(states, layer, plan, block, torch.empty_like(block.v)).run()
    return {"standard_kernel"}


def run_layer(name: str) -> None:
    """Run every kernel of a layer and print their names."""
    layer, device = LAYERS[name], torch.device("cuda")
    names = standard(layer, device)
    if name == "one-pass":
        for fmt, tokens in product(Format, (1, 3)):
            names |= drive_one_pass(layer, fmt, tokens, device)
    if name == "additive-pass":
        for fmt, tokens in product((Format.BF16, Format.Q24, Format.Q16), (1, 3)):
            names |= drive_one_pass(layer, fmt, tokens, device)
    for fmt in () if name.endswith("-pass") else (Format.F32, Format.Q24):
        for tokens in (1, 3):
            for way in range(5 if name == "mamba2" else 3):
                names |= drive(layer, fmt, tokens, way, device)
    torch.cuda.synchronize()
    print("kernels:", " ".join(sorted(names)))


def sanitize(tool: str, name: str, log: Path | None) -> dict[str, Any]:
    """Run one layer under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all",
               sys.executable, __file__, "--layer", name]  # fmt: skip
    begun = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, env=_alone(), check=False)
    if log is not None:
        (log / f"sanitizer-{tool}-{name}.txt").write_text(run.stdout[-200000:] + run.stderr[-9999:])
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", run.stdout)
    kernels = re.findall(r"^kernels: (.*)$", run.stdout, re.MULTILINE)
    return {
        "tool": tool, "layer": name, "kernels": kernels[0].split() if kernels else [],
        "summary": summary[-1] if summary else "none", "exit": run.returncode,
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def _alone() -> dict[str, str]:
    return {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def main() -> int:
    """Return 0 when no tool found anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="folder for the tools' own reports")
    parser.add_argument("--warm", action="store_true", help="compile the kernels only")
    parser.add_argument("--layer", choices=LAYERS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.layer:
        run_layer(chosen.layer)
        return 0
    with ThreadPoolExecutor() as pool:
        # compiled once, outside the tools
        plain = [[sys.executable, __file__, "--layer", name] for name in LAYERS]
        for done in pool.map(lambda c: subprocess.run(c, check=True, stdout=-1), plain):
            print(done.stdout.decode().strip())
        if chosen.warm:
            return 0
        jobs = [(tool, name) for tool in TOOLS for name in LAYERS]
        runs = list(pool.map(lambda job: sanitize(*job, chosen.log), jobs))
    for run in runs:
        print(run["tool"], run["layer"], run["summary"], f"{run['seconds']} s", *run["kernels"])
    if chosen.json:
        record = {"environment": environment(sys.argv), "runs": runs}
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    clean = [r["exit"] == 0 and re.search(r": 0 (errors|hazards)", r["summary"]) for r in runs]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    raise SystemExit(main())
