"""A progress bar on stderr for work of more than a second, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from datastreamer.printable import one_line

if TYPE_CHECKING:
    import rich.progress

_DELAY = 1.0


class ProgressBar:
    """A context manager; `advance` is cheap enough for every page of a file."""

    def __init__(self, title: str, total: int, *, enabled: bool = True) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._due = time.monotonic() + _DELAY
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Add `count` to what is done."""
        self._done += count
        if not self._enabled:
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, total=self._total)
        elif time.monotonic() >= self._due:
            self._show()

    def reach(self, done: int, total: int) -> None:
        """Set what is done, and the total."""
        self._total = total
        self.advance(done - self._done)

    def _show(self) -> None:
        import rich.progress

        from datastreamer.cli.shared.console import new_console

        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            console=new_console(sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task(
            one_line(self._title), total=self._total, completed=self._done
        )
        self._bar.start()
