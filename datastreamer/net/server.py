"""The server: listeners, the pass that serves live clients, and everybody's lifetimes.

Owns the view: how far the pass has come, which is what sessions stream from. One task
accepts per listener, one makes the passes, each client has a session.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import trio

from datastreamer.errors import DamagedFile, StreamFileError
from datastreamer.net._fanout import fan_out
from datastreamer.net.listen import Hosts, name_of, open_listeners, peer_of
from datastreamer.net.secure import transport_over
from datastreamer.net.session import Session, State
from datastreamer.net.tls import ServerTLS
from datastreamer.net.transport import Transport
from datastreamer.storage.reader import Cursor
from datastreamer.storage.record import Head
from datastreamer.storage.stream import ChangeCallback, DataStream

_log = logging.getLogger(__name__)

# One pass sends so much to each client, and takes so long, before others have a turn.
_PASS_BYTES = 128 * 1024
_PASS_NS = 2_000_000
# A commit wakes the pass; this often it looks for one that did not.
_POLL_SECONDS = 0.010
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# What accept gives where the listener itself is no more.
_NO_LISTENER = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP)
_ACCEPT_PAUSE = 0.1
# After a header that cannot be read.
_DAMAGE_PAUSE = 1.0

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
        self.view = stream.new_reader()
        self.parked: set[Session] = set()
        self.sessions: set[Session] = set()
        self._live: dict[Session, int] = {}
        self._max_clients = max_clients
        self._epoch = stream.epoch
        self._waker = waker
        self._tls = tls
        # How many changes of what was committed are under way in this process.
        self._held = 0
        self._settling = trio.lowlevel.ParkingLot()

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
            wakeup = stack.enter_context(_wakeup(self.stream, self._waker))
            stack.callback(self.stream.on_change(_in_loop(token, self.change)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_forever, wakeup)
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
        session = Session(self, transport)
        self.sessions.add(session)
        _log.debug("%s: connected", transport.peer)
        return session

    async def _look_after(self, session: Session) -> None:
        transport = session.transport
        try:
            await session.run()
        finally:
            self.sessions.discard(session)
            self.parked.discard(session)
            # A descriptor leaves the pass before it is closed.
            self.leave_live(session)
            with trio.CancelScope(shield=True):
                await transport.close()
            _log.debug("%s: disconnected", transport.peer)

    # The pass.

    def join_live(self, session: Session) -> None:
        """Have the pass serve a session whose cursor is where the last pass ended."""
        fd = session.transport.socket_fd
        assert fd is not None and session.cursor.number == self.view.head.entries
        session.state = State.LIVE
        self._live[session] = fd

    def leave_live(self, session: Session) -> None:
        """The session writes to its connection by itself again."""
        if self._live.pop(session, None) is not None:
            session.state = State.CATCH_UP

    async def _pass_forever(self, wakeup: int) -> None:
        trouble = ""
        while True:
            await self._settle()
            try:
                self.stream.refresh()
            except (StreamFileError, OSError) as error:
                # The file may be repaired.
                if str(error) != trouble:
                    trouble = str(error)
                    _log.error("nothing new can be seen: %s", trouble)
                await trio.sleep(_DAMAGE_PAUSE)
                continue
            trouble = ""
            if self.stream.epoch != self._epoch:
                self._start_over()
            if self._settling and not self.changing:
                self._begin_anew()
            await self._catch_up_live()
            with trio.move_on_after(_POLL_SECONDS):
                await trio.lowlevel.wait_readable(wakeup)
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)

    async def _catch_up_live(self) -> None:
        while not self.changing:
            head = self.stream.reader.head
            place = Cursor(*self.view.head)
            if place.number >= head.entries:
                return
            if not self._live:
                self._move_view(head)
                return
            try:
                chunk = self.stream.reader.chunk(place, _PASS_BYTES)
            except DamagedFile:
                # Not the pass's to judge: each client comes there by itself, and ends there.
                if not self.outdated():
                    self._dismiss(list(self._live))
                    self._move_view(head)
                continue
            if self.outdated():
                return
            while behind := [s for s in self._live if s.cursor.number == place.number]:
                results = fan_out([self._live[s] for s in behind], chunk.data, _PASS_NS)
                size = len(chunk.data)
                for session, sent in zip(behind, results, strict=False):
                    if sent == size:
                        session.cursor, session.at = chunk.next, chunk.next.offset
                    else:
                        self._drop_out(session, place, chunk.start, sent)
                if len(results) < len(behind):
                    await trio.lowlevel.checkpoint()
                    if self.changing:
                        # Who has this run already waits for the next one by himself.
                        self._dismiss([s for s in self._live if s.cursor.number > place.number])
                        return
            self._move_view(Head(*chunk.next))
            await trio.lowlevel.checkpoint()

    def _move_view(self, head: Head) -> None:
        self.view.head = head
        self._wake_parked()

    def _dismiss(self, sessions: list[Session]) -> None:
        for session in sessions:
            self.leave_live(session)
            session.wake()

    def _drop_out(self, session: Session, place: Cursor, start: int, sent: int) -> None:
        """A client took less than the whole run, or is gone: its own sender goes on."""
        del self._live[session]
        if sent < 0 and -sent not in (errno.EAGAIN, errno.EWOULDBLOCK):
            _log.debug("%s: gone: %s", session.transport.peer, os.strerror(-sent))
            sent = 0
        session.fell_behind(place, start + sent if sent > 0 else place.offset)

    def _wake_parked(self) -> None:
        parked, self.parked = self.parked, set()
        for session in parked:
            session.wake()

    # Changes of what was sent already.

    @property
    def changing(self) -> bool:
        """Whether committed entries are being taken back or changed, or were just now.

        Nothing is read or sent then, but by whom it cannot concern.
        """
        stream = self.stream
        return self._held > 0 or stream.epoch != self._epoch or stream.changing

    def outdated(self) -> bool:
        """Whether what was just read may be of another history, or half changed."""
        self.stream.refresh()
        return self.changing

    async def settled(self) -> None:
        """Return when no change is under way."""
        while self.changing:
            await self._settling.park()

    async def _settle(self) -> None:
        """Wait for the end of a change in this process."""
        while self._held:
            await self._settling.park()

    def change(self, start: int, stop: int | None, done: bool) -> None:
        """Entries are about to go or to be changed: end whom that concerns, now. Or that is
        done: whoever waits goes on."""
        self.stream.refresh()
        if done:
            self._held -= 1
            self._begin_anew()
            return
        reader = self.stream.reader
        offset = reader.cursor(start).offset
        end = offset if stop is None else reader.cursor(stop).offset
        concerned = [s for s in self.sessions if s.concerned(start, offset, stop, end)]
        # Nothing fails from here on: who is told of the begin is told of the end.
        self._held += 1
        for session in concerned:
            self._end(session, "truncated" if stop is None else "changed", start)
        if stop is None:
            for session in self.sessions.difference(concerned):
                session.cut_short(start, offset)
            # Who waits at the end waits at the new one; nothing behind it is sent any more.
            self.view.head = min(self.view.head, Head(offset, start))

    def _start_over(self) -> None:
        """Another process took entries back or changed them; what, is not known here."""
        self.view.head = self.stream.reader.head
        for session in list(self.sessions):
            if session.streaming:
                self._end(session, "changed by another process", self.view.head.entries)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.view.forget()
        self._epoch = self.stream.epoch
        self._settling.unpark_all()
        self._wake_parked()

    def _end(self, session: Session, what: str, number: int) -> None:
        _log.info(
            "%s: connection ended: the stream was %s at entry %d, this client is at entry %d",
            session.transport.peer,
            what,
            number,
            session.cursor.number,
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
            while any(session.owes(target) for session in self.sessions):  # noqa: ASYNC110
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


@contextlib.contextmanager
def _wakeup(stream: DataStream, waker: int | None) -> Iterator[int]:
    """A descriptor to read that becomes readable with each commit."""
    if waker is not None:
        yield waker
        return
    if hasattr(os, "eventfd"):
        reading = writing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    else:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
    stream.add_waker(writing, inside=True)
    try:
        yield reading
    finally:
        stream.remove_waker(writing)
        for fd in {reading, writing}:
            os.close(fd)


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
