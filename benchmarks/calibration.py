"""Is the evaluation of a plan calibrated? Equal runs, planted slowdowns, planted precision faults.

python benchmarks/calibration.py [--part live ..]

Prints, and writes results/calibration.json beside this file; parts that are not named stay there
as they are. The first three need a machine at rest. What they measure:

* ``resampled``: runs of one variant, measured one after the other, paired with their neighbours in
  random order; 2,000 experiments of 8 pairs are drawn from them. Nothing differs, so an interval
  that excludes 1 is a false alarm.
* ``live``: 20 experiments of 8 pairs between two engines that are the same.
* ``virtual``: an engine on a virtual clock, in which every forward of the candidate costs 5 % more,
  and one in which it does not; both with 5 % of noise in every run.
* ``planted``: a live engine whose candidate waits 5 % of every step. The pilot's spread says how
  many pairs are needed; they are run.
* ``precision``: write strengths that are too large and decays that are too weak (whose error
  grows along the context), small ones and large ones, against the margins of the example's plan.
  Decision 2 compares logits step by step and sees small faults; decision 5 asks if they matter.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpu_kernels import environment
from replayssm.engine.clock import MonotonicClock, VirtualClock, Work
from replayssm.engine.engine import Engine
from replayssm.engine.request import STANDARD, Limits, Request
from replayssm.evaluate import compatibility
from replayssm.evaluate.arms import STANDARD as STANDARD_ARM
from replayssm.evaluate.checks import Status
from replayssm.evaluate.decisions import quality
from replayssm.evaluate.decisions.driving import Driver
from replayssm.evaluate.decisions.paired import (
    Comparison,
    at_most,
    careful_spread,
    compare,
    log_ratios,
    pairs_for_effect,
)
from replayssm.evaluate.decisions.serving import Job
from replayssm.evaluate.decisions.tables import Variant
from replayssm.evaluate.plan import Plan, Scope
from replayssm.evaluate.subject import Subject, load
from replayssm.state import StatePool
from replayssm.types import Block

RESULT = Path(__file__).parent / "results" / "calibration.json"
MODEL, PROMPT, OUTPUT = "gdn-tiny", 16, 6
PAIRS, RESAMPLED, LIVE, VIRTUAL = 8, 2000, 20, 200
SLOWER, NOISE = 0.05, 0.05
MARGIN, LOGIT_MARGIN = 0.002, 1e-3
BASELINE = Variant(name="standard", path="standard", state="f32")
CANDIDATE = Variant(name="s32-full", path="replay", state="s32")
Run = Callable[[], float]


def server(
    subject: Subject,
    clock: Any = None,  # noqa: ANN401
    *,
    rows: int = 1,
    lag: float = 0.0,
) -> Run:
    """Return a function that serves a few requests and returns the seconds it took.

    Args:
        subject: The model.
        clock: The engine's clock.
        rows: Requests, all at once.
        lag: Share of every step that is waited on top.
    """
    clock = MonotonicClock() if clock is None else clock
    limits = Limits(slots=rows, context=PROMPT + OUTPUT, prefill_chunk=rows * PROMPT)
    engine = Engine(subject.model, limits, router=lambda _: STANDARD, clock=clock)
    honest = engine.step

    def slow_step() -> list[Any]:
        start = clock.now()
        events = honest()
        until = clock.now() + lag * (clock.now() - start)
        while clock.now() < until:
            pass
        return events

    if lag:
        engine.step = slow_step  # type: ignore[method-assign]
    tokens = subject.encode(subject.text)

    def request(job: Job) -> Request:
        return Request(job.id, job.prompt, job.output_tokens)

    driver = Driver(engine, request, lambda _: None)
    jobs = [
        Job(f"r{i}", 0.0, tuple(tokens[i * PROMPT : (i + 1) * PROMPT]), OUTPUT, "all")
        for i in range(rows)
    ]
    return lambda: driver.run(jobs, rows).span_s


def paired(a: Run, b: Run, pairs: int) -> list[float]:
    """Run two servers in turn and return the log ratios, above 0 where b is faster."""
    times: dict[str, list[float]] = {"a": [], "b": []}
    for i in range(pairs):
        for name in ("a", "b") if i % 2 == 0 else ("b", "a"):
            times[name].append((a if name == "a" else b)())
    return log_ratios(times["a"], times["b"], better="lower")


def resampled(runs: list[float], seed: int = 0) -> float:
    """Return the share of false alarms among experiments drawn from runs of one variant."""
    logs = np.log(np.array(runs))
    pairs = logs[: len(logs) // 2 * 2].reshape(-1, 2)
    differences = pairs[:, 0] - pairs[:, 1]
    rng = np.random.default_rng(seed)
    alarms = 0
    for _ in range(RESAMPLED):
        # either of two neighbours may have been called the candidate
        drawn = rng.choice(differences, PAIRS) * rng.choice([-1, 1], PAIRS)
        alarms += compare(drawn.tolist()).differs
    return alarms / RESAMPLED


def virtual(subject: Subject, extra: float) -> float:
    """Return the share of experiments in a virtual-clock engine that see a slower candidate."""
    rng = np.random.default_rng(1)

    def cost(work: Work) -> float:
        return 1e-3 * (1 + 0.1 * work.rows)

    a, b = (
        server(subject, VirtualClock(lambda w, share=share: cost(w) * (1 + share)))
        for share in (0.0, extra)
    )
    # the same forwards each time: the model need not run again, the noise is drawn per run
    plain, slower = a(), b()
    seen = 0
    for _ in range(VIRTUAL):
        noise = np.exp(NOISE * rng.standard_normal((2, PAIRS * 4)))
        drift = np.exp(np.cumsum(rng.normal(0, 0.1, PAIRS * 4)))
        logs = log_ratios(plain * drift * noise[0], slower * drift * noise[1], better="lower")
        spread = careful_spread(logs[:PAIRS])
        wanted = pairs_for_effect(spread, SLOWER, confidence=0.95, power=0.8)
        count = min(len(logs), max(PAIRS, wanted))
        seen += compare(logs[:count]).ratio.high < 1
    return seen / VIRTUAL


@contextmanager
def planted(change: Callable[[Block], Block]) -> Iterator[None]:
    """Change what every step and block hands to the pool."""
    honest = StatePool.step_

    def step_(
        self: StatePool,
        ticket: Any,  # noqa: ANN401
        layer: int,
        block: Block,
        **options: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        return honest(self, ticket, layer, change(block), **options)

    StatePool.step_ = step_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        StatePool.step_ = honest  # type: ignore[method-assign]


def precision(subject: Subject) -> dict[str, dict[str, float | bool]]:
    """Return what decisions 2 and 5 see of the honest variant and of each fault."""

    def write(factor: float) -> Callable[[Block], Block]:
        return lambda b: Block(b.q, b.k, b.v, b.g, b.w * factor)

    def decay(factor: float) -> Callable[[Block], Block]:
        return lambda b: Block(b.q, b.k, b.v, b.g * factor, b.w)

    faults = {
        "none": write(1.0),
        "write strength 1 % too large": write(1.01),
        "write strength 30 % too large": write(1.3),
        "decay 0.5 % too weak": decay(0.995),
        "decay 30 % too weak": decay(0.7),
    }
    return {name: seen(subject, change) for name, change in faults.items()}


def seen(subject: Subject, change: Callable[[Block], Block]) -> dict[str, float | bool]:
    """Return the numbers of decisions 2 and 5 with a fault planted, and whether each catches it."""
    rows = [(ids[:64], ids[64:]) for ids in quality.adversarial(subject, 1024, 6, 0)]
    scope = Scope(steps=128, prefills=(16,))
    plan = Plan(MODEL, (STANDARD_ARM, quality.arm_of(CANDIDATE)), scope=scope)
    with planted(change):
        moved = quality.drifts(subject.model, rows, BASELINE, [CANDIDATE])["s32-full"]
        agreements = compatibility.run(subject, plan, lambda _: None).agreements
    (bucket,) = quality.buckets(moved, (1024,), "adversarial", 0.95, 0)
    kl = bucket.mean_kl
    error = max(a.logit_error for a in agreements if a.arm == "s32-full")
    return {
        "logit_error": error,
        "caught_by_2": error > LOGIT_MARGIN,
        "mean_kl": kl.value,
        "low": kl.low,
        "high": kl.high,
        "caught_by_5": at_most(kl, MARGIN) is not Status.PASS,
        "first_128": float(np.mean([d.kl[:128].mean() for d in moved])),
        "last_128": float(np.mean([d.kl[-128:].mean() for d in moved])),
    }


def told(comparison: Comparison) -> dict[str, float]:
    """Return a comparison as JSON fields."""
    ratio = comparison.ratio
    return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": ratio.n}


def ready(*servers: Run) -> None:
    """Run each server once, untimed."""
    for run in servers:
        run()
    gc.freeze()  # a collection before every run need not look at all that was loaded


def equal_runs(subject: Subject) -> dict[str, object]:
    """Return the false alarms among experiments drawn from runs of one server."""
    run = server(subject)
    ready(run)
    series = [run() for _ in range(160)]
    alarms = resampled(series)
    return {
        "runs": len(series), "experiments": RESAMPLED, "pairs": PAIRS, "false_alarms": alarms
    }  # fmt: skip


def equal_servers(subject: Subject) -> dict[str, object]:
    """Return how many experiments between two equal servers say that nothing differs."""
    a, b = server(subject), server(subject)
    ready(a, b)
    calm = sum(not compare(paired(a, b, PAIRS)).differs for _ in range(LIVE))
    return {"experiments": LIVE, "pairs": PAIRS, "no_difference": calm}


def slower_server(subject: Subject) -> dict[str, object]:
    """Return what as many pairs as the pilot asks for say of a server that is slower."""
    plain, slow = server(subject, rows=2), server(subject, rows=2, lag=SLOWER)
    ready(plain, slow)
    pilot = paired(plain, slow, PAIRS)
    wanted = pairs_for_effect(careful_spread(pilot), SLOWER, confidence=0.95, power=0.8)
    logs = pilot + paired(plain, slow, max(0, wanted - PAIRS))
    return {"slower": SLOWER, "pairs_wanted": wanted, **told(compare(logs))}


def in_virtual_time(subject: Subject) -> dict[str, object]:
    """Return how often a slower engine on a virtual clock is seen, and one that is not slower."""
    return {
        "experiments": VIRTUAL,
        "noise": NOISE,
        "caught": virtual(subject, SLOWER),
        "false_alarms_of_slower": virtual(subject, 0.0),
    }


def planted_faults(subject: Subject) -> dict[str, object]:
    """Return what decisions 2 and 5 see of planted faults."""
    return {"margin": MARGIN, **precision(subject)}


PARTS: dict[str, Callable[[Subject], dict[str, object]]] = {
    "resampled": equal_runs,
    "live": equal_servers,
    "planted": slower_server,
    "virtual": in_virtual_time,
    "precision": planted_faults,
}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, object] = json.loads(args.out.read_text()) if args.out.exists() else {}
    record |= {"environment": environment(), "model": MODEL}
    for part in args.part or PARTS:
        # engines hold hooks on the model, and faults are planted in it: each part has its own
        record[part] = PARTS[part](load(MODEL))
        print(part, json.dumps(record[part]), flush=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
