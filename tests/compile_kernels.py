"""Compile every CPU kernel once between all processes that ask for it at the same time.

Each pytest worker would otherwise compile every kernel for itself, since all of them come to the
first test that needs one before any has been cached on disk.
"""

from __future__ import annotations

import fcntl
from functools import partial
from pathlib import Path

import torch

from replayssm.ops import standard_
from replayssm.state import StatePool
from replayssm.testing.factories import FAMILIES, make_block, make_layer, make_plan
from replayssm.types import Format, Impl, LayerSpec

# of the second, two rows are enough state for a call to be spread over threads
SMALL, LARGE = make_layer(*FAMILIES[0]), make_layer(*FAMILIES[0], (1, 1), (256, 256))


def step(layer: LayerSpec, *, exact: bool) -> None:
    pool = StatePool([layer], 2, state=Format.F32, impl=Impl.CPU, exact=exact)
    ticket = pool.begin([pool.admit_(), pool.admit_()])
    pool.step_(ticket, 0, make_block(layer, 2, 1, seed=0))


def steps(*, exact: bool) -> None:
    # what a call in one thread compiles, one that is spread over threads calls
    step(SMALL, exact=exact)
    step(LARGE, exact=exact)


def standard() -> None:
    for layer in (SMALL, LARGE):
        state = torch.zeros(2, layer.value_heads, layer.value_dim, layer.key_dim)
        plan, block = make_plan([0, 1], [1, 1], [0, 0]), make_block(layer, 2, 1, seed=0)
        standard_(state, layer, plan, block, impl=Impl.CPU)


# nothing in common, the longest to compile first
KERNELS = (partial(steps, exact=False), partial(steps, exact=True), standard)


def compile_kernels() -> None:
    """Return when all kernels are compiled, here or by others that were called meanwhile."""
    waiting = []
    # byte n of this file is the lock of kernel n; nothing is written
    with Path(__file__).open("r+b") as file:
        for n, call in enumerate(KERNELS):
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, n)
            except BlockingIOError:
                waiting.append((n, call))
            else:
                call()
                fcntl.lockf(file, fcntl.LOCK_UN, 1, n)
        for n, call in waiting:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, n)
            call()


if __name__ == "__main__":
    compile_kernels()
