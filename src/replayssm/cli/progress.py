"""Progress of an evaluation: one bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from replayssm.cli.output import LINE_EVERY_S
from replayssm.evaluate.run import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


class Bar:
    """One rich bar over all sections, weighted by the time they usually take.

    Args:
        label: Put before every section's name.
        weights: Share of the time that each section usually takes.
    """

    def __init__(self, label: str, weights: Mapping[str, float]) -> None:
        self._label, self._weights = label, weights
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[what]}"),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task(f"{label}starting", total=1.0, what="")
        self._done = self._weight = self._step = 0.0

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def start(self, section: str, steps: int) -> None:
        """A section begins."""
        self._weight = self._weights[section]
        self._step = self._weight / max(1, steps)
        name = f"{self._label}{section}"
        self._bar.update(self._task, description=name, completed=self._done, what="")

    def tick(self, what: str) -> None:
        """One step is done."""
        self._bar.update(self._task, advance=self._step, what=what)

    def finish(self, section: str, seconds: float) -> None:
        """The section is done."""
        self._done += self._weight
        self._bar.update(self._task, completed=self._done)
        line = f"{self._label}{section}: {seconds:.0f} s"
        self._bar.console.print(line, style="dim", highlight=False)


class Lines:
    """A line per section, and one every ten seconds in between.

    Args:
        label: Put before every line.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._last = 0.0
        self._section = ""
        self._steps = self._ticks = 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def start(self, section: str, steps: int) -> None:
        """A section begins."""
        self._section, self._steps, self._ticks = section, steps, 0
        self._say(f"{section} ...")

    def tick(self, what: str) -> None:
        """One step is done."""
        self._ticks += 1
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._say(f"{self._section}: {self._ticks} of {self._steps} ({what})")

    def finish(self, section: str, seconds: float) -> None:
        """The section is done."""
        self._say(f"{section}: done in {seconds:.0f} s")

    def _say(self, line: str) -> None:
        self._last = time.monotonic()
        sys.stderr.write(f"{self._label}{line}\n")
        sys.stderr.flush()


class Nothing(Lines):
    """No progress at all."""

    def _say(self, line: str) -> None:
        pass


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
