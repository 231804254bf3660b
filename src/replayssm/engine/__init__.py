"""Continuous batching over slots: requests, scheduling, speculation and the prefix cache."""
