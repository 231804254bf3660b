"""Enums, frozen specifications and results shared by every layer.

Shape legend, used in every docstring of this package:

    B  sequences (rows) of a batch        S   slots of a pool
    T  tokens of a block                  R   entries of a ring
    C  channels of a convolution          Rc  entries of a convolution's ring
    H  key/query heads (Mamba-2: groups)  HV  value heads, a multiple of H
    K  key dim (Mamba-2: d_state)         V   value dim (Mamba-2: head_dim)

A state is ``[S, HV, V, K]``; value head ``hv`` uses key head ``hv // (HV / H)``. Gates are natural
logarithms (``g <= 0``). The recurrence of one head, with ``D = exp(g)`` acting on the key side:

    S_t = S_{t-1} D_t + u_t k_t^T        y_t = S_t q_t
    additive:  u = w v                   delta:  u = w (v - S_{t-1} D_t k)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Never

from replayssm.errors import ContractError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class _Choice(StrEnum):
    """An enum whose unknown values are refused with the list of known ones."""

    @classmethod
    def _missing_(cls, value: object) -> Never:
        raise ContractError(cls.__name__, f"one of {', '.join(cls)}", repr(value))


class Write(_Choice):
    """How an entry is written into the state."""

    ADDITIVE = "additive"
    DELTA = "delta"


class Decay(_Choice):
    """What one log-decay covers: a whole head, or one key channel."""

    SCALAR = "scalar"
    CHANNEL = "channel"


class Format(_Choice):
    """State formats of a checkpoint; bytes and planes are in :mod:`replayssm.formats`."""

    F32 = "f32"
    S32 = "s32"
    Q24 = "q24"
    Q16 = "q16"
    BF16 = "bf16"


class ReadDepth(_Choice):
    """Which planes a step reads. A fold always reads and writes both."""

    HIGH = "high"
    FULL = "full"


class Impl(_Choice):
    """Which implementation serves an operation; ``AUTO`` picks by device and says what it chose."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
    TRITON = "triton"


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Geometry of the short causal convolution in front of a recurrent layer.

    Attributes:
        channels: C, channels that are convolved, each by itself.
        width: Inputs that one output sees, its own and the ``width - 1`` before it.
    """

    channels: int
    width: int

    def __post_init__(self) -> None:
        for name, least in (("channels", 1), ("width", 2)):
            if getattr(self, name) < least:
                raise ContractError(name, f"an integer >= {least}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Geometry of one recurrent layer.

    Attributes:
        write: Additive (Mamba-2) or delta (Gated DeltaNet, Kimi Delta Attention).
        decay: Scalar (one g per value head) or channel (one g per value head and key channel).
        key_heads: H, heads that carry their own key and query.
        value_heads: HV, heads that carry their own value, gate and state; a multiple of H.
        key_dim: K.
        value_dim: V.
        conv: The convolution whose inputs the pool keeps, None when it keeps none.
    """

    write: Write
    decay: Decay
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: ConvSpec | None = None

    def __post_init__(self) -> None:
        # the code compares by identity, so a plain string would silently mean the other choice
        object.__setattr__(self, "write", Write(self.write))
        object.__setattr__(self, "decay", Decay(self.decay))
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ContractError(name, "a positive integer", getattr(self, name))
        if self.value_heads % self.key_heads:
            raise ContractError(
                "value_heads",
                f"a multiple of key_heads ({self.key_heads})",
                self.value_heads,
                "repeat or regroup the keys so that every key head serves equally many value heads",
            )

    @property
    def heads_per_key(self) -> int:
        """Value heads served by one key head."""
        return self.value_heads // self.key_heads

    @property
    def state_elements(self) -> int:
        """Elements of one slot's state."""
        return self.value_heads * self.value_dim * self.key_dim

    def gate_shape(self) -> tuple[int, ...]:
        """Shape of one entry's log-decay: ``[HV]`` or ``[HV, K]``."""
        if self.decay is Decay.SCALAR:
            return (self.value_heads,)
        return (self.value_heads, self.key_dim)


@dataclass(frozen=True, slots=True)
class Block:
    """The inputs of T consecutive tokens for B rows of one layer.

    Attributes:
        q: ``[B, T, H, K]`` queries, already scaled.
        k: ``[B, T, H, K]`` keys, already normalised where the family normalises.
        v: ``[B, T, HV, V]`` values.
        g: ``[B, T, HV]`` or ``[B, T, HV, K]`` natural-log decays, <= 0.
        w: ``[B, T, HV]`` write strengths (Mamba-2 dt, delta-rule beta).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor

    @property
    def rows(self) -> int:
        """B."""
        return int(self.q.shape[0])

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.q.shape[1])

    def to(self, dtype: torch.dtype) -> Block:
        """Return the block with every floating tensor cast to ``dtype``."""
        q, k, v, g, w = (x.to(dtype) for x in (self.q, self.k, self.v, self.g, self.w))
        return Block(q, k, v, g, w)
