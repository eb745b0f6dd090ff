"""What happened in a world, in order: to compare two runs of one seed, and to read a failure."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_PAGE = re.compile(r"\bpage (\d+) \(entr")
_DAMAGE = ("do not match their checksum", "the damaged bytes are kept")


class Trace:
    """A digest of all that happened, and the last of it as text."""

    def __init__(self, now: Callable[[], float], kept: int = 1 << 20) -> None:
        self._now = now
        self._digest = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=kept)
        self.events = 0
        self.damage = 0
        """How often a program logged a damaged page, or that it has restored one."""
        self.named: set[tuple[str, int]] = set()
        """The machines and pages in lines that a program logged about pages."""
        self.replaced = 0
        """How often a relay logged that it has replaced one by entries that were updated."""

    def note(self, what: str, *details: object) -> None:
        shown = [_shown(each) for each in details]
        line = f"{self._now():12.6f} {what} {' '.join(shown)}"
        self._digest.update(line.encode())
        self.lines.append(line)
        self.events += 1

    def digest(self) -> str:
        return self._digest.hexdigest()


def _shown(detail: object) -> str:
    if isinstance(detail, bytes):
        return f"{len(detail)}:{hashlib.blake2b(detail, digest_size=6).hexdigest()}"
    return str(detail)


class _Handler(logging.Handler):
    def __init__(self, trace: Trace, name: ContextVar[str]) -> None:
        super().__init__(logging.INFO)
        self._trace = trace
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self._trace.note("log", self._name.get(""), record.levelname, message)
        self._trace.damage += any(words in message for words in _DAMAGE)
        self._trace.named |= {(self._name.get(""), int(page)) for page in _PAGE.findall(message)}
        self._trace.replaced += "replaced by these entries" in message
        if record.exc_info:
            self._trace.note("log", logging.Formatter().formatException(record.exc_info))


@contextlib.contextmanager
def logged(trace: Trace, name: ContextVar[str]) -> Iterator[None]:
    """What the package logs is a part of the trace, with the machine that logs it, and goes nowhere
    else."""
    logger = logging.getLogger("datastreamer")
    propagate, level = logger.propagate, logger.level
    handler = _Handler(trace, name)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
