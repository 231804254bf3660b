r"""Train one of the bundled tiny models within a wall-clock budget.

    python benchmarks/tiny_data.py --out tiny-data ...          # once, builds the corpus
    python benchmarks/train_tiny.py --name gdn-tiny --data tiny-data --out runs \
        --budget 490 --tokens 32768 --compile

Mamba-2 learns key-value recall only with wider gates and a first stage of short recall:
``--recall-first --dt-range 0.02 0.5 --a-range 0.01 1`` (with the defaults it reached 0 %).

Lengths grow in stages (512, 2,048, 8,192 bytes), schedules follow the clock, and the learning
rate warms up, holds and decays to zero. Answers of the recall tasks and running text are averaged
apart and added, so that a few answer bytes in a long sequence still count. It writes
``<out>/<name>.safetensors`` (bf16; gate parameters fp32) and ``<out>/<name>.json`` (all scores of
the rounded weights, and the history).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import lzma
import math
import multiprocessing
import signal
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

import tiny_data
from tiny_arch import build_model, use_reference_kernels, use_training_kernels
from tiny_score import bits_per_byte, recall_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STAGES = (
    # (until this share of the budget, ((length, probability), ...), share of task sequences)
    (0.30, ((512, 1.0),), 0.5),
    (0.62, ((512, 0.2), (2048, 0.8)), 0.45),
    (1.01, ((512, 0.1), (2048, 0.3), (8192, 0.6)), 0.4),
)
RECALL_FIRST = (
    # The same, behind a first stage that is almost only recall at a short length.
    (0.25, ((256, 1.0),), 0.9),
    (0.40, ((256, 0.3), (512, 0.7)), 0.5),
    (0.65, ((512, 0.3), (2048, 0.7)), 0.45),
    (1.01, ((512, 0.1), (2048, 0.3), (8192, 0.6)), 0.4),
)
_CORPUS: dict[str, np.ndarray] = {}


@dataclass
class Clock:
    """Wall-clock progress of a run."""

    budget: float
    start: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Return seconds since the start."""
        return time.monotonic() - self.start

    def progress(self) -> float:
        """Return the share of the budget that is spent."""
        return self.elapsed() / self.budget


def _end_with_parent() -> None:
    # A worker of a killed run would wait for work for ever.
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _make(seed: int, count: int, length: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    return tiny_data.make_batch(_CORPUS, seed, count, length, share)


class Loader:
    """Batches made ahead by worker processes, following the stages."""

    def __init__(self, clock: Clock, args: argparse.Namespace) -> None:
        self.clock, self.tokens, self.seed = clock, args.tokens, args.seed
        self.stages = RECALL_FIRST if args.recall_first else STAGES
        workers, seed = args.workers, args.seed
        self.rng = np.random.default_rng(seed)
        # Forked before CUDA starts, so the corpus is shared and not copied.
        self.pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("fork"), initializer=_end_with_parent
        )
        self.queue: deque[Future[tuple[np.ndarray, np.ndarray]]] = deque()
        self.made = 0
        for _ in range(3 * workers):
            self._submit()

    def _submit(self) -> None:
        progress = self.clock.progress()
        _, lengths, share = next(
            stage for stage in self.stages if progress < stage[0] or stage[0] > 1
        )
        choice = self.rng.choice(len(lengths), p=[p for _, p in lengths])
        length = lengths[int(choice)][0]
        count = max(1, self.tokens // length)
        self.made += 1
        seed = self.seed * 1_000_003 + self.made
        self.queue.append(self.pool.submit(_make, seed, count, length, share))

    def next(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids, classes) on the device."""
        ids, classes = self.queue.popleft().result()
        self._submit()
        return (
            torch.from_numpy(ids).to(device, non_blocking=True).long(),
            torch.from_numpy(classes).to(device, non_blocking=True),
        )


def make_optimizer(model: torch.nn.Module, decay: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only (no gates, norms or convolutions)."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        plain = parameter.ndim == 2 and "conv" not in name
        (matrices if plain else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)


def learning_rate(peak: float, step: int, progress: float, warmup: int, hold: float) -> float:
    """Return the rate: linear warm-up by step, constant, then linear decay to zero by the clock."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if progress < hold:
        return peak
    return peak * max(0.0, (1.0 - progress) / (1.0 - hold))


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return the bf16 autocast context of a GPU; on the CPU, one that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def losses(
    model: torch.nn.Module, ids: torch.Tensor, classes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (text loss, answer loss), each a mean over its own bytes, in nats."""
    with mixed_precision(ids.device):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    kind = classes[:, 1:].flatten()
    means = []
    for wanted in (tiny_data.TEXT, tiny_data.ANSWER):
        mask = (kind == wanted).float()
        means.append((each * mask).sum() / mask.sum().clamp_min(1.0))
    return means[0], means[1]


def rounded_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights as they ship: bf16, gate parameters (A_log, dt_bias, D) fp32."""
    state = {}
    for name, tensor in model.state_dict().items():
        gate = name.rsplit(".", 1)[-1] in {"A_log", "dt_bias", "D"}
        state[name] = tensor.detach().to(torch.float32 if gate else torch.bfloat16).contiguous()
    return state


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Write the rounded weights where ``from_pretrained`` can read them."""
    save_file(rounded_state(model), path, metadata={"format": "pt"})


def quick_score(
    model: PreTrainedModel, held: bytes, lengths: list[int], count: int
) -> dict[str, float]:
    """Return a small set of scores for the log."""
    model.eval()
    with mixed_precision(next(model.parameters()).device):
        scores = {"bits": bits_per_byte(model, held[:131072], window=2048)}
        rows = recall_table(model, held, lengths, count, seed=3)
    scores |= {f"{row['kind']}@{row['length']}": float(row["rate"]) for row in rows}
    model.train()
    return {key: round(value, 4) for key, value in scores.items()}


def train(
    args: argparse.Namespace, clock: Clock, model: PreTrainedModel, loader: Loader, held: bytes
) -> dict[str, Any]:
    """Run the training loop until the budget is spent; return steps, bytes and history."""
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, args.weight_decay)
    history: list[dict[str, float]] = []
    step = seen = 0
    next_log, next_score, log_every = 0.0, args.score_every, min(10.0, args.budget / 5)
    model.train()
    while clock.progress() < 1.0:
        ids, classes = loader.next(device)
        rate = learning_rate(args.lr, step, clock.progress(), args.warmup, args.hold)
        for group in optimizer.param_groups:
            group["lr"] = rate
        text, answer = losses(model, ids, classes)
        optimizer.zero_grad(set_to_none=True)
        (text + args.answer_weight * answer).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A step whose gradient is not finite would spoil every weight.
        if bool(torch.isfinite(norm)):
            optimizer.step()
        step += 1
        seen += ids[:, 1:].numel()
        if clock.elapsed() >= next_log:
            next_log = clock.elapsed() + log_every
            row = {
                "seconds": round(clock.elapsed(), 1),
                "step": step,
                "bytes": seen,
                "length": ids.shape[1] - 1,
                "text_bits": round(float(text) / math.log(2), 4),
                "answer_bits": round(float(answer) / math.log(2), 4),
                "norm": round(float(norm), 3),
            }
            if clock.elapsed() >= next_score:
                next_score = clock.elapsed() + args.score_every
                row |= quick_score(model, held, args.lengths[:3], args.quick)
                save_weights(model, args.out / f"{args.name}.safetensors")
                late = clock.elapsed() > args.give_up
                if late and row[f"key_value@{args.lengths[0]}"] < 0.1:
                    raise SystemExit(f"{args.name}: no recall after {clock.elapsed():.0f} s")
            history.append(row)
            print(args.name, json.dumps(row), flush=True)
    return {"steps": step, "bytes": seen, "history": history}


def final_scores(args: argparse.Namespace, model: PreTrainedModel, held: bytes) -> dict[str, Any]:
    """Score the rounded weights, without autocast where that is cheap; return all numbers."""
    model.load_state_dict({k: v.float() for k, v in rounded_state(model).items()})
    model.eval()
    with mixed_precision(next(model.parameters()).device):
        rows = recall_table(model, held, args.lengths, args.count)
        rows += recall_table(model, held, args.lengths, args.count, zero_state=True)
        bits = {str(w): bits_per_byte(model, held, window=w) for w in (1024, 4096)}
    return {"bits_per_byte": bits, "recall": rows}


def check_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """Print how far the training kernels are from transformers' own functions."""
    ids = torch.randint(32, 127, (2, 512), device=device)
    results = []
    use_reference_kernels()
    for fast in (False, True):
        if fast:
            use_training_kernels(2)
        model.zero_grad(set_to_none=True)
        with mixed_precision(device):
            out = model(input_ids=ids, use_cache=False).logits.float()
        flat = out[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten()).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((out.detach(), grads))
    model.zero_grad(set_to_none=True)
    (out_a, grad_a), (out_b, grad_b) = results
    cosine = torch.nn.functional.cosine_similarity(grad_a, grad_b, dim=0)
    error = (out_a - out_b).abs().max() / out_a.abs().max()
    print(f"kernels: logits differ by {float(error):.2e}, gradient cosine {float(cosine):.6f}")


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds of training")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=65536, help="bytes per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--hold", type=float, default=0.6)
    parser.add_argument("--answer-weight", type=float, default=1.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 4096])
    parser.add_argument("--count", type=int, default=500, help="probes per final score")
    parser.add_argument("--quick", type=int, default=64, help="probes per score in the log")
    parser.add_argument("--score-every", type=float, default=50.0)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--init", type=Path, help="weights to continue from")
    parser.add_argument("--recall-first", action="store_true", help="start with short recall")
    parser.add_argument("--dt-range", type=float, nargs=2, default=[1e-3, 1e-1])
    parser.add_argument("--a-range", type=float, nargs=2, default=[0.1, 8.0])
    parser.add_argument("--skip", type=float, default=1.0, help="initial D of Mamba-2")
    parser.add_argument(
        "--give-up",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="end without result if key-value recall is below 10 %% by then",
    )
    parser.add_argument("--check", action="store_true", help="compare the kernels first")
    parser.add_argument("--compile", action="store_true", help="compile norms and MLPs")
    return parser.parse_args()


def main() -> None:
    """Train, score and save one model."""
    args = parse()
    clock = Clock(args.budget)
    args.out.mkdir(parents=True, exist_ok=True)
    held = lzma.decompress((args.data / "heldout.txt.xz").read_bytes())
    _CORPUS.update(tiny_data.read_corpus(args.data / "corpus.xz"))
    loader = Loader(clock, args)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(args.device)
    model = build_model(
        args.name,
        args.seed,
        dt_range=tuple(args.dt_range),
        a_range=tuple(args.a_range),
        skip=args.skip,
    )
    if args.init:
        from safetensors.torch import load_file

        model.load_state_dict({k: v.float() for k, v in load_file(args.init).items()})
    model.to(device)
    if device.type == "cuda":
        if args.check:
            check_kernels(model, device)
        use_training_kernels(2)
    if args.compile:
        for module in model.modules():
            if type(module).__name__.endswith(("MLP", "RMSNorm", "RMSNormGated")):
                module.compile(dynamic=True)
    print(args.name, f"ready after {clock.elapsed():.1f} s", flush=True)
    report = train(args, clock, model, loader, held)
    save_weights(model, args.out / f"{args.name}.safetensors")
    if device.type == "cuda":
        report["memory"] = torch.cuda.max_memory_allocated()
    report |= final_scores(args, model, held)
    report["parameters"] = sum(p.numel() for p in model.parameters())
    report["arguments"] = {k: str(v) for k, v in vars(args).items()}
    report["versions"] = {"torch": torch.__version__, "device": str(device)}
    report["seconds"] = clock.elapsed()
    (args.out / f"{args.name}.json").write_text(json.dumps(report, indent=1))
    print(args.name, "final", json.dumps(report["bits_per_byte"]))
    for row in report["recall"]:
        print(args.name, row["kind"], row["length"], row["zero_state"], row["rate"], flush=True)
    loader.pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
