"""Who is let in: admission of connections before anything is spent on them.

Owns the counts of who is inside, by address, and the pace. Knows neither sockets nor
sessions: `server.py` accepts, asks, and closes.
"""

from __future__ import annotations

import logging
from collections import Counter

from datastreamer.net.counts import Counts
from datastreamer.net.limits import Limits
from datastreamer.net.turns import Turns

_log = logging.getLogger(__name__)

# Refusals are logged together, at most so often.
_LOG_SECONDS = 5.0

TOO_MANY = "max_clients"
TOO_MANY_OF_ADDRESS = "max_clients_per_address"
# While the stream's file is missing.
NO_STREAM = "no_stream"


class Gate:
    """Admission to one server. `limits.max_clients` has been bounded by descriptors; `turns`
    tells of the other processes that accept from the same listeners."""

    def __init__(self, limits: Limits, counts: Counts, turns: Turns | None = None) -> None:
        self.clients = 0
        self._limits = limits
        self._counts = counts
        self._by_address: Counter[str] = Counter()
        self._turns = turns
        self._log_after = -_LOG_SECONDS
        # Since the last line: who was refused last, why, and how many others were.
        self._untold = 0
        self._last = self._last_kind = ""

    def admit(self, host: str, shown: str, now: float) -> bool:
        """Whether a connection from `host` may come in; it is counted then, until `leave`.

        `shown` names it in the log; `now` is the loop's time.
        """
        limits = self._limits
        if self.clients >= limits.max_clients:
            self._refuse(TOO_MANY, f"{shown} refused: {self.clients} clients are connected", now)
            return False
        most = limits.max_clients_per_address
        if most is not None:
            elsewhere = 0 if self._turns is None else self._turns.elsewhere(host)
            if self._by_address[host] + elsewhere >= most:
                why = f"{shown} refused: {most} clients of its address are connected"
                self._refuse(TOO_MANY_OF_ADDRESS, why, now)
                return False
            self._note(host, +1)
        self.clients += 1
        self._counts.accepted += 1
        return True

    def leave(self, host: str) -> None:
        """One that was admitted is gone."""
        self.clients -= 1
        if self._limits.max_clients_per_address is not None:
            self._note(host, -1)

    def _note(self, host: str, step: int) -> None:
        self._by_address[host] += step
        count = self._by_address[host]
        if self._turns is not None:
            self._turns.note_address(host, count)
        if not count:
            del self._by_address[host]

    def _refuse(self, kind: str, words: str, now: float) -> None:
        self._counts.refused[kind] += 1
        self._untold += 1
        self._last, self._last_kind = f"{words}, which is the limit", kind
        if now >= self._log_after:
            self.tell(now)

    def tell(self, now: float) -> None:
        """Log what was refused since the last line, where that is due."""
        if not self._untold or now < self._log_after:
            return
        others = f" ({self._untold} refused since the last such line)" * (self._untold > 1)
        told = {"reason": self._last_kind, "refused": self._untold}
        _log.warning("%s%s", self._last, others, extra=told)
        self._log_after = now + _LOG_SECONDS
        self._untold = 0


class Pace:
    """At most `rate` steps a second, as many as one second's together."""

    __slots__ = ("_credit", "_rate", "_since")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._credit = max(1.0, rate)
        self._since = now

    def step(self, now: float) -> float:
        """Seconds to wait before the step that is about to be taken."""
        credit = self._credit + (now - self._since) * self._rate
        self._since = now
        self._credit = min(credit, max(1.0, self._rate)) - 1
        return max(0.0, -self._credit / self._rate)
