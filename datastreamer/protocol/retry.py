"""When a client retries after it has lost its server.

Owns which errors are worth another attempt, and the waits between attempts. Must not know sockets,
clocks or randomness: the caller passes times and random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from datastreamer.errors import (
    BadFromBookmark,
    ConnectFailed,
    ConnectionLost,
    EntriesDamaged,
    HistoryChanged,
    NoAnswer,
    PeerError,
    ProtocolViolation,
    TLSFailed,
    UsageError,
)

UNANSWERED_LIMIT: Final = 16
"""Connections in a row that were closed without an answer, after which the loss is reported again
with the possible reasons: a server of another stream type does that, and one without room for more
clients."""


MOST_SECONDS: Final = 1e9
"""Maximum number of seconds, which all clocks and sockets accept."""


def check_seconds(what: str, seconds: float, *, zero: bool = False) -> None:
    """Raise `UsageError` unless it is more than 0 seconds (with `zero`, 0 or more)."""
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
    """Raise `UsageError` for an invalid time; None means never."""
    check_seconds("timeout", timeout)
    if retry_for is not None and retry_for != math.inf:
        check_seconds("retry_for", retry_for, zero=True)
    if heartbeat is not None:
        check_seconds("heartbeat", heartbeat)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The waits between attempts, in seconds: from `first`, times `factor`, up to `most`.

    Each wait is shortened at random by up to half, so that clients do not all return at once.
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
                f"waits must go from `first` (0 or more) up to `most` by a `factor` of 1 or more, "
                f"not from {self.first!r} to {self.most!r} by {self.factor!r}"
            )

    def wait(self, attempt: int, luck: float) -> float:
        """The seconds before attempt 0, 1, ...; `luck` is a random number from 0 to 1."""
        bound = self.first
        for _ in range(attempt):
            if bound >= self.most:
                break
            bound *= self.factor
        return min(bound, self.most) * (0.5 + 0.5 * luck)


BACKOFF: Final = Backoff()
"""The default waits."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What a client does about a server that is lost or silent.

    With `resume`, streaming continues over another connection, which is attempted for `retry_for`
    seconds (None: without a limit) with the waits of `backoff`. After `heartbeat` seconds without
    a byte, the client checks on a second connection whether the server is alive (None: never).
    """

    resume: bool = True
    retry_for: float | None = None
    backoff: Backoff = BACKOFF
    heartbeat: float | None = None


class Recovery:
    """The attempts to reconnect, from the loss of the server to the next entry.

    `error` is that of the last attempt.
    """

    def __init__(self, retry_policy: RetryPolicy, now: float) -> None:
        self._backoff = retry_policy.backoff
        self._retry_for = retry_policy.retry_for
        self._since = now
        self._attempts = 0
        self._unanswered = 0
        self._violated = False
        self._last = False
        self.down = False
        self.error: PeerError | None = None
        self.due = now

    def lost(self, error: PeerError, *, answered: bool, now: float, luck: float) -> bool:
        """An attempt failed with `error`: `due` is the time of the next one. Or raises it.

        `answered`: whether anything was received on the connection. Returns whether to report the
        loss: it is new (`down`), the server says now why, or it looks like the wrong one.
        """
        if isinstance(error, HistoryChanged | BadFromBookmark | TLSFailed):
            raise error
        if isinstance(error, ProtocolViolation):
            # A stream that was rewritten under its readers can cause this once, and a new
            # connection shows it. Twice in the same place it is the server.
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
            # The last attempt is at the end of the time.
            self._last = wait >= left
            wait = min(wait, left)
        self._attempts += 1
        # An earlier attempt may have been lost without a reason.
        explained = isinstance(error, EntriesDamaged) and not isinstance(self.error, EntriesDamaged)
        self.error = error
        self.due = now + wait
        news, self.down = not self.down, True
        return news or explained or self._unanswered == UNANSWERED_LIMIT
