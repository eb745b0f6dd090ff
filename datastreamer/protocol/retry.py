"""When a client asks again, and which of several servers.

Owns which errors are worth another attempt, the waits between attempts, and the next server. Must
not know sockets, clocks or randomness: the caller passes times, or its clock, and random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from datastreamer._codec import EntryBatch, scan_chosen
from datastreamer.errors import (
    BadFromBookmark,
    ConnectFailed,
    ConnectionLost,
    DatastreamerError,
    DifferentStream,
    EntriesDamaged,
    HistoryChanged,
    NoAnswer,
    NotFound,
    NotSupported,
    PeerError,
    ProtocolViolation,
    ServerBehind,
    ServerRefused,
    TLSFailed,
    UsageError,
)
from datastreamer.protocol.batches import Read, read, wait_ms
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Exchange

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


# What the same server would raise again.
_FINAL: Final = (BadFromBookmark, DifferentStream, TLSFailed, ProtocolViolation)

# The pauses between requests to a server that cannot wait for a commit.
_POLLING: Final = Backoff(0.02, 1.0)


class BatchCall:
    """The requests of one `batch_read`, which waits up to `wait` seconds for an entry, on the clock
    `now`. Raises `UsageError`."""

    def __init__(self, wanted: Read, wait: float, now: Callable[[], float]) -> None:
        self.stopped = False
        self._now = now
        self._until = now() + wait_ms(wait) / 1000
        self._wanted = wanted
        # Where the answer begins, and how many requests there were.
        self._first: int | None = None
        self._requests = 0

    @property
    def left(self) -> float:
        """The rest of the wait."""
        return max(0.0, self._until - self._now())

    def read(self, connection: ClientConnection) -> Exchange[EntryBatch]:
        wanted = replace(self._wanted, wait_ms=wait_ms(self.left))
        batch = yield from read(connection, wanted)
        if self._first is None:
            self._first = batch.first_number
        if batch.first_number == self._first:
            return batch
        packed = batch.packed()
        return scan_chosen(packed, self._first, batch.next_number, start=0, end=len(packed))

    def due(self, batch: EntryBatch, total: int, *, waits: bool) -> float | None:
        """When to send another request; None: `batch` is the answer. `waits`: whether the server
        waits for a commit itself; it may be one of other types."""
        waited = waits and batch.next_number == max(self._wanted.from_entry, self._first or 0)
        if batch or waited or self.stopped or total > batch.next_number or not wait_ms(self.left):
            return None
        self._wanted = replace(self._wanted, from_entry=batch.next_number)
        pause = 0.0 if waits else _POLLING.wait(self._requests, 1.0)
        self._requests += 1
        return min(self._until, self._now() + pause)

    def nothing(self) -> EntryBatch:
        """The answer where the wait was stopped."""
        reached = max(0, self._wanted.from_entry)
        first = reached if self._first is None else self._first
        return scan_chosen(b"", first, reached, start=0, end=0)


class ServerChoice:
    """The servers of one stream, of which a client asks one at a time: after a failure the next.

    `failures` is what each said last, since `begin`.
    """

    def __init__(self, peers: Sequence[str]) -> None:
        self.peers = peers
        self.current = 0
        self.failures: dict[int, DatastreamerError] = {}
        # The servers whose failure is an assumption.
        self._supposed: set[int] = set()
        # Of the failures since the last whole round.
        self._in_round = 0
        self._chosen: int | None = None

    def __len__(self) -> int:
        return len(self.peers)

    @property
    def peer(self) -> str:
        """The current server as messages name it."""
        return self.peers[self.current]

    def others(self) -> Iterator[int]:
        """The other servers, the next one first."""
        for distance in range(1, len(self.peers)):
            yield (self.current + distance) % len(self.peers)

    def begin(self) -> None:
        """Begin a new call: discard the failures of the last one."""
        self.failures.clear()
        self._supposed.clear()
        self._in_round = 0

    def failed(self, error: DatastreamerError, *, supposed: bool = False) -> None:
        """Note what the current server said, or is `supposed` to support."""
        self.failures[self.current] = error
        (self._supposed.add if supposed else self._supposed.discard)(self.current)
        self._in_round = self._in_round % len(self.peers) + 1

    def choose(self, server: int) -> None:
        """Make this one the next server."""
        self._chosen = server

    def go_on(self) -> None:
        """Make the next server the current one; or, if all hold fewer entries than were received,
        the one that holds most."""
        following, self._chosen = self._chosen, None
        if behind := self._all_behind():
            following = max(behind, key=behind.__getitem__)
        if following is None:
            following = (self.current + 1) % len(self.peers)
        self.current = following

    @property
    def may_lag(self) -> bool:
        """Whether entries that the current server lacks are expected to come: another one has not
        said yet that it lacks them too."""
        return len(self.peers) > 1 and not self._all_behind()

    def _all_behind(self) -> dict[int, int]:
        """The totals of all servers if all are behind; else nothing."""
        totals = {
            server: error.total
            for server, error in self.failures.items()
            if isinstance(error, ServerBehind)
        }
        return totals if len(totals) == len(self.peers) else {}

    @property
    def all_failed(self) -> bool:
        """Whether each server has said something since `begin`."""
        return len(self.failures) == len(self.peers)

    @property
    def is_round_over(self) -> bool:
        """Whether the last failure was the last of a round."""
        return self._in_round == len(self.peers)

    @property
    def is_final(self) -> bool:
        """Whether each server would say the same again."""
        final = (isinstance(error, _FINAL) for error in self.failures.values())
        return self.all_failed and all(final)

    def error(self) -> DatastreamerError:
        """The failure that says most about the stream, with what each server said."""
        # An answer says more about a stream than a lost connection, and most about a long one.
        _, found = max(
            self.failures.items(),
            key=lambda failure: (
                failure[0] not in self._supposed,
                isinstance(failure[1], NotFound | NotSupported | ServerRefused),
                getattr(failure[1], "total_entries", 0),
            ),
        )
        if len(self.failures) == 1:
            return found
        # The same attributes; their constructors differ.
        combined = type(found).__new__(type(found))
        combined.__dict__.update(found.__dict__)
        combined.args = (self._said(),)
        return combined

    def _said(self) -> str:
        parts = []
        for server, error in self.failures.items():
            # Without the advice.
            text = str(error).partition(";")[0]
            peer = self.peers[server]
            parts.append(text if peer in text else f"{peer}: {text}")
        return f"asked {len(parts)} servers: {'; '.join(parts)}"


class Recovery:
    """The attempts to reconnect, from the loss of the server to the next entry.

    `error` is that of the last attempt.
    """

    def __init__(self, retry_policy: RetryPolicy, now: float) -> None:
        self._backoff = retry_policy.backoff
        self._retry_for = retry_policy.retry_for
        self._since = now
        self._rounds = 0
        self._unanswered = 0
        self._violated = False
        self._last = False
        self.down = False
        self.error: PeerError | None = None
        self.due = now

    def lost(
        self,
        error: PeerError,
        *,
        answered: bool,
        now: float,
        luck: float,
        servers: ServerChoice | None = None,
    ) -> bool:
        """An attempt failed with `error`: `due` is the time of the next one. Or raises it.

        `answered`: whether anything was received on the connection. Of several `servers`, which
        know the error, the next is asked at once, and the first again after a wait. Returns whether
        to report the loss: it is new (`down`), the server says now why, or it looks like the wrong
        one.
        """
        if isinstance(error, HistoryChanged) and not isinstance(error, DifferentStream):
            raise error
        # A stream that was rewritten under its readers can cause a violation once, and a new
        # connection shows it. Twice in the same place it is the server.
        first = isinstance(error, ProtocolViolation) and not self._violated
        self._violated = self._violated or first
        if servers is None and isinstance(error, _FINAL) and not first:
            raise error
        if servers is not None and servers.is_final:
            raise servers.error()
        heard = answered or isinstance(error, ConnectFailed | NoAnswer)
        self._unanswered = 0 if heard else self._unanswered + 1
        wait = 0.0
        if servers is None or servers.is_round_over:
            wait = self._backoff.wait(self._rounds, luck)
            if self._retry_for is not None:
                left = self._since + self._retry_for - now
                if self._last or left <= 0:
                    final = error if servers is None else servers.error()
                    raise ConnectionLost(
                        f"given up after {max(0.0, now - self._since):.1f} s: {final}"
                    ) from error
                # The last attempt is at the end of the time.
                self._last = wait >= left
                wait = min(wait, left)
            self._rounds += 1
        # An earlier attempt may have been lost without a reason.
        explained = isinstance(error, EntriesDamaged) and not isinstance(self.error, EntriesDamaged)
        self.error = error
        self.due = now + wait
        news, self.down = not self.down, True
        return news or explained or self._unanswered == UNANSWERED_LIMIT
