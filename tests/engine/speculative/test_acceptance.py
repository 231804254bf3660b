import itertools

import numpy as np
import pytest
from speculative_toys import Markov, NoiseDrafter, RecurrentToy, decode

from replayssm.engine.speculative import (
    AcceptanceStats,
    Draft,
    DraftModel,
    ModelDrafter,
    ModelTreeDrafter,
    NgramDrafter,
    OverlapCheck,
    ScriptDrafter,
    accept_greedy,
    accept_residual,
    accept_sampled,
    recompute_path,
    sample_token,
    softmax,
)
from replayssm.errors import ContractError

PROMPT = [0, 1, 2, 0, 1]


def deterministic_drafters(verifier, blur=0.4):
    """Return name -> factory of drafters whose candidates are not sampled."""
    draft_model = verifier.blurred(77, blur)

    def recurrent():
        toy = RecurrentToy(draft_model)
        return DraftModel(toy.step, toy.rollback)

    return {
        "ngram": lambda: NgramDrafter(1, 3),
        "ngram tree": lambda: NgramDrafter(1, 3, width=3, depth=3),
        "model": lambda: ModelDrafter(recurrent()),
        "model tree": lambda: ModelTreeDrafter(recurrent(), width=3, forwards=4),
        "noise tree": lambda: NoiseDrafter(5, verifier.vocab),
    }


NAMES = sorted(deterministic_drafters(Markov(0)))


def sampled_chain(verifier, blur, seed, temperature=1.0):
    toy = RecurrentToy(verifier.blurred(77, blur))
    model = DraftModel(toy.step, toy.rollback)
    return ModelDrafter(model, temperature=temperature, rng=np.random.default_rng(seed))


# ---- greedy


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [1, 4, 12])
def test_greedy_output_equals_plain_decode_token_for_token(name, limit):
    for seed in range(3):
        verifier = Markov(seed, vocab=6)
        drafter = deterministic_drafters(verifier)[name]()
        plain = verifier.greedy(PROMPT, 300)

        def watch(context, _rows, draft, accepted, plain=plain):
            # acceptance recomputed against the independent plain decode
            assert recompute_path(draft, plain[len(context) :]) == accepted.path

        out = decode(verifier, drafter, accept_greedy, PROMPT, 250, limit, watch)
        assert out == plain[: len(out)]


def test_counts_name_the_pending_token_and_not_the_bonus():
    draft = Draft.chain([4, 3, 2])
    logits = np.eye(5)[[4, 3, 0, 1]]
    accepted = accept_greedy(logits, draft)
    assert accepted.path == (0, 1)
    assert accepted.bonus == 0
    assert accepted.num_accepted == 3
    assert accepted.emitted(draft) == [4, 3, 0]
    assert accepted.is_prefix
    plain = accept_greedy(logits[:1], Draft.empty())
    assert (plain.path, plain.bonus, plain.num_accepted) == ((), 4, 1)


def test_a_tree_path_may_skip_entries_and_says_so():
    draft = Draft(np.array([1, 2, 3, 4], np.int64), np.array([-1, 0, -1, 2], np.int64))
    accepted = accept_greedy(np.eye(5)[[3, 0, 0, 4, 2]], draft)
    assert accepted.path == (2, 3)
    assert accepted.num_accepted == 3
    assert not accepted.is_prefix
    assert accepted.emitted(draft) == [3, 4, 2]


def test_ties_go_to_the_lowest_token():
    assert accept_greedy(np.zeros((1, 5)), Draft.empty()).bonus == 0


def test_a_verifier_that_drifts_towards_its_drafter_is_caught():
    verifier = Markov(1)
    draft_model = verifier.blurred(77, 1.0)
    toy = RecurrentToy(draft_model)
    drafter = ModelDrafter(DraftModel(toy.step, toy.rollback))
    drifted = verifier.blurred(77, 0.9)
    claimed, true = 0, 0

    def watch(context, _rows, draft, accepted):
        nonlocal claimed, true
        claimed += len(accepted.path)
        true += len(recompute_path(draft, verifier.greedy(context, 4)[len(context) :]))

    decode(drifted, drafter, accept_greedy, PROMPT, 200, 4, watch)
    assert claimed > true


# ---- sampled: deterministic candidates


def sampled_rule(seed):
    rng = np.random.default_rng(seed)
    return lambda rows, draft: accept_sampled(softmax(rows), draft, rng)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [1, 4, 12])
def test_sampled_acceptance_emits_what_plain_sampling_draws_from_the_same_generator(name, limit):
    for seed in range(3):
        verifier = Markov(seed, vocab=6)
        drafter = deterministic_drafters(verifier)[name]()
        plain = verifier.sampled(PROMPT, 200, np.random.default_rng(seed))
        rule = sampled_rule(seed)
        out = decode(verifier, drafter, rule, PROMPT, 200, limit)
        assert out == plain


# ---- laws, by exact enumeration of one node and by many draws


def uniforms(points):
    """Return a stand-in generator that plays the given uniform numbers."""

    class Played:
        def __init__(self):
            self.left = list(points)

        def random(self):
            return self.left.pop(0)

    return Played()


def test_the_residual_rule_has_law_p_by_quadrature():
    rng = np.random.default_rng(0)
    grid = (np.arange(2000) + 0.5) / 2000
    for _ in range(4):
        p = softmax(rng.normal(0, 1.5, 4))
        q = softmax(rng.normal(0, 1.5, 4)).astype(np.float32)
        rows = np.stack([p, np.eye(4)[0]])
        law, kept = np.zeros(4), 0.0
        for token in range(4):
            draft = Draft.chain([token], q[None])
            for u in grid[::20]:
                first = accept_residual(rows, draft, uniforms([u, 0.5]))
                if first.path:
                    law[token] += q[token] / 100
                    kept += q[token] / 100
                    continue
                for v in grid[::20]:
                    law[accept_residual(rows, draft, uniforms([u, v])).bonus] += q[token] / 1e4
        assert np.abs(law - p).max() < 0.015
        assert abs(kept - np.minimum(p, q).sum()) < 0.015


def test_equal_laws_always_accept_and_disjoint_ones_never():
    rng = np.random.default_rng(1)
    q = softmax(rng.normal(0, 1, (1, 6))).astype(np.float32)
    for token in range(6):
        for _ in range(50):
            rows = np.concatenate([q, q]).astype(np.float64)
            assert accept_residual(rows, Draft.chain([token], q), rng).path == (0,)
    p = np.array([[0.5, 0.5, 0, 0], [1, 0, 0, 0]])
    q = np.array([[0, 0, 0.5, 0.5]], np.float32)
    for _ in range(50):
        accepted = accept_residual(p, Draft.chain([2], q), rng)
        assert accepted.path == ()
        assert accepted.bonus in (0, 1)


def joint_law(model, prompt, count):
    """Return the exact probability of every continuation of ``count`` tokens."""
    law = {}
    for cell in itertools.product(range(model.vocab), repeat=count):
        chance, context = 1.0, list(prompt)
        for token in cell:
            chance *= model.law(context)[token]
            context.append(token)
        law[cell] = chance
    return law


def worst_cells(counts, law, draws):
    """Return the largest |z| of a cell with p > 1e-3, and chi-square per cell over all of them."""
    z = []
    for cell, p in law.items():
        if p > 1e-3:
            z.append((counts.get(cell, 0) - draws * p) / np.sqrt(draws * p * (1 - p)))
    z = np.array(z)
    return np.abs(z).max(), (z**2).mean()


def draw_joint(model, make, rule, draws, count=3, limit=4):
    counts = {}
    for i in range(draws):
        out = decode(model, make(i), rule, PROMPT, count, limit)
        cell = tuple(out[len(PROMPT) :])
        counts[cell] = counts.get(cell, 0) + 1
    return counts


DRAWS = 20_000


def assert_law(counts, law, draws):
    # 5 standard deviations over about 100 cells: chance of a false alarm under 1e-4
    worst, spread = worst_cells(counts, law, draws)
    assert worst < 5
    assert spread < 1.6


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "sampled chain", "plain"])
def test_the_joint_law_of_three_tokens_is_plain_samplings(name):
    verifier = Markov(11, vocab=4, sharpness=1.0)
    rng = np.random.default_rng(2024)

    def rule(x, d):
        accept = accept_residual if d.q is not None else accept_sampled
        return accept(softmax(x), d, rng)

    makers = {
        key: (lambda i, m=make: m()) for key, make in deterministic_drafters(verifier).items()
    }
    makers["sampled chain"] = lambda i: sampled_chain(verifier, 1.0, i + 10**6)
    makers["plain"] = lambda i: NgramDrafter()
    # two drafts leave the third token to the row after a block accepted whole
    limit = {"plain": 0, "sampled chain": 2}.get(name, 4)
    counts = draw_joint(verifier, makers[name], rule, DRAWS, limit=limit)
    assert_law(counts, joint_law(verifier, PROMPT, 3), DRAWS)


@pytest.mark.slow
def test_the_law_test_sees_an_argmax_draft_passed_off_as_sampled():
    verifier = Markov(11, vocab=4, sharpness=1.0)
    draft_model = verifier.blurred(77, 1.0)
    rng = np.random.default_rng(2024)

    class Wrong:
        def propose(self, context, limit):
            q = draft_model.law(context).astype(np.float32)
            return Draft.chain([int(np.argmax(q))], q[None])

        def observe(self, accepted):
            pass

    counts = draw_joint(
        verifier, lambda i: Wrong(), lambda x, d: accept_residual(softmax(x), d, rng), DRAWS
    )
    worst, _ = worst_cells(counts, joint_law(verifier, PROMPT, 3), DRAWS)
    assert worst > 10


# ---- acceptance within the interval of sum min(p, q)


@pytest.mark.parametrize("blur", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_acceptance_is_within_the_interval_of_the_overlap(blur, temperature):
    verifier = Markov(2, vocab=8)
    rng = np.random.default_rng(9)
    check, stats = OverlapCheck(), AcceptanceStats()

    def watch(context, _rows, draft, accepted):
        # p once more from the model itself, not from the rows that were accepted on
        check.record_(softmax(verifier.verify(context, draft)), draft, accepted)
        stats.record_(draft, accepted)

    drafter = sampled_chain(verifier, blur, 3, temperature)
    decode(
        verifier, drafter, lambda x, d: accept_residual(softmax(x), d, rng), PROMPT, 3000, 4, watch
    )
    assert check.trials > 1000
    assert check.accepted == stats.accepted
    assert abs(check.deviation) < 4
    if blur == 0 and temperature == 1:
        assert stats.rate > 0.999


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_acceptance_is_within_the_interval_of_its_children(name):
    verifier = Markov(2, vocab=6)
    rng = np.random.default_rng(4)
    check = OverlapCheck()
    decode(
        verifier,
        deterministic_drafters(verifier)[name](),
        lambda x, d: accept_sampled(softmax(x), d, rng),
        PROMPT,
        2000,
        6,
        lambda _c, rows, draft, accepted: check.record_(softmax(rows), draft, accepted),
    )
    assert check.trials > 500
    assert abs(check.deviation) < 4


def test_the_overlap_interval_sees_a_drifted_verifier():
    verifier = Markov(2, vocab=8)
    drifted = verifier.blurred(77, 0.8)
    rng = np.random.default_rng(9)
    check = OverlapCheck()
    decode(
        drifted,
        sampled_chain(verifier, 1.0, 3),
        lambda x, d: accept_residual(softmax(x), d, rng),
        PROMPT,
        3000,
        4,
        lambda context, _r, draft, accepted: check.record_(
            softmax(verifier.verify(context, draft)), draft, accepted
        ),
    )
    assert check.deviation > 6


# ---- contracts


def test_malformed_rows_are_refused():
    chain = Draft.chain([1, 2])
    rng = np.random.default_rng(0)
    good = np.full((3, 4), 0.25)
    q = np.full((2, 4), 0.25, np.float32)
    with pytest.raises(ContractError, match="shape"):
        accept_greedy(good[:2], chain)
    with pytest.raises(ContractError, match="below 4"):
        accept_greedy(good, Draft.chain([1, 4]))
    with pytest.raises(ContractError, match="NaN"):
        accept_greedy(good * np.nan, chain)
    for bad in (good * 2, good * np.nan, good - 0.5, np.log(good)):
        with pytest.raises(ContractError, match="probabilities"):
            accept_sampled(bad, chain, rng)
    with pytest.raises(ContractError, match="no q"):
        accept_residual(good, chain, rng)
    with pytest.raises(ContractError, match="vocab"):
        accept_residual(good, Draft.chain([1, 2], q[:, :3] * 4 / 3), rng)
    zero = np.array([[1, 0, 0, 0]] * 2, np.float32)
    with pytest.raises(ContractError, match="q > 0"):
        accept_residual(good, Draft.chain([1, 2], zero), rng)


def test_a_token_of_zero_weight_is_never_drawn():
    weights = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    for u in (0.0, 0.3, np.nextafter(0.3, 1), 1 - 2**-53):
        assert sample_token(weights, uniforms([u])) in (1, 3)
    assert sample_token(np.array([0.0, 5e-324, 0.0]), uniforms([0.9])) == 1


def test_a_rest_that_vanishes_by_rounding_falls_back_to_p():
    p = np.array([[0.5 - 2**-54, 0.5]] * 2)
    draft = Draft.chain([0], np.array([[0.5, 0.5]], np.float32))
    accepted = accept_residual(p, draft, uniforms([1 - 2**-53, 0.75]))
    assert (accepted.path, accepted.bonus) == ((), 1)


def test_after_a_chain_accepted_whole_the_last_row_gives_the_bonus_token():
    rows = np.eye(4)[[1, 2, 3]]
    draft = Draft.chain([1, 2], np.full((2, 4), 0.25, np.float32))
    accepted = accept_residual(rows, draft, np.random.default_rng(0))
    assert (accepted.path, accepted.bonus, accepted.num_accepted) == ((0, 1), 3, 3)


def test_softmax_honours_masks_and_refuses_nonsense():
    p = softmax(np.array([[0.0, -np.inf, 1000.0]]), temperature=0.5)
    assert p.tolist() == [[0, 0, 1]]
    assert softmax(np.log([4.0, 1.0]), temperature=2.0) == pytest.approx([2 / 3, 1 / 3])
    with pytest.raises(ContractError, match="temperature"):
        softmax(np.zeros(3), 0.0)
    for bad in ([np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]):
        with pytest.raises(ContractError, match="logits"):
            softmax(np.array(bad))


def test_script_and_greedy_agree_on_a_forced_prefix_of_every_length():
    verifier = Markov(5)
    sequence = verifier.greedy(PROMPT, 10)
    for count in range(7):
        drafter = ScriptDrafter(sequence, [count], verifier.vocab)
        draft = drafter.propose(PROMPT, 6)
        accepted = accept_greedy(verifier.verify(PROMPT, draft), draft)
        assert accepted.num_accepted == count + 1
        assert accepted.emitted(draft) == sequence[len(PROMPT) : len(PROMPT) + count + 1]
