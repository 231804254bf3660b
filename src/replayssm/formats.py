"""State formats: how a checkpoint is cut into planes, encoded and decoded.

A stored number is an integer q cut in two planes. With m low bits:

    high = (q + 2^(m-1)) >> m          the integer rounded to its top byte(s)
    low  = q - (high << m) + 2^(m-1)   the exact remainder, biased so that it is unsigned

``s32``: q is the fp32 bit pattern as int32, so ``high`` is a bf16 number and nothing is lost.
``q24`` and ``q16``: q = rint(S_vn / c_n / r_v * 2^m) with a row scale r_v (fp32, row amax / 127)
and a column scale c_n (bf16, any positive value is correct: it only equalises channels). ``f32``
and ``bf16`` are plain tensors with one plane.

A high read of a fixed-point row sees ``high * r_v * c_n``, a full one ``q * 2^-m * r_v * c_n``.
A row with a non-finite element gets row scale NaN, so it stays visible at both depths. A row whose
scale would fall under 2^-100 gets row scale 0 and reads as exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.errors import ContractError
from replayssm.types import Format, ReadDepth

# column scales stay in a range whose reciprocal and product with any sane state are normal fp32
COLUMN_SCALE_MIN = 2.0**-60
COLUMN_SCALE_MAX = 2.0**60
# below this a row scale's reciprocal times 2^16 would leave the fp32 range
ROW_SCALE_MIN = 2.0**-100
HIGH_MAX = 127
CANONICAL_NAN = 0x7FC00000


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """What a format stores.

    Attributes:
        high: dtype of the high plane.
        low: dtype of the low plane, None for one-plane formats.
        low_bits: m, bits of the low plane.
        scaled: Whether row and column scales exist.
    """

    high: torch.dtype
    low: torch.dtype | None
    low_bits: int
    scaled: bool

    @property
    def read_bytes(self) -> dict[ReadDepth, int]:
        """Plane bytes per element that a read of each depth moves."""
        full = self.high.itemsize + (self.low.itemsize if self.low else 0)
        return {ReadDepth.HIGH: self.high.itemsize, ReadDepth.FULL: full}

    @property
    def stored_bytes(self) -> int:
        """Plane bytes per element, without scales."""
        return self.read_bytes[ReadDepth.FULL]


FORMATS: dict[Format, FormatSpec] = {
    Format.F32: FormatSpec(torch.float32, None, 0, scaled=False),
    Format.S32: FormatSpec(torch.bfloat16, torch.uint16, 16, scaled=False),
    Format.Q24: FormatSpec(torch.int8, torch.uint16, 16, scaled=True),
    Format.Q16: FormatSpec(torch.int8, torch.uint8, 8, scaled=True),
    Format.BF16: FormatSpec(torch.bfloat16, None, 0, scaled=False),
}


@dataclass(frozen=True, slots=True)
class Planes:
    """An encoded state.

    Attributes:
        high: ``[..., V, K]`` high plane.
        low: ``[..., V, K]`` low plane or None.
        row_scale: ``[..., V]`` fp32 or None.
    """

    high: Tensor
    low: Tensor | None = None
    row_scale: Tensor | None = None


def column_scale(amax: Tensor) -> Tensor:
    """Turn column amaxes into column scales.

    Args:
        amax: ``[..., K]`` largest finite magnitude of each key channel, fp32.

    Returns:
        ``[..., K]`` bf16, positive and finite; of an all-zero channel the smallest there is.
    """
    return amax.clamp(COLUMN_SCALE_MIN, COLUMN_SCALE_MAX).to(torch.bfloat16)


def column_amax(state: Tensor) -> Tensor:
    """Return ``[..., K]`` fp32, the largest finite magnitude of each key channel of a state.

    Args:
        state: ``[..., V, K]`` fp32.
    """
    finite = torch.where(torch.isfinite(state), state, torch.zeros_like(state))
    return finite.abs().amax(-2)


def cut(q: Tensor, low_bits: int) -> tuple[Tensor, Tensor]:
    """Cut integers into a signed high part and a biased, non-negative low part.

    Args:
        q: int32 integers; ``q + 2^(low_bits-1)`` must not overflow int32.
        low_bits: m.

    Returns:
        ``(high, low)`` as int32 with ``q == join(high, low, low_bits)``.
    """
    half = 1 << (low_bits - 1)
    high = (q + half) >> low_bits
    return high, q - (high << low_bits) + half


def join(high: Tensor, low: Tensor, low_bits: int) -> Tensor:
    """Undo :func:`cut`; both planes are converted to int32 first."""
    half = 1 << (low_bits - 1)
    return (high.to(torch.int32) << low_bits) + low.to(torch.int32) - half


def encode(state: Tensor, fmt: Format, columns: Tensor | None = None) -> Planes:
    """Encode a state.

    Args:
        state: ``[..., V, K]`` fp32.
        fmt: Target format.
        columns: ``[..., K]`` bf16 column scales; needed by scaled formats, ignored by the others.

    Returns:
        The planes; every tensor is fresh.

    Raises:
        ContractError: ``state`` is not fp32, or a scaled format was given no column scales.
    """
    fmt = Format(fmt)
    if state.dtype != torch.float32:
        raise ContractError("state", "float32", state.dtype, "convert it with .float()")
    if fmt is Format.F32:
        return Planes(state.clone())
    if fmt is Format.BF16:
        return Planes(state.to(torch.bfloat16))
    if fmt is Format.S32:
        return _encode_s32(state)
    if columns is None:
        raise ContractError("columns", f"column scales, which {fmt.value} needs", "none")
    return _encode_fixed(state, FORMATS[fmt], columns)


def _encode_s32(state: Tensor) -> Planes:
    nan = torch.full_like(state, CANONICAL_NAN, dtype=torch.int32).view(torch.float32)
    q = torch.where(torch.isnan(state), nan, state).contiguous().view(torch.int32)
    high, low = cut(q, 16)
    return Planes(high.to(torch.int16).view(torch.bfloat16), low.to(torch.uint16))


def _encode_fixed(state: Tensor, spec: FormatSpec, columns: Tensor) -> Planes:
    normal = state * columns.float().reciprocal().unsqueeze(-2)
    amax = normal.abs().amax(-1)
    scale = amax / HIGH_MAX
    is_finite = torch.isfinite(amax)
    usable = is_finite & (scale >= ROW_SCALE_MIN)
    divisor = torch.where(usable, scale, torch.ones_like(scale))
    limit = HIGH_MAX << spec.low_bits
    q = torch.round(normal * ((1 << spec.low_bits) / divisor).unsqueeze(-1)).clamp(-limit, limit)
    q = torch.where(usable.unsqueeze(-1), q, torch.zeros_like(q))
    row_scale = torch.where(usable, scale, torch.zeros_like(scale))
    row_scale = torch.where(is_finite, row_scale, torch.full_like(scale, torch.nan))
    high, low = cut(q.to(torch.int32), spec.low_bits)
    if spec.low is None:
        raise TypeError("a fixed-point format has two planes")
    return Planes(high.to(spec.high), low.to(spec.low), row_scale)


def decode(planes: Planes, fmt: Format, depth: ReadDepth, columns: Tensor | None = None) -> Tensor:
    """Decode planes to the fp32 state that a read of ``depth`` sees.

    Args:
        planes: ``[..., V, K]`` planes.
        fmt: Their format.
        depth: High or full.
        columns: ``[..., K]`` bf16 column scales of scaled formats.

    Returns:
        ``[..., V, K]`` fp32.

    Raises:
        ContractError: A scaled format was given no row or column scales.
    """
    fmt, depth = Format(fmt), ReadDepth(depth)
    spec = FORMATS[fmt]
    if spec.low is None or planes.low is None:
        return planes.high.float()
    if not spec.scaled:
        if depth is ReadDepth.HIGH:
            return planes.high.float()
        return join(planes.high.view(torch.int16), planes.low, 16).view(torch.float32)
    if columns is None or planes.row_scale is None:
        expected = f"row and column scales, which {fmt.value} needs"
        raise ContractError("columns", expected, "not both")
    row, column = planes.row_scale.unsqueeze(-1), columns.float().unsqueeze(-2)
    if depth is ReadDepth.HIGH:
        return planes.high.float() * row * column
    q = join(planes.high, planes.low, spec.low_bits).float()
    return q * (row * 2.0**-spec.low_bits) * column
