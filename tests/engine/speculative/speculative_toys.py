"""Toy models whose law is known exactly: an order-2 Markov verifier and a recurrent draft model."""

import numpy as np

from replayssm.engine.speculative import Draft, recompute_path, sample_token, softmax


class Markov:
    """Logits depend on the last two tokens; ``sharpness`` scales them."""

    def __init__(self, seed, vocab=5, sharpness=1.5):
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.table = rng.normal(0, sharpness, (vocab, vocab, vocab))

    def logits(self, context):
        return self.table[context[-2], context[-1]]

    def law(self, context):
        return softmax(self.logits(context))

    def verify(self, context, draft):
        """Return ``[N + 1, vocab]`` logits of the block, every node in its own context."""
        paths = [list(context)]
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            paths.append([*paths[parent + 1], token])
        return np.stack([self.logits(path) for path in paths])

    def greedy(self, prompt, count):
        out = list(prompt)
        for _ in range(count):
            out.append(int(np.argmax(self.logits(out))))
        return out

    def sampled(self, prompt, count, rng):
        out = list(prompt)
        for _ in range(count):
            out.append(sample_token(self.law(out), rng))
        return out

    def blurred(self, seed, amount):
        """Return another model near this one: the draft model of this verifier."""
        other = Markov(seed, self.vocab)
        other.table = self.table + amount * other.table
        return other


class RecurrentToy:
    """A draft model as step and rollback; it remembers its tokens, so its state can be checked."""

    def __init__(self, markov):
        self.markov = markov
        self.state = []
        self.deepest_rollback = 0
        self.fed = 0
        self.calls = 0

    def step(self, tokens):
        assert len(tokens)
        self.state.extend(int(token) for token in tokens)
        self.fed += len(tokens)
        self.calls += 1
        return self.markov.logits([0, 0, *self.state])

    def rollback(self, count):
        assert 0 < count <= len(self.state)
        self.deepest_rollback = max(self.deepest_rollback, count)
        del self.state[len(self.state) - count :]


class NoiseDrafter:
    """Random trees that have nothing to do with the model."""

    def __init__(self, seed, vocab):
        self.rng = np.random.default_rng(seed)
        self.vocab = vocab

    def propose(self, context, limit):
        count = int(self.rng.integers(0, limit + 1))
        known = {}
        for node in range(count):
            key = (
                int(self.rng.integers(-1, node)) if node else -1,
                int(self.rng.integers(self.vocab)),
            )
            if key in known or key[0] >= len(known):
                continue
            known[key] = len(known)
        tokens = np.array([token for _, token in known], np.int64)
        parents = np.array([parent for parent, _ in known], np.int64)
        return Draft(tokens, parents)

    def observe(self, accepted):
        pass


def decode(model, drafter, rule, prompt, count, limit, watch=None):
    """Return prompt and ``count`` tokens; ``rule(rows of logits, draft)`` accepts.

    ``watch(context, rows, draft, accepted)`` sees every round before it is emitted.
    """
    out = list(prompt)
    while len(out) < len(prompt) + count:
        draft = drafter.propose(out, limit)
        assert len(draft) <= limit
        rows = model.verify(out, draft)
        accepted = rule(rows, draft)
        if watch is not None:
            watch(out, rows, draft, accepted)
        emitted = accepted.emitted(draft)
        # the path, looked up again from the emitted tokens alone
        assert recompute_path(draft, emitted)[: len(accepted.path)] == accepted.path
        out += emitted
        drafter.observe(emitted)
    return out[: len(prompt) + count]
