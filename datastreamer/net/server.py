"""The server: listeners, sessions, and whom a change of the stream concerns.

Owns who is connected. One task accepts per listener, one makes the passes (`live.py`),
each client has a session.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import trio

from datastreamer.net.counts import Counts
from datastreamer.net.listen import Hosts, name_of, open_listeners, peer_of
from datastreamer.net.live import Live, wakeup
from datastreamer.net.secure import transport_over
from datastreamer.net.session import Session
from datastreamer.net.tls import ServerTLS
from datastreamer.net.transport import Transport
from datastreamer.storage.record import Head
from datastreamer.storage.stream import ChangeCallback, DataStream

_log = logging.getLogger(__name__)

# This often it is looked whether everybody has all.
_POLL_SECONDS = 0.010
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# What accept gives where the listener itself is no more.
_NO_LISTENER = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP)
_ACCEPT_PAUSE = 0.1

T = TypeVar("T")


class Server:
    """Serves one stream to any number of clients. Made and run by `serve`."""

    def __init__(
        self,
        stream: DataStream,
        *,
        max_clients: int = 10_000,
        waker: int | None = None,
        tls: ServerTLS | None = None,
    ) -> None:
        self.stream = stream
        self.counts = Counts()
        self.live = Live(stream, self.counts)
        self.sessions: set[Session] = set()
        self._max_clients = max_clients
        self._waker = waker
        self._tls = tls

    async def run(
        self,
        listeners: Iterable[socket.socket],
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on listening sockets until cancelled; closes them and all clients."""
        listeners = list(listeners)
        token = trio.lowlevel.current_trio_token()
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.callback(listener.close)
                listener.setblocking(False)
            woken = stack.enter_context(wakeup(self.stream, self._waker))
            stack.callback(self.stream.on_change(_in_loop(token, self.change)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.live.run, woken, self._start_over)
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
                task_status.started([name_of(listener) for listener in listeners])

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        short_of_descriptors = False
        while True:
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener)
                continue
            except OSError as error:
                if error.errno in _NO_LISTENER:
                    raise
                if error.errno in _OUT_OF_DESCRIPTORS:
                    if not short_of_descriptors:
                        _log.error("connections wait: %s; raise the limit", error.strerror)
                    short_of_descriptors = True
                    await trio.sleep(_ACCEPT_PAUSE)
                await trio.lowlevel.checkpoint()
                continue
            short_of_descriptors = False
            if len(self.sessions) >= self._max_clients:
                _log.warning(
                    "%s refused: %d clients are connected, which is the limit",
                    peer_of(connection, address),
                    len(self.sessions),
                )
                connection.close()
            else:
                session = self._admit(transport_over(connection, address, self._tls))
                nursery.start_soon(self._look_after, session)
            await trio.lowlevel.checkpoint()

    async def handle(self, transport: Transport) -> None:
        """Serve one client until it is done. Its failures are its own."""
        await self._look_after(self._admit(transport))

    def _admit(self, transport: Transport) -> Session:
        session = Session(self.live, transport)
        self.sessions.add(session)
        _log.debug("%s: connected", transport.peer)
        return session

    async def _look_after(self, session: Session) -> None:
        transport = session.transport
        try:
            await session.run()
        finally:
            self.sessions.discard(session)
            self.live.forget(session.sender)
            with trio.CancelScope(shield=True):
                await transport.close()
            _log.debug("%s: disconnected", transport.peer)

    # Changes of what was sent already.

    def change(self, start: int, stop: int | None, done: bool) -> None:
        """Entries are about to go or to be changed: end whom that concerns, now. Or that is
        done: whoever waits goes on."""
        self.stream.refresh()
        if done:
            self.live.release()
            return
        reader = self.stream.reader
        offset = reader.cursor(start).offset
        end = offset if stop is None else reader.cursor(stop).offset
        concerned = [s for s in self.sessions if s.concerned(start, offset, stop, end)]
        # Nothing fails from here on: who is told of the begin is told of the end.
        self.live.hold(Head(offset, start) if stop is None else None)
        for session in concerned:
            self._end(session, "truncated" if stop is None else "changed", start)
        if stop is None:
            for session in self.sessions.difference(concerned):
                session.sender.cut_short(start, offset)

    def _start_over(self) -> None:
        """Another process took entries back or changed them; what, is not known here."""
        head = self.live.view.head = self.stream.reader.head
        for session in list(self.sessions):
            if session.streaming:
                self._end(session, "changed by another process", head.entries)
        self.live.begin_anew()

    def _end(self, session: Session, what: str, number: int) -> None:
        _log.info(
            "%s: connection ended: the stream was %s at entry %d, this client is at entry %d",
            session.transport.peer,
            what,
            number,
            session.sender.cursor.number,
        )
        session.end()

    async def drain(self, seconds: float) -> bool:
        """Wait until every streaming client has been sent all that is committed now.

        True when that is so, False after `seconds`.
        """
        self.stream.refresh()
        target = self.stream.total_entries
        with trio.move_on_after(seconds):
            # Clients get on in many places, in the pass above all; none of them counts.
            while any(session.sender.owes(target) for session in self.sessions):  # noqa: ASYNC110
                await trio.sleep(_POLL_SECONDS)
            return True
        return False


async def serve(
    stream: DataStream,
    *,
    host: Hosts = None,
    port: int | None = 6900,
    unix: str | os.PathLike[str] | None = None,
    listeners: Iterable[socket.socket] | None = None,
    tls: ServerTLS | None = None,
    max_clients: int = 10_000,
    waker: int | None = None,
    task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `stream` until cancelled: ``await nursery.start(partial(serve, stream, port=0))``.

    Starts with the addresses it listens on, [(host, port), ...]: every interface, IPv4
    and IPv6, unless `host` names one or several; a Unix socket at the path `unix` beside
    them, ("unix:PATH", 0), or alone where `port` is None; or `listeners` that are bound
    already. With `tls` TCP is spoken with TLS alone; `tls.reload()` has its files read
    again. The stream
    may be open for writing (commits of this process, from any thread, are served at
    once) or with `follow=True`; it stays the caller's to close. `waker` is a non-blocking
    descriptor that becomes readable when another process has committed.

    Raises `ListenFailed`. Cancelling it closes the listeners and every connection.
    """
    server = Server(stream, max_clients=max_clients, waker=waker, tls=tls)
    sockets = open_listeners(host, port, unix) if listeners is None else listeners
    await server.run(sockets, task_status=task_status)


def _in_loop(token: trio.lowlevel.TrioToken, callback: ChangeCallback) -> ChangeCallback:
    """The callback, run in the loop's thread wherever it is called from."""

    def call(start: int, stop: int | None, done: bool) -> None:
        def hand_over() -> None:
            trio.from_thread.run_sync(callback, start, stop, done, trio_token=token)

        if _loop_here() is token:
            callback(start, stop, done)
        else:
            with contextlib.suppress(trio.RunFinishedError):
                outside_of_loops(hand_over)

    return call


def outside_of_loops(call: Callable[[], T]) -> T:
    """`call()`, in another thread where this one runs an event loop: from there trio lets
    nobody wait for a second loop."""
    if _loop_here() is None:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def _loop_here() -> trio.lowlevel.TrioToken | None:
    try:
        return trio.lowlevel.current_trio_token()
    except RuntimeError:
        return None
