"""Slots of the standard path: one fp32 state a layer, rewritten at every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.baselines import WholeStates
from replayssm.errors import UnsupportedError
from replayssm.ticket import per_row
from replayssm.types import Impl

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from replayssm.ring import BlockPlan
    from replayssm.slots import SlotRef
    from replayssm.ticket import Ticket
    from replayssm.types import LayerSpec

MAX_BLOCK = 65
"""Most tokens of one block: a shadow follows as many as one verify may keep."""


@dataclass(frozen=True, slots=True)
class StandardImage:
    """A copy of one slot.

    Attributes:
        committed: Token count.
        states: ``[HV, V, K]`` fp32 a layer.
        windows: ``[C, width - 1]`` newest convolution inputs a layer; None without a convolution.
    """

    committed: int
    states: tuple[Tensor, ...]
    windows: tuple[Tensor | None, ...]


class StandardPool(WholeStates):
    """Slots whose only state every step rewrites.

    Nothing that was written can be taken back, so a commit keeps every token of a block.

    Args:
        layers: Geometry of the model's recurrent layers, in order.
        slots: Sequences that fit at once.
        dtype: dtype of convolution inputs.
        device: Where everything lives.
        impl: Implementation of the standard step.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        impl: Impl | str = Impl.AUTO,
    ) -> None:
        super().__init__(layers, slots, max_block=MAX_BLOCK, dtype=dtype, device=device, impl=impl)

    @staticmethod
    def slot_nbytes(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
        """Return the bytes of one slot."""
        convs = [x.conv for x in layers if x.conv is not None]
        inputs = sum((conv.width - 1) * conv.channels for conv in convs) * dtype.itemsize
        return sum(x.state_elements for x in layers) * torch.float32.itemsize + inputs

    def commit_(self, ticket: Ticket, num_accepted: Sequence[int | None] | int) -> None:
        """Close a forward and move the counts over all of its tokens.

        Raises:
            UnsupportedError: Fewer are to be kept; nothing was changed.
        """
        ticket.check_owner(self)
        counts = per_row("num_accepted", num_accepted, len(ticket.refs))
        rows = ticket.accepted_rows(self._slots, counts)
        whole = dict(zip(ticket.plan.slots.tolist(), ticket.plan.lengths.tolist(), strict=True))
        if any(count != whole[slot] for slot, count in rows):
            raise UnsupportedError("rollback on the standard path, which rewrites its states")
        super().commit_(ticket, num_accepted)

    def export(self, ref: SlotRef) -> StandardImage:
        """Return a copy of a slot."""
        states, windows = self.materialise(ref), self.conv_windows(ref)
        return StandardImage(self.committed(ref), tuple(states), tuple(windows))

    def import_(self, image: StandardImage) -> SlotRef:
        """Take a free slot and write an image into it, bit for bit."""
        return self.admit_(image.states, image.committed, image.windows)

    def _places(self, max_block: int) -> int:
        return 1

    def _moved_states(self, tokens: int, accepted: int) -> int:
        return 2 * tokens

    def _targets(self, plan: BlockPlan, tokens: int) -> None:
        """Rewrite in place."""

    def _keep_(self, forward: Ticket, accepted: NDArray[np.int64]) -> None:
        """Mutates nothing: the state after the last token is where it was read."""
