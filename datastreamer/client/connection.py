"""What a client's link knows of its server and its connection, and judges by: the same whether
tasks wait for the bytes or threads.

Owns no socket, no turn and no clock. Must not import trio.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    NotSupported,
    PeerError,
    ServerRefused,
)
from datastreamer.protocol import flows as exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.flows import Work
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import Endurance, Recovery
from datastreamer.transport.fork_guard import ForkGuard


class Lasting(Protocol):
    """An iteration, as far as its link looks at it."""

    work: Work[Any]
    recovery: Recovery | None


class Attachment(ForkGuard):
    """To one server, by one connection after another."""

    def __init__(
        self, stream_type: int, peer: str, timeout: float, endurance: Endurance, batch_reads: bool
    ) -> None:
        super().__init__()
        self.stream_type = stream_type
        self.peer = peer
        self.closed_on_asking = False
        """Whether the server closed on the question what it can do, without a word: that may
        have been an accident."""
        self._timeout = timeout
        self._endurance = endurance
        # Whether this server may be asked what it can do: some close on the question.
        self._may_ask = self._extensions = batch_reads
        self._connection = ClientConnection(stream_type, peer=peer, extensions=batch_reads)
        # Whether this server has ever said anything, on an earlier connection.
        self._answered = False
        # After a refusal: does the connection still work?
        self._suspect = False
        self._closed = False

    @property
    def total_entries(self) -> int | None:
        """The newest total that the server told on this connection."""
        return self._connection.total_entries

    @property
    def resumes(self) -> bool:
        """Whether a lost connection can and shall be replaced without a word."""
        return self._endurance.resume and self._redials and not self._closed

    @property
    def _redials(self) -> bool:
        """Whether another connection can be made."""
        return True

    def _new_connection(self) -> ClientConnection:
        if self._connection.refused:
            self._extensions = False
        return ClientConnection(self.stream_type, peer=self.peer, extensions=self._extensions)

    def _lost_by_asking(self) -> bool:
        """Whether the server closed on the question what it can do: it is not asked again."""
        if not self._connection.probing or not self._redials:
            return False
        self.closed_on_asking = not self._connection.refused
        self._extensions = False
        return True

    def _is_asked_again(self, received_before: int, resumes: bool) -> bool:
        """Whether a request whose connection was lost goes out over another: one that was good
        once and is stale, or that was lost by a question which is not asked again."""
        stale = resumes and 0 < received_before == self._connection.received_bytes
        return stale or self._lost_by_asking()

    def _outlives(self, iteration: Lasting, error: PeerError, now: float) -> tuple[bool, bool]:
        """Whether to join again after `error` - when, says the iteration's recovery - and whether
        that it is lost is news.

        Raises what is no loss of a connection, or one time too many.
        """
        answered = self._connection.received_bytes > 0
        self._answered = self._answered or answered
        if isinstance(error, ConnectionLost):
            self._lost_by_asking()
        if not (self._answered and self.resumes and isinstance(iteration.work, Resumable)):
            return False, False
        if iteration.recovery is None:
            iteration.recovery = Recovery(self._endurance, now)
        luck = random.random()  # noqa: S311
        return True, iteration.recovery.lost(error, answered=answered, now=now, luck=luck)

    def _explained(self, error: PeerError) -> PeerError:
        """`error`, which the system told, with what may be behind it on a new connection."""
        connection = self._connection
        if connection.received_bytes or not isinstance(error, ConnectionLost):
            return error
        return exchanges.unanswered(connection, f"{str(error).partition(';')[0]},")

    def _is_spent(self, error: BaseException, *, in_step: bool) -> bool:
        """Whether the connection is to be given up for `error`: one that is out of step is."""
        if isinstance(error, ConnectFailed):
            self._extensions = self._may_ask
        if self._connection.out_of_step:
            return True
        if isinstance(error, NotSupported):
            return False
        if isinstance(error, ServerRefused) and not self._connection.outstanding:
            self._suspect = True
            return False
        return isinstance(error, PeerError) or not in_step

    def _note_end(self) -> None:
        """The connection is closed."""
        self._answered = self._answered or self._connection.received_bytes > 0
        self._suspect = False
