"""Progress of a load run: a bar on a terminal, a line every ten seconds elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from replayssm.cli.output import LINE_EVERY_S

if TYPE_CHECKING:
    from types import TracebackType

    from replayssm.traffic.run import Sample


class Quiet:
    """No progress; what the others are built on.

    Args:
        total: Requests of the trace.
    """

    def __init__(self, total: int) -> None:
        self.total = total

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def update(self, sample: Sample) -> None:
        """Ignore."""


class Lines(Quiet):
    """A line every ten seconds."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._last = time.monotonic()

    def update(self, sample: Sample) -> None:
        """Say where the run stands, if it is time."""
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            sys.stderr.write(f"{describe(sample, self.total)}\n")
            sys.stderr.flush()


class Bar(Quiet):
    """One rich bar over the requests."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._bar = Progress(
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[what]}"),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, what="")

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

    def update(self, sample: Sample) -> None:
        """Move the bar."""
        done = sample.sent - sample.running
        self._bar.update(self._task, completed=done, what=describe(sample, self.total))


def describe(sample: Sample, total: int) -> str:
    """Return where a run stands, in one line."""
    done = sample.sent - sample.running
    rate = sample.tokens / sample.at_s if sample.at_s > 0 else 0.0
    ttft = "" if sample.ttft_ms is None else f", TTFT p50 {sample.ttft_ms:.0f} ms"
    failed = f", {sample.failed} failed" if sample.failed else ""
    return f"{done} of {total} done, {sample.running} running{failed}{ttft}, {rate:.0f} tokens/s"


def choose(quiet: bool, total: int) -> Quiet:
    """Return the progress that suits the terminal."""
    if quiet:
        return Quiet(total)
    return Bar(total) if sys.stderr.isatty() else Lines(total)
