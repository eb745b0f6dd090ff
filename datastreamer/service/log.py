"""The log on stderr: text lines, or JSON lines with the fields of each event.

Owns the format of a line, with its time as RFC 3339 has it, which a serving process shares with its
parent. A caller passes the event as a message and as fields (``extra``) with the names in
docs/OPERATING.md.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from datetime import datetime
from typing import Any, Literal

from datastreamer.printable import PrintableStream, cut, json_text, one_line, printable

Style = Literal["text", "json"]

_NAMES = {"warning": "warn", "critical": "error"}
# Attributes of every record; all others are fields of the event.
_RECORD = frozenset(
    (*vars(logging.makeLogRecord({})), "message", "asctime", "time", "level", "logger")
)


class StderrLog(logging.Handler):
    """Writes to the current ``sys.stderr``, as text or as JSON lines."""

    style: Style = "text"

    def emit(self, record: logging.LogRecord) -> None:
        # A closed log must not stop the program.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()

    def format(self, record: logging.LogRecord) -> str:
        level = _NAMES.get(record.levelname.lower(), record.levelname.lower())
        message, trace = record.getMessage(), ""
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)
        moment = datetime.fromtimestamp(record.created).astimezone()
        shown = moment.isoformat(timespec="milliseconds")
        if self.style == "json":
            line: dict[str, object] = {
                "time": shown,
                "level": level,
                "logger": record.name,
                "message": cut(message) + f"\n{trace}" * bool(trace),
            }
            fields = vars(record).items()
            line.update((key, value) for key, value in fields if key not in _RECORD)
            return json_text(line)
        return f"{shown} {level:5} {one_line(message)}{_indented(trace)}"


class _Plain(logging.Formatter):
    """The formatter for a parent with its own log format."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei)).removeprefix("\n")


def _indented(trace: str) -> str:
    """A traceback, indented so that none of its lines looks like a log line."""
    return "".join([f"\n    {line}" for line in printable(trace).splitlines()])


def style_of_log() -> Style | None:
    """The style of this process's log on stderr; None if the application set up its own log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, StderrLog):
            return handler.style
    return None


def log_to_stderr(style: Style | None, level: int) -> None:
    """Set up the log of a serving process in the style of its parent."""
    sys.stderr = PrintableStream(sys.stderr)
    handler: logging.Handler
    if style is None:
        handler = logging.StreamHandler()
        handler.setFormatter(_Plain("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler = StderrLog()
        handler.style = style
    logging.basicConfig(level=level, handlers=[handler])
