"""What a step's bytes take on a device by themselves: a kernel that moves them, nothing more.

It reads the planes that a step reads, rewrites those of rows that fold, reads live entries and
inputs, appends entries and writes outputs, each once and in one launch, with no order among them.
A replay step moves at least these bytes. The floor is the fastest of a few shapes: a measurement,
no proof that no other kernel could move them faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from gpu.arms import Kind
from gpu.ours import OurReplay, plans
from replayssm.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gpu.arms import Arm, Traffic
    from gpu.cases import Inputs, Point

WORD = 4  # bytes


@triton.jit
def _pass(  # noqa: ANN202
    source, total, start, words, is_rewritten, SHARE: tl.constexpr, BLOCK: tl.constexpr  # noqa: ANN001
):  # fmt: skip
    """Read ``source[start : start + SHARE]`` as far as ``words``; write it back where it is due."""
    for block in tl.static_range(0, SHARE, BLOCK):
        at = start + block + tl.arange(0, BLOCK)
        live = at < words
        x = tl.load(source + at, live, 0)
        if is_rewritten:
            tl.store(source + at, x, live)
        total += x
    return total


@triton.jit
def move(  # noqa: ANN201
    read, rest, ring, inputs, out, phases, kept,  # noqa: ANN001
    HEADS: tl.constexpr, READ: tl.constexpr, REST: tl.constexpr, ENTRY: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, OUT: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Move a share of a head's bytes; the grid is rows x value heads, shares.

    All sizes are words of a head. ``phases [B]``: entries that a row has not folded.
    """
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entries = tl.load(phases + unit // HEADS)
    # what came in with the last step has brought the row to a boundary
    is_due = entries < kept
    total = tl.zeros((BLOCK,), tl.int32)
    total = _pass(read + unit * READ, total, part * SHARE, READ, is_due, SHARE, BLOCK)
    if is_due:
        parts: tl.constexpr = (READ + SHARE - 1) // SHARE
        rest_share: tl.constexpr = (REST + parts - 1) // parts
        if REST > 0:
            end = tl.minimum(REST, (part + 1) * rest_share)
            total = _pass(
                rest + unit * REST, total, part * rest_share, end, True, rest_share, BLOCK
            )
        entries += WINDOW
    ring += unit * (2 * WINDOW + TOKENS) * ENTRY
    for start in range(part * BLOCK, entries * ENTRY, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(ring + at, at < entries * ENTRY, 0)
    word = tl.sum(total, 0)
    if part == 0:
        wide = tl.arange(0, WIDE)
        word += tl.sum(tl.load(inputs + unit * INPUTS + wide, wide < INPUTS, 0), 0)
        tl.store(ring + 2 * WINDOW * ENTRY + wide, word, wide < TOKENS * ENTRY)
        tl.store(out + unit * OUT + wide, word, wide < OUT)
    elif word == 1234567:
        tl.store(out + unit * OUT, word)


@dataclass(frozen=True)
class Shape:
    """How bytes are handed to programs.

    Attributes:
        share: Words of the planes that are read every step, a program.
        block: Words that it has on their way at a time.
        warps: Its warps.
    """

    share: int
    block: int
    warps: int


SHAPES = (Shape(2048, 2048, 1), Shape(4096, 2048, 1), Shape(4096, 4096, 4), Shape(1024, 1024, 1))


class Bytes:
    """One state set that holds words and no numbers."""

    def __init__(self, arm: Floor, point: Point, device: torch.device, steps: int) -> None:
        self._arm, self._point = arm, point
        at, units = point.case.layer, point.batch * point.case.layer.value_heads
        self._words = arm.words(point)
        entries = 2 * point.window + point.tokens
        read, rest, entry, inputs, outputs = self._words
        self._tensors = [
            torch.zeros(units * n, dtype=torch.int32, device=device)
            for n in (read, max(rest, 1), entries * entry, inputs, outputs)
        ]
        self._phases = [
            torch.as_tensor(p.committed % point.window, dtype=torch.int32, device=device)
            for p in plans(point, steps)
        ]
        self._grid = (units, -(-read // arm.shape.share))
        self._wide = triton.next_power_of_2(max(point.tokens * entry, inputs, outputs))
        self._heads = at.value_heads

    def load(self, inputs: Inputs) -> None:
        """Take nothing: bytes are bytes."""

    def launch(self, step: int) -> Tensor:
        """Launch one step."""
        shape, (read, rest, entry, inputs, outputs) = self._arm.shape, self._words
        move[self._grid](
            *self._tensors, self._phases[step], self._point.kept,
            self._heads, read, rest, entry, self._point.window, self._point.tokens, inputs, outputs,
            shape.share, shape.block, self._wide, num_warps=shape.warps, num_stages=1,
        )  # fmt: skip
        return self._tensors[-1]


@dataclass(frozen=True)
class Floor:
    """The bytes of a replay arm, moved one way."""

    of: OurReplay
    shape: Shape
    kind: Kind = Kind.FLOOR
    tolerance: float = float("inf")

    @property
    def name(self) -> str:
        """Shown in the table."""
        at = self.shape
        return f"floor {self.state} {self.depth} {at.share}/{at.block}/{at.warps}"

    @property
    def state(self) -> str:
        """The format."""
        return self.of.state

    @property
    def depth(self) -> str:
        """The read depth."""
        return self.of.depth

    def refuses(self, point: Point) -> str:
        """Nothing."""
        return ""

    def period(self, point: Point) -> int:
        """Return that of the replay arm."""
        return self.of.period(point)

    def prepare(self, point: Point, device: torch.device, seed: int | None, steps: int) -> Bytes:
        """Allocate one state set."""
        return Bytes(self, point, device, steps)

    def traffic(self, point: Point) -> Traffic:
        """Return that of the replay arm."""
        return self.of.traffic(point)

    def words(self, point: Point) -> tuple[int, int, int, int, int]:
        """Return a head's words of planes read, of the others, an entry, inputs and outputs."""
        at, fmt = point.case.layer, FORMATS[self.of.format]
        elements, units = at.key_dim * at.value_dim, point.batch * at.value_heads
        read = fmt.read_bytes[self.of.read]
        scales = 4 * at.value_dim + 2 * at.key_dim if fmt.scaled else 0
        keys, values, gates = (n / units for n in point.entry_elements)
        entry = 2 * keys + 2 * values + 4 * (gates + 1)
        outputs = 2 * at.value_dim * point.tokens
        # scales count as inputs: they are read every step, and seldom written
        inputs = point.io_bytes / units - outputs + scales
        planes = (elements * read, elements * (fmt.stored_bytes - read))
        return tuple(round(n / WORD) for n in (*planes, entry, inputs, outputs))  # type: ignore[return-value]


def arms_of(arms: Iterable[Arm]) -> list[Arm]:
    """Return the floors of all replay arms among ``arms``."""
    return [Floor(arm, shape) for arm in arms if isinstance(arm, OurReplay) for shape in SHAPES]
