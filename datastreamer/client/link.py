"""The connection of a client to its server, written once for every driver.

Owns the channel, an exchange on it, the timeouts of its waits, and what the client knows of the
server. Whose turn it is, and what follows from a loss, is `engine`'s. Must not know sockets, tasks
or clocks: `effects` has the steps that its driver performs.
"""

from __future__ import annotations

from typing import Any, TypeVar

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
from datastreamer.protocol.retry import BACKOFF, Backoff, RetryPolicy, check_waits
from datastreamer.transport.connection_errors import answer_timeout, silent_server
from datastreamer.transport.fork_guard import ForkGuard

T = TypeVar("T")


class ServerLink(ForkGuard):
    """One connection at a time to one server.

    `timeout` bounds, in seconds, each step of connecting, of beginning a streaming and of
    restoring a connection; `answer_timeout` each wait for another answer (None: no limit). The
    other options are those of `connect`. Raises `UsageError` for an invalid one.
    """

    def __init__(
        self,
        driver: Driver,
        peer: str,
        *,
        stream_type: int,
        timeout: float,
        answer_timeout: float | None = None,
        resume: bool = True,
        retry_for: float | None = None,
        backoff: Backoff = BACKOFF,
        heartbeat: float | None = None,
        batch_reads: bool = True,
    ) -> None:
        check_number("stream_type", stream_type)
        check_waits(timeout, retry_for, heartbeat)
        super().__init__()
        self.stream_type = stream_type
        self.peer = peer
        self.answer_timeout = answer_timeout
        self.closed_on_asking = False
        self.channel: Channel | None = None
        self._driver = driver
        self._turn = driver.turn
        self._timeout = timeout
        self._retry_policy = RetryPolicy(resume, retry_for, backoff, heartbeat)
        # Whether to query the server's capabilities: some servers close the connection then.
        self._may_ask = self._extensions = batch_reads
        self._connection = ClientConnection(stream_type, peer=peer, extensions=batch_reads)
        # Whether this server has ever sent anything, on an earlier connection.
        self._answered = False
        # After a refusal: whether the connection must be tested before the next request.
        self._suspect = False
        # Whether a part of a request may have been sent.
        self._sending = False
        self._closed = False

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

    def _connect(self) -> Steps[None]:
        self._ensure_open()
        if self._connection.refused:
            self._extensions = False
        self._connection = ClientConnection(
            self.stream_type, peer=self.peer, extensions=self._extensions
        )
        self.channel = yield Connect(self._timeout)
        # From here on a call that closes the client finds the connection.
        self._ensure_open()

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
            raise answer_timeout(self.peer, seconds or 0.0) from None
        except ConnectionLost as error:
            if receives:
                raise self._explained(error, connection) from None
            raise

    def _receive(self, channel: Channel, work: Resumable, seconds: float | None) -> Steps[None]:
        """Wait for bytes of a streaming; query a silent server on a second connection."""
        heartbeat = self._retry_policy.heartbeat if self._driver.reconnects else None
        while True:
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
            header = yield from self._ask_header()
        except PeerError as error:
            raise silent_server(self.peer, silent_seconds, error) from error
        work.silent(header, self.peer, silent_seconds)

    def _ask_header(self) -> Steps[Header]:
        connection = ClientConnection(self.stream_type, peer=self.peer)
        channel = yield Connect(self._timeout)
        try:
            flow = exchanges.header(connection)
            return (yield from self._exchange(flow, channel, connection, self._timeout))
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
        self._extensions = False
        return True

    def _is_spent(self, error: BaseException, *, in_step: bool) -> bool:
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

    def _hang_up(self) -> Steps[None]:
        channel, self.channel = self.channel, None
        self._answered = self._answered or self._connection.received_bytes > 0
        self._suspect = self._sending = False
        if channel is not None:
            yield Close(channel, farewell=self._ours)
