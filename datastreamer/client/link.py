"""The connection of a client to one of its servers, written once for every driver.

Owns the channel, an exchange on it, the timeouts of its waits, and what the client knows of the
servers. Whose turn it is, and what follows from a loss, is `engine`'s. Must not know sockets, tasks
or clocks: `effects` has the steps that its driver performs.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeVar

from datastreamer.client.effects import (
    Channel,
    Close,
    Connect,
    Driver,
    Receive,
    Send,
    Steps,
)
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    NotSupported,
    PeerError,
    ServerBehind,
    ServerRefused,
    StreamClosed,
)
from datastreamer.format import Header
from datastreamer.protocol import exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Exchange, Work
from datastreamer.protocol.messages import Capabilities
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import BACKOFF, Backoff, RetryPolicy, ServerChoice, check_waits
from datastreamer.transport.connection_errors import answer_timeout, silent_server
from datastreamer.transport.fork_guard import ForkGuard

T = TypeVar("T")

MAX_LAG: Final = 1000
"""Default of the entries that a server may lag another one."""

# With several servers, what a client cannot do without: the default `heartbeat`.
_HEARTBEAT: Final = 10.0
# A streaming waits while another server is asked how many entries it holds. One that does not
# answer is asked more rarely: after up to this many times the heartbeat.
_COMPARE_SECONDS: Final = 1.0
_RARER: Final = 8


class ServerLink(ForkGuard):
    """One connection at a time, to one of the driver's servers: `peers` are their names.

    `timeout` bounds, in seconds, each step of connecting, of beginning a streaming and of
    restoring a connection; `answer_timeout` each wait for another answer (None: no limit, with
    several servers `timeout`). The other options are those of `connect`. Raises `UsageError` for an
    invalid one.
    """

    def __init__(
        self,
        driver: Driver,
        *peers: str,
        stream_type: int,
        timeout: float,
        answer_timeout: float | None = None,
        resume: bool = True,
        retry_for: float | None = None,
        backoff: Backoff = BACKOFF,
        heartbeat: float | None = None,
        batch_reads: bool = True,
        max_lag: int | None = MAX_LAG,
    ) -> None:
        check_number("stream_type", stream_type)
        check_waits(timeout, retry_for, heartbeat)
        if max_lag is not None:
            check_number("max_lag", max_lag)
        super().__init__()
        self.stream_type = stream_type
        if len(peers) > 1:
            answer_timeout = timeout if answer_timeout is None else answer_timeout
            heartbeat = _HEARTBEAT if heartbeat is None else heartbeat
        self.answer_timeout = answer_timeout
        self.closed_on_asking = False
        self.channel: Channel | None = None
        self._driver = driver
        self._turn = driver.turn
        self._timeout = timeout
        self._retry_policy = RetryPolicy(resume, retry_for, backoff, heartbeat)
        self._servers = ServerChoice(peers)
        # Whether to query the capabilities of servers, except of those that close the connection
        # then.
        self._may_ask = batch_reads
        self._without: set[str] = set()
        self._connection = ClientConnection(stream_type, peer=self.peer, extensions=batch_reads)
        # When to compare the servers' totals, and after which time again.
        self._max_lag = max_lag
        self._compare_at = math.inf
        self._compare_wait = heartbeat or 0.0
        # Whether a server has ever sent anything, on an earlier connection.
        self._answered = False
        # After a refusal: whether the connection must be tested before the next request.
        self._suspect = False
        # Whether a part of a request may have been sent.
        self._sending = False
        self._closed = False

    @property
    def peer(self) -> str:
        """The server of this connection, as messages name it."""
        return self._servers.peer

    @property
    def total_entries(self) -> int | None:
        """The newest total that the server sent on this connection."""
        return self._connection.total_entries

    @property
    def state(self) -> str:
        """Whether it is connected, for people."""
        if self._closed:
            return "closed"
        return "not connected" if self.channel is None else "connected"

    @property
    def resumes(self) -> bool:
        """Whether a lost connection is replaced without an error."""
        return self._retry_policy.resume and self._driver.reconnects and not self._closed

    @property
    def moves(self) -> bool:
        """Whether another server is asked if this one fails."""
        return len(self._servers) > 1 and self.resumes

    def _connect(self) -> Steps[None]:
        self._ensure_open()
        if self._connection.refused:
            self._without.add(self._connection.peer)
        extensions = self._may_ask and self.peer not in self._without
        self._connection = ClientConnection(self.stream_type, peer=self.peer, extensions=extensions)
        self.channel = yield Connect(self._timeout, self._servers.current)
        # From here on a call that closes the client finds the connection.
        self._ensure_open()
        if self.moves and self._max_lag is not None:
            self._compare_at = self._driver.now() + self._compare_wait

    def _ensure_open(self) -> None:
        if self._closed:
            raise StreamClosed("this client was closed while it was in use") from None

    def _drive(
        self, flow: Exchange[T], seconds: float | None, work: Work[Any] | None = None
    ) -> Steps[T]:
        """Perform an exchange on this connection, each wait within `seconds`."""
        if self.channel is None:
            self._ensure_open()
            raise ConnectionLost(f"the connection to {self.peer} is lost")
        watched = work if isinstance(work, Resumable) else None
        return self._exchange(flow, self.channel, self._connection, seconds, watched)

    def _exchange(
        self,
        flow: Exchange[T],
        channel: Channel,
        connection: ClientConnection,
        seconds: float | None,
        watched: Resumable | None = None,
    ) -> Steps[T]:
        receives = False
        try:
            # Without a generator for each step: queries are many, and short.
            while True:
                data = next(flow)
                if data:
                    self._sending = True
                    yield Send(channel, data, seconds)
                    self._sending = False
                elif data is None and watched is not None:
                    yield from self._receive(channel, watched, seconds)
                elif data is None:
                    with connection.receive_buffer() as room:
                        receives = True
                        count = yield Receive(channel, room, seconds)
                        receives = False
                    connection.received(count)
        except StopIteration as done:
            outcome: T = done.value
            return outcome
        except TimeoutError:
            raise answer_timeout(connection.peer, seconds or 0.0) from None
        except ConnectionLost as error:
            if receives:
                raise self._explained(error, connection) from None
            raise

    def _receive(self, channel: Channel, work: Resumable, seconds: float | None) -> Steps[None]:
        """Wait for bytes of a streaming; query a silent server on a second connection."""
        heartbeat = self._retry_policy.heartbeat if self._driver.reconnects else None
        while True:
            if self._compare_at < math.inf and self._driver.now() >= self._compare_at:
                yield from self._compare_servers(work)
            try:
                with self._connection.receive_buffer() as room:
                    count = yield Receive(channel, room, heartbeat or seconds)
            except TimeoutError:
                if heartbeat is None:
                    raise answer_timeout(self.peer, seconds or 0.0) from None
                yield from self._look_after(work, heartbeat)
            except ConnectionLost as error:
                raise self._explained(error, self._connection) from None
            else:
                self._connection.received(count)
                return

    def _explained(self, error: ConnectionLost, connection: ClientConnection) -> ConnectionLost:
        """`error`, which the system reported, with its possible reason on a new connection."""
        if connection.received_bytes or type(error) is not ConnectionLost:
            return error
        return exchanges.unanswered(connection, f"{str(error).partition(';')[0]},")

    def _look_after(self, work: Resumable, silent_seconds: float) -> Steps[None]:
        """Nothing was received for `silent_seconds`: query the server on another connection."""
        try:
            header = yield from self._ask_header(self._servers.current, self._timeout)
        except PeerError as error:
            raise silent_server(self.peer, silent_seconds, error) from error
        work.silent(header, self.peer, silent_seconds)

    def _compare_servers(self, work: Resumable) -> Steps[None]:
        """Raise `ServerBehind` if another server holds at least `max_lag` + 1 entries more than
        this one; that server is the next then."""
        assert self._max_lag is not None
        heartbeat = self._retry_policy.heartbeat or 0.0
        wait, seconds = heartbeat, min(_COMPARE_SECONDS, self._timeout)
        for server in self._servers.others():
            try:
                ahead = yield from self._ask_header(server, seconds)
                if not work.lags(ahead, self._max_lag):
                    continue
                # Asked later, so that commits in the meantime do not count.
                own = yield from self._ask_header(self._servers.current, seconds)
            except PeerError:
                wait = min(2 * self._compare_wait, _RARER * heartbeat)
                continue
            if ahead.total_entries - own.total_entries > self._max_lag:
                name = self._servers.peers[server]
                self._servers.choose(server)
                raise ServerBehind(
                    f"{self.peer} holds {own.total_entries} entries, and {name} holds "
                    f"{ahead.total_entries}",
                    own.total_entries,
                )
        self._compare_wait = wait
        self._compare_at = self._driver.now() + wait

    def _ask_header(self, server: int, seconds: float) -> Steps[Header]:
        """The header of a server, on a connection of its own."""
        connection = ClientConnection(self.stream_type, peer=self._servers.peers[server])
        channel = yield Connect(seconds, server)
        try:
            flow = exchanges.header(connection)
            return (yield from self._exchange(flow, channel, connection, seconds))
        finally:
            yield Close(channel)

    @property
    def known_capabilities(self) -> Capabilities | None:
        """What the server has reported on this connection; None before."""
        return self._connection.capabilities

    def _lost_by_asking(self) -> bool:
        """Whether the server closed because of the capabilities query; then do not repeat it."""
        if not self._connection.probing or not self._driver.reconnects:
            return False
        self.closed_on_asking = not self._connection.refused
        self._without.add(self._connection.peer)
        return True

    def _is_spent(self, error: BaseException, *, in_step: bool) -> bool:
        if isinstance(error, ConnectFailed):
            self._without.discard(self._connection.peer)
        if self._connection.out_of_step:
            return True
        if isinstance(error, NotSupported):
            return False
        if isinstance(error, ServerRefused) and not self._connection.outstanding:
            self._suspect = True
            return False
        return isinstance(error, PeerError) or not in_step

    def _hang_up(self) -> Steps[None]:
        channel, self.channel = self.channel, None
        self._answered = self._answered or self._connection.received_bytes > 0
        self._suspect = self._sending = False
        if channel is not None:
            yield Close(channel, farewell=self._ours)
