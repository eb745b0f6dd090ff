"""Log lines about refused connections: at most one of each kind in five seconds, with a count.

Decides when a line is due and how many events it counts. The caller passes kind and message.
"""

from __future__ import annotations

import logging
from typing import Final

LOG_SECONDS: Final = 5.0
"""Least time between two lines of one kind."""

# A kind that a caller composes from what a client sent must not become a kind of its own.
_MOST_KINDS: Final = 64


class _Kind:
    __slots__ = ("count", "due", "level", "peer", "words")

    def __init__(self) -> None:
        self.count = 0
        self.due = 0.0
        self.level = logging.INFO
        self.peer = self.words = ""


class RefusalLog:
    """The log of one server's refusals. The first of a kind is logged at once; those that follow
    within `LOG_SECONDS` share one line, which names the last of them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, _Kind] = {}

    def note(self, kind: str, peer: str, words: str, now: float, level: int = logging.INFO) -> None:
        """The connection of `peer` was refused; `words` say why. `now` is the loop's time."""
        if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            kind = "other"
        noted = self._kinds.get(kind)
        if noted is None:
            noted = self._kinds[kind] = _Kind()
            noted.due = now
        noted.count += 1
        noted.peer, noted.words, noted.level = peer, words, level
        if now >= noted.due:
            self._write(kind, noted, now)

    def flush(self, now: float, *, last: bool = False) -> None:
        """Log what has not been logged and is due; with `last`, everything."""
        for kind, noted in self._kinds.items():
            if noted.count and (last or now >= noted.due):
                self._write(kind, noted, now)

    def _write(self, kind: str, noted: _Kind, now: float) -> None:
        others = f" ({noted.count} refused since the last such line)" * (noted.count > 1)
        fields = {"reason": kind, "refused": noted.count, "peer": noted.peer}
        self._log.log(noted.level, "%s: %s%s", noted.peer, noted.words, others, extra=fields)
        noted.count = 0
        noted.due = now + LOG_SECONDS
