"""Where the Triton kernels run: on a GPU, or on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of every tensor of a kernel test."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; pip install 'replayssm[gpu]'")
    if IS_INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1 to interpret the kernels on the CPU")
    return torch.device("cuda")
