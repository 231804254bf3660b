"""One step of a model as a CUDA graph: capture it, time it, profile it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from replayssm.integrations.hooks import cache_argument
from replayssm.integrations.resident import seat

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.integrations.transformers import Enabled
    from replayssm.types import ReadDepth

# kernels that read or write states and rings
RECURRENT = tuple(
    f"{name}_kernel"
    for name in (
        "standard", "products", "chain", "read", "due", "step", "whole", "fold", "conv", "advance",
    )
)  # fmt: skip
WARM = 3
BUSIEST, NAME = 10, 70  # kernels of a profile that are kept, letters of a name


class Decode:
    """The steps of a batch on rows of its own, with a static cache for the attention layers.

    Args:
        handle: The enabled model.
        rows: Rows on the device.
        tokens: T of a step.
        kept: Tokens of it that are kept.
        length: Tokens that an attention cache holds.
        start: Tokens that are in it before the first step.
        depth: Planes that a step reads.
    """

    def __init__(
        self, handle: Enabled, rows: Any, tokens: int, kept: int, *, length: int, start: int,  # noqa: ANN401 - rows of either kind
        depth: ReadDepth,
    ) -> None:  # fmt: skip
        from transformers import StaticCache

        self.model: Any = handle.model
        handle.read = depth
        self._rejected, self._start = tokens - kept, start
        self._room, self._launched = (length - start - tokens) // kept, 0
        self._argument = cache_argument(self.model)
        device = self.model.get_input_embeddings().weight.device
        self.cache: Any = StaticCache(config=self.model.config, max_cache_len=length)
        seat(handle, self.cache, rows)
        vocab = self.model.config.get_text_config().vocab_size
        self.ids = torch.randint(vocab, (rows.count, tokens), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._lengths: list[Tensor] = []

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Run one block and return its logits; attention takes rejected tokens back."""
        logits: Tensor = self.model(ids, **{self._argument: self.cache}, use_cache=True).logits
        if not self._lengths:
            self._lengths = [x.cumulative_length for x in self.cache.layers
                             if hasattr(x, "cumulative_length")]  # fmt: skip
        if self._rejected:
            for count in self._lengths:
                count.sub_(self._rejected)
        return logits

    def step(self) -> None:
        """Run one block and take the likeliest tokens as the next one."""
        self.ids.copy_(self.forward(self.ids).argmax(-1))

    def launch(self) -> None:
        """Run one step: a launch of the graph, or the step itself where nothing can be captured.

        Attention caches that are full go back to the tokens that they started with.
        """
        if self._launched == self._room:
            self.rewind()
        self._launched += 1
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()

    def rewind(self) -> None:
        """Set the attention caches to the tokens that they start with."""
        self._launched = 0
        for count in self._lengths:
            count.fill_(self._start)

    def capture(self) -> None:
        """Warm up on a side stream and capture a step; nothing on a CPU."""
        if self.ids.device.type != "cuda":
            self.step()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph


def step_seconds(run: Decode, steps: int, warm: int) -> float:
    """Return seconds of a step, the mean of ``steps`` launches behind ``warm`` others."""
    run.rewind()
    for _ in range(warm):
        run.launch()
    _wait(run)
    started = time.perf_counter()
    for _ in range(steps):
        run.launch()
    _wait(run)
    return (time.perf_counter() - started) / steps


@dataclass(frozen=True)
class Profile:
    """Where the device's busy time goes.

    Attributes:
        recurrent: Part of it in which a kernel of ours ran; side by side they count once.
        busiest: Parts of single kernels by name, the largest first.
    """

    recurrent: float
    busiest: dict[str, float]


def profile(run: Decode, steps: int) -> Profile | None:
    """Profile some launches; None where no kernel was seen."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    run.rewind()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            run.launch()
        _wait(run)
    events = [x for x in recorded.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(x.time_range.start, x.time_range.end, x.name) for x in events]
    busy = _covered([(a, b) for a, b, _ in spans])
    if not busy:
        return None
    ours = [(a, b) for a, b, name in spans if any(k in name for k in RECURRENT)]
    by_name: Counter[str] = Counter()
    for start, end, name in spans:
        by_name[name[:NAME]] += end - start
    top = {name: round(us / busy, 3) for name, us in by_name.most_common(BUSIEST)}
    return Profile(round(_covered(ours) / busy, 4), top)


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _wait(run: Decode) -> None:
    if run.ids.device.type == "cuda":
        torch.cuda.synchronize(run.ids.device)
