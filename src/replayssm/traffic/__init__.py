"""Traffic: traces in, load against a target, one record per request out."""
