"""Where the real traces lie, an engine that is none, and small traces."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of real traces: beside a checkout, or where the environment says."""
    named = os.environ.get("REPLAYSSM_TRACES")
    places = [Path(named)] if named else [p / "shared/data/traces" for p in ROOT.parents]
    for place in places:
        if place.is_dir():
            return place
    pytest.skip("no real traces: set REPLAYSSM_TRACES to the folder that holds them")
