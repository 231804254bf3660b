"""Speculation without a model library: drafters, acceptance rules and adaptive draft length.

Models are callables and states are counts here, so everything can be tested on toys. A round:

    n = length.choose()
    draft = drafter.propose(context, n)
    ... one forward of the block [pending, *draft] gives [N + 1, vocab] logits ...
    accepted = accept_greedy(logits, draft)
    ... commit accepted.num_accepted entries ...
    emitted = accepted.emitted(draft)
    drafter.observe(emitted)
    length.update_(len(draft), len(accepted.path))

:class:`SpeculativeSession` is that loop.
"""

from replayssm.engine.speculative.acceptance import (
    Accepted,
    accept_greedy,
    accept_residual,
    accept_sampled,
    recompute_path,
)
from replayssm.engine.speculative.draft import MAX_NODES, Draft, Drafter
from replayssm.engine.speculative.follow import DraftModel
from replayssm.engine.speculative.length import AdaptiveLength, CostModel
from replayssm.engine.speculative.model import ModelDrafter, ModelTreeDrafter
from replayssm.engine.speculative.ngram import NgramDrafter
from replayssm.engine.speculative.sampling import sample_token, softmax
from replayssm.engine.speculative.script import ScriptDrafter, even_schedule
from replayssm.engine.speculative.session import BlockVerifier, Generation, SpeculativeSession
from replayssm.engine.speculative.simulate import (
    AcceptanceTrace,
    FixedLength,
    LengthRule,
    Outcome,
    record_runs,
    simulate,
)
from replayssm.engine.speculative.stats import AcceptanceStats, OverlapCheck
from replayssm.engine.speculative.tree import merge_paths

__all__ = [
    "MAX_NODES",
    "AcceptanceStats",
    "AcceptanceTrace",
    "Accepted",
    "AdaptiveLength",
    "BlockVerifier",
    "CostModel",
    "Draft",
    "DraftModel",
    "Drafter",
    "FixedLength",
    "Generation",
    "LengthRule",
    "ModelDrafter",
    "ModelTreeDrafter",
    "NgramDrafter",
    "Outcome",
    "OverlapCheck",
    "ScriptDrafter",
    "SpeculativeSession",
    "accept_greedy",
    "accept_residual",
    "accept_sampled",
    "even_schedule",
    "merge_paths",
    "recompute_path",
    "record_runs",
    "sample_token",
    "simulate",
    "softmax",
]
