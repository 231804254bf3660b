"""Precision of one variant for one cohort: distributions, replies, and long adversarial prompts.

Three sources, all against the baseline on the same tokens:

* **Replies**: the cohort's own prompts, the baseline's replies teacher-forced through the variant's
  state, as served traffic would be: KL and |delta logprob| of the served token.
* **Adversarial prompts**: long prompts that state a fact again and again with different values
  between filler, decoded through the variant's state from the first window on.
* **Graders**: the variant's own replies, by rules.

The unit is the request. Its tokens share their context and are resampled together.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from replayssm.evaluate.arms import Arm
from replayssm.evaluate.decisions import graders
from replayssm.evaluate.probes import key_value_facts
from replayssm.evaluate.session import Session, enabled, one_thread, twin
from replayssm.evaluate.stats import TAIL_MINIMUM, Estimate, paired_drop

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from replayssm.evaluate.decisions.serving import Job
    from replayssm.evaluate.decisions.tables import Variant
    from replayssm.evaluate.subject import Subject

LEAST_REQUESTS = 4
DRAWS = 1000
PAIRS = 8
RESTATED = 4


@dataclass(frozen=True, slots=True)
class Drift:
    """How far one request's distributions moved.

    Attributes:
        length: Tokens of its context at the end.
        kl: KL from the baseline's next-token distribution, nats, per token.
        delta: |delta logprob| of the token that follows, per token.
    """

    length: int
    kl: NDArray[np.float64]
    delta: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """One variant on the requests of one length.

    Attributes:
        stop: Upper end of the bucket, tokens.
        source: ``replies`` or ``adversarial``.
        requests: Requests in it.
        mean_kl: Mean KL, nats a token.
        p99_logprob: 99th percentile of |delta logprob|; None under 1,000 tokens.
    """

    stop: int
    source: str
    requests: int
    mean_kl: Estimate
    p99_logprob: Estimate | None


@dataclass(frozen=True, slots=True)
class LengthScore:
    """One grader on the replies to prompts of one length.

    Attributes:
        stop: Upper end of the bucket, tokens of prompt and reply.
        graded: Replies that its rule applies to.
        baseline: Of them, passed by the baseline.
        variant: Of them, passed by the variant.
    """

    stop: int
    graded: int
    baseline: int
    variant: int


@dataclass(frozen=True, slots=True)
class Score:
    """One grader on all replies of a cohort.

    Attributes:
        grader: Name.
        graded: Replies that its rule applies to.
        baseline: Of them, passed by the baseline.
        variant: Of them, passed by the variant.
        drop: Share lost, reply by reply; None where no rule applied.
        lengths: The same counts by length.
    """

    grader: str
    graded: int
    baseline: int
    variant: int
    drop: Estimate | None
    lengths: tuple[LengthScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Quality:
    """One variant for one cohort.

    Attributes:
        cohort: Name.
        variant: Name.
        buckets: By source and length.
        p99_logprob: Over all tokens of all requests; None under 1,000 tokens.
        scores: By grader.
    """

    cohort: str
    variant: str
    buckets: tuple[LengthBucket, ...]
    p99_logprob: Estimate | None
    scores: tuple[Score, ...]


def arm_of(variant: Variant) -> Arm:
    """Return the way of carrying the state that a variant stands for."""
    return Arm(variant.name, variant.path, variant.state, variant.read, variant.name)


def drifts(
    model: PreTrainedModel,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    baseline: Variant,
    variants: Sequence[Variant],
) -> dict[str, list[Drift]]:
    """Teacher-force rows through every variant's state and compare with the baseline's.

    The prompt is prefilled, the continuation goes through the ring in blocks that divide the
    window, so that every token finds the ring as deep as in single steps. One row is held at a
    time.

    Args:
        model: The model, not enabled; twins of it are.
        rows: Token ids of ``(prompt, continuation)``.
        baseline: What is compared with.
        variants: What is compared, by name in the result.
    """
    found: dict[str, list[Drift]] = {v.name: [] for v in variants}
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        ways = [(v, stack.enter_context(_carrying(model, v))) for v in (baseline, *variants)]
        for prompt, continuation in rows:
            (_, reference), *others = ways
            theirs = log_probs(reference, prompt, continuation, block_of(baseline.window))
            for variant, own in others:
                mine = log_probs(own, prompt, continuation, block_of(variant.window))
                found[variant.name].append(_drift(theirs, mine, len(prompt), continuation))
    return found


def last_log_probs(
    model: PreTrainedModel, prompt: Sequence[int], continuation: Sequence[int], variant: Variant
) -> NDArray[np.float64]:
    """Return a variant's log-probabilities of a continuation's last token, ``[vocabulary]``."""
    with one_thread(), _carrying(model, variant) as own:
        found = log_probs(own, prompt, continuation, block_of(variant.window))
    last: NDArray[np.float64] = found[-1]
    return last


def adversarial(subject: Subject, length: int, count: int, seed: int) -> list[list[int]]:
    """Return long prompts in which facts are stated again with other values, among filler.

    Args:
        subject: Its held-out text is the filler.
        length: Tokens of each prompt, about.
        count: Prompts.
        seed: The same arguments give the same prompts.
    """
    rng, text = np.random.default_rng([seed, length, 77]), subject.text
    prompts = []
    for _ in range(count):
        stated = [line for line, _, _ in key_value_facts(rng, PAIRS)]
        parts = []
        for _ in range(RESTATED):
            start = int(rng.integers(max(1, len(text) - length)))
            parts.append(text[start : start + length // RESTATED])
            for line in rng.permutation(np.array(stated, object)):
                # the same key, another value: only the newest is right
                value = bytes(rng.choice(np.frombuffer(b"ABCDEFGHKLMNPRSTUXYZ", np.uint8), 2))
                parts.append(bytes(line)[:-3] + value + b";")
        prompts.append(subject.encode(b"".join(parts))[:length])
    return prompts


def buckets(
    moved: Sequence[Drift], stops: Sequence[int], source: str, confidence: float, seed: int
) -> tuple[LengthBucket, ...]:
    """Return mean KL and p99 |delta logprob| by length; buckets of few requests are joined up."""
    found, pending = [], []
    start = 0
    for stop in stops:
        pending += [d for d in moved if start < d.length <= stop]
        start = stop
        if len(pending) >= LEAST_REQUESTS:
            found.append(_bucket(pending, stop, source, confidence, seed))
            pending = []
    return tuple(found)


def tail(moved: Sequence[Drift], confidence: float, seed: int) -> Estimate | None:
    """Return the 99th percentile of |delta logprob|, resampled by request."""
    if sum(d.delta.size for d in moved) < TAIL_MINIMUM or len(moved) < 2:
        return None
    rng = np.random.default_rng(seed)
    values = [d.delta for d in moved]
    draws = [
        np.quantile(
            np.concatenate([values[i] for i in rng.integers(len(values), size=len(values))]), 0.99
        )
        for _ in range(DRAWS // 4)
    ]
    low, high = _ends(np.array(draws), confidence)
    value = float(np.quantile(np.concatenate(values), 0.99))
    method = f"bootstrap over {len(values)} requests"
    return Estimate(value, low, high, len(values), method, confidence)


def grade(
    names: tuple[str, ...],
    jobs: Sequence[Job],
    replies: Mapping[str, str],
    references: Mapping[str, str],
    stops: Sequence[int] = (),
) -> tuple[Score, ...]:
    """Grade every reply by every rule, in pairs with the baseline's.

    Args:
        names: Graders.
        jobs: What was asked.
        replies: The variant's replies by job.
        references: The baseline's.
        stops: Upper ends of length buckets, ascending.
    """
    scores = []
    for name, grader in graders.find(names).items():
        pairs: list[tuple[int, bool, bool]] = []
        for job in jobs:
            reference = references[job.id]
            mine = grader(graders.Ticket(job.text, replies[job.id], reference))
            theirs = grader(graders.Ticket(job.text, reference, reference))
            if mine is not None and theirs is not None:
                pairs.append((len(job.prompt) + job.output_tokens, bool(theirs), bool(mine)))
        lost = sum(theirs and not mine for _, theirs, mine in pairs)
        won = sum(mine and not theirs for _, theirs, mine in pairs)
        drop = paired_drop(lost, won, len(pairs)) if pairs else None
        lengths, start = [], 0
        for stop in stops:
            within = [pair for pair in pairs if start < pair[0] <= stop]
            lengths.append(LengthScore(stop, *_passed(within)))
            start = stop
        scores.append(Score(name, *_passed(pairs), drop, tuple(x for x in lengths if x.graded)))
    return tuple(scores)


def block_of(window: int) -> int:
    """Return the tokens of one forward: the largest power of 2 up to 16 that divides a window."""
    return next(b for b in (16, 8, 4, 2, 1) if window % b == 0)


@torch.inference_mode()
def _log_probs(
    model: PreTrainedModel, prompt: Sequence[int], continuation: Sequence[int], block: int
) -> NDArray[np.float32]:
    session = Session(model)
    device = model.device
    logits = [session.feed(torch.tensor([list(prompt)], device=device), last_only=True)[0]]
    known = list(continuation[:-1])
    session.forget()
    for at in range(0, len(known), block):
        ids = torch.tensor([known[at : at + block]], device=device)
        logits.append(session.feed(ids)[0])
        session.forget()
    session.close()
    found: NDArray[np.float32] = torch.cat(logits).log_softmax(-1).cpu().numpy()
    return found


@torch.inference_mode()
def log_probs(
    model: PreTrainedModel, prompt: Sequence[int], continuation: Sequence[int], block: int
) -> NDArray[np.float64]:
    """Return ``[continuation, vocabulary]`` log-probabilities of an enabled model.

    Args:
        model: The model, with a variant enabled.
        prompt: Token ids that are prefilled.
        continuation: Token ids that follow; row i is the prediction of the i-th.
        block: Tokens a forward.
    """
    session = Session(model)
    device = model.device
    logits = [session.feed(torch.tensor([list(prompt)], device=device), last_only=True)[0]]
    session.forget()
    known = list(continuation[:-1])
    for at in range(0, len(known), block):
        ids = torch.tensor([known[at : at + block]], device=device)
        logits.append(session.feed(ids)[0])
        session.forget()
    session.close()
    # in fp64: the KL of two nearly equal distributions is far below the rounding of fp32 logarithms
    found: NDArray[np.float64] = torch.cat(logits).double().log_softmax(-1).cpu().numpy()
    return found


@contextmanager
def _carrying(model: PreTrainedModel, variant: Variant) -> Iterator[PreTrainedModel]:
    """Give a twin of a model that carries its state in a variant's way."""
    own = twin(model)
    block = block_of(variant.window)
    with enabled(own, arm_of(variant), window=variant.window, max_block=block):
        yield own


def _drift(
    theirs: NDArray[np.float64],
    mine: NDArray[np.float64],
    prompt: int,
    continuation: Sequence[int],
) -> Drift:
    kl = (np.exp(theirs) * (theirs - mine)).sum(-1).clip(min=0)
    at = np.arange(len(continuation)), np.array(continuation)
    return Drift(prompt + len(continuation), kl, np.abs(theirs[at] - mine[at]))


def _passed(pairs: Sequence[tuple[int, bool, bool]]) -> tuple[int, int, int]:
    """Return how many were graded, and passed by the baseline and by the variant."""
    return len(pairs), sum(b for _, b, _ in pairs), sum(v for _, _, v in pairs)


def _bucket(
    moved: Sequence[Drift], stop: int, source: str, confidence: float, seed: int
) -> LengthBucket:
    means = np.array([d.kl.mean() for d in moved])
    picks = np.random.default_rng(seed).integers(means.size, size=(DRAWS, means.size))
    low, high = _ends(means[picks].mean(axis=1), confidence)
    method = f"bootstrap over {means.size} requests"
    mean = Estimate(float(means.mean()), low, high, int(means.size), method, confidence)
    return LengthBucket(stop, source, len(moved), mean, tail(moved, confidence, seed))


def _ends(sampled: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    out = (1 - confidence) / 2
    low, high = np.quantile(sampled, [out, 1 - out])
    return float(low), float(high)
