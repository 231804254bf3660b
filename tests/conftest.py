"""Fixed seeds, one thread a worker, and the implementations that a test runs on."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from replayssm.types import Impl

torch.set_num_threads(1)
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fixed")

has_numba = find_spec("numba") is not None


@pytest.fixture(
    params=[
        Impl.REFERENCE,
        pytest.param(
            Impl.CPU, marks=pytest.mark.skipif(not has_numba, reason="numba is not installed")
        ),
    ]
)
def impl(request: pytest.FixtureRequest) -> Impl:
    return request.param
