"""From a plan to a rollout gate: six decisions per cohort, and the routing they earn."""
