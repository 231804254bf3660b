"""One forward of a bound cache through the recurrent layers of its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from replayssm.errors import DriftError
from replayssm.integrations.rows import RawRows
from replayssm.models.adapters import conv_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from replayssm.integrations.handle import Handle
    from replayssm.integrations.hooks import Call, StateHook
    from replayssm.integrations.rows import Rows
    from replayssm.models.registry import Mixer
    from replayssm.types import Block, LayerSpec, ReadDepth


@dataclass(slots=True)
class Forward:
    """What a forward is and how far it came.

    A *step* is a block of the ring. A *prefill* runs the model's own chunk functions, and what they
    leave behind is gathered here layer by layer, to be admitted when the last one is through. The
    newest ``tail`` tokens of a prefill go into the rings instead, so that they can be taken back.

    Attributes:
        rows: B.
        tokens: T.
        is_step: Whether it is a step.
        is_held: Whether its commit is left to the caller.
        tail: Tokens of a prefill that go into the rings.
        initial: Of a prefill on live rows, each layer's state in the model's own layout.
        before: Of a prefill on live rows, each layer's newest convolution inputs.
        states: ``[B, HV, V, K]`` of each layer at the start of the tail.
        windows: ``[B, C, width - 1]`` of each layer at the start of the tail.
        tail_inputs: ``[B, tail, C]`` convolution inputs of each layer.
        tail_blocks: What the tail adds to the ring of each layer.
        done: Layers that are through.
        is_convolved: Whether the layer that runs now has called its convolution.
        is_served: Whether it has called its step or chunk function.
    """

    rows: int
    tokens: int
    is_step: bool
    is_held: bool = False
    tail: int = 0
    initial: list[Tensor] | None = None
    before: list[Tensor] | None = None
    states: list[Tensor] = field(default_factory=list)
    windows: list[Tensor] = field(default_factory=list)
    tail_inputs: list[Tensor] = field(default_factory=list)
    tail_blocks: list[Block] = field(default_factory=list)
    done: int = 0
    is_convolved: bool = False
    is_served: bool = False

    @property
    def head(self) -> int:
        """Tokens of a prefill that do not go into the rings."""
        return self.tokens - self.tail

    def take_inputs(self, layer: int, inputs: Tensor, width: int) -> Tensor:
        """Gather a prefill's ``[B, C, T]`` convolution inputs; return them behind those before."""
        full = inputs if self.before is None else torch.cat([self.before[layer], inputs], dim=-1)
        seen = full[..., : full.shape[-1] - self.tail].detach()
        self.windows.append(newest(seen, width - 1))
        if self.tail:
            self.tail_inputs.append(inputs[..., self.head :].detach().transpose(1, 2))
        self.is_convolved = True
        return full

    def run_prefill(self, layer: int, call: Call, hook: StateHook, spec: LayerSpec) -> object:
        """Run a chunk function from the materialised state, and gather what the tail adds.

        Without a tail the mixer hands the final state back itself; with one it hands back ``hook``.
        """
        if self.initial is None:
            raise DriftError(f"{call.site.name} was handed a state that was never materialised")
        site, initial = call.site, self.initial[layer]
        if not self.tail:
            return call.run_original(**{site.state: initial})
        head = site.between(call.arguments, 0, self.head)
        tail = site.between(call.arguments, self.head, self.tokens)
        y, state = call.original(**{**head, site.state: initial})
        rest, _ = call.original(**{**tail, site.state: state})
        self.states.append(call.adapter.from_model(state.detach()))
        with torch.no_grad():
            self.tail_blocks.append(call.adapter.block(site, tail, spec))
        self.is_served = True
        return torch.cat([y, rest], dim=1), hook

    @torch.no_grad()
    def append_tail(self, rows: Rows, mixers: Sequence[Mixer], depth: ReadDepth) -> None:
        """Mutates ``rows``, which stand at the start of the tail: put it into their rings."""
        rows.begin(self.tail)
        layers = zip(mixers, self.tail_inputs, self.tail_blocks, strict=True)
        for layer, (mixer, inputs, block) in enumerate(layers):
            rows.conv(layer, inputs, *conv_weights(mixer.module))
            rows.step(layer, block, depth)
        rows.commit()


@torch.no_grad()
def run_step(rows: Rows, layer: int, call: Call, hook: StateHook, handle: Handle) -> object:
    """Serve a call of a step or chunk function from rows with an open forward.

    Rows whose kernels do gates, norms and the skip connection themselves get the arguments raw.
    """
    adapter, site, arguments, spec = call.adapter, call.site, call.arguments, handle.specs[layer]
    raw = adapter.raw_block(site, arguments, spec) if isinstance(rows, RawRows) else None
    if raw is None or not isinstance(rows, RawRows):
        y = rows.step(layer, adapter.block(site, arguments, spec), handle.read)
        return adapter.finish(site, arguments, y, hook)
    y = rows.step_raw(layer, *raw, handle.read)
    return adapter.finish_raw(site, arguments, y, hook)


def newest(inputs: Tensor, count: int) -> Tensor:
    """Return the last ``count`` columns of ``[B, C, N]`` inputs, behind zeros where N is less."""
    missing = max(0, count - inputs.shape[-1])
    return F.pad(inputs, (missing, 0))[..., missing + inputs.shape[-1] - count :]
