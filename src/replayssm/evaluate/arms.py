"""Arms: the ways of carrying the state that an evaluation compares."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.types import Format, ReadDepth


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of carrying the recurrent state.

    Attributes:
        name: Short name used in tables, plots and files.
        path: ``standard`` (the state is rewritten for every token) or ``replay``.
        state: State format.
        read: Planes that a step reads; always full on the standard path.
        label: What a reader should know about it.
    """

    name: str
    path: str
    state: Format
    read: ReadDepth
    label: str

    @property
    def is_replay(self) -> bool:
        """Whether this arm is a candidate (state replay), not a baseline."""
        return self.path == "replay"


def _replay(state: Format, read: ReadDepth, label: str) -> Arm:
    return Arm(f"{state} {read}", "replay", state, read, label)


STANDARD = Arm("standard f32", "standard", Format.F32, ReadDepth.FULL, "fp32 state, the reference")
TODAY = Arm(
    "standard bf16",
    "standard",
    Format.BF16,
    ReadDepth.FULL,
    "bf16 state rounded at every token, common practice today",
)
DEFAULT = (
    STANDARD,
    TODAY,
    _replay(Format.S32, ReadDepth.FULL, "fp32 state bit for bit, both planes read"),
    _replay(Format.Q24, ReadDepth.HIGH, "fp32-grade state, one byte per element read"),
    _replay(Format.Q16, ReadDepth.HIGH, "two bytes per element stored, one read"),
)
FULL = (
    *DEFAULT,
    _replay(Format.F32, ReadDepth.FULL, "plain fp32 checkpoint"),
    _replay(Format.S32, ReadDepth.HIGH, "fp32 state stored, its bf16 half read"),
    _replay(Format.Q24, ReadDepth.FULL, "fp32-grade state, both planes read"),
    _replay(Format.Q16, ReadDepth.FULL, "two bytes per element, both read"),
    _replay(Format.BF16, ReadDepth.FULL, "bf16 checkpoint rounded once per window"),
)
