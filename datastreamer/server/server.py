"""The server: listeners, sessions, and whom a change of the stream concerns.

Owns who is connected. One task accepts per listener, one makes the passes (`live.py`),
each client has a session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import trio

from datastreamer.errors import DamagedFile, UnknownEntry
from datastreamer.format import FEATURE_AUTHENTICATE, FEATURE_PUBLISH
from datastreamer.metrics.counters import Counts
from datastreamer.server.admission.accept_balance import AcceptBalance
from datastreamer.server.admission.gate import NO_STREAM, ConnectionSlot, Gate, Pace
from datastreamer.server.admission.tokens import TokenExaminer
from datastreamer.server.file_watch import FileWatch
from datastreamer.server.limits import PROVISIONAL_CLIENTS, Limits, room_for_clients
from datastreamer.server.publish.lease import PublishLease
from datastreamer.server.publish.policy import Publishing, check_client_tokens
from datastreamer.server.session import CHANGED, SERVER_ENDED, Session
from datastreamer.server.streaming.broadcast import Broadcast, wakeup
from datastreamer.server.timeouts import guard
from datastreamer.storage.header.records import Change, Head
from datastreamer.storage.stream import ChangeCallback, DataStream
from datastreamer.transport.listeners import Hosts, host_of, name_of, open_listeners, peer_of
from datastreamer.transport.server_stream import Transport
from datastreamer.transport.tcp_info import keep_alive
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import transport_over

_log = logging.getLogger(__name__)

# This often it is looked whether everybody has all.
_POLL_SECONDS = 0.010
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# What accept gives where the listener itself is no more.
_NO_LISTENER = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP)
_ACCEPT_PAUSE = 0.1
_ELSEWHERE = " by another process"
# Of a crowd that knocks at once, so many are let in before the others have their turn.
_ACCEPTED_TOGETHER = 16
# At the end clients have so much of the grace to take all; then only to an entry's end.
_UNHURRIED = 0.8

T = TypeVar("T")


class Server:
    """Serves one stream to any number of clients. Made and run by `serve`, or by oneself
    where a good end is wanted: ``await nursery.start(server.run, listeners)`` and, later,
    ``await server.finish()``."""

    def __init__(
        self,
        stream: DataStream,
        *,
        limits: Limits | None = None,
        waker: int | None = None,
        tls: ServerTLS | None = None,
        turns: AcceptBalance | None = None,
        publishing: Publishing | None = None,
        changes_streams: bool = True,
        logs_file: bool = True,
    ) -> None:
        """`changes_streams`: where another process writes `stream` and its file is replaced, go on
        with the stream that is at the path then. `logs_file`: say what becomes of the file."""
        self.stream = stream
        self.limits = limits or Limits()
        self.counts = Counts()
        self.live = Broadcast(stream, self.counts)
        self.sessions: set[Session] = set()
        self.desk = (
            None if publishing is None else PublishLease(publishing, stream, tls, self.counts)
        )
        self.watch = FileWatch(stream, logs=logs_file)
        self._changes_streams = changes_streams and stream.follows
        # Whether clients are refused until there is a stream to serve.
        self._without_stream = False
        # What was opened here in place of a stream that was replaced.
        self._opened: DataStream | None = None
        self._waker = waker
        self._tls = tls
        # Where other processes accept from the same listeners.
        self._turns = turns
        self._gate = self._make_gate()
        tokens = self.limits.client_token_file
        self._examiner = TokenExaminer(tokens, self.counts, self._gate.refusals)
        self.live.features = self._features
        self._accepting = trio.CancelScope()
        self._scope = trio.CancelScope()
        self._finishing = False
        self._changed = trio.Event()

    async def run(
        self,
        listeners: Iterable[socket.socket],
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on listening sockets until cancelled or until `finish` is through; closes
        them and all clients."""
        listeners = list(listeners)
        token = trio.lowlevel.current_trio_token()
        self._fit_into_descriptors()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_opened)
            for listener in listeners:
                stack.callback(listener.close)
                listener.setblocking(False)
            woken = stack.enter_context(wakeup(self.stream, self._waker))
            stack.callback(self.stream.on_change(_in_loop(token, self.change)))
            stack.callback(lambda: self._gate.refusals.flush(0, last=True))
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._serve_streams, woken)
                    nursery.start_soon(guard, self.sessions, self.limits, self._gate)
                    nursery.start_soon(self._accept_all, listeners, nursery)
                    task_status.started([name_of(listener) for listener in listeners])

    # The stream, and the one that replaces it.

    async def _serve_streams(self, woken: int) -> None:
        """Keep passes going over the stream and, where another process writes it and its file
        is replaced, over the stream that is at its path then."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.live.run, woken, self._start_over)
                nursery.start_soon(self.live.poll, self._start_over)
                if not self._changes_streams:
                    await self.watch.report()
                await self.watch.until_lost()
                self._without_stream = True
                self.watch.say_lost()
                for session in list(self.sessions):
                    session.end(CHANGED, self.watch.lost)
                await self._until_nobody_is_here()
                nursery.cancel_scope.cancel()
            successor = await self.watch.successor()
            if successor is not None:
                before, self._opened = self.stream, successor
                self.stream = successor
                self.live = Broadcast(successor, self.counts)
                self.live.features = self._features
                # Else a file that was removed kept its place on the disk.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(before.close)
                self.watch.adopt(successor)
            self._without_stream = False

    def _close_opened(self) -> None:
        if self._opened is not None:
            self._opened.close()

    async def _until_nobody_is_here(self) -> None:
        while self.sessions:
            if self._changed.is_set():
                self._changed = trio.Event()
            await self._changed.wait()

    @property
    def clients(self) -> int:
        """How many connections have a place here: one that ends keeps it until it is closed."""
        return self._gate.clients

    @property
    def unready(self) -> str:
        """Why new clients had better go elsewhere; empty where they are served."""
        if self._finishing:
            return "the server is about to end"
        if self._without_stream:
            return f"{self.stream.path}: {self.watch.lost}"
        return self.live.trouble or self.stream.misplaced

    @property
    def gate(self) -> Gate:
        """The places of its clients."""
        return self._gate

    @property
    def takes_tokens(self) -> bool:
        """Whether clients may show a token."""
        return self._examiner.takes_tokens

    @property
    def _features(self) -> int:
        """What clients are told of beside what every server of ours has."""
        publishing = FEATURE_PUBLISH * (self.desk is not None)
        return publishing | FEATURE_AUTHENTICATE * self.takes_tokens

    @property
    def authenticates(self) -> bool:
        """Whether a client has any way to prove who it is."""
        certificates = self._tls is not None and self._tls.asks_clients
        tokens = self.limits.client_token_file is not None
        return certificates or tokens or self.desk is not None

    def _make_gate(self) -> Gate:
        reserved = self.limits.reserved if self.authenticates else 0
        publishing = self.desk is not None
        return Gate(self.limits, self.counts, self._turns, reserved, publishing)

    def _fit_into_descriptors(self) -> None:
        wanted, reserved = self.limits.max_clients, self._gate.reserved
        beyond = reserved + PROVISIONAL_CLIENTS if reserved else 0
        room, descriptors = room_for_clients(wanted + beyond)
        room = max(1, room - beyond)
        if room < wanted:
            self.limits = dataclasses.replace(self.limits, max_clients=room)
            self._gate.shrink(self.limits)
            _log.warning(
                "at most %d clients, not %d: this process may have %d descriptors open; raise "
                "that (ulimit -n, LimitNOFILE=), or ask for fewer",
                room,
                wanted,
                descriptors,
            )

    async def _accept_all(self, listeners: list[socket.socket], clients: trio.Nursery) -> None:
        rate = self.limits.accept_rate
        pace = None if rate is None else Pace(rate, trio.current_time())
        self._gate.note_room()
        try:
            with self._accepting:
                async with trio.open_nursery() as nursery:
                    for listener in listeners:
                        nursery.start_soon(self._accept, listener, clients, pace)
        finally:
            self._gate.close()
        for listener in listeners:
            listener.close()

    async def _accept(
        self, listener: socket.socket, clients: trio.Nursery, pace: Pace | None
    ) -> None:
        short_of_descriptors = False
        together = 0
        while True:
            if self._turns is not None:
                await trio.lowlevel.wait_readable(listener)
                await self._turns.wait()
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                together = 0
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
            now = trio.current_time()
            place = None
            if self._without_stream:
                self.counts.refused[NO_STREAM] += 1
            else:
                peer = peer_of(connection, address)
                place = self._gate.admit(host_of(address), peer, now)
            if place is None:
                connection.close()
            else:
                clients.start_soon(self._serve, connection, place)
            together += 1
            if pace is not None:
                await trio.sleep(pace.step(now))
            elif together % _ACCEPTED_TOGETHER == 0:
                await trio.lowlevel.checkpoint()

    async def _serve(self, connection: socket.socket, place: ConnectionSlot) -> None:
        try:
            if place.over:
                connection.close()
                return
            keep_alive(connection)
            transport = transport_over(connection, place.peer, self._tls, self._gate.refusals)
            await self.handle(transport, connection, place)
        finally:
            self._gate.leave(place, trio.current_time())

    async def handle(
        self,
        transport: Transport,
        connection: socket.socket | None = None,
        place: ConnectionSlot | None = None,
    ) -> None:
        """Serve one client until it is done. Its failures are its own. `connection` is the
        socket under the transport, where there is one, and `place` its place at the gate."""
        if self._without_stream:
            await transport.close()
            return
        session = Session(
            self.live,
            transport,
            connection=connection,
            limits=self.limits,
            desk=self.desk,
            examiner=self._examiner,
            gate=self._gate,
            place=place,
        )
        self.sessions.add(session)
        _log.debug("%s: connected", transport.peer)
        if self._finishing:
            session.finish(0)
        try:
            await session.run()
        finally:
            self.sessions.discard(session)
            self.live.forget(session.sender)
            if place is None or not place.short_of:
                self.counts.ended[session.reason or SERVER_ENDED] += 1
            with trio.CancelScope(shield=True):
                await transport.close()
            _log.debug("%s: disconnected (%s)", transport.peer, session.reason or SERVER_ENDED)
            self._changed.set()

    # The end.

    async def finish(self, grace: float | None = None) -> bool:
        """End in good order: let nobody in, answer what was asked, send streaming clients what
        is committed now, close; at the latest after `grace` seconds (None: the limits').
        Clients that cannot take all by then are cut off at an entry's end, or in the middle of
        one if they do not take even that.

        True when everybody had all. `run` returns then. Cancelled, it leaves `run` going,
        without listeners.
        """
        grace = self.limits.grace if grace is None else grace
        self._accepting.cancel()
        self._finishing = True
        self.stream.refresh_open_file()
        entries = self.stream.total_entries
        late = not await self._leave_within(grace * _UNHURRIED, entries)
        if late:
            behind = sum(session.sender.owes(entries) for session in self.sessions)
            await self._leave_within(grace * (1 - _UNHURRIED), 0)
            if behind:
                words = "%d clients did not take all within %g s"
                _log.warning(words, behind, grace, extra={"clients": behind})
        self._scope.cancel()
        return not late

    async def _leave_within(self, seconds: float, entries: int) -> bool:
        """Whether all clients have left `seconds` after they were told how far to go."""
        for session in list(self.sessions):
            session.finish(entries)
        with trio.move_on_after(seconds):
            await self._until_nobody_is_here()
        return not self.sessions

    # Changes of what was sent already.

    def change(self, start: int, stop: int | None, done: bool) -> None:
        """Entries are about to go or to be changed: end whom that concerns, now. Or that is
        done: whoever waits goes on."""
        self.stream.refresh_open_file()
        if done:
            self.live.release()
            return
        offset, concerned = self._concerned(start, stop)
        # Nothing fails from here on: who is told of the begin is told of the end.
        self.live.hold(Head(offset, start) if stop is None else None)
        self._carry_out(start, stop, offset, concerned)

    def _concerned(
        self, start: int, stop: int | None, *, late: bool = False
    ) -> tuple[int, set[Session]]:
        """Where the entries from `start` on stand, and whom a change of them, up to
        `stop`, concerns."""
        reader = self.stream.reader
        offset = reader.cursor(start).offset
        end = offset if stop is None else reader.cursor(stop).offset
        found = {s for s in self.sessions if s.concerned(start, offset, stop, end, late)}
        return offset, found

    def _carry_out(
        self, start: int, stop: int | None, offset: int, concerned: set[Session], by: str = ""
    ) -> None:
        what = "truncated" if stop is None else "changed"
        for session in concerned:
            self._end(session, what + by, start)
        if stop is None:
            for session in self.sessions.difference(concerned):
                session.sender.cut_short(start, offset)

    def _start_over(self) -> None:
        """Another process took entries back or changed them."""
        # A thread that asks for a bookmark may see the next change meanwhile; that one has a
        # turn of its own.
        epoch = self.stream.epoch
        told = self.stream.changes_since(self.live.epoch)
        try:
            if told is None:
                self._start_over_with_nobody()
            else:
                self._start_over_where(told)
        except (DamagedFile, UnknownEntry):
            self._start_over_with_nobody()
        self.live.begin_anew(epoch)

    def _start_over_where(self, told: Sequence[Change]) -> None:
        """As if each change had been announced; the file has gone on since."""
        entries = self.stream.reader.head.entries
        cut = min((change.start for change in told if change.stop is None), default=entries)
        for _, start, stop in told:
            if stop is not None and stop <= cut:
                offset, concerned = self._concerned(start, stop, late=True)
                self._carry_out(start, stop, offset, concerned, _ELSEWHERE)
        if any(change.stop is None for change in told):
            offset, concerned = self._concerned(cut, None, late=True)
            self.live.cut_short(Head(offset, cut))
            self._carry_out(cut, None, offset, concerned, _ELSEWHERE)

    def _start_over_with_nobody(self) -> None:
        """What was changed is not known here."""
        head = self.live.view.head = self.stream.reader.head
        for session in list(self.sessions):
            if session.sending:
                self._end(session, "changed" + _ELSEWHERE, head.entries)

    def _end(self, session: Session, what: str, number: int) -> None:
        at = session.sender.cursor.number
        words = f"the stream was {what} at entry {number}, this client is at entry {at}"
        session.end(CHANGED, words)

    async def drain(self, seconds: float) -> bool:
        """Wait until every streaming client has been sent all that is committed now.

        True when that is so, False after `seconds`.
        """
        self.stream.refresh_open_file()
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
    limits: Limits | None = None,
    waker: int | None = None,
    publishing: Publishing | None = None,
    task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `stream` until cancelled: ``await nursery.start(partial(serve, stream, port=0))``.

    Starts with the addresses it listens on, [(host, port), ...]: every interface, IPv4
    and IPv6, unless `host` names one or several; a Unix socket at the path `unix` beside
    them, ("unix:PATH", 0), or alone where `port` is None; or `listeners` that are bound
    already. With `tls` TCP is spoken with TLS alone; `tls.reload()` has its files read
    again. The stream
    may be open for writing (commits of this process, from any thread, are served at
    once) or with `follow=True`; it stays the caller's to close. One with `follow=True` is closed
    where its file is replaced, and the stream that is at its path then is served. `limits` are
    the defaults of `Limits` where none are given. `waker` is a non-blocking descriptor that
    becomes readable when another process has committed. `publishing` says who may publish into
    the stream, which is open for writing then (``docs/PUBLISHING.md``).

    Raises `ListenFailed`, and `UsageError` where the limits' client token file has no tokens.
    Cancelling it closes the listeners and every connection at once;
    `Server.finish` is the way to end in good order.
    """
    check_client_tokens(None if limits is None else limits.client_token_file)
    server = Server(stream, limits=limits, waker=waker, tls=tls, publishing=publishing)
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
