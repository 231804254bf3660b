"""Input factories, oracles, error budgets and guard pools, for us and for other engines."""

from replayssm.testing.budgets import Budget, fold_budget, output_budget, relative_error
from replayssm.testing.conformance import check_step
from replayssm.testing.factories import Regime, make_block, make_layer, make_plan, make_state
from replayssm.testing.guard import guard_pool_, guarded_store, pool_digest
from replayssm.testing.oracle import SerialOracle
from replayssm.testing.rollback import check_rollback

__all__ = [
    "Budget",
    "Regime",
    "SerialOracle",
    "check_rollback",
    "check_step",
    "fold_budget",
    "guard_pool_",
    "guarded_store",
    "make_block",
    "make_layer",
    "make_plan",
    "make_state",
    "output_budget",
    "pool_digest",
    "relative_error",
]
