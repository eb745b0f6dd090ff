"""What happened in a world, in order: to compare two runs of one seed, and to read a failure."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable


class Trace:
    """A digest of all that happened, and the last of it as text."""

    def __init__(self, now: Callable[[], float], kept: int = 4000) -> None:
        self._now = now
        self._digest = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=kept)
        self.events = 0

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
