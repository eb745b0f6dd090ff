"""Reads the stream for answers, while it grows, is truncated, or is replaced.

Owns that an answer is of one state of the stream, and that reads which wait for the disk, and
conversions of many entries, run in threads. Uses the server's own knowledge of the head, of
resident pages and of damage. Knows no request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

import trio

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import (
    UNREADABLE,
    BadArgument,
    BadBookmark,
    DamagedFile,
    DamagedPage,
    EvictedEntry,
    StreamClosed,
    StreamFileError,
    TimeUnknown,
    UnknownEntry,
)
from datastreamer.format import page_start
from datastreamer.http.answers.monitoring import Gather, UpstreamStatus
from datastreamer.http.port.messages import HttpProblem, number, search_hint
from datastreamer.selection.times import moment_ms
from datastreamer.server import damage
from datastreamer.server.answers.bookmark_queries import BookmarkQueries
from datastreamer.server.server import Server
from datastreamer.server.streaming.turns import EntryChange
from datastreamer.storage.header.records import Change
from datastreamer.storage.objects.waits import NotAtHand, at_hand_only
from datastreamer.storage.pages.page_states import pages_between
from datastreamer.storage.read.skip_damage import after_damage
from datastreamer.storage.read.spans import Cursor
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.bookmark_keys import key_of, parse_key

# Conversions, and compressions, that run at a time for all clients: more would only compete for the
# processor, with the event loop too.
_CONVERSIONS = 2
# At most this number of bytes is converted or compressed in the event loop.
_INLINE_BYTES: Final = 64 * 1024

# Of a stream's id, in a client's position.
_ID_BYTES: Final = 4

T = TypeVar("T")

Encode = Callable[[EntryBatch], bytes]


class Piece(NamedTuple, Generic[T]):
    """Entries, encoded or not, and the place after them."""

    data: T
    offset: int
    number: int


class Received(NamedTuple):
    """What a client has: the entries below `number`, as they were at `epoch`, of the stream that
    begins its id with `stream` (empty: it did not say)."""

    epoch: int
    number: int
    stream: bytes = b""


def received(stream: DataStream, number: int) -> Received:
    """Of a client that has the entries below `number` as they are now."""
    return Received(stream.epoch, number, stream.stream_id[:_ID_BYTES])


class DamagedAnswer(HttpProblem):
    """Entries of the answer are damaged: those of a page, from `first` on (0: not known), at or
    after byte `offset` of the file."""

    def __init__(self, status: int, detail: str, *, first: int, offset: int) -> None:
        super().__init__(status, detail)
        self.first = first
        self.offset = offset


@dataclass(frozen=True, slots=True)
class HttpSource:
    """What an HTTP port serves: a server (None while a relay has none yet), its metrics, and why it
    is not ready."""

    server: Callable[[], Server | None]
    gather: Gather
    unready: Callable[[], str]
    path: str = ""
    """The file, also while there is no server."""
    upstreams: Callable[[], list[UpstreamStatus]] | None = None
    """The upstreams of a relay; None for another server."""
    # An event loop of its own for each port, if one process has several.
    _conversions: trio.CapacityLimiter = field(
        default_factory=partial(trio.CapacityLimiter, _CONVERSIONS), init=False, repr=False
    )

    _compressions: trio.CapacityLimiter = field(
        default_factory=partial(trio.CapacityLimiter, _CONVERSIONS), init=False, repr=False
    )

    def reading(self) -> Reading:
        """The stream as it is now. Raises `HttpProblem` if there is none."""
        server = self.server()
        if server is None or server.stream_missing:
            why = self.unready() or "there is no stream"
            raise HttpProblem(503, f"{why}; try again later", [("Retry-After", "5")])
        reading = Reading(server, self._conversions, self._compressions)
        reading.refresh()
        return reading


class Reading:
    """One answer's view of the stream."""

    def __init__(
        self, server: Server, conversions: trio.CapacityLimiter, compressions: trio.CapacityLimiter
    ) -> None:
        self.server = server
        self._conversions = conversions
        self._compressions = compressions
        self.broadcast = server.broadcast
        self.stream = server.stream
        self.broken = False
        """Whether entries of the range that is `kept` were truncated or updated."""
        self._range = range(0)

    def refresh(self) -> None:
        """See what another process has committed."""
        try:
            self.stream.refresh_open_file()
        except (*UNREADABLE, StreamClosed, OSError) as error:
            raise HttpProblem(503, f"{error}; try again later") from None

    @property
    def total(self) -> int:
        """The number of committed entries."""
        if self.broadcast.view.head.entries > self.stream.total_entries:
            # A thread has moved the view, and this process has not looked at the file since.
            with contextlib.suppress(HttpProblem):
                self.refresh()
        return self.stream.total_entries

    def received(self, number: int) -> Received:
        return received(self.stream, number)

    async def wait(self, news: trio.Event) -> None:
        """Return when `news` is set, which the next commit after `total`, or a change, does."""
        self.broadcast.watch(news)
        try:
            await news.wait()
        finally:
            self.broadcast.watchers.discard(news)

    # Changes.

    @property
    def gone(self) -> bool:
        """Whether the stream's file was removed or replaced."""
        return self.server.stream_missing or self.server.broadcast is not self.broadcast

    def missed(self, epoch: int) -> Sequence[Change] | None:
        """The changes since the stream's epoch was `epoch`; None if they are not known."""
        return () if epoch == self.stream.epoch else self.stream.recorded_changes(epoch)

    @contextlib.contextmanager
    def kept(self, entries: range) -> Iterator[None]:
        """Within the block `broken` says whether any of these entries was changed."""
        self._range = entries
        self.server.other_readers[self] = None
        try:
            yield
        finally:
            del self.server.other_readers[self]

    def changed(self, change: EntryChange) -> None:
        before = change.stop is not None and change.stop <= self._range.start
        self.broken = self.broken or not (before or change.start >= self._range.stop)

    def lost(self) -> None:
        self.broken = True

    async def steadily(self, read: Callable[[], Awaitable[T]]) -> T:
        """As `Turns.steadily`. Raises `HttpProblem` for damage, and what `read` raises."""
        try:
            return await self.broadcast.turns.steadily(read)
        except UNREADABLE as error:
            raise await self.damaged(error) from None
        except StreamClosed as error:
            raise HttpProblem(503, str(error)) from None

    async def damaged(self, error: StreamFileError) -> DamagedAnswer:
        """The answer to a request for entries that are damaged."""
        if isinstance(error, EvictedEntry):
            raise HttpProblem(503, f"{error.what}; try again later")
        error = await damage.noted(self.broadcast, error)
        detail = f"damaged {error.what}; the operator has to repair the file"
        first = error.first if isinstance(error, DamagedPage) else 0
        offset = error.offset if isinstance(error, DamagedFile) else 0
        return DamagedAnswer(500, detail, first=first, offset=offset)

    # Entries.

    async def entry(self, number: int) -> Entry:
        """Raises `HttpProblem` if there is none."""

        async def read() -> Entry:
            return await self.broadcast.read(self.stream.reader.entry, number)

        try:
            return await self.steadily(read)
        except UnknownEntry:
            raise HttpProblem(
                404, f"there is no entry {number}; the stream has {self.total} entries"
            ) from None

    async def piece(
        self, encode: Encode, place: Cursor, stop: int, most_bytes: int, *, inline: bool
    ) -> Piece[bytes]:
        """The entries from `place` on, up to entry `stop` and about `most_bytes` of the file, in
        the form that `encode` gives them. The offset of `place` is 0 if it is not known. With
        `inline` that is little work, unless an entry is large: it is done in the event loop if it
        need not wait for the disk. Raises `UnknownEntry`."""
        reader, broadcast = self.stream.reader, self.broadcast

        def run(place: Cursor) -> Piece[EntryBatch]:
            batch, after = reader.run(place, most_bytes)
            if after.number > stop:
                # Also entries that were committed since `stop` was the end.
                batch, after = batch[: stop - batch.first_number], reader.cursor(stop)
            return Piece(batch, after.offset, after.number)

        def make(place: Cursor) -> Piece[bytes]:
            batch, offset, number = run(place)
            return Piece(encode(batch), offset, number)

        async def read() -> Piece[bytes]:
            nonlocal place
            begin, place = place, Cursor(0, place.number)  # in another turn it may be elsewhere
            if not begin.offset:
                begin = await broadcast.read(reader.cursor, begin.number)
            if inline:
                batch, *after = await broadcast.read_from(run, begin, begin.offset, most_bytes)
                data = await self.convert(lambda: encode(batch), batch.nbytes)
                return Piece(data, *after)
            if begin.offset < page_start(broadcast.pages.floor):
                # No conversion waits for those who wait for the archive.
                await broadcast.cold.read(begin.offset, most_bytes)
            async with self._conversions:
                return await broadcast.cold.run_verified(
                    make, begin, lambda it: pages_between(begin.offset, it.offset)
                )

        return await self.steadily(read)

    async def after_damage(self, problem: DamagedAnswer, number: int) -> int:
        """The first entry after the damaged page of entry `number` that can be read, or the total.
        Raises `HttpProblem`."""
        find, place = partial(after_damage, self.stream.reader), Cursor(problem.offset, number)
        return (await self.steadily(partial(self.broadcast.cold.run, find, place))).number

    async def convert(self, work: Callable[[], T], size: int) -> T:
        """The result of `work()` on `size` bytes; in a thread if they are many."""
        if size <= _INLINE_BYTES:
            with contextlib.suppress(NotAtHand), at_hand_only():
                return work()
        return await self.broadcast.cold.run(lambda _: work(), None, limiter=self._conversions)

    async def compress(self, work: Callable[[], bytes], size: int) -> bytes:
        """The same for compression, which takes some 30 times as long: it delays only others."""
        if size <= _INLINE_BYTES:
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._compressions)

    # Bookmarks.

    def key(self, text: str) -> bytes:
        """The key that a client writes: 0x..., block:N, batch:N, or text. Raises `HttpProblem`."""
        try:
            found = parse_key(text)
            if isinstance(found, bytes):
                return found
            return key_of(self.stream.header.version, found)
        except BadBookmark as error:
            raise HttpProblem(400, f"{error}{search_hint(text)}") from None

    async def bookmark(self, text: str) -> int:
        """The entry of the bookmark that a client names. Raises `HttpProblem` if there is none."""
        key = self.key(text)
        try:
            found = await BookmarkQueries(self.broadcast).find(key)
        except UNREADABLE as error:
            raise await self.damaged(error) from None
        if found is None:
            raise HttpProblem(404, f"there is no bookmark {text!r:.80} (0x{key.hex()})")
        return found

    async def first(self, text: str) -> int:
        """The entry that the parameter `from` names. Raises `HttpProblem`."""
        if text.isdigit():
            return number("from", text)
        if text.startswith(("block:", "batch:", "0x")):
            return await self.bookmark(text)
        if text.startswith("time:"):
            return await self._at_time(text[5:])
        raise HttpProblem(
            400, f"from is an entry's number, block:N, batch:N, 0x... or time:..., not {text!r:.80}"
        )

    async def _at_time(self, text: str) -> int:
        """The first entry at or after a time that a client writes. Raises `HttpProblem`."""
        cold = self.broadcast.cold
        try:
            ms = moment_ms(text.replace(" ", "+"))  # a plus sign in a query is a blank
            return await self.steadily(partial(cold.run, self.stream.entry_at, ms))
        except BadArgument as error:
            raise HttpProblem(400, f"from: {error}") from None
        except TimeUnknown as error:
            raise HttpProblem(404, str(error).removeprefix(f"{self.stream.path}: ")) from None

    async def first_event(self, number: int) -> int | None:
        """The first entry from `number` on that is not a bookmark."""
        first_event = self.stream.reader.first_event

        async def read() -> Entry | None:
            return await self.broadcast.read(
                first_event, number, lambda it: it.number if it else number
            )

        event = await self.steadily(read)
        return None if event is None else event.number
