"""Progress of a load run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from replayssm.cli.display import BarDisplay, Display, LineDisplay

if TYPE_CHECKING:
    from replayssm.traffic.run import Sample


class Nothing(Display):
    """No progress."""

    def update(self, sample: Sample) -> None:
        """Ignore."""


class Lines(LineDisplay):
    """A line every ten seconds.

    Args:
        total: Requests of the trace.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total = total

    def update(self, sample: Sample) -> None:
        """Say where the run stands, if it is time."""
        if self.is_due:
            self.say(describe(sample, self._total))


class Bar(BarDisplay):
    """One bar over the requests.

    Args:
        total: Requests of the trace.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._total = total

    def update(self, sample: Sample) -> None:
        """Move the bar."""
        done = sample.sent - sample.running
        self.bar.update(self.task, completed=done, what=describe(sample, self._total))


def describe(sample: Sample, total: int) -> str:
    """Return where a run stands, in one line."""
    done = sample.sent - sample.running
    rate = sample.tokens / sample.at_s if sample.at_s > 0 else 0.0
    ttft = "" if sample.ttft_ms is None else f", TTFT p50 {sample.ttft_ms:.0f} ms"
    failed = f", {sample.failed} failed" if sample.failed else ""
    return f"{done} of {total} done, {sample.running} running{failed}{ttft}, {rate:.0f} tokens/s"


def choose(quiet: bool, total: int) -> Nothing | Lines | Bar:
    """Return the progress that suits the terminal."""
    if quiet:
        return Nothing()
    return Bar(total) if sys.stderr.isatty() else Lines(total)
