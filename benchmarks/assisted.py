"""Speculation end to end: tokens per second of the bundled models on repetitive Python text.

    python benchmarks/assisted.py --model gdn-tiny --json assisted.json

Greedy decoding of one sequence. Every way to decode takes its turn in every round; all of them must
emit the tokens of plain transformers. Times are medians over rounds and cover a whole call, prefill
included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import replayssm
from replayssm.engine.speculative import (
    DraftModel,
    FixedLength,
    ModelDrafter,
    NgramDrafter,
    SpeculativeSession,
)
from replayssm.integrations.speculation import Decoder, Verifier
from replayssm.models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

    from replayssm.integrations.transformers import Enabled

FUNCTION = '''def {name}(left, right):
    """Return left {sign} right."""
    return left {sign} right


'''
PROMPT = "".join(
    FUNCTION.format(name=name, sign=sign)
    for name, sign in [("add", "+"), ("subtract", "-"), ("multiply", "*"), ("divide", "/")]
)


class Bench:
    """One model, with the draft model beside it, and the ways to decode with them.

    Args:
        name: A bundled model.
        tokens: Tokens to emit.
        drafts: Drafts a round.
    """

    def __init__(self, name: str, tokens: int, drafts: int) -> None:
        self.model, self.draft = tiny.load(name), tiny.load("draft-tiny")
        self.prompt, self.tokens, self.drafts = tiny.encode(PROMPT + "def "), tokens, drafts
        self.forwards = 0
        self.model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def generate(self, **options: object) -> list[int]:
        """Decode with transformers' ``generate``."""
        ids = torch.tensor([self.prompt])
        model: Any = self.model
        out = model.generate(ids, max_new_tokens=self.tokens, do_sample=False, **options)
        new: list[int] = out[0, len(self.prompt) :].tolist()
        return new

    def session(self, handle: Enabled, draft_handle: Enabled | None = None) -> list[int]:
        """Decode with our own loop, drafting from n-grams or from the draft model."""
        drafter: Any = NgramDrafter()
        if draft_handle is not None:
            decoder = Decoder(draft_handle, keep=self.drafts)
            drafter = ModelDrafter(DraftModel(decoder.step, decoder.rollback))
        verifier = Verifier(handle, max_nodes=self.drafts)
        session = SpeculativeSession(verifier, drafter, FixedLength(self.drafts))
        return session.generate(self.prompt, self.tokens).tokens

    def ways(self) -> dict[str, Callable[[], list[int]]]:
        """Return every way to decode, by name."""
        lookup = {"prompt_lookup_num_tokens": self.drafts}

        def enabled(way: Callable[[Enabled, Enabled], list[int]]) -> Callable[[], list[int]]:
            def run() -> list[int]:
                options = {"self_test": False}
                with (
                    replayssm.enable(self.model, **options) as handle,
                    replayssm.enable(self.draft, **options) as draft_handle,
                ):
                    return way(handle, draft_handle)

            return run

        return {
            "transformers": self.generate,
            "enabled": enabled(lambda *_: self.generate()),
            "prompt lookup": enabled(lambda *_: self.generate(**lookup)),
            "assistant": enabled(lambda *_: self.generate(assistant_model=self.draft)),
            "session, n-gram": enabled(lambda handle, _: self.session(handle)),
            "session, draft model": enabled(self.session),
        }


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """Return one record a way, after a warm-up that also compares the tokens."""
    ways = bench.ways()
    wanted = bench.generate()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    forwards = {}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            bench.forwards, start = 0, time.perf_counter()
            tokens = run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
            if tokens != wanted:
                raise SystemExit(f"{name}: other tokens than plain transformers")
            forwards[name] = bench.forwards
    plain = statistics.median(seconds["transformers"])
    return [
        {
            "way": name,
            "tokens_per_second": round(bench.tokens / statistics.median(taken), 1),
            "over_plain": round(plain / statistics.median(taken), 2),
            "forwards": forwards[name],
            "seconds": [round(s, 4) for s in taken],
        }
        for name, taken in seconds.items()
    ]


def environment() -> dict[str, str]:
    """Return what the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{package: version(package) for package in ("numba", "torch", "transformers")},
    }


def main() -> None:
    """Measure and print; optionally write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gdn-tiny", choices=tiny.NAMES[:3])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="results go here, beside other models'")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    records = measure(Bench(args.model, args.tokens, args.drafts), args.rounds)
    for record in records:
        print(args.model, record["way"], record["tokens_per_second"], record["over_plain"])
    if args.json:
        old = json.loads(args.json.read_text()) if args.json.exists() else {"results": {}}
        options = {"tokens": args.tokens, "drafts": args.drafts, "prompt": len(PROMPT) + 4}
        results = {**old["results"], args.model: {**options, "ways": records}}
        content = {"environment": environment(), "results": results}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
