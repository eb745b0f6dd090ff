"""How long a client goes on when its server is lost: what it does, and after which waits.

Owns which losses are worth another attempt, and when. Must not know sockets, clocks or chance:
those are told to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from datastreamer.errors import (
    BadFromBookmark,
    ConnectFailed,
    ConnectionLost,
    HistoryChanged,
    NoAnswer,
    PeerError,
    ProtocolViolation,
    TLSFailed,
    UsageError,
)

UNANSWERED_LIMIT: Final = 16
"""After so many connections in a row that were closed without a word it is said again that the
server is lost, with what that may come of: a server of another stream type does so, and one that
has no place for more clients."""


MOST_SECONDS: Final = 1e9
"""What clocks and sockets take for a wait, a while beyond anybody's."""


def check_seconds(what: str, seconds: float, *, zero: bool = False) -> None:
    """Raises `UsageError` unless it is more than 0 seconds (with `zero` 0 or more)."""
    try:
        if (seconds > 0 or (zero and seconds == 0)) and seconds <= MOST_SECONDS:
            return
    except TypeError:
        pass
    least = "0 seconds or more" if zero else "more than 0 seconds"
    raise UsageError(f"{what} must be {least} and at most {MOST_SECONDS:g}, not {seconds!r}")


def check_waits(
    timeout: float, retry_for: float | None = None, heartbeat: float | None = None
) -> None:
    """Raises `UsageError` where one of them is no such time; None is never."""
    check_seconds("timeout", timeout)
    if retry_for is not None and retry_for != math.inf:
        check_seconds("retry_for", retry_for, zero=True)
    if heartbeat is not None:
        check_seconds("heartbeat", heartbeat)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The waits between attempts, in seconds: from `first`, times `factor`, up to `most`.

    Of each wait up to a half is left out, by chance, so that clients do not come back all
    at once.
    """

    first: float = 0.1
    most: float = 5.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        try:
            fine = 0 <= self.first <= self.most <= MOST_SECONDS and self.factor >= 1
        except TypeError:
            fine = False
        if not fine:
            raise UsageError(
                f"waits go from `first` (0 or more) up to `most` by a `factor` of 1 or more, "
                f"not from {self.first!r} to {self.most!r} by {self.factor!r}"
            )

    def wait(self, attempt: int, luck: float) -> float:
        """The seconds before attempt 0, 1, ...; `luck` is drawn from 0 to 1."""
        bound = self.first
        for _ in range(attempt):
            if bound >= self.most:
                break
            bound *= self.factor
        return min(bound, self.most) * (0.5 + 0.5 * luck)


BACKOFF: Final = Backoff()
"""The waits, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a client does about a server that is lost or silent; the seconds are its user's.

    `resume` has streaming go on over another connection, tried for `retry_for` (None:
    for ever) with the waits of `backoff`. After `heartbeat` without a byte the server is
    asked on a second connection whether it is there (None: never).
    """

    resume: bool = True
    retry_for: float | None = None
    backoff: Backoff = BACKOFF
    heartbeat: float | None = None


class Recovery:
    """The attempts to get a server back, from its loss to the next entry received.

    `error` is what the last one failed with.
    """

    def __init__(self, endurance: Endurance, now: float) -> None:
        self._backoff = endurance.backoff
        self._retry_for = endurance.retry_for
        self._since = now
        self._attempts = 0
        self._unanswered = 0
        self._violated = False
        self._last = False
        self.down = False
        self.error: PeerError | None = None
        self.due = now

    def lost(self, error: PeerError, *, answered: bool, now: float, luck: float) -> bool:
        """Another attempt failed with `error`: `due` says when the next is. Or raises it.

        `answered` tells whether anything was received on the connection, if there was
        one. Whether somebody may want to know: it is `down` only since now, or looks as if it
        were not the right one.
        """
        if isinstance(error, HistoryChanged | BadFromBookmark | TLSFailed):
            raise error
        if isinstance(error, ProtocolViolation):
            # Once it may be a stream that was rewritten under its readers: a new
            # connection shows. Twice in the same place it is the server.
            if self._violated:
                raise error
            self._violated = True
        heard = answered or isinstance(error, ConnectFailed | NoAnswer)
        self._unanswered = 0 if heard else self._unanswered + 1
        wait = self._backoff.wait(self._attempts, luck)
        if self._retry_for is not None:
            left = self._since + self._retry_for - now
            if self._last or left <= 0:
                raise ConnectionLost(
                    f"given up after {max(0.0, now - self._since):.1f} s: {error}"
                ) from error
            # The last attempt is when the time is over.
            self._last = wait >= left
            wait = min(wait, left)
        self._attempts += 1
        self.error = error
        self.due = now + wait
        news, self.down = not self.down, True
        return news or self._unanswered == UNANSWERED_LIMIT
