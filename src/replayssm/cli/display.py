"""How a command shows where it stands: on a terminal a bar, elsewhere lines, or not at all."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.progress import ProgressColumn

LINE_EVERY_S = 10.0


class Display:
    """Shows nothing; a context manager, as all of them are."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class LineDisplay(Display):
    """Lines on stderr.

    Args:
        label: Put before every line.
    """

    def __init__(self, label: str = "") -> None:
        self._label, self._last = label, time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the last line is ten seconds old."""
        return time.monotonic() - self._last >= LINE_EVERY_S

    def say(self, line: str) -> None:
        """Write a line."""
        self._last = time.monotonic()
        sys.stderr.write(f"{self._label}{line}\n")
        sys.stderr.flush()


class BarDisplay(Display):
    """One rich bar on stderr, gone when it ends.

    Args:
        total: Where it is full.
        description: What stands before it; nothing by default.
    """

    def __init__(self, total: float, description: str = "") -> None:
        before: list[ProgressColumn] = []
        if description:
            before = [TextColumn("[bold]{task.description}")]
        self.bar = Progress(
            *before,
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[what]}"),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self.task = self.bar.add_task(description, total=total, what="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()
