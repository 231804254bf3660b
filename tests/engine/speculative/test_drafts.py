import numpy as np
import pytest
from speculative_toys import Markov, RecurrentToy, decode

from replayssm.engine.speculative import (
    MAX_NODES,
    Draft,
    Drafter,
    DraftModel,
    ModelDrafter,
    ModelTreeDrafter,
    NgramDrafter,
    ScriptDrafter,
    accept_greedy,
    even_schedule,
    merge_paths,
)
from replayssm.errors import ContractError


def ints(*values):
    return np.array(values, np.int64)


# ---- Draft


@pytest.mark.parametrize(
    ("tokens", "parents", "q"),
    [
        (np.array([1, 2], np.int32), ints(-1, 0), None),
        (ints(1, 2), ints(-1), None),
        (ints(1, -2), ints(-1, 0), None),
        (ints(1, 2), ints(-1, 1), None),
        (ints(1, 2), ints(-1, -2), None),
        (ints(3, 3), ints(-1, -1), None),
        (ints(*range(65)), ints(*range(-1, 64)), None),
        (ints(1, 2), ints(-1, -1), np.ones((2, 4), np.float32)),
        (ints(1, 2), ints(-1, 0), np.ones((1, 4), np.float32)),
        (ints(1, 2), ints(-1, 0), np.ones((2, 4), np.float64)),
    ],
)
def test_a_malformed_draft_is_refused(tokens, parents, q):
    with pytest.raises(ContractError):
        Draft(tokens, parents, q)


def test_block_counting_puts_the_pending_token_first():
    draft = Draft(ints(7, 8, 9, 7), ints(-1, 0, -1, 2))
    assert draft.block_tokens(5).tolist() == [5, 7, 8, 9, 7]
    assert draft.block_parents().tolist() == [-1, 0, 1, 0, 3]
    assert draft.depths().tolist() == [0, 1, 0, 1]
    assert not draft.is_chain
    assert Draft.chain([4, 4, 4]).is_chain
    assert Draft.empty().block_tokens(5).tolist() == [5]
    assert Draft.empty().block_parents().tolist() == [-1]


def test_merged_paths_share_prefixes_and_run_depth_first():
    draft = merge_paths([[1, 2, 3], [4, 2], [1, 2, 5], [1, 6]], limit=64)
    assert draft.tokens.tolist() == [1, 2, 3, 5, 6, 4, 2]
    assert draft.parents.tolist() == [-1, 0, 1, 1, 0, -1, 5]
    assert merge_paths([[1, 2, 3], [4, 2]], limit=4).tokens.tolist() == [1, 2, 3, 4]
    assert len(merge_paths([range(100)], limit=100)) == MAX_NODES
    assert len(merge_paths([], limit=4)) == 0


# ---- n-gram lookup


def naive_lookup(context, min_n, max_n, count):
    """Scan for the longest suffix that occurred before, the newest occurrence first."""
    size = len(context)
    for n in range(max_n, min_n - 1, -1):
        for start in range(size - 1, n - 1, -1):
            if n < size and context[start - n : start] == context[size - n :]:
                out = list(context)
                for position in range(start, start + count):
                    out.append(out[position])
                return out[size:]
    return []


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 3), (3, 3)])
@pytest.mark.parametrize("vocab", [2, 4, 20])
def test_ngram_equals_a_naive_scan_at_every_length(min_n, max_n, vocab):
    tokens = np.random.default_rng(vocab).integers(0, vocab, 300).tolist()
    drafter = NgramDrafter(min_n, max_n)
    size = 1
    while size < len(tokens):
        want = naive_lookup(tokens[:size], min_n, max_n, 6)
        assert drafter.propose(tokens[:size], 6).tokens.tolist() == want
        size += 1 + size % 3


class Counted(list):
    reads = 0

    def __getitem__(self, key):
        Counted.reads += 1
        return super().__getitem__(key)


def test_a_round_of_ngram_costs_the_same_at_any_context_length():
    costs = []
    for size in (200, 20_000):
        context = Counted(np.random.default_rng(0).integers(0, 3, size).tolist())
        drafter = NgramDrafter(1, 4)
        drafter.propose(context, 8)
        Counted.reads = 0
        for token in (0, 1, 2, 1, 0):
            context.append(token)
            drafter.propose(context, 8)
        costs.append(Counted.reads)
    assert costs[1] <= costs[0] + 5


def test_ngram_tree_offers_alternatives_longest_match_first():
    #          0  1  2  3  4  5  6  7  8  9 10
    context = [1, 2, 3, 9, 2, 4, 9, 1, 2, 6, 1, 2]
    draft = NgramDrafter(1, 2, width=3, depth=2).propose(context, 16)
    assert draft.tokens[draft.parents == -1].tolist() == [6, 3, 4]
    assert draft.tokens.tolist() == [6, 1, 3, 9, 4, 9]
    chain = NgramDrafter(1, 2, depth=2).propose(context, 16)
    assert chain.is_chain
    assert chain.tokens.tolist() == [6, 1]
    assert len(NgramDrafter(1, 2, width=3, depth=2).propose(context, 5)) == 5


def test_ngram_refuses_a_context_that_is_not_a_continuation():
    drafter = NgramDrafter()
    drafter.propose([1, 2, 3], 2)
    with pytest.raises(ContractError, match="context"):
        drafter.propose([1, 2], 2)
    with pytest.raises(ContractError, match="context"):
        drafter.propose([1, 2, 4, 5], 2)


# ---- script


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_the_script_forces_exactly_its_schedule(limit):
    model = Markov(0)
    sequence = model.greedy([1, 2], 200)
    schedule = [3, 0, 9, 1, 2]
    got = []
    drafter = ScriptDrafter(sequence, schedule, model.vocab)
    out = decode(
        model,
        drafter,
        accept_greedy,
        [1, 2],
        150,
        limit,
        lambda _c, _r, draft, accepted: got.append((len(draft), accepted.num_accepted)),
    )
    assert out == sequence[:152]
    want = [(limit, 1 + min(schedule[i % 5], limit)) for i in range(len(got))]
    assert got == want


def test_the_script_refuses_to_leave_its_sequence_and_ends_with_it():
    drafter = ScriptDrafter([1, 2, 3, 4], [8], 5)
    with pytest.raises(ContractError, match="prefix"):
        drafter.propose([1, 2, 4], 2)
    assert drafter.propose([1, 2], 8).tokens.tolist() == [3, 4]
    assert len(drafter.propose([1, 2, 3, 4], 8)) == 0


def test_an_aborted_block_does_not_advance_the_script():
    drafter = ScriptDrafter(list(range(9)), [2, 0], 10)
    first = drafter.propose([0, 1], 3).tokens.tolist()
    drafter.observe([])
    assert drafter.propose([0, 1], 3).tokens.tolist() == first == [2, 3, 5]
    drafter.observe([2, 3, 4])
    assert drafter.propose([0, 1, 2, 3, 4], 3).tokens.tolist() == [6, 7, 8]


@pytest.mark.parametrize("mean", [0, 0.25, 1.5, 3.3])
def test_an_even_schedule_keeps_its_mean(mean):
    schedule = even_schedule(mean, 40)
    for n in range(1, 41):
        assert abs(sum(schedule[:n]) - mean * n) < 1
    assert max(schedule) - min(schedule) <= 1


# ---- draft model


def chain_drafter(toy, temperature):
    model = DraftModel(toy.step, toy.rollback)
    return ModelDrafter(model, temperature=temperature, rng=np.random.default_rng(0))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("blur", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_draft_state_follows_for_a_thousand_rounds(blur, limit, temperature):
    verifier = Markov(3)
    toy = RecurrentToy(verifier.blurred(4, blur))
    drafter = chain_drafter(toy, temperature)
    context = [0, 0, 1, 2]
    rng = np.random.default_rng(limit)
    behind = len(context)
    for _ in range(1000):
        fed = toy.fed
        draft = drafter.propose(context, limit)
        assert toy.state == context + draft.tokens.tolist()[:-1]
        assert toy.fed - fed == behind + limit - 1
        kept = int(rng.integers(0, limit + 1))
        rejected = limit - kept
        before = len(toy.state)
        bonus = (int(draft.tokens[kept]) + 1) % 5 if rejected else 3
        emitted = [*draft.tokens[:kept].tolist(), bonus]
        drafter.observe(emitted)
        context = context + emitted
        assert before - len(toy.state) == max(rejected - 1, 0)
        # the bonus token is missing, and after a block accepted whole the last draft too
        behind = 1 if rejected else 2
        assert toy.state == context[:-behind]
        assert drafter.model.length == len(toy.state)
        context, toy.state, drafter.model.length = _shorten(context, toy.state)
    assert toy.deepest_rollback <= max(limit - 1, 0)


def _shorten(context, state):
    """Drop old tokens so that a thousand rounds stay quick; the toy looks at two only."""
    cut = max(len(context) - 12, 0)
    return context[cut:], state[cut:], len(state) - cut


@pytest.mark.parametrize("tree", [False, True])
def test_a_draft_that_was_never_verified_is_taken_back(tree):
    toy = RecurrentToy(Markov(1))
    model = DraftModel(toy.step, toy.rollback)
    drafter = ModelTreeDrafter(model) if tree else ModelDrafter(model)
    context = [0, 1, 2]
    first = drafter.propose(context, 4).tokens.tolist()
    assert drafter.propose(context, 4).tokens.tolist() == first  # proposed twice
    drafter.observe([])  # aborted
    assert drafter.propose(context, 4).tokens.tolist() == first
    drafter.observe([(first[0] + 1) % 5])
    assert len(drafter.propose([*context, (first[0] + 1) % 5], 0)) == 0  # plain rounds in between
    drafter.observe([1])
    context = [*context, (first[0] + 1) % 5, 1]
    draft = drafter.propose(context, 3)
    assert toy.state == context + ([] if tree else draft.tokens.tolist()[:-1])


def test_another_drafters_accepted_tokens_do_not_stay_in_the_state():
    toy = RecurrentToy(Markov(1))
    drafter = ModelDrafter(DraftModel(toy.step, toy.rollback))
    own = drafter.propose([0, 1], 4).tokens.tolist()
    other = [own[0], (own[1] + 1) % 5, 2, 3]
    drafter.observe(other)
    assert toy.state == [0, 1, own[0]]


def brute_tree(markov, context, width, forwards, limit):
    """Best-first expansion with the whole context recomputed at every node."""
    nodes, waiting = {}, set()

    def expand(path, score):
        p = markov.law([*context, *path])
        for token in np.argsort(-p, kind="stable")[:width].tolist():
            nodes[(*path, token)] = score + np.log(p[token])
            waiting.add((*path, token))

    expand((), 0.0)
    for _ in range(min(forwards, limit - 1)):
        best = max(waiting, key=nodes.get)
        waiting.remove(best)
        expand(best, nodes[best])
    return set(sorted(nodes, key=nodes.get, reverse=True)[:limit])


@pytest.mark.parametrize(
    ("width", "forwards", "limit"), [(1, 5, 4), (2, 4, 7), (3, 8, 16), (4, 0, 3)]
)
def test_the_model_tree_keeps_the_most_probable_nodes(width, forwards, limit):
    for seed in range(8):
        markov = Markov(seed)
        toy = RecurrentToy(markov)
        drafter = ModelTreeDrafter(
            DraftModel(toy.step, toy.rollback), width=width, forwards=forwards
        )
        context = [0, 1, 2, 3]
        draft = drafter.propose(context, limit)
        assert toy.state == context
        paths = []
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert toy.calls <= 1 + min(forwards, limit - 1)
        assert set(paths) == brute_tree(markov, context, width, forwards, limit)
        first = [int(np.argmax(markov.logits(context)))]
        assert draft.tokens[:1].tolist() == first


def test_drafters_are_drafters_and_refuse_nonsense():
    toy = RecurrentToy(Markov(0))
    model = DraftModel(toy.step, toy.rollback)
    script = ScriptDrafter([1, 2, 3], [1], 5)
    for drafter in (NgramDrafter(), script, ModelDrafter(model), ModelTreeDrafter(model)):
        assert isinstance(drafter, Drafter)
        assert len(drafter.propose([1, 2], 0)) == 0
        with pytest.raises(ContractError, match="context"):
            drafter.propose([], 2)
        with pytest.raises(ContractError, match="limit"):
            drafter.propose([1, 2], -1)
    for bad in (
        lambda: NgramDrafter(0, 3),
        lambda: NgramDrafter(3, 2),
        lambda: NgramDrafter(width=0),
        lambda: ScriptDrafter([1], [], 5),
        lambda: ScriptDrafter([1], [1], 1),
        lambda: ModelDrafter(model, temperature=1.0),
        lambda: ModelDrafter(model, temperature=-1.0),
        lambda: ModelTreeDrafter(model, width=0),
        lambda: even_schedule(-1, 4),
    ):
        with pytest.raises(ContractError):
            bad()
    long = ModelDrafter(model)
    long.propose([1, 2, 3, 4], 2)
    with pytest.raises(ContractError, match="context"):
        long.propose([1, 2], 2)
    with pytest.raises(ContractError, match="logits"):
        ModelDrafter(DraftModel(lambda tokens: np.zeros((2, 5)), lambda k: None)).propose([1], 2)
