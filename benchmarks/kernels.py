"""GPU kernels: one layer-step, ours and those of other packages side by side.

    python benchmarks/kernels.py --family mamba2 --batch 1,8,64,256 --json kernels.json
    python benchmarks/kernels.py --plot kernels.json --over window --out kernels.svg
    python benchmarks/kernels.py --policy kernels.json
    TRITON_INTERPRET=1 python benchmarks/kernels.py --check-only --tiny --device cpu

Every arm is first checked against an fp64 recurrence, then timed as ``gpu/timing.py`` says: whole
fold cycles in a CUDA graph, rows at different positions, state sets that no cache holds, arms in
turns. Bytes count rings, inputs and outputs; their share is of the bandwidth that plain streams
reach in the same run. An arm that is not installed, does not run or is wrong is listed with the
reason, and the others go on. Checks run in --jobs processes, which compile the kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpu import report
from gpu.arms import Kind
from gpu.cases import CASES, KEPT, Point
from gpu.check import check, compile_for_batches
from gpu.peers import PACKAGES
from gpu.peers.loading import select_no_device
from replayssm import policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu.arms import Arm
    from gpu.report import Record

FAMILIES = ("mamba2", "gdn", "kda")
SHARE = "share "  # a line of a worker starts with it
WINDOW = 16  # standard kernels have none and are timed once


def our_arms() -> list[Arm]:
    """Return this library's arms and their floors; only they need Triton."""
    from gpu import floor, launches

    arms = launches.arms()
    return [*arms, *floor.arms_of(arms)]


@cache
def every_arm() -> tuple[list[Arm], dict[str, str]]:
    """Return all arms, and why packages are missing; kernel files are loaded once."""
    found: list[Arm] = []
    missing: dict[str, str] = {}
    for package, make in {"ours": our_arms, **PACKAGES}.items():
        try:
            found += make()
        except Exception as error:
            missing[package] = f"{type(error).__name__}: {error}"
    return found, missing


def named(words: list[str]) -> list[Arm]:
    """Return the arms whose names hold one of the words, all where there are none."""
    return [a for a in every_arm()[0] if not words or any(w in a.name for w in words)]


def points(args: argparse.Namespace) -> list[Point]:
    """Return the points of this run, smallest batch first."""
    cases = [c for c in CASES.values() if c.family in args.family]
    cases = [c for c in cases if ("tiny" in c.name) == args.tiny]
    if args.case:
        cases = [c for c in cases if c.name in args.case]
    sizes = sorted(args.batch)
    return [Point(*x) for x in product(cases, sizes, args.tokens, args.window)]


def check_share(args: argparse.Namespace, share: int, shares: int) -> list[Record]:
    """Check every shares-th arm at each case, block length and window; one record each."""
    arms = named(args.arms)
    device = torch.device(args.device)
    done = []
    kinds = dict.fromkeys(p.at(1) for p in points(args))
    tasks = [(a, p) for p in kinds for a in arms if wanted(a, p, args)]
    for arm, point in tasks[share::shares]:
        found = {"arm": arm.name, "case": point.case.name, "tokens": point.tokens,
                 "window": point.window}  # fmt: skip
        try:
            error = 0.0 if arm.kind is Kind.FLOOR else check(arm, point, device).error
            if not args.check_only:
                compile_for_batches(arm, point, args.batch, device)
            found |= {"error": float(f"{error:.3g}")}
        except Exception as error:
            found |= {"absent": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        done.append(found)
    return done


def wanted(arm: Arm, point: Point, args: argparse.Namespace) -> bool:
    """Whether an arm is measured at a point: those without a window at the first one only."""
    has_window = arm.kind in (Kind.REPLAY, Kind.FLOOR)
    return not arm.refuses(point) and (has_window or point.window == args.window[0])


def checks(args: argparse.Namespace) -> list[Record]:
    """Check in worker processes, or here when there is one job."""
    if args.jobs == 1:
        return check_share(args, 0, 1)
    command = [sys.executable, *sys.argv]
    workers = [
        subprocess.Popen(
            [*command, "--worker", f"{i}/{args.jobs}"], stdout=subprocess.PIPE, text=True
        )
        for i in range(args.jobs)
    ]
    done: list[Record] = []
    for worker in workers:
        out, _ = worker.communicate()
        lines = [x for x in out.splitlines() if x.startswith(SHARE)]
        done += json.loads(lines[-1].removeprefix(SHARE)) if lines else []
    return done


def measure(args: argparse.Namespace, checked: list[Record]) -> Iterator[list[Record]]:
    """Time every arm that was right, point by point; yield ceilings, then each point's records."""
    from gpu import ceilings, timing

    device = torch.device(args.device)
    limits = ceilings.measure(device)
    print({k: f"{v / 1e12:.2f} TB/s" for k, v in vars(limits).items()}, flush=True)
    arms = named(args.arms)
    known = {(c["arm"], c["case"], c["tokens"], c["window"]): c for c in checked}
    yield [{"ceilings": vars(limits)}]
    start = time.monotonic()
    for point in points(args):
        here, told = [], []
        for arm in (a for a in arms if wanted(a, point, args)):
            key = (arm.name, point.case.name, point.tokens, point.window)
            result = known.get(key, {"absent": "its check did not end"})
            if "absent" in result:
                told.append(report.record(arm, point, result["absent"], limits, 0.0))
            else:
                here.append((arm, result["error"]))
        if time.monotonic() - start > args.seconds:
            told += [report.record(a, point, "no time left", limits, e) for a, e in here]
            here = []
        figures = timing.side_by_side([a for a, _ in here], point, device)
        told += [report.record(a, point, figures[a.name], limits, e) for a, e in here]
        yield told
        took = time.monotonic() - start
        print(f"{took:5.0f} s {point.case.name} B={point.batch} T={point.tokens} "
              f"window {point.window}: {len(here)} arms", flush=True)  # fmt: skip


def numbers(text: str) -> list[int]:
    """Parse ``1,8,64``."""
    return [int(x) for x in text.split(",")]


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", type=lambda x: x.split(","), default=list(FAMILIES))
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="all by default")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 64, 128, 256, 512])
    parser.add_argument("--tokens", type=numbers, default=[1], help=f"of a block: {sorted(KEPT)}")
    parser.add_argument("--window", type=numbers, default=[WINDOW])
    parser.add_argument("--arms", type=lambda x: x.split(","), default=[], help="words of names")
    parser.add_argument("--json", type=Path, help="results go here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check and compile")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which nothing is begun")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="shapes for Triton's interpreter")
    parser.add_argument("--list", action="store_true", help="print the arms and end")
    parser.add_argument("--plot", type=Path, help="draw these results instead")
    parser.add_argument("--over", choices=sorted(report.AXES), default="batch", help="of --plot")
    parser.add_argument("--policy", type=Path, nargs="+",
                        help="make a policy table of a device of its results instead")  # fmt: skip
    parser.add_argument("--out", type=Path, help="of --plot (kernels.svg) and --policy")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, known in (("family", FAMILIES), ("tokens", KEPT)):
        if not set(getattr(args, name)) <= set(known):
            parser.error(f"--{name}: choose from {sorted(known)}")
    return args


def main() -> None:
    """Check, time, print, write."""
    args = parse()
    if args.plot:
        report.plot(json.loads(args.plot.read_text()), args.out or Path("kernels.svg"), args.over)
        return
    if args.policy:
        runs = [json.loads(path.read_text()) for path in args.policy]
        about = runs[0]["environment"]
        named_for = about["device"].lower().replace(" ", "-")
        out = args.out or policy.SHIPPED / f"{named_for}.policy.json"
        # a window that was measured at one batch would judge all others by it
        found = [row for run in runs for row in run["results"] if row["window"] in args.window]
        rows = report.policy_rows({"results": found})
        policy.write_table(out, rows, about)
        return
    if args.device == "cpu":
        select_no_device()
    if args.worker:
        share, shares = (int(x) for x in args.worker.split("/"))
        print(SHARE + json.dumps(check_share(args, share, shares)))
        return
    missing = every_arm()[1]
    for package, reason in missing.items():
        print(f"absent: {package}: {reason}")
    if args.list:
        print("\n".join(a.name for a in named(args.arms)))
        return
    start = time.monotonic()
    checked = checks(args)
    print(f"{len(checked)} checks in {time.monotonic() - start:.0f} s", flush=True)
    if args.check_only:
        for c in checked:
            print(f"{c['case']} T={c['tokens']} w{c['window']} {c['arm']}: "
                  f"{c.get('error', c.get('absent'))}")  # fmt: skip
        return
    timed = measure(args, checked)
    (limits,), records = next(timed), []
    for found in timed:
        records += found
        report.add_ratios(records)
        command = ["benchmarks/kernels.py", *report.lasting_words()]
        run = {"environment": report.environment(command), **limits, "missing": missing,
               "results": records}  # fmt: skip
        if args.json:  # after every point: a run that is cut leaves what it measured
            report.save(args.json, run)
    print(report.table(records))


if __name__ == "__main__":
    main()
