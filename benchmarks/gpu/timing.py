"""Time arms side by side: whole fold cycles in a CUDA graph, replayed in turns.

A graph holds the cycle of an arm, step by step over N state sets, so that no cache holds a state
between two steps that use it. One figure is the median over replays of (replay time / layer-steps).
What advances the positions runs once per step for all layers of a model: it is not in the graph,
where every step's positions are laid down beforehand.
"""

from __future__ import annotations

import gc
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gpu.cases import draw

if TYPE_CHECKING:
    from gpu.arms import Arm, StateSet
    from gpu.cases import Point

CACHE = 130_000_000  # bytes of state, more than twice any cache so far
LEAST_SETS = 2
GRAPH_SECONDS = 2e-3  # shorter graphs would time their own launch
SECONDS = 0.06  # of replays, each arm
REPLAYS = (5, 30)
WARM = 2
ROOM = 40_000_000_000  # bytes that the largest arm may take
GUESS = 3.5e12  # bytes per second, to size a graph before anything was timed
LAUNCH = 3e-6


@dataclass
class Timed:
    """A captured graph and its samples, microseconds per layer-step."""

    graph: torch.cuda.CUDAGraph
    sets: list[StateSet]
    layer_steps: int
    samples: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Replay once; return microseconds per layer-step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.layer_steps


@dataclass(frozen=True)
class Figure:
    """What was measured.

    Attributes:
        us: Median microseconds per layer-step.
        spread: Half the distance between the 10th and the 90th percentile, over the median.
        replays: Samples behind it.
        sets: State sets in turn.
        layer_steps: Layer-steps in one graph.
    """

    us: float
    spread: float
    replays: int
    sets: int
    layer_steps: int


def plan(arm: Arm, point: Point) -> tuple[int, int]:
    """Return how many state sets an arm needs and how many cycles make a graph long enough."""
    traffic = arm.traffic(point)
    sets = max(LEAST_SETS, math.ceil(CACHE / traffic.state_read))
    seconds = max(LAUNCH, traffic.total / GUESS) * sets * arm.period(point)
    return sets, max(1, math.ceil(GRAPH_SECONDS / seconds))


def capture(arm: Arm, point: Point, device: torch.device) -> Timed:
    """Prepare, warm up over a whole cycle, and capture."""
    count, cycles = plan(arm, point)
    period = arm.period(point)
    sets = []
    for i in range(count):
        sets.append(arm.prepare(point, device, i + 1, period))
        sets[-1].load(draw(point, device, seed=i))
    for step in range(period):
        sets[0].launch(step)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(cycles):
            for step in range(period):
                for states in sets:
                    states.launch(step)
    return Timed(graph, sets, cycles * period * count)


def figure(timed: Timed) -> Figure:
    """Sum up the samples."""
    ordered = sorted(timed.samples)
    n, middle = len(ordered), statistics.median(ordered)
    spread = (ordered[(9 * n) // 10 - (n >= 10)] - ordered[n // 10]) / 2 / middle
    return Figure(round(middle, 3), round(spread, 4), n, len(timed.sets), timed.layer_steps)


def side_by_side(arms: list[Arm], point: Point, device: torch.device) -> dict[str, Figure | str]:
    """Time arms at one point in turns; in several groups where one would not fit in memory.

    Returns:
        By name of the arm, its figure, or why it could not be timed.
    """
    found: dict[str, Figure | str] = {}
    group: dict[str, Timed] = {}
    for arm in arms:
        try:
            group[arm.name] = capture(arm, point, device)
        except Exception as error:
            found[arm.name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            torch.cuda.synchronize(device)
        if torch.cuda.mem_get_info(device)[0] < ROOM:
            _finish(group, found)
    _finish(group, found)
    return found


def _finish(group: dict[str, Timed], found: dict[str, Figure | str]) -> None:
    """Take the samples of a group, note its figures and free its memory."""
    for timed in group.values():
        for _ in range(WARM):
            timed.sample()
    waiting = dict(group)
    for turn in range(REPLAYS[1]):
        for name, timed in list(waiting.items()):
            timed.samples.append(timed.sample())
            if turn + 1 >= REPLAYS[0] and sum(timed.samples) * timed.layer_steps > SECONDS * 1e6:
                del waiting[name]
    found.update({name: figure(timed) for name, timed in group.items()})
    group.clear()
    waiting.clear()
    gc.collect()
    torch.cuda.empty_cache()
