"""Records of one run: what the figures depend on, ratios, tables, JSON and plots."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from gpu.arms import REFERENCE, Kind
from gpu.cases import CASES

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.arms import Arm, Ceilings
    from gpu.cases import Point
    from gpu.timing import Figure
    from replayssm.policy import Measured

PACKAGES = ("torch", "triton", "transformers", "fla-core", "mamba-ssm", "vllm", "sglang",
            "flashinfer-python", "apache-tvm-ffi", "replayssm")  # fmt: skip
Record = dict[str, Any]


def lasting_words() -> list[str]:
    """Return the command line's words without what leaves no trace in the figures."""
    words, silent = [], {"--json", "--jobs"}
    given = iter(sys.argv[1:])
    for word in given:
        if word.partition("=")[0] not in silent:
            words.append(word)
        elif "=" not in word:
            next(given, None)
    return words


def environment(command: list[str]) -> Record:
    """Return device, driver, clocks after the run, versions and the command line."""
    import torch

    found: Record = {"command": " ".join(command), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if not torch.cuda.is_available():
        return found
    device = torch.cuda.get_device_properties(0)
    found["device"] = device.name
    found["multiprocessors"] = device.multi_processor_count
    found["cache_mb"] = round(device.L2_cache_size / 1e6, 1)
    found["memory_gb"] = round(device.total_memory / 1e9, 1)
    found["cuda"] = torch.version.cuda
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--id=0",
                 "--format=csv,noheader"]  # fmt: skip
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        names = ("driver", "clock_multiprocessors", "clock_memory")
        found |= dict(zip(names, (x.strip() for x in answer.split(",")), strict=False))
    return found


def record(
    arm: Arm, point: Point, figure: Figure | str, ceilings: Ceilings, error: float
) -> Record:
    """Return one figure with what it moved; of an arm that did not run, why."""
    found: Record = {
        "case": point.case.name, "family": point.case.family, "batch": point.batch,
        "tokens": point.tokens, "kept": point.kept, "window": point.window, "arm": arm.name,
        "kind": arm.kind.value, "state": arm.state, "depth": arm.depth, "error": error,
    }  # fmt: skip
    if isinstance(figure, str):
        return {**found, "absent": figure}
    traffic = arm.traffic(point)
    rate = traffic.total / figure.us * 1e6
    moved = {f"mb_{name}": round(x / 1e6, 2) for name, x in asdict(traffic).items()}
    return {
        **found, **asdict(figure), **moved, "mb": round(traffic.total / 1e6, 2),
        "tb_per_s": round(rate / 1e12, 3),
        "share_of_ceiling": round(rate / ceilings.of(traffic), 3),
    }  # fmt: skip


def add_ratios(records: list[Record]) -> None:
    """Add, to every figure, its ratio to the best standard or snapshot kernel of its point.

    ``ratio`` counts all of them, ``ratio_to_peers`` those of other packages. A state of at most two
    bytes an element is compared with bf16, any other with f32.
    """
    best: dict[tuple[Any, ...], float] = {}
    for r in records:
        if "us" not in r or r["kind"] in (Kind.REPLAY, Kind.FLOOR):
            continue
        for scope in ("all", "peers"):
            if scope == "peers" and r["arm"].startswith("ours"):
                continue
            key = (scope, r["case"], r["batch"], r["tokens"], r["state"])
            best[key] = min(best.get(key, r["us"]), r["us"])
    for r in records:
        if "us" not in r:
            continue
        for scope, name in (("all", "ratio"), ("peers", "ratio_to_peers")):
            key = (scope, r["case"], r["batch"], r["tokens"], REFERENCE[r["state"]])
            r[name] = round(best[key] / r["us"], 3) if key in best else None


def table(records: list[Record]) -> str:
    """Return a table for every case and block length: arms down, batches across."""
    lines = []
    for case, tokens in dict.fromkeys((r["case"], r["tokens"]) for r in records):
        rows = [r for r in records if (r["case"], r["tokens"]) == (case, tokens) and "us" in r]
        batches = sorted({r["batch"] for r in rows})
        if not rows:
            continue
        head = "".join(f"{f'B={b}':>15}" for b in batches)
        lines += ["", f"{case} T={tokens}: microseconds (ratio), last column's share of ceiling",
                  f"{'':35}{head}"]  # fmt: skip
        for arm, window in dict.fromkeys((r["arm"], r["window"]) for r in rows):
            cells = {r["batch"]: r for r in rows if (r["arm"], r["window"]) == (arm, window)}
            label = f"{arm} w{window}" if cells[min(cells)]["kind"] == Kind.REPLAY else arm
            text = "".join(f"{_cell(cells.get(b)):>15}" for b in batches)
            lines.append(f"{label:35}{text} {cells[max(cells)]['share_of_ceiling']:5.0%}")
    absent = sorted({f"{r['arm']}: {r['absent']}"[:160] for r in records if "absent" in r})
    return "\n".join([*lines, *(["", "absent", *absent] if absent else [])])


def _cell(r: Record | None) -> str:
    if r is None:
        return "-"
    ratio = "" if r["ratio"] is None else f" ({r['ratio']:.2f})"
    return f"{r['us']:.1f}{ratio}"


def save(path: Path, run: Record) -> None:
    """Write a run as JSON."""
    path.write_text(json.dumps(run, indent=1) + "\n")


def policy_rows(run: Record) -> list[Measured]:
    """Return a run's figures of our own arms as rows of a policy table.

    Every replay arm is put beside the standard kernel (of blocks: the snapshots) that ``auto``
    would choose instead: with a bf16 state for ``bf16``, else an fp32 one.
    """
    from replayssm.policy import Measured
    from replayssm.types import Format, ReadDepth

    ours = [r for r in run["results"] if r["arm"].startswith("ours") and "us" in r]
    standard = {
        (r["case"], r["batch"], r["tokens"], r["state"]): r["us"]
        for r in ours
        if r["kind"] != Kind.REPLAY
    }
    times: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for r in ours:
        other = "bf16" if r["state"] == Format.BF16 else "f32"
        slow = standard.get((r["case"], r["batch"], r["tokens"], other))
        if r["kind"] == Kind.REPLAY and slow is not None:
            key = (r["case"], r["state"], r["depth"], r["tokens"], r["window"])
            times.setdefault(key, {})[r["batch"]] = slow, r["us"]
    return [
        Measured(
            CASES[case].layer, Format(state), ReadDepth(depth), tokens, window,
            tuple(sorted(at)), *(tuple(at[b][i] for b in sorted(at)) for i in (0, 1)),
        )
        for (case, state, depth, tokens, window), at in times.items()
    ]  # fmt: skip


# what a plot has along its axis, by name: the column, the words under it
AXES = {
    "batch": ("batch", "sequences"),
    "window": ("window", "window, tokens"),
    "tokens": ("tokens", "tokens of a block"),
}


def plot(run: Record, path: Path, axis: str = "batch") -> None:
    """Draw the ratio of each replay kernel over the batch, the window or the tokens of a block.

    A panel is a case and what else was varied: block lengths over the batch, batches over the
    others. Over the batch and the tokens an arm stands at its best window.
    """
    from matplotlib.figure import Figure as Canvas

    column, words = AXES[axis]
    panel_by = "tokens" if axis == "batch" else "batch"
    records = [r for r in run["results"] if r.get("ratio") and r["kind"] == Kind.REPLAY]
    if axis == "window":
        records = [r for r in records if r["tokens"] == 1]
    panels = list(dict.fromkeys((r["case"], r[panel_by]) for r in records))
    if not panels:
        raise SystemExit("no replay figures to draw")
    canvas = Canvas(figsize=(7.5, 3.6 * len(panels)), layout="constrained")
    all_axes = canvas.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (case, value) in zip(all_axes, panels, strict=True):
        here = [r for r in records if (r["case"], r[panel_by]) == (case, value)]
        best: dict[str, dict[int, float]] = {}
        for r in here:
            at = best.setdefault(r["arm"], {})
            at[r[column]] = max(at.get(r[column], 0.0), r["ratio"])
        for arm, points in best.items():
            style = "-o" if arm.startswith("ours") else "--x"
            axes.plot(sorted(points), [points[x] for x in sorted(points)], style, label=arm, ms=4)
        axes.axhline(1.0, color="0.6", lw=0.8)
        axes.set_xscale("log", base=2)
        ticks = sorted({r[column] for r in here})
        axes.set_xticks(ticks, [str(x) for x in ticks])
        other = f"T = {value}" if panel_by == "tokens" else f"{value} sequences"
        axes.set(
            title=f"{case}, {other}", xlabel=words, ylabel="times faster than the best standard"
        )
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    canvas.savefig(path)
