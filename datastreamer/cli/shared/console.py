"""Tables, trees and progress bars, drawn by rich, on a terminal or not.

Every console of the command line is made here. Its text is made printable, so that the only
escape sequences are rich's own; markup in a text is text.
"""

from __future__ import annotations

import functools
import io
import sys
from typing import TYPE_CHECKING, Any

from datastreamer.printable import below, one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live
    from rich.segment import Segment
    from rich.text import Text


class Rendered(bytes):
    """Output of rich, which `write_out` does not escape."""


@functools.cache
def _kind() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return PrintableConsole


def new_console(file: Any, *, markup: bool = False, **options: Any) -> Console:
    """A console that writes to `file`. `markup` is only for texts without outside data."""
    return _kind()(file=below(file), markup=markup, emoji=False, highlight=False, **options)


def rendered(*what: RenderableType, width: int | None = None, styled: bool = True) -> Rendered:
    """Output for standard output: `styled` on a terminal only, of `width` elsewhere."""
    on_terminal = sys.stdout.isatty()
    text = io.StringIO()
    console = new_console(
        text,
        force_terminal=on_terminal and styled,
        width=None if on_terminal else width,
    )
    for each in what:
        # rich loses this when it prints a text.
        console.print(each, soft_wrap=bool(getattr(each, "no_wrap", False)))
    return Rendered(text.getvalue().encode(sys.stdout.encoding or "utf-8", "replace"))


def live_display() -> Live:
    """A display on standard output, a terminal, that each update replaces."""
    from rich.live import Live

    return Live(console=new_console(sys.stdout), auto_refresh=False, vertical_overflow="crop")


def text(value: str, style: str = "", *, wrap: bool = True) -> Text:
    """Outside data as text on one line. Without `wrap`, no part of it begins a new line, where it
    could look like a line of the program's."""
    from rich.text import Text

    return Text(one_line(value), style, no_wrap=not wrap)
