"""A progress bar on stderr for work of more than a second, on a terminal only; and how far the work
was when a signal ended it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from datastreamer.printable import one_line

if TYPE_CHECKING:
    import rich.console
    import rich.progress

_DELAY = 1.0


class ProgressBar:
    """A context manager; `advance` is cheap enough for every page of a file.

    The error of a signal within the block says how far the work was, and `left`: what there is
    of its result.
    """

    def __init__(self, title: str, total: int, *, enabled: bool = True, left: str = "") -> None:
        self._title = title
        self._total = total
        self._left = left
        self._done = 0
        self._due = time.monotonic() + _DELAY
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if isinstance(error, KeyboardInterrupt):
            share = f", {100 * self._done // self._total} % done" if self._done else ""
            left = f"; {self._left}" if self._left else ""
            error.add_note(f" while {self._title}{share}{left}")

    def close(self) -> None:
        """Remove the bar. Later progress shows it again, after a second."""
        if self._bar is not None:
            sys.stderr = self._stderr
            self._bar.stop()
            self._bar, self._due = None, time.monotonic() + _DELAY

    @property
    def shown(self) -> bool:
        return self._bar is not None

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

        console = new_console(sys.stderr)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(
            one_line(self._title), total=self._total, completed=self._done
        )
        self._bar.start()
        self._stderr, sys.stderr = sys.stderr, _AboveBar(sys.stderr, console)


class _AboveBar:
    """Standard error while a bar is shown: lines appear above it, whole."""

    def __init__(self, below: Any, console: rich.console.Console) -> None:
        self._below = below
        self._console = console

    def write(self, text: str) -> int:
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True, end="")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)
