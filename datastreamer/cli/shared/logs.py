"""Output to stderr: the log, errors and hints, as text or as JSON lines."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Literal

from datastreamer.errors import DamagedFile
from datastreamer.printable import cut, json_text, one_line
from datastreamer.service.log import StderrLog, Style

Level = Literal["debug", "info", "warn", "error"]

_handler = StderrLog()


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """Within the block, log to stderr from level info on, as text."""
    root = logging.getLogger()
    level = root.level
    _handler.style = "text"
    root.addHandler(_handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(_handler)
        root.setLevel(level)


@contextlib.contextmanager
def hold_index_errors() -> Iterator[None]:
    """Hold the errors that the bookmark index logs until the end of the block; drop them if it
    raises `DamagedFile`, which reports the damage itself."""
    logger = logging.getLogger("datastreamer.storage.bookmarks")
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        held.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield
    except DamagedFile:
        held.clear()
        raise
    finally:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)


def set_level(level: Level) -> None:
    """Log from this level on."""
    logging.getLogger().setLevel(level.upper())


def set_style(style: Style) -> None:
    """Log as text or as JSON lines."""
    _handler.style = style


def say(text: str) -> None:
    """Write a line for people, whatever the log level; in a JSON log, as a line of it."""
    _write(text, "info")


def say_verbatim(text: str) -> None:
    """Write a line for programs, the same in every format of the log."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(one_line(text, None) + "\n")
        sys.stderr.flush()


def say_error(text: str) -> None:
    """Write the line that says why the command failed."""
    _write(text if _handler.style == "json" else f"error: {text}", "error")


def _write(text: str, level: str) -> None:
    if _handler.style == "json":
        say_verbatim(json_text({"level": level, "message": cut(text)}))
    else:
        say_verbatim(one_line(text))
