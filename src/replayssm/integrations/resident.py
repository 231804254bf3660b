"""Rows whose counts live on the device, so that a CUDA graph can hold a whole forward.

A forward over these rows asks the host nothing and copies nothing from it: ``commit`` is a launch
that moves the counts by what the tensor ``accepted`` says. Capture a forward once, and every launch
of the graph is the next step of the same sequences::

    rows = ResidentReplay(pool, refs, tokens=1, depth="high")
    seat(handle, cache, rows)                       # the cache's recurrent layers are these rows
    model(ids, past_key_values=cache)               # compiled, warm
    with torch.cuda.graph(graph):
        logits = model(ids, past_key_values=cache).logits
    graph.replay()                                  # as often as asked
    rows.close()                                    # the pool knows where its slots stand again

Number of rows, T and read depth are fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import numpy as np
import torch

from replayssm.errors import ContractError, UnsupportedError
from replayssm.integrations.bind import bind
from replayssm.integrations.layer import BoundLayer
from replayssm.ring import BlockPlan, RingSpec
from replayssm.types import Block, Impl, ReadDepth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from replayssm.integrations.handle import Handle
    from replayssm.ops.triton.plan import DevicePlan
    from replayssm.slots import SlotRef
    from replayssm.state import StatePool
    from replayssm.types import LayerSpec

MOVED = "rows on the device: close() them and use the pool"


class _Resident:
    """What both kinds share: fixed rows and tokens, and a convolution whose ring is theirs.

    Attributes:
        accepted: ``[B]`` int64 entries that the next commits keep; write into it, also inside a
            graph.
    """

    def __init__(self, plan: DevicePlan, ring: RingSpec, tokens: int) -> None:
        self._plan, self._ring, self._tokens = plan, ring, tokens
        device = plan.counts.device
        self.accepted = torch.full((plan.rows,), tokens, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        """B."""
        return self._plan.rows

    @property
    def ring(self) -> RingSpec:
        """Ring sizes."""
        return self._ring

    def begin(self, tokens: int, parents: Sequence[int] | None = None) -> None:
        """Check that the forward is one of these rows; launches nothing."""
        if tokens != self._tokens or parents is not None:
            raise ContractError("tokens", f"a chain of {self._tokens} a row", tokens)

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Launch one layer's step; outputs are in v's dtype."""
        return self.step_raw(layer, block, {}, depth)

    def step_raw(
        self, layer: int, block: Block, inside: dict[str, Any], depth: ReadDepth
    ) -> Tensor:
        """Launch one layer's step with what its family does around it done inside."""
        raise NotImplementedError

    def commit(self, path: Sequence[int] | None = None) -> None:
        """Launch the commit of :attr:`accepted` entries."""
        from replayssm.ops.triton.others import advance_call

        if path is not None:
            raise UnsupportedError(f"a path of the host's: {MOVED}")
        advance_call(self._plan, self._ring, self.accepted).run()

    def _convolve(self, ring: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from replayssm.ops.triton.others import conv_call, dense_weight, empty_like_dense
        from replayssm.ops.triton.others import inner_dense as dense

        out = empty_like_dense(x)
        conv_call(ring, self._plan, dense(x), dense_weight(weight), bias, out).run()
        return out

    def admit(self, *_given: object) -> Never:
        """Refuse: rows are admitted before their counts go to the device."""
        raise UnsupportedError(f"admit: {MOVED}")

    def materialise(self) -> Never:
        """Refuse: the host does not know where the rows stand."""
        raise UnsupportedError(f"materialise: {MOVED}")

    def windows(self) -> Never:
        """Refuse: the host does not know where the rows stand."""
        raise UnsupportedError(f"windows: {MOVED}")

    def select(self, index: Sequence[int]) -> Never:
        """Refuse: the rows of a graph are fixed."""
        raise UnsupportedError(f"select: {MOVED}")

    def croppable(self) -> int:
        """Return 0."""
        return 0

    def crop(self, tokens: int) -> None:
        """Refuse to take tokens back; keep fewer of them by :attr:`accepted`."""
        if tokens:
            raise UnsupportedError(f"crop: {MOVED}")


class ResidentReplay(_Resident):
    """Live slots of a pool, served until :meth:`close`.

    Args:
        pool: Served by Triton.
        refs: Slot of every row. They hold an open ticket and can only be released.
        tokens: T of every forward, at most the ring's ``max_block``.
        depth: Planes that every step reads.
    """

    def __init__(
        self, pool: StatePool, refs: Sequence[SlotRef], *, tokens: int = 1,
        depth: ReadDepth | str = ReadDepth.FULL,
    ) -> None:  # fmt: skip
        from replayssm.ops.triton.host import check_served
        from replayssm.ops.triton.plan import device_plan

        if pool.impl is not Impl.TRITON:
            raise UnsupportedError(f"rows on the device need impl=triton, not {pool.impl.value}")
        for store in pool.stores:
            check_served(store)
        self._pool, self._depth = pool, ReadDepth(depth)
        self._ticket = pool.begin(refs, tokens)
        plan = device_plan(
            self._ticket.plan, pool.ring, [self._depth] * len(refs), tokens, pool.device
        )
        super().__init__(plan, pool.ring, tokens)

    @property
    def pool(self) -> StatePool:
        """The pool; its slots stand where they stood when these rows were made."""
        return self._pool

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Launch one layer's convolution."""
        ring = self._pool.stores[layer].conv
        if ring is None:
            raise ContractError("layer", "one with a convolution", layer)
        return self._convolve(ring, x, weight, bias)

    def step_raw(
        self, layer: int, block: Block, inside: dict[str, Any], depth: ReadDepth
    ) -> Tensor:
        """Launch one layer's step; outputs are in v's dtype."""
        from replayssm.ops.triton.call import Fused
        from replayssm.ops.triton.host import step_

        if depth is not self._depth:
            raise ContractError("depth", f"{self._depth.value}, as the rows were made", depth.value)
        block = _dense(block)
        out = torch.empty_like(block.v)
        step_(self._pool.stores[layer], self._plan, block, out, Fused(**inside))
        return out

    def close(self) -> None:
        """Wait for the device and tell the pool where its slots stand; these rows are spent."""
        from replayssm.ops.triton.plan import counts_on_host

        self._pool.settle_(self._ticket, *counts_on_host(self._plan))


class ResidentStandard(_Resident):
    """The standard step over states of its own, with a snapshot after every token of a block.

    With T = 1 the state is rewritten in place. With more, a row has T slots: a commit of n entries
    makes the next block go on from the state after the n-th token.

    Args:
        specs: Geometry of the layers.
        rows: B.
        tokens: T of every forward.
        dtype: Of the states: fp32 or bf16.
        ring_dtype: Of the convolutions' inputs.
        device: Where everything lives.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], rows: int, *, tokens: int = 1,
        dtype: torch.dtype = torch.float32, ring_dtype: torch.dtype = torch.bfloat16,
        device: torch.device,
    ) -> None:  # fmt: skip
        ring = RingSpec(window=1, max_block=tokens)
        super().__init__(_fresh_plan(rows, 1, tokens, ring, device), ring, tokens)
        self._specs = tuple(specs)
        self._slots = _fresh_plan(rows, tokens, tokens, ring, device)
        self._targets = torch.arange(rows * tokens, device=device).view(rows, tokens)
        self._states = [
            torch.zeros(rows * tokens, x.value_heads, x.value_dim, x.key_dim, dtype=dtype,
                        device=device)
            for x in specs
        ]  # fmt: skip
        self._convs = [
            None if x.conv is None else
            torch.zeros(rows, ring.conv_len(x.conv.width), x.conv.channels, dtype=ring_dtype,
                        device=device)
            for x in specs
        ]  # fmt: skip

    @property
    def pool(self) -> None:
        """There is no pool."""
        return

    @property
    def states(self) -> list[Tensor]:
        """``[B * T, HV, V, K]`` of every layer; row b has the T from ``b * T`` on."""
        return self._states

    def nbytes(self) -> int:
        """Return the bytes of states and convolution inputs."""
        held = [*self._states, *(x for x in self._convs if x is not None)]
        return sum(x.nbytes for x in held)

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Launch one layer's convolution."""
        ring = self._convs[layer]
        if ring is None:
            raise ContractError("layer", "one with a convolution", layer)
        return self._convolve(ring, x, weight, bias)

    def step_raw(
        self, layer: int, block: Block, inside: dict[str, Any], depth: ReadDepth
    ) -> Tensor:
        """Launch one layer's standard step; outputs are in v's dtype."""
        from replayssm.ops.triton.call import Fused
        from replayssm.ops.triton.others import standard_call

        block = _dense(block)
        out = torch.empty_like(block.v)
        targets = self._targets if self._tokens > 1 else None
        spec, state = self._specs[layer], self._states[layer]
        standard_call(state, spec, self._slots, block, out, targets, Fused(**inside)).run()
        return out

    def commit(self, path: Sequence[int] | None = None) -> None:
        """Launch the commit; a block's next one goes on from the last kept token's state."""
        super().commit(path)
        if self._tokens > 1:
            torch.add(self._targets[:, 0], self.accepted - 1, out=self._slots.counts[0])


def seat(handle: Handle, cache: Any, rows: ResidentReplay | ResidentStandard) -> None:  # noqa: ANN401 - transformers' Cache
    """Make ``rows`` what the recurrent layers of a cache hold; mutates the cache.

    Args:
        handle: The enabled model.
        cache: A cache of that model, empty or not; what its recurrent layers held is dropped.
        rows: Rows of every recurrent layer.
    """
    binding = bind(handle, cache, 0)
    binding.reset()
    binding.ring, binding.rows = rows.ring, rows
    for layer in cache.layers:
        if isinstance(layer, BoundLayer):
            layer.has_previous_state[0] = True


def _dense(block: Block) -> Block:
    from replayssm.ops.triton.others import inner_dense as dense

    q, k, v, g = (dense(x) for x in (block.q, block.k, block.v, block.g))
    # a family without strengths of its own hands its gates over twice
    return Block(q, k, v, g, g if block.w is block.g else dense(block.w))


def _fresh_plan(
    rows: int, stride: int, tokens: int, ring: RingSpec, device: torch.device
) -> DevicePlan:
    from replayssm.ops.triton.plan import device_plan

    index = np.arange(rows, dtype=np.int64)
    plan = BlockPlan(index * stride, 0 * index, 0 * index, 0 * index, 0 * index + tokens)
    return device_plan(plan, ring, [ReadDepth.FULL] * rows, tokens, device)
