"""Progress of an evaluation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from replayssm.cli.display import BarDisplay, LineDisplay
from replayssm.evaluate.run import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping


class Bar(BarDisplay):
    """One bar over all sections, weighted by the time they usually take.

    Args:
        label: Put before every section's name.
        weights: Share of the time that each section usually takes.
    """

    def __init__(self, label: str, weights: Mapping[str, float]) -> None:
        super().__init__(1.0, f"{label}starting")
        self._label, self._weights = label, weights
        self._done = self._weight = self._step = 0.0

    def start(self, section: str, steps: int) -> None:
        """A section begins."""
        self._weight = self._weights[section]
        self._step = self._weight / max(1, steps)
        name = f"{self._label}{section}"
        self.bar.update(self.task, description=name, completed=self._done, what="")

    def tick(self, what: str) -> None:
        """One step is done."""
        self.bar.update(self.task, advance=self._step, what=what)

    def finish(self, section: str, seconds: float) -> None:
        """The section is done."""
        self._done += self._weight
        self.bar.update(self.task, completed=self._done)
        line = f"{self._label}{section}: {seconds:.0f} s"
        self.bar.console.print(line, style="dim", highlight=False)


class Lines(LineDisplay):
    """A line per section, and one every ten seconds in between."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._section = ""
        self._steps = self._ticks = 0

    def start(self, section: str, steps: int) -> None:
        """A section begins."""
        self._section, self._steps, self._ticks = section, steps, 0
        self.say(f"{section} ...")

    def tick(self, what: str) -> None:
        """One step is done."""
        self._ticks += 1
        if self.is_due:
            self.say(f"{self._section}: {self._ticks} of {self._steps} ({what})")

    def finish(self, section: str, seconds: float) -> None:
        """The section is done."""
        self.say(f"{section}: done in {seconds:.0f} s")


class Nothing(Lines):
    """No progress at all."""

    def say(self, line: str) -> None:
        """Ignore."""


def choose(quiet: bool, label: str = "", weights: Mapping[str, float] = SECTIONS) -> Bar | Lines:
    """Return the progress that suits the terminal.

    Args:
        quiet: No progress.
        label: Put before every section's name.
        weights: Names of the sections and the share of the time that each usually takes.
    """
    if quiet:
        return Nothing(label)
    return Bar(label, weights) if sys.stderr.isatty() else Lines(label)
