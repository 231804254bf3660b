"""Section 4, precision: bits per byte, KL and recall, per arm, against the standard fp32 path.

Every arm decodes the same held-out texts and probes, teacher forced, in blocks that go through the
ring as single tokens do: a block divides the window and starts at a multiple of itself, so every
token reads the checkpoint and the ring at the depth it would find in single steps (section 1 checks
the results). Only the first window is prefilled, so nearly every token of the context has passed
through the arm's own state.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replayssm.evaluate.probes import KINDS, make_probes
from replayssm.evaluate.session import Session, enabled, one_thread, twin
from replayssm.evaluate.stats import Estimate, block_mean, block_quantile, paired_drop, wilson
from replayssm.evaluate.subject import Subject, Texts, held_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.plan import Plan, Scope

BLOCKS_PER_BUCKET = 8
LONGEST_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """One arm on the tokens whose position lies in ``(start, stop]``.

    Attributes:
        start: Lower end of the bucket.
        stop: Upper end.
        tokens: Tokens scored.
        bits_per_byte: Of this arm.
        increase: Bits per byte above the reference, relative to it.
        mean_kl: Mean KL from the reference's next-token distribution, nats; None for itself.
        p99_kl: 99th percentile; None under 1,000 tokens.
        flips: Share of tokens whose most likely next token differs from the reference's.
    """

    start: int
    stop: int
    tokens: int
    bits_per_byte: Estimate
    increase: Estimate | None
    mean_kl: Estimate | None
    p99_kl: Estimate | None
    flips: float


@dataclass(frozen=True, slots=True)
class Recall:
    """Probes of one kind and length.

    Attributes:
        kind: Probe kind.
        length: Tokens of the probe.
        right: Share answered right (every token of the answer).
    """

    kind: str
    length: int
    right: Estimate


@dataclass(frozen=True, slots=True)
class ArmPrecision:
    """One arm.

    Attributes:
        arm: Name.
        buckets: By position in the context, ascending.
        recall: By kind and length.
        recall_all: All probes together.
        recall_drop: Against the reference, probe by probe; None for itself.
        seconds: Time this arm took, beside others where cores allow it, and waiting for the
            reference's distributions.
    """

    arm: str
    buckets: tuple[Bucket, ...]
    recall: tuple[Recall, ...]
    recall_all: Estimate
    recall_drop: Estimate | None
    seconds: float


@dataclass(frozen=True, slots=True)
class PrecisionResult:
    """Outcome of the section.

    Attributes:
        arms: One per arm; the first is the reference.
        rows: Held-out sequences.
        probes: Probes.
        block: Tokens per forward.
        seconds: Time the section took.
    """

    arms: tuple[ArmPrecision, ...]
    rows: int
    probes: int
    block: int
    seconds: float = 0.0

    def arm(self, name: str) -> ArmPrecision:
        """Return one arm."""
        return next(a for a in self.arms if a.arm == name)


@dataclass(frozen=True, slots=True)
class _Question:
    kind: str
    length: int
    answer: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of one length, decoded as one batch: texts first, then probes."""

    ids: Tensor
    texts: int
    questions: tuple[_Question, ...]


@dataclass(slots=True)
class _Scores:
    """What one arm leaves behind."""

    log_probs: Tensor | None
    kl: NDArray[np.float64] | None
    nats: NDArray[np.float64]
    flips: NDArray[np.float64]
    right: NDArray[np.bool_]
    seconds: float = 0.0


def run(subject: Subject, plan: Plan, tick: Callable[[str], None]) -> PrecisionResult:
    """Decode every group under every arm and score it.

    Args:
        subject: Model and text.
        plan: Arms and sizes.
        tick: Called after each arm and group with their names.
    """
    texts = held_out(subject, plan.scope.text_rows, plan.scope.buckets[-1], plan.seed)
    groups = _groups(subject, texts, plan)
    questions = tuple(q for group in groups for q in group.questions)
    reference, *others = _decode_arms(subject, groups, plan, tick)
    results = [_score(plan.arms[0], reference, None, texts, questions, plan)]
    for arm, scores in zip(plan.arms[1:], others, strict=True):
        results.append(_score(arm, scores, reference, texts, questions, plan))
    return PrecisionResult(tuple(results), len(texts.ids), len(questions), plan.scope.block)


def count_steps(subject: Subject, plan: Plan) -> int:
    """Return how often :func:`run` will call its ``tick``."""
    texts = held_out(subject, plan.scope.text_rows, plan.scope.buckets[-1], plan.seed)
    return len(_groups(subject, texts, plan)) * len(plan.arms)


def _groups(subject: Subject, texts: Texts, plan: Plan) -> list[_Group]:
    groups = []
    for length, count in plan.scope.probes:
        rows, questions = [], []
        for kind in KINDS:
            probes = make_probes(kind, length, count, filler=subject.text, seed=plan.seed)
            for probe in probes:
                answer = subject.encode(probe.answer)
                row = subject.encode(probe.prompt) + answer
                rows.append(row)
                questions.append(_Question(kind, length, len(answer)))
        is_text = length == plan.scope.buckets[-1]
        groups += _batches(rows, questions, texts if is_text else None)
    if all(length != plan.scope.buckets[-1] for length, _ in plan.scope.probes):
        groups += _batches([], [], texts)
    return groups


def _batches(
    rows: list[list[int]], questions: list[_Question], texts: Texts | None
) -> list[_Group]:
    """Batch rows of equal token count; with a tokenizer probes of one length may differ."""
    found: dict[int, tuple[list[list[int]], list[_Question]]] = {}
    for row, question in zip(rows, questions, strict=True):
        same = found.setdefault(len(row), ([], []))
        same[0].append(row)
        same[1].append(question)
    groups = []
    if texts is not None:
        same = found.pop(texts.ids.shape[1], ([], []))
        ids = torch.tensor(texts.ids.tolist() + same[0])
        groups.append(_Group(ids, len(texts.ids), tuple(same[1])))
    groups += [_Group(torch.tensor(r), 0, tuple(q)) for r, q in found.values()]
    return groups


def _decode_arms(
    subject: Subject, groups: list[_Group], plan: Plan, tick: Callable[[str], None]
) -> list[_Scores]:
    """Decode under every arm; of a small model several side by side, each on one thread."""
    is_shared = subject.is_small and subject.model.device.type == "cpu"
    workers = torch.get_num_threads() if is_shared else 1
    lock, scope = Lock(), plan.scope
    reference: Future[_Scores] = Future()

    def tell(what: str) -> None:
        with lock:
            tick(what)

    def decode(model: PreTrainedModel, arm: Arm) -> _Scores:
        try:
            with one_thread() if workers > 1 else nullcontext():
                return _decode_arm(model, arm, groups, plan, reference, tell)
        except Exception as error:
            if arm is plan.arms[0] and not reference.done():
                reference.set_exception(error)  # the others would wait for ever
            raise

    with ExitStack() as stack:
        # one after the other: enabling changes the modeling module that all twins share
        models = [twin(subject.model) for _ in plan.arms]
        for model, arm in zip(models, plan.arms, strict=True):
            stack.enter_context(enabled(model, arm, window=scope.window, max_block=scope.block))
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        return list(pool.map(decode, models, plan.arms))


def _decode_arm(
    model: PreTrainedModel,
    arm: Arm,
    groups: list[_Group],
    plan: Plan,
    reference: Future[_Scores],
    tick: Callable[[str], None],
) -> _Scores:
    """Decode all groups; the first arm gives ``reference`` what the others' texts wait for."""
    is_first, right = arm is plan.arms[0], {}
    scores: _Scores | None = None
    start = time.perf_counter()
    # texts come first under the reference and last under the others, which wait for its answers
    for group in sorted(groups, key=lambda g: bool(g.texts) is not is_first):
        known = reference.result() if group.texts and not is_first else None
        scored, right[id(group)] = _decode_group(model, group, plan.scope, known)
        if scored is not None:
            scores = scored
            if is_first:
                reference.set_result(scored)
        tick(f"{arm.name}, {group.ids.shape[1]} tokens")
    if scores is None:
        raise RuntimeError("no group held the held-out texts")
    scores.right = np.array([hit for group in groups for hit in right[id(group)]], bool)
    scores.seconds = time.perf_counter() - start
    return scores


def _decode_group(
    model: PreTrainedModel, group: _Group, scope: Scope, reference: _Scores | None
) -> tuple[_Scores | None, list[bool]]:
    rows, tokens = group.ids.shape
    texts = group.texts
    longest = max((q.answer for q in group.questions), default=0)
    session, device = Session(model), model.device
    keep, kl, nats, flips = [], [], [], []
    hits = torch.ones(rows - texts, longest, dtype=torch.bool)
    at = 0
    while at < tokens - 1:
        stop = min(tokens - 1, scope.window if at == 0 else at + scope.block)
        logits = session.feed(group.ids[:, at:stop].to(device)).cpu()
        session.forget()
        nexts = group.ids[:, at + 1 : stop + 1]
        if texts:
            log_p = logits[:texts].log_softmax(-1)
            nats.append(-log_p.gather(-1, nexts[:texts].unsqueeze(-1)).squeeze(-1))
            if reference is None:
                keep.append(log_p)
            else:
                log_q = _at(reference, at, stop)
                kl.append((log_q.exp() * (log_q - log_p)).sum(-1))
                flips.append(log_q.argmax(-1) != log_p.argmax(-1))
        _mark(hits, logits[texts:].argmax(-1) == nexts[texts:], at, tokens - 1 - longest)
        at = stop
    answers = [bool(hits[i, longest - q.answer :].all()) for i, q in enumerate(group.questions)]
    if not texts:
        return None, answers
    zeros = np.zeros((texts, tokens - 1))
    scored = _Scores(
        log_probs=torch.cat(keep, 1) if keep else None,
        kl=torch.cat(kl, 1).double().clamp(min=0).numpy() if kl else None,
        nats=torch.cat(nats, 1).double().numpy(),
        flips=torch.cat(flips, 1).double().numpy() if flips else zeros,
        right=np.zeros(0, bool),
    )
    return scored, answers


def _at(reference: _Scores, start: int, stop: int) -> Tensor:
    if reference.log_probs is None:
        raise RuntimeError("the reference arm kept no distributions")
    return reference.log_probs[:, start:stop]


def _mark(hits: Tensor, equal: Tensor, at: int, first: int) -> None:
    """Note which predicted tokens of the longest answer were right."""
    for i in range(max(at, first), at + equal.shape[1]):
        hits[:, i - first] = equal[:, i - at]


def _score(
    arm: Arm,
    scores: _Scores,
    reference: _Scores | None,
    texts: Texts,
    questions: tuple[_Question, ...],
    plan: Plan,
) -> ArmPrecision:
    start, buckets = 0, []
    for stop in plan.scope.buckets:
        buckets.append(_bucket(scores, reference, texts, start, stop, plan.seed))
        start = stop
    recall = []
    for kind, length in sorted({(q.kind, q.length) for q in questions}):
        mine = [
            r
            for r, q in zip(scores.right, questions, strict=True)
            if (q.kind, q.length) == (kind, length)
        ]
        recall.append(Recall(kind, length, wilson(int(sum(mine)), len(mine))))
    drop = None
    if reference is not None:
        lost = int((reference.right & ~scores.right).sum())
        won = int((~reference.right & scores.right).sum())
        drop = paired_drop(lost, won, len(scores.right))
    total = wilson(int(scores.right.sum()), len(scores.right))
    return ArmPrecision(arm.name, tuple(buckets), tuple(recall), total, drop, scores.seconds)


def _bucket(
    scores: _Scores, reference: _Scores | None, texts: Texts, start: int, stop: int, seed: int
) -> Bucket:
    # column i is the prediction of token i + 1
    cut = slice(max(start - 1, 0), stop - 1)
    width = cut.stop - cut.start
    block = max(1, min(LONGEST_BLOCK, width // BLOCKS_PER_BUCKET))
    bytes_a_token = float(texts.sizes[:, cut.start + 1 : cut.stop + 1].mean())
    to_bits = 1 / (np.log(2) * bytes_a_token)
    bits = block_mean(scores.nats[:, cut] * to_bits, block, seed=seed)
    increase = mean = tail = None
    if reference is not None and scores.kl is not None:
        base = float(reference.nats[:, cut].mean() * to_bits)
        rise = (scores.nats[:, cut] - reference.nats[:, cut]) * (to_bits / base)
        increase = block_mean(rise, block, seed=seed)
        mean = block_mean(scores.kl[:, cut], block, seed=seed)
        tail = block_quantile(scores.kl[:, cut], 0.99, block, seed=seed)
    flips = float(scores.flips[:, cut].mean())
    tokens = int(scores.nats[:, cut].size)
    return Bucket(start, stop, tokens, bits, increase, mean, tail, flips)
