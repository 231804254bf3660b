"""Kernels compiled ahead: two more processes compile while section 1 keeps one core busy.

Compiled kernels are cached on disk. So a kernel that another process has run needs no compiling in
this one, and the first evaluation on a machine takes little longer than the next. One of the two
compiles what runs in the calling thread, the other what is spread over threads, which takes as
long.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from replayssm.evaluate.compatibility import is_exact
from replayssm.evaluate.session import one_thread
from replayssm.evaluate.subject import one_geometry
from replayssm.evaluate.workload import Runner, Shape, make_blocks
from replayssm.models.registry import find_mixers
from replayssm.ops.dispatch import choose
from replayssm.types import Impl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replayssm.evaluate.arms import Arm
    from replayssm.evaluate.plan import Plan
    from replayssm.evaluate.subject import Subject
    from replayssm.types import LayerSpec

# enough state for a call to be spread over threads, one byte an element
STATE_ELEMENTS = 1 << 18


@contextmanager
def compiled_ahead(subject: Subject, plan: Plan) -> Iterator[Callable[[Arm], None]]:
    """Compile the kernels of all arms in other processes; give what waits for those of one.

    Does nothing where no kernels are compiled, or where the run itself is to use one thread. What
    those processes could not compile, the caller's own first call will.

    Args:
        subject: The model, loaded.
        plan: Its arms; those that section 1 needs come first.
    """
    device = subject.model.device
    if choose(Impl.AUTO, device) is not Impl.CPU or torch.get_num_threads() == 1:
        yield lambda _: None
        return
    spec = one_geometry(tuple(mixer.spec for mixer in find_mixers(subject.model)[0]))
    arms = sorted(plan.arms, key=lambda arm: not is_exact(arm))
    command, pipe = [sys.executable, "-m", "replayssm.evaluate.ahead"], subprocess.PIPE
    with ExitStack() as stack:
        waits = []
        for is_spread in (False, True):
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            stack.enter_context(child)
            stack.callback(child.kill)
            waits.append(_Ready(child, (arms, spec, plan.scope.window, is_spread)))

        def ready(arm: Arm) -> None:
            for wait in waits:
                wait(arm)

        yield ready


class _Ready:
    """Waits for another process to have run an arm; for nothing once that process has ended."""

    def __init__(self, child: subprocess.Popen[bytes], task: object) -> None:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the other process has no pipes")
        child.stdin.write(pickle.dumps(task))
        child.stdin.close()
        self._lines = child.stdout
        self._done: set[str] = set()

    def __call__(self, arm: Arm) -> None:
        while arm.name not in self._done:
            line = self._lines.readline()
            if not line:
                return
            self._done.add(line.decode().strip())


def run_once(arm: Arm, spec: LayerSpec, window: int, *, is_spread: bool) -> None:
    """Run an arm's kernels, in the calling thread or spread over threads."""
    rows = -(-STATE_ELEMENTS // spec.state_elements)
    runner = Runner(arm, Shape(spec, 1, rows, window), make_blocks(spec, rows, 0, 1))
    with nullcontext() if is_spread else one_thread():
        runner.step()


def main() -> None:
    """Be one of the others: read from the first what to run, name each arm that is done."""
    arms, spec, window, is_spread = pickle.load(sys.stdin.buffer)
    for arm in arms:
        run_once(arm, spec, window, is_spread=is_spread)
        print(arm.name, flush=True)


if __name__ == "__main__":
    main()
