"""The speculative loop for one request: propose, verify, accept, commit, observe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from replayssm.engine.speculative.acceptance import (
    Accepted,
    accept_greedy,
    accept_residual,
    accept_sampled,
)
from replayssm.engine.speculative.draft import Draft
from replayssm.engine.speculative.sampling import check_sampling, softmax
from replayssm.engine.speculative.stats import AcceptanceStats
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from replayssm.engine.speculative.draft import Drafter
    from replayssm.engine.speculative.simulate import LengthRule


class BlockVerifier(Protocol):
    """What runs the model: ``replayssm.integrations.speculation.Verifier``, or a toy."""

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Append a prompt; return ``[vocab]`` logits after its last token."""
        ...

    def verify(
        self, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> NDArray[np.floating[Any]]:
        """Run a block without committing it; return ``[N + 1, vocab]`` logits."""
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep the tokens of one path of the verified block; none aborts it."""
        ...


@dataclass(slots=True)
class Generation:
    """What one request emitted, and how.

    Attributes:
        tokens: Emitted tokens, a stop token included.
        rounds: Forwards after the prefill.
        stats: Acceptance over them.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)


class SpeculativeSession:
    """Generates for one request; its tokens have the law of plain decode.

    Args:
        verifier: The model, at the start of the request.
        drafter: Fresh, for this request alone.
        length: Draft length of each round: fixed or adaptive.
        temperature: 0 is greedy; above 0 samples from the model.
        rng: Generator of acceptance, needed when sampling; never the drafter's.

    Raises:
        ContractError: Sampling without a generator, or a negative temperature.
    """

    def __init__(
        self,
        verifier: BlockVerifier,
        drafter: Drafter,
        length: LengthRule,
        *,
        temperature: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        check_sampling(temperature, rng)
        self._verifier, self._drafter, self._length = verifier, drafter, length
        self._temperature, self._rng = temperature, rng

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, stop: Collection[int] = ()
    ) -> Generation:
        """Emit tokens after ``prompt``; a session serves one call.

        Args:
            prompt: At least one token.
            max_new_tokens: Most tokens to emit, at least 1.
            stop: Tokens after which nothing more is emitted.
        """
        if not len(prompt) or max_new_tokens < 1:
            expected = "a token to start from and one to emit"
            raise ContractError("prompt, max_new_tokens", expected, (len(prompt), max_new_tokens))
        done = Generation()
        first = self._verifier.prefill(prompt)
        context = [*prompt, self._accept(first[None], Draft.empty()).bonus]
        done.tokens.append(context[-1])
        while len(done.tokens) < max_new_tokens and done.tokens[-1] not in stop:
            emitted = self._round(context, max_new_tokens - len(done.tokens), done)
            context += emitted
            done.tokens += _until(emitted, stop)
        return done

    def _round(self, context: Sequence[int], left: int, done: Generation) -> list[int]:
        """Run one round; return what it emits, at most ``left`` tokens."""
        draft = self._drafter.propose(context, self._length.choose(left - 1))
        parents = None if draft.is_chain else draft.block_parents().tolist()
        logits = self._verifier.verify(draft.block_tokens(context[-1]).tolist(), parents)
        try:
            accepted = self._accept(logits, draft)
        except BaseException:
            self._verifier.commit(())
            self._drafter.observe(())
            raise
        self._verifier.commit([0, *(node + 1 for node in accepted.path)])
        emitted = accepted.emitted(draft)
        self._drafter.observe(emitted)
        self._length.update_(len(draft), len(accepted.path))
        done.stats.record_(draft, accepted)
        done.rounds += 1
        return emitted

    def _accept(self, logits: NDArray[np.floating[Any]], draft: Draft) -> Accepted:
        if self._rng is None or self._temperature == 0:
            return accept_greedy(logits, draft)
        rule = accept_sampled if draft.q is None else accept_residual
        return rule(softmax(logits, self._temperature), draft, self._rng)


def _until(tokens: list[int], stop: Collection[int]) -> list[int]:
    """Return ``tokens`` up to and with the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop:
            return tokens[: i + 1]
    return tokens
