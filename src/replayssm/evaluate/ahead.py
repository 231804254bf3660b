"""Kernels compiled ahead: two more processes compile while section 1 keeps one core busy.

Compiled kernels are cached on disk. So a kernel that another process has run needs no compiling in
this one, and the first evaluation on a machine takes little longer than the next. The standard and
the replay step have no kernel in common: a process each.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from replayssm.evaluate.compatibility import is_exact
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

# enough state for a call to be spread over threads, one byte an element: that takes both kernels,
# the loop over threads and what one thread runs
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
    waits: dict[Arm, _Ready] = {}
    with ExitStack() as stack:
        for is_replay in (False, True):
            group = [arm for arm in arms if arm.is_replay == is_replay]
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            stack.enter_context(child)
            stack.callback(child.kill)
            wait = _Ready(child, (group, spec, plan.scope.window))
            waits |= dict.fromkeys(group, wait)
        yield lambda arm: waits[arm](arm)


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


def run_once(arm: Arm, spec: LayerSpec, window: int) -> None:
    """Run an arm's kernels, spread over threads."""
    rows = -(-STATE_ELEMENTS // spec.state_elements)
    Runner(arm, Shape(spec, 1, rows, window), make_blocks(spec, rows, 0, 1)).step()


def main() -> None:
    """Be one of the others: read from the first what to run, name each arm that is done."""
    arms, spec, window = pickle.load(sys.stdin.buffer)
    for arm in arms:
        run_once(arm, spec, window)
        print(arm.name, flush=True)


if __name__ == "__main__":
    main()
