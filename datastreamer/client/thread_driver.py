"""A blocking client's link to its server, under the public face of `blocking`.

Owns the socket, its timeouts, the turns of threads, and when a connection is given up and
another made. What is said on a connection stands in `datastreamer.protocol.flows`, what a
lost one means in `datastreamer.protocol.resume`. Must not import trio.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from datastreamer.client.connection import Attachment
from datastreamer.client.thread_iteration import LOST, Iteration, Lost
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    PeerError,
    StreamClosed,
    UsageError,
)
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
from datastreamer.protocol import flows as exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.authentication import token_request
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.flows import Flow, Work
from datastreamer.protocol.resume import Resumable
from datastreamer.protocol.retry import BACKOFF, Backoff, Endurance, check_waits
from datastreamer.transport.connection_errors import (
    answer_timeout,
    connection_lost,
    say_back,
    say_lost,
    silent_server,
    watch_over,
)
from datastreamer.transport.endpoint import close_blocking, connect_blocking, endpoint_of

if TYPE_CHECKING:
    import ssl

    from datastreamer._codec import EntryBatch

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

# While a server is waited for, how often it is looked whether that is still wanted.
_LOOK_SECONDS = 0.1


class BlockingLink(Attachment):
    """The connection of a `BlockingClient`, which says what its arguments are."""

    def __init__(
        self,
        host: str,
        port: int = DEFAULT_PORT,
        *,
        stream_type: int = STREAM_TYPE_SEQUENCER,
        timeout: float = exchanges.TIMEOUT,
        tls: bool | ssl.SSLContext = False,
        tls_server_name: str | None = None,
        resume: bool = True,
        retry_for: float | None = None,
        backoff: Backoff = BACKOFF,
        heartbeat: float | None = None,
        batch_reads: bool = True,
        token: bytes | str | None = None,
    ) -> None:
        check_number("stream_type", stream_type)
        check_waits(timeout, retry_for, heartbeat)
        request = token_request(stream_type, token)
        self._place = endpoint_of(host, port, tls, tls_server_name, request)
        endurance = Endurance(resume, retry_for, backoff, heartbeat)
        super().__init__(stream_type, self._place.peer, timeout, endurance, batch_reads)
        self._active: Iteration[Any] | None = None
        # Held during a call; never waited for, so that a signal's handler may come to it, too.
        self._turn = threading.Lock()
        self._socket: socket.socket | None = None
        self._connect()

    def close(self) -> None:
        """Close the connection. A second call does nothing.

        While another thread is in a call, that call raises `StreamClosed`.
        """
        self._closed = True
        if self._turn.acquire(blocking=False):
            self._release()
        else:
            self._interrupt()

    def stop(self) -> None:
        """End the iteration that is open, if there is one; it ends without an error.

        While another thread waits for its next item, that thread still gets what has arrived,
        and the connection is given up; the next call makes another.
        """
        active = self._active
        if active is None or not self._ours:
            return
        active.finish()
        if self._turn.acquire(blocking=False):
            try:
                self._restore()
            finally:
                self._release()
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        """Wake who waits for the connection; he sees that it has ended, and why."""
        channel = self._socket
        if channel is not None and self._ours:
            with contextlib.suppress(OSError):
                # Not TLS's own, which takes its state from under the thread that is in it.
                socket.socket.shutdown(channel, socket.SHUT_RDWR)

    # Exchanges

    def call(
        self,
        exchange: Callable[Concatenate[ClientConnection, P], Flow[T]],
        *what: P.args,
        **named: P.kwargs,
    ) -> T:
        """One exchange of `datastreamer.protocol.flows`, from request to answer."""
        self._claim()
        try:
            if self._socket is None or self._suspect or self._active is not None:
                self._prepare()
            again = self.resumes
            while True:
                before = self._connection.received_bytes
                try:
                    return self._drive(exchange(self._connection, *what, **named), self._timeout)
                except ConnectionLost:
                    if not self._is_asked_again(before, again):
                        raise
                    again = False
                self._drop()
                self._prepare()
        except BaseException as error:
            self._judge(error, in_step=not self._connection.outstanding)
            raise
        finally:
            self._release()

    def begin(self, iteration: Iteration[Any]) -> None:
        """The first part of an exchange of many parts."""
        try:
            self.call(iteration.work.begin)
        except (ConnectFailed, ConnectionLost) as error:
            if not self._survives(iteration, error):
                raise
        self._active = iteration

    def join(self, iteration: Iteration[Any]) -> None:
        """Join the stream again where its connection was lost, until it is stopped."""
        if self._socket is not None or not isinstance(iteration.work, Resumable):
            return
        self._claim()
        try:
            while not iteration.over and not self._rejoin(iteration, iteration.work):
                pass
        except PeerError:
            self._drop()
            raise
        finally:
            self._release()

    def advance(self, iteration: Iteration[T], timeout: float | None) -> T | Lost | None:
        """The next part; None at the end, and where it was stopped."""
        self._claim()
        work = iteration.work
        try:
            if iteration.over:
                return None
            item: T | None = None
            if isinstance(work, Resumable):
                item = cast("T | None", self._arrived(work, timeout))
            if item is None:
                item = self._drive(work.advance(), timeout, work)
        except BaseException as error:
            if isinstance(error, PeerError) and iteration.over:
                self._drop()
                return None
            if isinstance(error, PeerError) and self.resumes:
                try:
                    lost = self._survives(iteration, error)
                except PeerError:
                    self._drop()
                    raise
                if lost:
                    self._hang_up()
                    return LOST
            self._judge(error, in_step=isinstance(error, Exception))
            raise
        else:
            iteration.recovery = None
            return item
        finally:
            self._release()

    def _survives(self, iteration: Iteration[Any], error: PeerError) -> bool:
        """Whether to join again after `error`; when, says the iteration's recovery.

        Raises what is no loss of a connection, or one time too many.
        """
        again, news = self._outlives(iteration, error, time.monotonic())
        if news:
            say_lost(_log, self.peer, error)
        return again

    def _rejoin(self, iteration: Iteration[Any], work: Resumable) -> bool:
        """One attempt; false where it failed and there is to be another."""
        if iteration.recovery is not None:
            left = _LOOK_SECONDS
            while left >= _LOOK_SECONDS and not (iteration.over or self._closed):
                left = max(0.0, iteration.recovery.due - time.monotonic())
                time.sleep(min(left, _LOOK_SECONDS))
        try:
            self._connect()
            self._drive(work.begin(self._connection), self._timeout)
        except PeerError as error:
            self._hang_up()
            if not self._survives(iteration, error):
                raise
            return False
        except BaseException:
            self._hang_up()
            raise
        if iteration.recovery is not None:
            iteration.recovery.down = False
        say_back(_log, self.peer, work.next_number)
        return True

    def _look_after(self, work: Resumable, seconds: float) -> None:
        """Nothing came for so long: ask on another connection whether the server is there."""
        connection = ClientConnection(self.stream_type, peer=self.peer)
        try:
            channel = connect_blocking(self._place, self._timeout)
            try:
                channel.settimeout(self._timeout)
                header = self._exchange(exchanges.header(connection), channel, connection)
            finally:
                close_blocking(channel)
        except PeerError as error:
            raise silent_server(self.peer, seconds, error) from error
        work.silent(header, self.peer, seconds)

    def settle(self, iteration: Iteration[Any]) -> None:
        """The end of it, at the cost of the connection if it must be."""
        if self._active is iteration and self._ours:
            self._claim()
            try:
                self._restore()
            finally:
                self._release()

    def _claim(self) -> None:
        self._ensure_ours()
        if not self._turn.acquire(blocking=False):
            raise UsageError("this client is in use; give each thread its own")

    def _release(self) -> None:
        try:
            if self._closed:
                self._drop()
        finally:
            self._turn.release()
        # Who closed it meanwhile may have come too late for that.
        if self._closed and self._socket is not None and self._turn.acquire(blocking=False):
            self._release()

    def _arrived(self, work: Resumable, timeout: float | None) -> EntryBatch | None:
        """The next run, where it comes as most do: one wait at most, and none of the steps of an
        exchange. None: it is to be driven."""
        try:
            run = work.arrived()
            if run is None and work.hungry and self._socket is not None:
                self._receive_watched(self._socket, timeout, work)
                run = work.arrived()
        except PeerError:
            self._ensure_open()
            raise
        return run

    def _drive(self, flow: Flow[T], timeout: float | None, work: Work[Any] | None = None) -> T:
        channel, connection = self._socket, self._connection
        if channel is None:
            self._ensure_open()
            raise ConnectionLost(f"the connection to {self.peer} is lost")
        watched = work if isinstance(work, Resumable) else None
        seconds = None if watched is None else self._endurance.heartbeat
        _set_timeout(channel, timeout if seconds is None else seconds)
        try:
            while True:
                data = next(flow)
                if data is None and watched is not None:
                    self._receive_watched(channel, timeout, watched)
                elif data is None:
                    self._receive(channel, connection)
                elif data:
                    self._send(channel, data)
        except StopIteration as done:
            outcome: T = done.value
            return outcome
        except PeerError:
            self._ensure_open()
            raise

    def _ensure_open(self) -> None:
        if self._closed:
            raise StreamClosed("this client was closed while it was in use") from None

    def _receive(self, channel: socket.socket, connection: ClientConnection) -> None:
        try:
            connection.received(channel.recv_into(connection.receive_buffer()))
        except TimeoutError:
            raise answer_timeout(self.peer, self._timeout) from None
        except OSError as error:
            raise self._explained(connection_lost(self.peer, error)) from None

    def _exchange(self, flow: Flow[T], channel: socket.socket, connection: ClientConnection) -> T:
        """One exchange on a connection of its own."""
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

    def _receive_watched(
        self, channel: socket.socket, timeout: float | None, work: Resumable
    ) -> None:
        connection, seconds = self._connection, self._endurance.heartbeat
        _set_timeout(channel, timeout if seconds is None else seconds)
        if seconds is None:
            self._receive(channel, connection)
            return
        while True:
            try:
                connection.received(channel.recv_into(connection.receive_buffer()))
            except TimeoutError:
                self._look_after(work, seconds)
            except OSError as error:
                raise self._explained(connection_lost(self.peer, error)) from None
            else:
                return

    def _send(self, channel: socket.socket, data: bytes) -> None:
        try:
            channel.sendall(data)
        except TimeoutError:
            raise answer_timeout(self.peer, self._timeout) from None
        except OSError as error:
            raise connection_lost(self.peer, error) from None

    # The state of the connection

    def _connect(self) -> None:
        if not self._closed:
            self._connection = self._new_connection()
            self._socket = connect_blocking(self._place, self._timeout)
            watch_over(self._socket.setsockopt)
        # From here on who closes it finds the socket.
        self._ensure_open()

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
            self._active = None
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
        if self._is_spent(error, in_step=in_step):
            self._drop()

    def _drop(self) -> None:
        """Give up the connection, and the iteration on it."""
        if self._active is not None:
            self._active.finish()
            self._active = None
        self._hang_up()

    def _hang_up(self) -> None:
        channel, self._socket = self._socket, None
        self._note_end()
        if channel is None:
            return
        if self._ours:
            close_blocking(channel)
        else:
            # TLS would tell the server that the parent's connection ends.
            socket.socket.close(channel)


def _set_timeout(channel: socket.socket, timeout: float | None) -> None:
    # Setting it calls the system, also where it says nothing new.
    if channel.gettimeout() != timeout:
        channel.settimeout(timeout)
