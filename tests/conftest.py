"""Fixed seeds, one thread a worker, and the implementations that a test runs on."""

from __future__ import annotations

import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path

# read when torch is imported: threads that wait by spinning take the cores of the other worker
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from replayssm.types import Impl

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fixed")

has_numba = find_spec("numba") is not None
# a session of fewer tests compiles the kernels that it comes to
WHOLE_SUITE = 1000


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Share the kernels to compile among the workers of a whole run."""
    # modules and collected tests live to the end: no collection of garbage has to visit them
    gc.freeze()
    is_worker = hasattr(session.config, "workerinput")
    if is_worker and has_numba and len(session.items) > WHOLE_SUITE:
        from compile_kernels import compile_kernels

        compile_kernels()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Run torch on one thread; compiled kernels on several threads give torch as many."""
    torch.set_num_threads(1)


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
