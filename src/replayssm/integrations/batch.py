"""Forwards of an enabled model over rows that stand at any positions in slots of shared pools.

:class:`BatchModel` runs the next tokens of one prompt, or one block a row for any rows; the rows of
one block may lie in different pools. It knows nothing of requests.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from replayssm.errors import ContractError, SlotError
from replayssm.integrations import hooks
from replayssm.integrations.cache import CacheBinding
from replayssm.integrations.forward import Forward
from replayssm.integrations.slotted import KvSpec, KvStore, slot_layers
from replayssm.integrations.transformers import disable, enable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from replayssm.integrations.transformers import Enabled
    from replayssm.ring import BlockPlan, RingSpec
    from replayssm.slots import SlotRef
    from replayssm.ticket import Ticket
    from replayssm.types import Block, ReadDepth


def acquire(model: nn.Module) -> Enabled:
    """Return the handle of a model, enabling it for its first user; :func:`release` gives it back.

    Raises:
        ContractError: Someone else has enabled the model.
    """
    handle: Enabled | None = getattr(model, "_replayssm_enabled", None)
    if handle is None:
        handle = enable(model)
    elif not handle.users:
        raise ContractError("model", "one that is not enabled", "an enabled one", "disable() it")
    handle.users += 1
    return handle


def release(handle: Enabled) -> None:
    """Drop one use of a handle; the last one disables the model.

    Raises:
        ContractError: It was not acquired, or was given back already.
    """
    if not handle.users:
        raise ContractError("handle", "one in use", "one that was given back")
    handle.users -= 1
    if not handle.users and handle.active:
        disable(handle.model)


class SlotPool(Protocol):
    """What a batch needs of a pool; see ``StatePool`` for the words."""

    @property
    def ring(self) -> RingSpec:
        """Ring sizes."""
        ...

    def begin(self, refs: Sequence[SlotRef | None], lengths: Sequence[int] | int = 1) -> Ticket:
        """Open a forward over rows."""
        ...

    def conv_(
        self, ticket: Ticket, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Run one layer's convolution in an open forward."""
        ...

    def step_(
        self,
        ticket: Ticket,
        layer: int,
        block: Block,
        *,
        depth: ReadDepth | Sequence[ReadDepth],
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer of an open forward."""
        ...

    def commit_(self, ticket: Ticket, num_accepted: Sequence[int | None] | int) -> None:
        """Keep the accepted entries of every row and close the forward."""
        ...

    def admit_(
        self,
        states: Sequence[Tensor] | None = None,
        position: int = 0,
        windows: Sequence[Tensor | None] | None = None,
    ) -> SlotRef:
        """Take a free slot and write a prefill state into it."""
        ...

    def materialise(self, ref: SlotRef) -> list[Tensor]:
        """Return every layer's ``[HV, V, K]`` fp32 state."""
        ...

    def conv_windows(self, ref: SlotRef) -> list[Tensor | None]:
        """Return every layer's ``[C, width - 1]`` inputs, the newest last."""
        ...

    def release_(self, ref: SlotRef) -> None:
        """Give a slot back."""
        ...


@dataclass(slots=True, eq=False)
class Seat:
    """What one sequence holds: a slot of a pool, and one of the keys and values.

    Attributes:
        pool: The pool of its recurrent state.
        ref: Its slot there; a prefill exchanges it.
        kv: Its slot of keys and values.
    """

    pool: SlotPool
    ref: SlotRef
    kv: SlotRef


class BatchRows:
    """The rows of one forward, each in its own pool; implements :class:`rows.Rows`."""

    def __init__(
        self, seats: Sequence[Seat], lengths: Sequence[int], depths: Sequence[ReadDepth]
    ) -> None:
        self._seats, self._lengths = seats, lengths
        # one depth for all is cheaper to check than one a row
        self._depths = depths[0] if len(set(depths)) == 1 else depths
        self._open: list[tuple[SlotPool, Ticket, Tensor]] = []

    @property
    def count(self) -> int:
        """B."""
        return len(self._seats)

    @property
    def pool(self) -> None:
        """There may be several."""
        return

    @property
    def ring(self) -> RingSpec:
        """Ring sizes of the first row's pool."""
        return self._seats[0].pool.ring

    @property
    def plans(self) -> list[tuple[SlotPool, BlockPlan]]:
        """The plan of the open forward in each pool."""
        return [(pool, ticket.plan) for pool, ticket, _ in self._open]

    def begin(self, tokens: int, parents: Sequence[int] | None = None) -> None:
        """Open a ticket in every pool; the other pools' rows are pad rows there."""
        del tokens, parents  # every row has its own length, and all are chains
        for pool in dict.fromkeys(seat.pool for seat in self._seats):
            own = [seat.pool is pool for seat in self._seats]
            pairs = zip(self._seats, own, strict=True)
            refs = [seat.ref if mine else None for seat, mine in pairs]
            self._open.append((pool, pool.begin(refs, self._lengths), torch.tensor(own)))

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run one layer's convolution in every pool."""
        return self._merge([p.conv_(t, layer, x, weight, bias) for p, t, _ in self._open])

    def step(self, layer: int, block: Block, depth: ReadDepth) -> Tensor:
        """Run one layer in every pool, each row at its own read depth."""
        del depth
        return self._merge(
            [
                pool.step_(
                    ticket,
                    layer,
                    block,
                    depth=self._depths,
                    out=torch.empty(block.v.shape, dtype=torch.float32, device=block.v.device),
                )
                for pool, ticket, _ in self._open
            ]
        )

    def commit_rows(self, num_accepted: Sequence[int]) -> None:
        """Close the forward; keep that many tokens of each row."""
        for pool, ticket, _ in self._open:
            pool.commit_(ticket, num_accepted)

    def admit(
        self, states: Sequence[Tensor] | None, windows: Sequence[Tensor] | None, position: int
    ) -> None:
        """Exchange the slot of the only row for one that holds the states at ``position``."""
        seat = self._only()
        seat.pool.release_(seat.ref)
        seat.ref = seat.pool.admit_(
            None if states is None else [state[0] for state in states],
            position,
            None if windows is None else [window[0] for window in windows],
        )

    def materialise(self) -> list[Tensor]:
        """Return the ``[1, HV, V, K]`` states of the only row."""
        seat = self._only()
        return [state.unsqueeze(0) for state in seat.pool.materialise(seat.ref)]

    def windows(self) -> list[Tensor]:
        """Return the ``[1, C, width - 1]`` windows of the only row."""
        seat = self._only()
        found = seat.pool.conv_windows(seat.ref)
        return [window.unsqueeze(0) for window in found if window is not None]

    def commit(self, path: Sequence[int] | None = None) -> None:
        """Refuse: rows of a batch are committed each by its own count."""
        raise ContractError("commit", "commit_rows", path)

    def select(self, index: Sequence[int]) -> None:
        """Refuse: rows of a batch are chosen anew for every forward."""
        raise ContractError("select", "no reordering of a batch", list(index))

    def croppable(self) -> int:
        """Return 0: a batch takes nothing back."""
        return 0

    def crop(self, tokens: int) -> None:
        """Refuse."""
        raise ContractError("crop", "no cropping of a batch", tokens)

    def _only(self) -> Seat:
        if len(self._seats) != 1:
            raise ContractError("rows", "one row in a prefill", len(self._seats))
        return self._seats[0]

    def _merge(self, parts: list[Tensor]) -> Tensor:
        merged = parts[0]
        # chosen, not added: a sum would turn -0.0 into 0.0 wherever another path shares the batch
        for part, (_, _, own) in zip(parts[1:], self._open[1:], strict=True):
            mask = own.to(part.device).view(-1, *[1] * (part.ndim - 1))
            merged = torch.where(mask, part, merged)
        return merged


class BatchBinding(CacheBinding):
    """A binding whose rows are chosen anew for every forward, by phase and never by length."""

    def open_block(self, rows: BatchRows, tokens: int) -> None:
        """Open a forward of one block a row."""
        self.rows = rows
        self.hold(tokens)

    def open_chunk(self, rows: BatchRows, position: int, tokens: int) -> None:
        """Open a forward of the next tokens of one prompt."""
        self.rows, self.position = rows, position
        initial, before = self._model_states(), rows.windows()
        self._forward = Forward(1, tokens, is_step=False, initial=initial, before=before)

    def close_block(self) -> None:
        """End a block after its rows were committed."""
        if self._held is None:
            raise SlotError("batch: the forward did not reach its last recurrent layer")
        self._held = None


class BatchModel:
    """Runs an enabled model over seats.

    Args:
        handle: The enabled model.
        kv: What its attention layers keep.
        slots: Slots of keys and values.
        context: Most tokens of one sequence.
        max_block: Largest T of one block.
    """

    def __init__(
        self, handle: Enabled, kv: KvSpec, *, slots: int, context: int, max_block: int
    ) -> None:
        from transformers import DynamicCache

        model: Any = handle.model
        self._model, config = model, model.config.get_text_config()
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.kv = KvStore(kv, slots, context, max_block, self.device)
        cache: Any = DynamicCache(config=config)
        self._cache = cache
        self._binding = BatchBinding(handle, cache, 0)
        self._binding.adopt(cache.layers)
        for mixer in handle.mixers:
            # an empty slot is a state too: every forward continues one
            cache.layers[mixer.layer_idx].has_previous_state[0] = True
        slot_layers(cache.layers, self.kv)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._argument = hooks.cache_argument(model)
        self._rows: BatchRows | None = None

    def chunk(self, seat: Seat, tokens: Sequence[int], position: int, depth: ReadDepth) -> Tensor:
        """Append the next tokens of a prompt; return ``[vocab]`` logits after the last one.

        A chunk of one token is a step: models run their step function on it.
        """
        if len(tokens) == 1:
            logits = self.block([seat], [tokens], [position], [depth])[0, 0]
            self.commit([1])
            return logits
        self._binding.open_chunk(BatchRows([seat], [len(tokens)], [depth]), position, len(tokens))
        mask = self.kv.plan_chunk(seat.kv, position, len(tokens))
        at = np.arange(position, position + len(tokens))[None]
        return self._forward(np.array([tokens], np.int64), at, mask, keep_logits=1)[0, -1]

    def block(
        self,
        seats: Sequence[Seat],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int],
        depths: Sequence[ReadDepth],
    ) -> Tensor:
        """Run one block a row and leave the commit to :meth:`commit`.

        Args:
            seats: Of each row.
            tokens: Of each row, at least one.
            positions: Tokens that each row has committed.
            depths: Read depth of each row.

        Returns:
            ``[B, T, vocab]`` logits; those past a row's length mean nothing.
        """
        lengths = np.array([len(own) for own in tokens], np.int64)
        first = np.array(positions, np.int64)
        ids = np.zeros((len(seats), int(lengths.max())), np.int64)
        for row, own in enumerate(tokens):
            ids[row, : len(own)] = own
        self._rows = BatchRows(seats, lengths.tolist(), depths)
        self._binding.open_block(self._rows, ids.shape[1])
        mask = self.kv.plan_block([seat.kv for seat in seats], first, lengths)
        at = first[:, None] + np.arange(ids.shape[1])
        return self._forward(ids, at, mask, keep_logits=0)

    @property
    def plans(self) -> list[tuple[SlotPool, BlockPlan]]:
        """Where the rows of the block in flight stand, by pool."""
        return [] if self._rows is None else self._rows.plans

    def commit(self, num_accepted: Sequence[int]) -> None:
        """Keep that many tokens of each row of the block in flight."""
        if self._rows is None:
            raise ContractError("commit", "a block in flight", "none")
        self._rows.commit_rows(num_accepted)
        self._rows = None
        self._binding.close_block()

    def abandon(self) -> None:
        """Forget a forward that failed; the slots of its rows can only be released."""
        self._rows = None
        self._binding.reset()

    @torch.no_grad()
    def _forward(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: Tensor,
        *,
        keep_logits: int,
    ) -> Tensor:
        offered = {
            "position_ids": torch.from_numpy(positions).to(self.device),
            "attention_mask": mask if self.kv.spec.layers else None,
            "logits_to_keep": keep_logits,
            "use_cache": True,
        }
        arguments = {name: value for name, value in offered.items() if name in self._parameters}
        tokens = torch.from_numpy(ids).to(self.device)
        logits: Tensor = self._model(tokens, **{self._argument: self._cache}, **arguments).logits
        return logits
