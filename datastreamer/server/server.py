"""The server: listeners, sessions, and which sessions a change of the stream affects.

Owns the connected clients. One task per listener accepts (`acceptor.py`), one broadcasts
(`broadcast.py`), and each client has a session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import trio

from datastreamer.errors import UNREADABLE, UnknownEntry
from datastreamer.format import FEATURE_AUTHENTICATE, FEATURE_PUBLISH
from datastreamer.metrics.counters import Counts
from datastreamer.server.admission.accept_balance import AcceptBalance
from datastreamer.server.admission.acceptor import Acceptor
from datastreamer.server.admission.gate import ConnectionSlot, Gate
from datastreamer.server.admission.tokens import TokenExaminer
from datastreamer.server.answers.bookmark_queries import BookmarkQueries
from datastreamer.server.file_watch import FileWatch
from datastreamer.server.healer import Healer
from datastreamer.server.limits import PROVISIONAL_CLIENTS, Limits, room_for_clients
from datastreamer.server.publish.lease import PublishLease
from datastreamer.server.publish.policy import Publishing
from datastreamer.server.scrub import Scrub
from datastreamer.server.session import CHANGED, SERVER_ENDED, Session
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.turns import EntryChange, OtherReader
from datastreamer.server.timeouts import guard
from datastreamer.server.wakes import Wakes
from datastreamer.storage.header.records import Change, Head
from datastreamer.storage.pages.restore import Peer
from datastreamer.storage.parts import ChangeBegins, ChangeEnds, Listener
from datastreamer.storage.stream import DataStream
from datastreamer.transport.listeners import name_of
from datastreamer.transport.server_stream import Transport
from datastreamer.transport.tcp_info import SERVER_KEEPALIVE, keep_alive
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import transport_over
from datastreamer.transport.trio_thread import current_loop, outside_of_loops

_log = logging.getLogger(__name__)

# Interval between checks that every client has received everything.
_POLL_SECONDS = 0.010
_ELSEWHERE = " by another process"
# The part of the grace period in which clients may receive everything; after it, only the rest of
# the current entry.
_UNHURRIED = 0.8

T = TypeVar("T")


class Server:
    """Serves one stream to any number of clients.

    `run` serves until it is cancelled, `finish` shuts down in order.
    """

    def __init__(
        self,
        stream: DataStream,
        *,
        limits: Limits | None = None,
        waker: int | None = None,
        early_waker: int | None = None,
        tls: ServerTLS | None = None,
        balance: AcceptBalance | None = None,
        publishing: Publishing | None = None,
        changes_streams: bool = True,
        logs_file: bool = True,
        heal_from: Sequence[Peer] = (),
        other_connections: int = 0,
    ) -> None:
        """`changes_streams`: if another process writes `stream` and its file is replaced, serve the
        stream that is at the path then. `logs_file`: log if the file is replaced. `heal_from`
        are servers that damaged pages are restored from, if this process writes the stream.
        `early_waker`: an eventfd that becomes readable when another process begins a commit after
        a pause. `other_connections`: descriptors that this process needs for other ports."""
        self.stream = stream
        self.limits = limits or Limits()
        self.counts = Counts()
        self.scrub = Scrub(self.limits.scrub_rate, self.counts)
        self._healer = Healer(heal_from, self.counts)
        self.sessions: dict[Session, None] = {}
        """The clients' sessions, in the order in which they were accepted."""
        self.other_readers: dict[OtherReader, None] = {}
        """Readers of the stream that are no clients of this protocol."""
        self.finish_with: dict[Callable[[float], Awaitable[None]], None] = {}
        """What `finish` calls with its grace period, and waits for."""
        self.publish_lease = (
            None if publishing is None else PublishLease(publishing, stream, tls, self.counts)
        )
        self.watch = FileWatch(stream, logs=logs_file)
        self._changes_streams = changes_streams and stream.follows
        # Whether clients are refused because there is no stream to serve.
        self._stream_missing = False
        # The stream that was opened here in place of one that was replaced.
        self._opened: DataStream | None = None
        self._waker = waker
        self._early_waker = early_waker
        self._other_connections = other_connections
        self.tls = tls
        """Its certificates; None without TLS."""
        # Set if other processes accept from the same listeners.
        self._balance = balance
        self.gate = self._make_gate()
        """The slots of its clients."""
        tokens = self.limits.client_token_file
        self._token_examiner = TokenExaminer(tokens, self.counts.not_allowed, self.gate.refusals)
        self.broadcast = self._broadcast_of(stream)
        self._bookmark_queries = BookmarkQueries(self.broadcast)
        self._accepting = trio.CancelScope()
        self._scope = trio.CancelScope()
        self._finishing = False
        self._changed = trio.Event()

    async def run(
        self,
        listeners: Iterable[socket.socket],
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on listening sockets until cancelled or until `finish` is done; closes them and
        all connections."""
        listeners = list(listeners)
        token = trio.lowlevel.current_trio_token()
        self._fit_into_descriptors()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_opened)
            for listener in listeners:
                stack.callback(listener.close)
                listener.setblocking(False)
            stack.callback(self.stream.parts.feed.subscribe(_in_loop(token, self.change)))
            stack.callback(lambda: self.gate.refusals.flush(0, last=True))
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._serve_streams)
                    nursery.start_soon(guard, self.sessions, self.limits, self.gate)
                    nursery.start_soon(self._accept, listeners, nursery)
                    task_status.started([name_of(listener) for listener in listeners])

    # The stream, and the one that replaces it.

    async def _serve_streams(self) -> None:
        """Broadcast the stream; if another process writes it and its file is replaced, broadcast
        the stream that is at its path then."""
        while True:
            with contextlib.closing(Wakes(self.stream, self._waker)) as wakes:
                await self._serve_stream(wakes)
            successor = await self.watch.successor()
            if successor is not None:
                before, self._opened = self.stream, successor
                self.stream = successor
                self.broadcast = self._broadcast_of(successor)
                self._bookmark_queries.close()
                self._bookmark_queries = BookmarkQueries(self.broadcast)
                # An open descriptor would keep a removed file on the disk.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(before.close)
                self.watch.adopt(successor)
            self._stream_missing = False

    async def _serve_stream(self, wakes: Wakes) -> None:
        """Broadcast the stream until its file is lost and all clients are disconnected."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.broadcast.run, wakes, self._start_over)
            nursery.start_soon(self.broadcast.feed.run)
            nursery.start_soon(self.broadcast.tick, self._start_over)
            nursery.start_soon(self.scrub.run, self.broadcast)
            nursery.start_soon(self._healer.run, self.broadcast)
            if not self._changes_streams:
                await self.watch.report()
            await self.watch.until_lost()
            self._stream_missing = True
            self.watch.say_lost()
            for session in list(self.sessions):
                session.end(CHANGED, self.watch.lost)
            for reader in list(self.other_readers):
                reader.lost()
            await self._until_no_clients()
            nursery.cancel_scope.cancel()

    def _broadcast_of(self, stream: DataStream) -> Broadcast:
        limits = self.limits
        stream.parts.pages.keep_fetched(
            limits.archive_cache, limits.archive_cache_dir, limits.archive_timeout
        )
        made = Broadcast(stream, self.counts, self._early_waker)
        made.features = self._features
        made.pages.on_damage = self._healer.wake
        return made

    def _close_opened(self) -> None:
        self._bookmark_queries.close()
        if self._opened is not None:
            self._opened.close()

    async def _until_no_clients(self) -> None:
        while self.sessions:
            if self._changed.is_set():
                self._changed = trio.Event()
            await self._changed.wait()

    @property
    def unready(self) -> str:
        """The reason why new clients should use another server; empty if they are served."""
        if self._finishing:
            return "the server is shutting down"
        if self._stream_missing:
            return f"{self.stream.path}: {self.watch.lost}"
        return self.broadcast.trouble or self.stream.parts.feed.misplaced

    @property
    def stream_missing(self) -> bool:
        """Whether there is no stream to serve now, because its file was removed or replaced."""
        return self._stream_missing

    @property
    def takes_tokens(self) -> bool:
        return self._token_examiner.takes_tokens

    @property
    def _features(self) -> int:
        publishing = FEATURE_PUBLISH * (self.publish_lease is not None)
        return publishing | FEATURE_AUTHENTICATE * self.takes_tokens

    @property
    def certificate_expires_at(self) -> int | None:
        """When the first of its certificates expires, in seconds since 1970; None without TLS."""
        return None if self.tls is None else self.tls.expires_at

    def _make_gate(self) -> Gate:
        publishing = self.publish_lease is not None
        certificates = self.tls is not None and self.tls.asks_clients
        authenticates = certificates or publishing or self.limits.client_token_file is not None
        reserved = self.limits.reserved if authenticates else 0
        return Gate(self.limits, self.counts, self._balance, reserved, publishing)

    def _fit_into_descriptors(self) -> None:
        wanted, reserved = self.limits.max_clients, self.gate.reserved
        beyond = reserved + PROVISIONAL_CLIENTS if reserved else 0
        beyond += self._other_connections
        room, descriptors = room_for_clients(wanted + beyond)
        room = max(1, room - beyond)
        if room < wanted:
            self.limits = dataclasses.replace(self.limits, max_clients=room)
            self.gate.shrink(self.limits)
            _log.warning(
                "serving at most %d clients, not %d: this process may open %d descriptors; raise "
                "that limit (ulimit -n, LimitNOFILE=) or ask for fewer clients",
                room,
                wanted,
                descriptors,
            )

    async def _accept(self, listeners: list[socket.socket], clients: trio.Nursery) -> None:
        acceptor = Acceptor(
            self.gate,
            self.limits.accept_rate,
            self._balance,
            lambda connection, slot: clients.start_soon(self._serve, connection, slot),
            lambda: not self._stream_missing,
        )
        with self._accepting:
            await acceptor.run(listeners)
        for listener in listeners:
            listener.close()

    async def _serve(self, connection: socket.socket, place: ConnectionSlot) -> None:
        try:
            if place.over:
                connection.close()
                return
            keep_alive(connection.setsockopt, SERVER_KEEPALIVE)
            transport = transport_over(connection, place.peer, self.tls, self.gate.refusals)
            await self.handle(transport, connection, place)
        finally:
            self.gate.leave(place, trio.current_time())

    async def handle(
        self,
        transport: Transport,
        connection: socket.socket | None = None,
        place: ConnectionSlot | None = None,
    ) -> None:
        """Serve one client until it is done. Its failures affect no other. `connection` is the
        socket under the transport, if there is one, and `place` its slot at the gate."""
        if self._stream_missing:
            await transport.close()
            return
        session = Session(
            self.broadcast,
            transport,
            bookmark_queries=self._bookmark_queries,
            connection=connection,
            limits=self.limits,
            publish_lease=self.publish_lease,
            token_examiner=self._token_examiner,
            gate=self.gate,
            place=place,
        )
        self.sessions[session] = None
        _log.debug("%s: connected", transport.peer)
        if self._finishing:
            session.finish(0)
        try:
            await session.run()
        finally:
            del self.sessions[session]
            self.broadcast.forget(session.sender)
            if place is None or not place.short_of:
                self.counts.ended[session.reason or SERVER_ENDED] += 1
            if place is not None:
                # Its slot is free when the metrics cease to count it, not some turns later.
                self.gate.leave(place, trio.current_time())
            with trio.CancelScope(shield=True):
                await transport.close()
            _log.debug("%s: disconnected (%s)", transport.peer, session.reason or SERVER_ENDED)
            self._changed.set()

    # Shutdown.

    async def finish(self, grace: float | None = None) -> bool:
        """Shut down in order: stop accepting, answer the commands received, send streaming clients
        what is committed now, close; at the latest after `grace` seconds (None: the limits').
        Clients that have not received all by then are closed at the end of an entry, or within
        one if they do not receive even that.

        True if every client received everything. `run` returns then. If cancelled, `run`
        continues without listeners.
        """
        grace = self.limits.grace if grace is None else grace
        self._accepting.cancel()
        self.scrub.stop()
        self._finishing = True
        self.stream.refresh_open_file()
        entries = self.stream.total_entries
        async with trio.open_nursery() as nursery:
            for finish in self.finish_with:
                nursery.start_soon(finish, grace)
            late = not await self._leave_within(grace * _UNHURRIED, entries)
            if late:
                unfinished = self._owes(entries)
                await self._leave_within(grace * (1 - _UNHURRIED), 0)
                if unfinished:
                    words = "%d clients did not receive all committed entries within %g s"
                    _log.warning(words, unfinished, grace, extra={"clients": unfinished})
        self._scope.cancel()
        return not late

    async def _leave_within(self, seconds: float, entries: int) -> bool:
        """Let clients finish after `entries` entries; whether all have within `seconds`."""
        for session in list(self.sessions):
            session.finish(entries)
        with trio.move_on_after(seconds):
            await self._until_no_clients()
        return not self.sessions

    # Truncations and updates.

    def change(self, event: ChangeBegins | ChangeEnds) -> None:
        """Entries are about to be truncated or updated: end the sessions that this affects. At the
        end of the change, waiting clients continue."""
        self.broadcast.disarm()
        self.stream.refresh_open_file()
        if isinstance(event, ChangeEnds):
            self.broadcast.release()
            return
        start, stop = event.start, event.stop
        change, affected = self._affected(start, stop, event.offset)
        # Nothing fails from here on, so that each begin is followed by its end.
        self.broadcast.hold(Head(change.offset, start) if stop is None else None)
        self._apply_change(change, affected)

    def _affected(
        self, start: int, stop: int | None, offset: int = 0, *, late: bool = False
    ) -> tuple[EntryChange, list[Session]]:
        """The change of the entries from `start` up to `stop`, and the sessions that it affects."""
        reader = self.stream.reader
        offset = offset or reader.cursor(start).offset
        end = offset if stop is None else reader.cursor(stop).offset
        found = [s for s in self.sessions if s.affected(start, offset, stop, end, late)]
        return EntryChange(start, offset, stop, end, late), found

    def _apply_change(self, change: EntryChange, affected: list[Session], by: str = "") -> None:
        start, offset, stop, _, _ = change
        what = "truncated" if stop is None else "changed"
        for session in affected:
            self._end(session, what + by, start)
        for reader in list(self.other_readers):
            reader.changed(change)
        if stop is None:
            ended = set(affected)
            for session in self.sessions:
                if session not in ended:
                    session.sender.cut_short(start, offset)

    def _start_over(self) -> None:
        """Another process has truncated or updated entries."""
        # A thread that looks up a bookmark may see the next change meanwhile, which is handled in
        # the next pass.
        epoch = self.stream.epoch
        changes = self.stream.changes_since(self.broadcast.turns.epoch)
        try:
            if changes is None:
                self._end_all_senders()
            else:
                self._apply_known_changes(changes)
        except (*UNREADABLE, UnknownEntry):
            self._end_all_senders()
        self.broadcast.begin_anew(epoch)

    def _apply_known_changes(self, changes: Sequence[Change]) -> None:
        """Handle changes that were made some time ago as if each had been announced."""
        entries = self.stream.reader.head.entries
        cut = min((change.start for change in changes if change.stop is None), default=entries)
        for _, start, stop in changes:
            if stop is not None and stop <= cut:
                self._apply_change(*self._affected(start, stop, late=True), _ELSEWHERE)
        if any(change.stop is None for change in changes):
            change, affected = self._affected(cut, None, late=True)
            self.broadcast.cut_short(Head(change.offset, cut))
            self._apply_change(change, affected, _ELSEWHERE)

    def _end_all_senders(self) -> None:
        """The changes are not recorded: end every session that is being sent entries."""
        head = self.broadcast.view.head = self.stream.reader.head
        for session in list(self.sessions):
            if session.sending:
                self._end(session, "changed" + _ELSEWHERE, head.entries)
        for reader in list(self.other_readers):
            reader.lost()

    def _end(self, session: Session, what: str, number: int) -> None:
        at = session.sender.cursor.number
        words = f"the stream was {what} at entry {number}, this client is at entry {at}"
        session.end(CHANGED, words)

    async def drain(self, seconds: float) -> bool:
        """Wait until every streaming client was sent all entries that are committed now.

        False if that takes more than `seconds`.
        """
        self.stream.refresh_open_file()
        target = self.stream.total_entries
        with trio.move_on_after(seconds):
            # Entries are sent in many places, which would each have to count.
            while self._owes(target):  # noqa: ASYNC110
                await trio.sleep(_POLL_SECONDS)
            return True
        return False

    def _owes(self, entries: int) -> int:
        """The number of streaming clients that were not sent the first `entries` entries."""
        self.broadcast.locate()
        return sum(session.sender.owes(entries) for session in self.sessions)


def _in_loop(token: trio.lowlevel.TrioToken, listener: Listener) -> Listener:
    """`listener`, called in the event loop's thread from any thread."""

    def call(event: ChangeBegins | ChangeEnds) -> None:
        def hand_over() -> None:
            trio.from_thread.run_sync(listener, event, trio_token=token)

        if current_loop() is token:
            listener(event)
        else:
            with contextlib.suppress(trio.RunFinishedError):
                outside_of_loops(hand_over)

    return call
