"""Make :mod:`serving` importable under any import mode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def model() -> Any:
    from serving import load

    return load("gdn-tiny")
