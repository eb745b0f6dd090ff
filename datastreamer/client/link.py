"""The connection of a client to one of its servers, written once for every driver.

Owns the channel, an exchange on it, the timeouts of its waits, and what the client knows of the
servers. Whose turn it is, and what follows from a loss, is `engine`'s. Must not know sockets, tasks
or clocks: `effects` has the steps that its driver performs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from datastreamer._codec import EntryBatch
from datastreamer.client.effects import (
    Channel,
    Close,
    Connect,
    Driver,
    Interrupted,
    Receive,
    Send,
    Sleep,
    Steps,
)
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    DatastreamerError,
    DifferentStream,
    HistoryChanged,
    NoAnswer,
    NotFound,
    NotSupported,
    PeerError,
    ServerBehind,
    ServerRefused,
    StreamClosed,
)
from datastreamer.format import Header
from datastreamer.printable import counted
from datastreamer.protocol import exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Exchange, Work
from datastreamer.protocol.history import LastRead
from datastreamer.protocol.messages import Capabilities
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import (
    BACKOFF,
    Backoff,
    BatchCall,
    RetryPolicy,
    ServerChoice,
    check_waits,
)
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
# An answer is in time as long as this many bytes of it arrive in the time for an answer.
_PROGRESS: Final = 1 << 16

_log = logging.getLogger(__name__)


class ServerLink(ForkGuard):
    """One connection at a time, to one of the driver's servers: `peers` are their names.

    `timeout` bounds, in seconds, each step of connecting, of beginning a streaming and of
    restoring a connection; `answer_timeout` another answer (None: no limit, in threads and with
    several servers `timeout`). The other options are those of `connect`. Raises `UsageError` for an
    invalid one.
    """

    # With several servers: what a connection to one of them is compared with.
    _read: LastRead | None = None

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
        if answer_timeout is None and (driver.threaded or len(peers) > 1):
            answer_timeout = timeout
        if heartbeat is None and len(peers) > 1:
            heartbeat = _HEARTBEAT
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
        # The servers from which `batch_read` requests single entries.
        self._singly: set[str] = set()
        # How often in a row each server closed the connection then. Of several, any may be killed
        # at that moment: once proves nothing.
        self._closings: dict[str, int] = {}
        self._connection = ClientConnection(stream_type, peer=self.peer, extensions=batch_reads)
        # When to compare the total of each other server, and the wait before; the first of them.
        self._max_lag = max_lag
        self._compared: dict[int, tuple[float, float]] = {}
        self._compare_at = math.inf
        # The servers that were found to hold another history.
        self._others_histories: set[int] = set()
        # Before which time not to look again for entries that this server lacks.
        self._elsewhere_at = -math.inf
        # Whether a server has ever sent anything, on an earlier connection.
        self._answered = False
        # After a refusal: whether the connection must be tested before the next request.
        self._suspect = False
        # Whether a part of a request may have been sent, on the channel.
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
        elif self._connection.capabilities is not None and not self._seems_without:
            self._closings.pop(self._connection.peer, None)
        extensions = self._may_ask and self.peer not in self._without and not self._seems_without
        self._connection = ClientConnection(self.stream_type, peer=self.peer, extensions=extensions)
        self.channel = yield Connect(self._timeout, self._servers.current)
        # From here on a call that closes the client finds the connection.
        self._ensure_open()
        if self.moves and self._max_lag is not None:
            self._compared.clear()
            for server in self._servers.others():
                self._compare_after(server, self._retry_policy.heartbeat or 0.0)

    @property
    def _may_wait(self) -> bool:
        """Whether the server may wait for a commit itself: it may have batches."""
        known = self._connection.capabilities
        return known is None or known.batch_reads

    def _repeats(self, call: BatchCall, batch: EntryBatch) -> Steps[bool]:
        """Whether `call` needs another request after this answer, and whose time has come."""
        if not self._may_wait and self.peer not in self._singly:
            self._singly.add(self.peer)
            _log.info("batch_read requests single entries from %s, without batches", self.peer)
        due = call.due(batch, self.total_entries or 0, waits=self._may_wait)
        if due is None:
            return False
        try:
            yield Sleep(due)
        except Interrupted:
            self._ensure_open()
            if call.stopped:
                raise
        return True

    def _ensure_not_closed(self, error: BaseException) -> None:
        """Raise `StreamClosed` in place of what the closed connection raised."""
        if isinstance(error, PeerError | Interrupted):
            self._ensure_open()

    def _ensure_open(self) -> None:
        if self._closed:
            raise StreamClosed("this client was closed while it was in use") from None

    def _drive(
        self, flow: Exchange[T], seconds: float | None, work: Work[Any] | None = None
    ) -> Steps[T]:
        """Perform an exchange on this connection, within `seconds`; see `_exchange`."""
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
        until: float = math.inf,
    ) -> Steps[T]:
        """Perform an exchange, each wait within `seconds`. If another server could be asked, the
        answer must arrive within `seconds`, or until then a part of it that is worth the wait; and
        before `until`."""
        receives = False
        due, counted = until, 0
        try:
            # Without a generator for each step: queries are many, and short.
            while True:
                data = next(flow)
                if data:
                    self._sending = channel is self.channel
                    yield Send(channel, data, seconds)
                    self._sending = False
                elif data is None and watched is not None:
                    yield from self._receive(channel, watched, seconds)
                elif data is None:
                    left = seconds
                    if seconds is not None and (self.moves or until < math.inf):
                        received, now = connection.received_bytes, self._driver.now()
                        if due == math.inf or received - counted >= _PROGRESS:
                            due, counted = min(until, now + seconds), received
                        left = min(seconds, due - now)
                        if left <= 0:
                            raise TimeoutError
                    with connection.receive_buffer() as room:
                        receives = True
                        count = yield Receive(channel, room, left)
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
            if work.starved and self.moves:
                yield from self._look_for_more(work)
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

    # Other connections: what fails there, is cancelled or is slow, leaves this one as it is.

    def _look_after(self, work: Resumable, silent_seconds: float) -> Steps[None]:
        """Nothing was received for `silent_seconds`: query the server on another connection."""
        server, seconds = self._servers.current, self._timeout
        try:
            header = yield from self._ask_aside(server, seconds, exchanges.header)
        except (ConnectionLost, ServerRefused) as error:
            if isinstance(error, NoAnswer) or not self.moves:
                raise silent_server(self.peer, silent_seconds, error) from error
            # It is alive, and has no room for another connection.
            more = True
        except PeerError as error:
            raise silent_server(self.peer, silent_seconds, error) from error
        else:
            work.silent(header, self.peer, silent_seconds)
            more = work.incomplete
        if more and self.moves:
            yield from self._look_for_more(work)

    def _compare_after(self, server: int, wait: float) -> None:
        self._compared[server] = self._driver.now() + wait, wait
        self._compare_at = min(self._compared.values())[0]

    def _compare_servers(self, work: Resumable) -> Steps[None]:
        """Raise `ServerBehind` if the other server that is due holds at least `max_lag` + 1 entries
        more than this one, of the same history; that server is the next then."""
        assert self._max_lag is not None
        heartbeat = self._retry_policy.heartbeat or 0.0
        server = min(self._compared, key=self._compared.__getitem__)
        # Also if it is cancelled: what arrives must not wait for the same server again.
        self._compare_after(server, min(2 * self._compared[server][1], _RARER * heartbeat))
        asked, ahead = yield from self._ahead(server, partial(work.ahead, bound=self._max_lag))
        if asked:
            self._compare_after(server, heartbeat)
        if ahead is None:
            return
        try:
            # Asked later, so that commits in the meantime do not count.
            seconds = min(_COMPARE_SECONDS, self._timeout)
            own = yield from self._ask_aside(self._servers.current, seconds, exchanges.header)
            total = own.total_entries
        except PeerError:
            # It has no room for another connection, perhaps.
            total = max(work.next_number or 0, self.total_entries or 0)
        if ahead.total_entries - total > self._max_lag:
            raise self._leave_for(server, ahead, total)

    def _look_for_more(self, work: Resumable) -> Steps[None]:
        """Raise `ServerBehind` if another server holds the next entry."""
        found = yield from self._look_elsewhere(partial(work.ahead, bound=0))
        if found is not None:
            raise self._leave_for(*found, work.next_number or 0)

    def _is_elsewhere(self, answer: object) -> Steps[bool]:
        """Whether another server, the current one then, holds what this one answered with an empty
        batch."""
        if self._read is None or not isinstance(answer, EntryBatch):
            return False
        if answer.next_number > answer.first_number:
            return False
        ask = partial(self._read.ahead, number=answer.next_number)
        found = yield from self._look_elsewhere(ask)
        if found is None:
            return False
        yield from self._hang_up()
        self._servers.choose(found[0])
        self._servers.go_on()
        return True

    def _look_elsewhere(
        self, ask: Callable[[ClientConnection], Exchange[Header | None]]
    ) -> Steps[tuple[int, Header] | None]:
        """The other server that holds most, of those with an answer to `ask`. They are asked once
        in a heartbeat at most."""
        now = self._driver.now()
        if now < self._elsewhere_at:
            return None
        self._elsewhere_at = now + (self._retry_policy.heartbeat or 0.0)
        found: tuple[int, Header] | None = None
        for server in self._servers.others():
            _, ahead = yield from self._ahead(server, ask)
            if ahead and (found is None or ahead.total_entries > found[1].total_entries):
                found = server, ahead
        return found

    def _leave_for(self, server: int, ahead: Header, total: int) -> ServerBehind:
        self._servers.choose(server)
        name = self._servers.peers[server]
        holds = f"{self.peer} holds {counted(total)}, and {name} holds {ahead.total_entries}"
        return ServerBehind(holds, total)

    def _ahead(
        self, server: int, ask: Callable[[ClientConnection], Exchange[Header | None]]
    ) -> Steps[tuple[bool, Header | None]]:
        """Whether another server answered, and its answer."""
        try:
            seconds = min(_COMPARE_SECONDS, self._timeout)
            return True, (yield from self._ask_aside(server, seconds, ask))
        except HistoryChanged as error:
            if server not in self._others_histories:
                self._others_histories.add(server)
                _log.warning("%s is not used: %s", self._servers.peers[server], error)
            return True, None
        except (PeerError, NotFound):
            return False, None

    def _ask_aside(
        self, server: int, seconds: float, ask: Callable[[ClientConnection], Exchange[T]]
    ) -> Steps[T]:
        """One exchange with a server on a connection of its own, all within `seconds`."""
        until = self._driver.now() + seconds
        connection = ClientConnection(self.stream_type, peer=self._servers.peers[server])
        channel = yield Connect(seconds, server)
        try:
            flow = ask(connection)
            return (yield from self._exchange(flow, channel, connection, seconds, until=until))
        finally:
            yield Close(channel)

    @property
    def known_capabilities(self) -> Capabilities | None:
        """What the server has reported on this connection; None before."""
        return self._connection.capabilities

    @property
    def _seems_without(self) -> bool:
        """Whether the server has closed the connection because of the capabilities query."""
        return self._closings.get(self.peer, 0) > self.moves

    def _lost_by_asking(self) -> bool:
        """Whether the server closed during the capabilities query, perhaps because of it."""
        if not self._connection.probing or not self._driver.reconnects:
            return False
        self.closed_on_asking = not self._connection.refused
        self._connection.asked_at = None
        if self._connection.refused:
            self._without.add(self._connection.peer)
        else:
            self._closings[self.peer] = self._closings.get(self.peer, 0) + 1
        return True

    def _is_asked_again(self, received_before: int, resumes: bool) -> bool:
        """Whether to send a request over another connection: the lost one had worked before and was
        stale, or the server closed it during the capabilities query, repeated once at most."""
        stale = resumes and 0 < received_before == self._connection.received_bytes
        return stale or self._lost_by_asking()

    def _move(self, error: BaseException) -> Steps[None]:
        """Go to the next server after what this one said. Raises what all said if all were asked
        since the request began; `error` if there is no other, or if the history was rewritten."""
        self._ensure_not_closed(error)
        rewritten = isinstance(error, HistoryChanged) and not isinstance(error, DifferentStream)
        if not self.moves or rewritten or not isinstance(error, DatastreamerError):
            raise error
        self._servers.failed(error, supposed=self._seems_without)
        self._closings.pop(self.peer, None)
        if self._servers.all_failed:
            raise self._servers.error() from error
        yield from self._hang_up()
        self._servers.go_on()

    def _is_spent(self, error: BaseException, *, in_step: bool) -> bool:
        if isinstance(error, ConnectFailed):
            self._without.discard(self._connection.peer)
            self._closings.pop(self._connection.peer, None)
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
            yield Close(channel, farewell=self.ours)
