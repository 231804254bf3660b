"""Read the Prometheus text format."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress


def parse(text: str) -> dict[str, float]:
    """Return samples by name, summed over their labels; buckets of histograms are left out."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        head, has_labels, rest = line.partition("{")
        if has_labels:
            name, value = head, rest.rpartition("}")[2].split()
        else:
            name, *value = line.split()
        if not value or name.endswith("_bucket"):
            continue
        with suppress(ValueError):
            found[name.strip()] += float(value[0])
    return dict(found)
