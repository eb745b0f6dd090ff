"""Servers for the clients' tests: an honest one in memory, and its bad habits as options.

`Stub` is fed bytes and says what to send and whether to close; `serve_stream` runs it on
a trio stream, `StubServer` on loopback sockets in a thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import trio

from datastreamer._codec import Entry
from datastreamer.format import TYPE_BOOKMARK, Header
from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    EntryQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
)
from datastreamer.protocol.messages import (
    NOT_FOUND,
    OK,
    Capabilities,
    encode_batch_head,
    encode_chosen_head,
    encode_range_head,
    encode_result,
)
from datastreamer.protocol.server import Drop, End, Event, Refuse, ServerConnection
from datastreamer.selection.clauses import Clause, Selection

EXTENSIONS = (CapabilitiesQuery, BatchQuery, RangeQuery)
ALREADY_STARTED = encode_result(1)


def sample(count: int) -> list[Entry]:
    """Entries 0 to count - 1; every tenth is a bookmark with its number as key."""
    return [
        Entry(n, TYPE_BOOKMARK, key(n)) if n % 10 == 0 else Entry(n, n % 7, bytes([n % 256]) * n)
        for n in range(count)
    ]


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


class Stub:
    """One connection to a stream in memory.

    `live` are entries that follow one by one, each when the client was sent all before;
    `behind_stop` are sent after a Stop's Result. `after_refusal`: "usable", "closed", or
    "refusing" everything. `deaf` to requests of these types. `extensions`: "known"; "refused";
    "fatal", after whose refusal nothing is answered any more; "closed" on.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        stream_type: int = 1,
        behind_stop: Sequence[Entry] = (),
        after_refusal: str = "usable",
        deaf: tuple[type, ...] = (),
        header_total: int | None = None,
        extensions: str = "known",
        max_batch_count: int = 1000,
        max_batch_bytes: int = 100_000,
    ) -> None:
        self.entries = list(entries)
        self.behind_stop = behind_stop
        self.after_refusal = after_refusal
        self.deaf = deaf
        self.header_total = header_total
        self.extensions = extensions
        # What is committed while a batch is waited for, one time after the other.
        self.commits: Iterator[list[Entry]] = iter(())
        self.limits = max_batch_count, max_batch_bytes
        self.connection = ServerConnection(stream_type)
        self.cursor: int | None = None
        self.seen: list[Event] = []
        self.refusing = False
        self.closed = False

    def receive(self, data: bytes) -> bytes:
        """What to send for what has come."""
        self.connection.receive(data)
        sent = b""
        while not self.closed and (event := self.connection.next_event()) is not None:
            self.seen.append(event)
            if isinstance(event, EXTENSIONS) and self.extensions != "known":
                sent += self.unknown()
            elif not isinstance(event, self.deaf):
                sent += self.answer(event)
        return sent

    def unknown(self) -> bytes:
        if self.extensions != "refused":
            self.closed = True
        return b"" if self.extensions == "closed" else encode_result(9)

    def batch(self, query: BatchQuery) -> bytes:
        self.append(*next(self.commits, ()))
        count, size = self.limits
        total, found, payload = len(self.entries), 0, b""
        for entry in self.entries[query.from_entry :][: min(query.max_count or count, count)]:
            packed = entry.pack()
            if found and len(payload) + len(packed) > min(query.max_bytes or size, size):
                break
            payload += packed
            found += 1
        return encode_batch_head(found, query.from_entry, total, len(payload)) + payload

    def append(self, *entries: Entry) -> bytes:
        """What to send when these are committed."""
        self.entries += entries
        return self.pump()

    def pump(self) -> bytes:
        if self.cursor is None:
            return b""
        sent = b"".join(entry.pack() for entry in self.entries[self.cursor :])
        self.cursor = len(self.entries)
        return sent

    def answer(self, event: Event) -> bytes:
        if self.refusing and not isinstance(event, Drop | End):
            return ALREADY_STARTED
        total = len(self.entries)
        match event:
            case HeaderQuery():
                claimed = total if self.header_total is None else self.header_total
                return OK + Header(2, 137, 1, 4096 + claimed, claimed).pack()
            case EntryQuery(number):
                return OK + (self.entries[number].pack(0xFE) if number < total else NOT_FOUND)
            case BookmarkQuery(wanted):
                at = self.find(wanted)
                events = (e for e in self.entries[at or 0 :] if not e.is_bookmark)
                found = next(events, None) if at is not None else None
                return OK + (NOT_FOUND if found is None else found.pack(0xFE))
            case Start(number):
                return self.start(number) if number <= total else self.refuse(3)
            case StartBookmark(wanted):
                at = self.find(wanted)
                return self.start(at) if at is not None else self.refuse(4)
            case CapabilitiesQuery():
                return OK + Capabilities(3, b"s" * 16, 4, *self.limits).pack()
            case BatchQuery(number):
                return self.batch(event) if number <= total else self.refuse(3)
            case RangeQuery(first, last):
                start, end = self.find(first), self.find(last)
                if start is None or end is None or end < start:
                    return self.refuse(4 if start is None else 5)
                packed = b"".join(entry.pack() for entry in self.entries[start : end + 1])
                return encode_range_head(end) + packed
            case Stop():
                self.connection.stopped()
                self.cursor = None
                return OK + b"".join(entry.pack() for entry in self.behind_stop)
            case Refuse(number, close):
                self.closed = close
                return encode_result(number)
        self.closed = True
        return b""

    def find(self, wanted: bytes) -> int | None:
        return next((e.number for e in self.entries if e.is_bookmark and e.data == wanted), None)

    def start(self, number: int) -> bytes:
        self.connection.started()
        self.cursor = number
        return OK + self.pump()

    def refuse(self, number: int) -> bytes:
        self.closed = self.after_refusal == "closed"
        self.refusing = self.after_refusal == "refusing"
        return encode_result(number)


class Filtering(Stub):
    """One that sends selected entries alone where it is asked to, `span` of the stream's entries to
    a frame. It streams in the epoch `epoch`."""

    features = 11

    def __init__(
        self, entries: Sequence[Entry], *, span: int = 7, epoch: int = 4, **options: Any
    ) -> None:
        super().__init__(entries, **options)
        self.span = span
        self.epoch = epoch
        self.where: Selection | None = None

    def frame(self, first: int, stop: int, chosen: Sequence[Entry]) -> bytes:
        payload = b"".join(entry.pack() for entry in chosen)
        total = len(self.entries)
        return (
            encode_chosen_head(len(chosen), first, stop, total, self.epoch, len(payload)) + payload
        )

    def pump(self) -> bytes:
        if self.where is None or self.cursor is None:
            return super().pump()
        sent = b""
        while self.cursor < len(self.entries):
            first, self.cursor = self.cursor, min(self.cursor + self.span, len(self.entries))
            part = [e for e in self.entries[first : self.cursor] if is_wanted(e, self.where)]
            sent += self.frame(first, self.cursor, part)
        return sent

    def answer(self, event: Event) -> bytes:
        total = len(self.entries)
        match event:
            case CapabilitiesQuery():
                return OK + Capabilities(self.features, b"s" * 16, self.epoch, *self.limits).pack()
            case FilteredRead(first, where, stop, most):
                if first > total:
                    return self.refuse(3)
                stop = max(first, min(stop, total, first + self.span))
                part = [e for e in self.entries[first:stop] if is_wanted(e, where)]
                if len(part) > (most or len(part)):
                    stop, part = part[most].number, part[:most]
                return OK + self.frame(first, stop, part)
            case FilteredStart(number, where):
                self.where = where
                return self.start(number) if number <= total else self.refuse(3)
            case FilteredStartBookmark(wanted, where):
                self.where = where
                at = self.find(wanted)
                return self.start(at) if at is not None else self.refuse(4)
            case Stop():
                self.where = None
        return super().answer(event)


class Selecting(Filtering):
    """One that selects entries by bytes at a fixed place in their data, too."""

    features = 11 | 1 << 8


def is_wanted(entry: Entry, where: Iterable[Clause]) -> bool:
    """Whether one of the clauses matches."""
    return any(
        entry.type == clause
        if isinstance(clause, int)
        else entry.type == clause.type
        and bytes(entry.data)[clause.offset :].startswith(clause.prefix)
        for clause in where
    )


async def serve_stream(stub: Stub, stream: trio.abc.Stream, size: int = 65536) -> None:
    """Run `stub` until one of the sides closes, sending in pieces of `size`."""
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while not stub.closed:
            sent = stub.receive(await stream.receive_some(65536))
            for at in range(0, len(sent), size):
                await stream.send_all(sent[at : at + size])
        await stream.aclose()


Handler = Callable[[socket.socket], None]


def handler(stub: Stub) -> Handler:
    """Serves one connection with `stub`."""

    def handle(connection: socket.socket) -> None:
        while not stub.closed:
            sent = stub.receive(connection.recv(65536))
            connection.sendall(sent)

    return handle


class StubServer:
    """Listens on loopback; the first connection goes to the first handler, and so on.

    Connections beyond the handlers are refused.

    Errors of a handler whose client has gone are nothing; others are raised at the end.
    """

    def __init__(self, *handlers: Handler, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family)
        self.host = host
        self.port: int = self.listener.getsockname()[1]
        self.handlers = handlers
        self.accepted = 0
        self.failure: Exception | None = None
        self.connections: list[socket.socket] = []
        self.served: list[threading.Thread] = []
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        """Each connection has a thread: a client may ask on a second one beside the first."""
        for handle in self.handlers:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                break
            self.accepted += 1
            self.connections.append(connection)
            thread = threading.Thread(target=self.handle, args=(handle, connection), daemon=True)
            self.served.append(thread)
            thread.start()
        # One client more than handlers is refused at once, and does not wait for an answer.
        self.refuse()
        for thread in self.served:
            thread.join()

    def refuse(self) -> None:
        """Accept no more connections; from any thread, also twice."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def handle(self, handle: Handler, connection: socket.socket) -> None:
        try:
            handle(connection)
        except OSError:
            pass
        except Exception as failure:  # noqa: BLE001 - raised in the test's own thread
            self.failure = failure
        connection.close()

    def __enter__(self) -> StubServer:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What clients have sent is still handled, so nothing is closed before that.
        for _ in range(200):
            for opened in (self.listener, *self.connections):
                with contextlib.suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)
            self.thread.join(0.05)
            if not self.thread.is_alive():
                break
        assert not self.thread.is_alive()
        for opened in (self.listener, *self.connections):
            opened.close()
        if self.failure is not None:
            raise self.failure
