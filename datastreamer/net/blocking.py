"""The client for plain threads: the same exchanges as the Trio client's, on a plain socket.

Owns the socket and its timeouts. Must not import trio: this is what a Spark executor or
a notebook loads.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import ConnectionLost, PeerError, ServerRefused, StreamClosed, UsageError
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER, Header
from datastreamer.net.peers import answer_timeout, connection_lost
from datastreamer.net.place import close_blocking, connect_blocking, place_of
from datastreamer.protocol import exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Flow, Work

if TYPE_CHECKING:
    import ssl

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class BlockingClient:
    """A connection to a server, made at once. Not for several threads at a time.

    `host`, `port`, `tls` and `tls_server_name` are those of `connect`.

    `timeout` (seconds) bounds the making of a connection and the wait for an answer;
    the wait for streamed entries has no bound. Raises `ConnectFailed` and
    `TLSFailed`.

    What is raised, and what it leaves: `ServerRefused` - the client is usable; a refusal
    may cost the connection, and the next call makes another. `ConnectionLost`,
    `ProtocolViolation` - the next call makes another. A call ends an iteration that was
    left open.
    """

    def __init__(
        self,
        host: str,
        port: int = DEFAULT_PORT,
        *,
        stream_type: int = STREAM_TYPE_SEQUENCER,
        timeout: float = exchanges.TIMEOUT,
        tls: bool | ssl.SSLContext = False,
        tls_server_name: str | None = None,
    ) -> None:
        self.stream_type = stream_type
        self._place = place_of(host, port, tls, tls_server_name)
        self.peer = self._place.peer
        self._timeout = timeout
        self._active: Iteration[Any] | None = None
        self._suspect = False
        self._closed = False
        self._busy = False
        self._socket: socket.socket | None = None
        self._connection: ClientConnection
        self._connect()

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._closed = True
        self._drop()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Queries

    def header(self) -> Header:
        """The stream's header as it is now: what is committed."""
        return self.call(exchanges.header)

    def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return self.call(exchanges.entry, number)

    def bookmark(self, key: bytes) -> Entry:
        """The first event at or after the bookmark `key`. Raises `UnknownBookmark`."""
        return self.call(exchanges.bookmark, key)

    def entries_by_number(
        self, numbers: Iterable[int], *, window: int = exchanges.WINDOW
    ) -> Entries:
        """The entries of these numbers, in this order, with `window` queries underway.

        Raises `UnknownEntry` at the first that is not there.
        """
        return Entries(self, exchanges.Lookup(numbers, window), self._timeout)

    # Streaming

    def entries(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> Entries:
        """Entries one by one, from a number (0 if nothing is said) or a bookmark's entry on.

        Goes on with what is committed later, without end, or up to and not including
        number `stop`. The iteration begins when it is entered (``with``) or asked for
        its first item, and raises `BadFromEntry` or `BadFromBookmark` then.
        """
        return Entries(self, exchanges.streaming(from_entry, from_bookmark, stop), None)

    def batches(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> Batches:
        """As `entries`, in runs as they arrive: for many entries the quick way.

        A batch keeps its bytes, within a receive buffer of up to 1 MiB.
        """
        return Batches(self, exchanges.streaming(from_entry, from_bookmark, stop), None)

    def run(
        self,
        callback: Callable[[Entry], object] | None = None,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> None:
        """Call `callback` for each entry; it may call the method `stop` to end this.

        Without a callback each entry is printed as a line: number, type, length of data.
        """
        work = exchanges.streaming(from_entry, from_bookmark, stop)
        if callback is None:
            with Batches(self, work, None) as batches:
                for batch in batches:
                    sys.stdout.write(exchanges.lines(batch))
                    sys.stdout.flush()
            return
        with Entries(self, work, None) as entries:
            for entry in entries:
                callback(entry)

    def stop(self) -> None:
        """End the iteration that is open, if there is one; it ends without an error."""
        if self._active is not None:
            self._active.close()

    # Exchanges

    def call(
        self,
        exchange: Callable[Concatenate[ClientConnection, P], Flow[T]],
        *what: P.args,
        **named: P.kwargs,
    ) -> T:
        """One exchange of `datastreamer.protocol.exchanges`, from request to answer."""
        self._claim()
        try:
            if self._socket is None or self._suspect or self._active is not None:
                self._prepare()
            return self._drive(exchange(self._connection, *what, **named), self._timeout)
        except BaseException as error:
            self._judge(error, in_step=not self._connection.outstanding)
            raise
        finally:
            self._busy = False

    def _begin(self, iteration: Iteration[Any]) -> None:
        self.call(iteration.work.begin)
        self._active = iteration

    def _advance(self, work: Work[T], timeout: float | None) -> T | None:
        self._claim()
        try:
            return self._drive(work.advance(), timeout)
        except BaseException as error:
            self._judge(error, in_step=isinstance(error, Exception))
            raise
        finally:
            self._busy = False

    def _settle(self, iteration: Iteration[Any]) -> None:
        if self._active is iteration:
            self._restore()

    def _claim(self) -> None:
        if self._busy:
            raise UsageError("this client is in use; give each thread its own")
        self._busy = True

    def _drive(self, flow: Flow[T], timeout: float | None) -> T:
        channel, connection = self._socket, self._connection
        if channel is None:
            raise ConnectionLost(f"the connection to {self.peer} is lost")
        channel.settimeout(timeout)
        try:
            while True:
                data = next(flow)
                if data is None:
                    self._receive(channel, connection)
                elif data:
                    self._send(channel, data)
        except StopIteration as done:
            outcome: T = done.value
            return outcome

    def _receive(self, channel: socket.socket, connection: ClientConnection) -> None:
        try:
            connection.received(channel.recv_into(connection.receive_buffer()))
        except TimeoutError:
            raise answer_timeout(self.peer, self._timeout) from None
        except OSError as error:
            raise connection_lost(self.peer, error) from None

    def _send(self, channel: socket.socket, data: bytes) -> None:
        try:
            channel.sendall(data)
        except TimeoutError:
            raise answer_timeout(self.peer, self._timeout) from None
        except OSError as error:
            raise connection_lost(self.peer, error) from None

    # The state of the connection

    def _connect(self) -> None:
        self._socket = connect_blocking(self._place, self._timeout)
        self._connection = ClientConnection(self.stream_type, peer=self.peer)

    def _prepare(self) -> None:
        """Make the connection fit for a request, or make another."""
        if self._closed:
            raise StreamClosed("this client is closed")
        if self._active is not None:
            self._active.take_over()
        self._restore()
        if self._socket is None:
            self._connect()

    def _restore(self) -> None:
        """End what is underway and try a suspect connection; give it up if that fails."""
        if self._socket is None:
            return
        work = None if self._active is None else self._active.work
        flow = exchanges.restore(self._connection, work, self._suspect, exchanges.DRAIN_LIMIT)
        fit = False
        try:
            fit = self._drive(flow, self._timeout)
        except PeerError:
            pass
        finally:
            if fit:
                self._active = None
                self._suspect = False
            else:
                self._drop()

    def _judge(self, error: BaseException, *, in_step: bool) -> None:
        """What `error` means for the connection; one that is out of step is given up."""
        if isinstance(error, ServerRefused) and not self._connection.outstanding:
            self._suspect = True
        elif isinstance(error, PeerError) or not in_step:
            self._drop()

    def _drop(self) -> None:
        channel, self._socket = self._socket, None
        if self._active is not None:
            self._active.finish()
            self._active = None
        self._suspect = False
        if channel is not None:
            close_blocking(channel)


class Iteration(Generic[Item]):
    """What the iterators of a client have in common: the life of one `Work`."""

    def __init__(self, client: BlockingClient, work: Work[Item], timeout: float | None) -> None:
        self.work = work
        self._client = client
        self._timeout = timeout
        self._begun = False
        self._over = False
        self._taken_over = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it; the client is usable then. What has arrived and was not taken is dropped."""
        self.finish()
        self._client._settle(self)

    def finish(self) -> None:
        """No more items."""
        self._over = True

    def take_over(self) -> None:
        """No more items, and whoever asks for one is told why."""
        self._taken_over = not self._over
        self.finish()

    def _begin(self) -> None:
        if not self._begun and not self._over:
            self._client._begin(self)
            self._begun = True

    def _next(self) -> Item:
        if self._taken_over:
            raise UsageError("this iteration was ended by a later call on its client")
        if not self._begun:
            self._begin()
        item = None if self._over else self._client._advance(self.work, self._timeout)
        if item is None:
            self.finish()
            raise StopIteration
        return item


class Batches(Iteration[EntryBatch]):
    """Batches of entries as they arrive: an iterator.

    ``with`` begins it at once and ends it on leaving; without that it begins with the
    first item, and after a ``break`` the client's next call ends it.
    """

    def __enter__(self) -> Batches:
        self._begin()
        return self

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> EntryBatch:
        return self._next()


class Entries(Iteration[Iterable[Entry]]):
    """Entries one by one: an iterator, begun and ended as `Batches`."""

    _items: Iterator[Entry] = iter(())

    def __enter__(self) -> Entries:
        self._begin()
        return self

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Entry:
        while True:
            for entry in self._items:
                return entry
            self._items = iter(self._next())

    def finish(self) -> None:
        super().finish()
        self._items = iter(())
