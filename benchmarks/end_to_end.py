"""A whole hybrid model on a GPU: decode and verify steps as CUDA graphs, arm by arm.

    python benchmarks/end_to_end.py --model nemotron-h-4b,qwen3.5-4b --json end-to-end.json
    python benchmarks/end_to_end.py --batch 256 --arms "standard f32,replay q24 high"
    TRITON_INTERPRET=1 python benchmarks/end_to_end.py --tiny --device cpu

A transformers model with random weights, enabled, its recurrent layers in rows whose counts live on
the device, its attention in static caches that start ``--context`` tokens full. One graph holds one
step: projections, convolutions, recurrences, attention, logits, the next tokens and the commit.
Rows stand at different positions of the window. ``standard`` is our own fused step; a verify step
runs T = 4 tokens of which 2 or 3 are kept by force, against the same step with a state snapshot
after every token. Every arm writes its row when it is done; one that fails says why and the others
go on.
"""

from __future__ import annotations

import argparse
import gc
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu import hybrid, report
from gpu.steps import Decode, profile, step_seconds
from replayssm.integrations.resident import ResidentReplay, ResidentStandard
from replayssm.ring import RingSpec
from replayssm.state import StatePool
from replayssm.storage import StorageSpec
from replayssm.types import Format, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from replayssm.integrations.transformers import Enabled

WINDOW = 16
VERIFY = 4
LEAST_STEPS = 64  # timed even where a figure takes longer than it may
GROWTH = 1024  # tokens that attention caches have room for beyond --context, alike for every arm
LARGEST = 0  # stands for the largest batch that every decode arm holds
SPARE = 8_000_000_000  # bytes left to activations and logits when the largest batch is sought
BATCHES = (1, 32, 128, 256, 512)
CHECKED = 32  # rows of the check: kernels are compiled once for this and all larger batches


@dataclass(frozen=True)
class Arm:
    """One way to keep the recurrent states.

    Attributes:
        path: ``standard`` or ``replay``; the first with T > 1 writes snapshots.
        state: State format.
        depth: Planes that a step reads.
        tokens: T.
        kept: Entries of a block that are kept.
    """

    path: str
    state: Format
    depth: ReadDepth = ReadDepth.FULL
    tokens: int = 1
    kept: int = 1

    @property
    def name(self) -> str:
        """As on the command line."""
        path = "snapshots" if self.path == "standard" and self.tokens > 1 else self.path
        depth = f" {self.depth.value}" if self.state not in (Format.F32, Format.BF16) else ""
        verify = f" T={self.tokens} kept={self.kept}" if self.tokens > 1 else ""
        return f"{path} {self.state.value}{depth}{verify}"

    def ring(self) -> RingSpec:
        """Return the ring sizes."""
        return RingSpec(WINDOW, max_block=self.tokens)

    def row_bytes(self, handle: Enabled) -> int:
        """Return the bytes of one sequence's recurrent states, rings included."""
        if self.path == "replay":
            dtype = handle.ring_dtype
            specs = (StorageSpec(x, self.state, self.ring(), dtype) for x in handle.specs)
            return sum(spec.nbytes(1) for spec in specs)
        return self.standard_rows(handle, 1, torch.device("meta")).nbytes()

    def standard_rows(self, handle: Enabled, rows: int, device: torch.device) -> ResidentStandard:
        """Return rows of the standard step."""
        dtype = torch.bfloat16 if self.state is Format.BF16 else torch.float32
        return ResidentStandard(
            handle.specs, rows, tokens=self.tokens, dtype=dtype, ring_dtype=handle.ring_dtype,
            device=device,
        )  # fmt: skip

    def rows(self, handle: Enabled, rows: int, device: torch.device) -> Any:  # noqa: ANN401 - rows of either kind
        """Return empty rows, row b at position b of its window."""
        if self.path == "standard":
            made: Any = self.standard_rows(handle, rows, device)
        else:
            pool = StatePool(
                handle.specs, rows, state=self.state, ring=self.ring(), device=device,
                ring_dtype=handle.ring_dtype, impl="triton",
            )  # fmt: skip
            refs = [pool.admit_(position=WINDOW + b % WINDOW) for b in range(rows)]
            made = ResidentReplay(pool, refs, tokens=self.tokens, depth=self.depth)
        made.accepted.fill_(self.kept)
        return made


HIGH = ReadDepth.HIGH
DECODE = (
    Arm("standard", Format.F32), Arm("replay", Format.F32), Arm("replay", Format.Q24, HIGH),
    Arm("replay", Format.Q24), Arm("replay", Format.S32, HIGH), Arm("standard", Format.BF16),
    Arm("replay", Format.BF16),
)  # fmt: skip
SPECULATIVE = tuple(
    Arm(path, state, depth, VERIFY, kept)
    for kept in (2, 3)
    for path, state, depth in (
        ("standard", Format.F32, ReadDepth.FULL),
        ("replay", Format.F32, ReadDepth.FULL),
        ("replay", Format.Q24, HIGH),
        ("replay", Format.S32, HIGH),
    )
)
ARMS = {arm.name: arm for arm in (*DECODE, *SPECULATIVE)}


def chosen(words: list[str]) -> list[Arm]:
    """Return the arms that are named, and those that hold another word; all without words."""
    parts = [w for w in words if w not in ARMS]
    return [a for n, a in ARMS.items() if not words or n in words or any(w in n for w in parts)]


def batches_of(arm: Arm, args: argparse.Namespace) -> list[int]:
    """Return the batches that an arm is measured at."""
    sizes: list[int] = args.batch if arm.tokens == 1 else args.verify
    return sizes


@torch.no_grad()
def check(handle: Enabled, arms: list[Arm], args: argparse.Namespace) -> dict[str, float]:
    """Return every arm's relative difference of logits from the first standard step's.

    All decode the same random tokens over more than two windows (a block at a time and all kept
    where T > 1), so a difference is the arm's own.
    """
    device = torch.device(args.device)
    steps = 4 if args.tiny else 2 * WINDOW + 4
    rows = 2 if args.tiny else CHECKED
    vocab = handle.model.config.get_text_config().vocab_size
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (rows, steps // VERIFY * VERIFY), generator=gen).to(device)
    seen: dict[Arm, Tensor] = {}
    for arm in [ARMS["standard f32"], *arms]:
        whole = replace(arm, kept=arm.tokens)
        if whole not in seen:
            made = whole.rows(handle, rows, device)
            run = Decode(handle, made, arm.tokens, arm.tokens, length=64, start=0, depth=arm.depth)
            seen[whole] = torch.cat([run.forward(x).float() for x in ids.split(arm.tokens, 1)], 1)
    want = seen[ARMS["standard f32"]]
    wholes = {arm.name: seen[replace(arm, kept=arm.tokens)] for arm in arms}
    return {n: float(f"{(got - want).norm() / want.norm():.3g}") for n, got in wholes.items()}


def measure(handle: Enabled, arm: Arm, batch: int, args: argparse.Namespace) -> report.Record:
    """Capture a step, run it, and return its figures."""
    device = torch.device(args.device)
    rows = arm.rows(handle, batch, device)
    run = Decode(handle, rows, arm.tokens, arm.kept, length=args.context + GROWTH,
                 start=args.context, depth=arm.depth)  # fmt: skip
    run.capture()
    # two windows fold every tile of every row at least once; they also say how long a step takes
    warm = step_seconds(run, 1 if args.tiny else 2 * WINDOW, warm=1)
    steps = max(min(args.steps, LEAST_STEPS), min(args.steps, int(args.seconds / warm)))
    seconds = step_seconds(run, steps, warm=1)
    found_in = profile(run, WINDOW) if batch in args.profile else None
    found: report.Record = {
        "step_ms": round(seconds * 1e3, 4),
        "tokens_per_s": round(batch * arm.kept / seconds, 1),
        "recurrent": None if found_in is None else found_in.recurrent,
        "busiest": None if found_in is None else found_in.busiest,
        "state_gb": round(arm.row_bytes(handle) * batch / 1e9, 3),
        "steps": steps,
    }
    if device.type == "cuda":
        found["allocated_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 1)
    return found


def largest(handle: Enabled, arm: Arm, args: argparse.Namespace) -> int:
    """Return how many sequences fit beside the weights, from the bytes that pools allocate."""
    device = torch.device(args.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 10**10
    config = handle.model.config.get_text_config()
    attention = sum("full_attention" in x for x in config.layer_types)
    heads = config.num_key_value_heads * config.head_dim
    token = attention * 2 * heads * handle.ring_dtype.itemsize
    per_row = arm.row_bytes(handle) + token * (args.context + GROWTH)
    return int((free - SPARE) // per_row)


def results(args: argparse.Namespace) -> Iterator[report.Record]:
    """Yield a row for every model, arm and batch, as they come."""
    from replayssm.integrations.transformers import disable, enable

    device = torch.device(args.device)
    for name in args.model:
        model = hybrid.build(name, device)
        size = sum(p.numel() for p in model.parameters())
        handle = enable(model, state="f32", window=WINDOW, max_block=VERIFY, impl="triton",
                        self_test=args.tiny)  # fmt: skip
        arms = chosen(args.arms)
        common = {"model": name, "parameters": size}
        try:
            errors: dict[str, float] = check(handle, arms, args)
        except Exception as error:
            errors = {}
            yield {**common, "check": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        _free()
        fits = min(largest(handle, arm, args) for arm in DECODE) // CHECKED * CHECKED
        for arm in arms:
            most = largest(handle, arm, args)
            about = {**common, "arm": arm.name, "tokens": arm.tokens, "kept": arm.kept,
                     "largest_batch": most, "logits_error": errors.get(arm.name)}  # fmt: skip
            for batch in (fits if b == LARGEST else b for b in batches_of(arm, args)):
                row = {**about, "batch": batch}
                if batch > most:
                    yield {**row, "absent": f"does not fit: {most} do"}
                    continue
                started = time.monotonic()
                try:
                    row |= measure(handle, arm, batch, args)
                except Exception as error:
                    row["absent"] = f"{type(error).__name__}: {str(error).strip()[:500]}"
                row["seconds"] = round(time.monotonic() - started, 1)
                yield row
                _free()
        disable(model)
        del model, handle
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def compile_kernels(task: tuple[str, str, int, str]) -> str | None:
    """Run one eager step of an arm on a cut model, in a process of its own."""
    from replayssm.integrations.transformers import enable

    name, arm_name, batch, on = task
    device, arm = torch.device(on), ARMS[arm_name]
    try:
        model = hybrid.build(name, device, layers=2)
        handle = enable(model, state="f32", window=WINDOW, max_block=VERIFY, impl="triton",
                        self_test=False)  # fmt: skip
        rows = arm.rows(handle, batch, device)
        run = Decode(handle, rows, arm.tokens, arm.kept, length=64, start=0, depth=arm.depth)
        run.step()
    except Exception as error:
        return f"{task}: {type(error).__name__}: {str(error).strip()[:300]}"
    return None


def compile_all(args: argparse.Namespace) -> None:
    """Compile what the arms launch, in parallel; Triton keeps it on disk."""
    tasks = []
    for name, arm in product(args.model, (a for a in chosen(args.arms) if a.kept != 2)):
        # from the check's rows on every batch takes the same kernels
        sizes = {min(b or CHECKED, CHECKED) for b in batches_of(arm, args)} | {CHECKED}
        tasks += [(name, arm.name, rows, args.device) for rows in sorted(sizes)]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as workers:
        for said in workers.map(compile_kernels, tasks):
            if said:
                print(said, flush=True)


def line(row: report.Record) -> str:
    """Return a row as text."""
    head = f"{row['model']:16}{row.get('arm', 'check'):32}B={row.get('batch', '-'):<5}"
    if "tokens_per_s" not in row:
        return f"{head} {row.get('absent', row.get('check'))}"
    share = row["recurrent"]
    return (f"{head}{row['step_ms']:9.3f} ms {row['tokens_per_s']:10.0f} tokens/s  recurrent "
            f"{'-' if share is None else f'{share:.0%}':>4}  most {row['largest_batch']:5}  "
            f"logits {row['logits_error']}")  # fmt: skip


def batches(text: str) -> list[int]:
    """Parse ``1,256,largest``."""
    return [LARGEST if word == "largest" else int(word) for word in text.split(",")]


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words = lambda text: text.split(",")  # noqa: E731 - a type of argparse
    parser.add_argument("--model", type=words, help=f"of {', '.join(hybrid.SHAPES)}")
    parser.add_argument("--batch", type=batches, default=None,
                        help="numbers, and 'largest': what every decode arm holds")  # fmt: skip
    parser.add_argument("--verify", type=batches, help="the same of blocks of drafts (--batch)")
    parser.add_argument("--profile", type=batches, default=[256], help="batches that are profiled")
    parser.add_argument("--seconds", type=float, default=60.0,
                        help="that one figure may take; 64 steps run in any case")  # fmt: skip
    parser.add_argument("--arms", type=words, default=[], help=f"words of: {'; '.join(ARMS)}")
    parser.add_argument("--steps", type=int, help="graph launches timed (512)")
    parser.add_argument("--context", type=int, help="tokens in the attention caches before (512)")
    parser.add_argument("--json", type=Path, help="rows go here, each when it is measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile kernels first")
    parser.add_argument("--tiny", action="store_true", help="toys, for a machine without a GPU")
    args = parser.parse_args()
    tiny = args.tiny
    args.model = args.model or [n for n in hybrid.SHAPES if ("tiny" in n) == tiny]
    args.batch = args.batch or ([2] if tiny else list(BATCHES))
    args.verify = args.verify or args.batch
    args.profile = [] if tiny else args.profile
    args.steps = args.steps or (2 if tiny else 512)
    args.context = args.context if args.context is not None else (8 if tiny else 512)
    return args


def main() -> None:
    """Measure, print and write row by row."""
    args = parse()
    started = time.monotonic()
    if args.jobs:
        compile_all(args)
        print(f"kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
    rows: list[report.Record] = []
    command = ["benchmarks/end_to_end.py", *report.lasting_words()]
    for row in results(args):
        rows.append(row)
        print(line(row), flush=True)
        if args.json:
            report.save(args.json, {"environment": report.environment(command), "results": rows})


if __name__ == "__main__":
    main()
