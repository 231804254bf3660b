"""Input factories, oracles, error budgets and guard pools, for us and for other engines."""
