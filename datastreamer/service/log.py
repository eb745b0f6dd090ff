"""The log on stderr: lines for people, or JSON with the fields of what happened.

Owns the forms of a line, which a serving process shares with its parent. Who is logging says
what happened in the message, and the same in fields (``extra``), named as docs/OPERATING.md says.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any, Literal

from datastreamer.printable import PrintableStream, cut, json_text, one_line, printable

Style = Literal["text", "json"]

_NAMES = {"warning": "warn", "critical": "error"}
# What every record has; the rest are an event's own fields.
_RECORD = frozenset(
    (*vars(logging.makeLogRecord({})), "message", "asctime", "time", "level", "logger")
)


class StderrLog(logging.Handler):
    """Writes to whatever stderr is at the moment, as text or as JSON lines."""

    style: Style = "text"

    def emit(self, record: logging.LogRecord) -> None:
        # A log that nobody reads any more is no reason to stop.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()

    def format(self, record: logging.LogRecord) -> str:
        level = _NAMES.get(record.levelname.lower(), record.levelname.lower())
        message, trace = record.getMessage(), ""
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)
        moment = time.localtime(record.created)
        milliseconds = int(record.created * 1000) % 1000
        if self.style == "json":
            zone = time.strftime("%z", moment)
            line: dict[str, object] = {
                "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{milliseconds:03}{zone}",
                "level": level,
                "logger": record.name,
                "message": cut(message) + f"\n{trace}" * bool(trace),
            }
            told = vars(record).items()
            line.update((key, value) for key, value in told if key not in _RECORD)
            return json_text(line)
        shown = time.strftime("%Y-%m-%d %H:%M:%S", moment)
        return f"{shown}.{milliseconds:03} {level:5} {one_line(message)}{_indented(trace)}"


class _Plain(logging.Formatter):
    """For a log in the application's form."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei)).removeprefix("\n")


def _indented(trace: str) -> str:
    """A traceback, no line of which can be taken for one of the log."""
    return "".join([f"\n    {line}" for line in printable(trace).splitlines()])


def style_of_log() -> Style | None:
    """How this process logs to stderr; None where its log is the application's own."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, StderrLog):
            return handler.style
    return None


def log_to_stderr(style: Style | None, level: int) -> None:
    """Set up a process that was started to serve another, which logs in this style."""
    sys.stderr = PrintableStream(sys.stderr)
    handler: logging.Handler
    if style is None:
        handler = logging.StreamHandler()
        handler.setFormatter(_Plain("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        handler = StderrLog()
        handler.style = style
    logging.basicConfig(level=level, handlers=[handler])
