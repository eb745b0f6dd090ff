"""Highest entry that the server has committed to send to a client.

That is the end of an answer with many entries, or the end of the commit that was announced.
Owns both ends and the announcement that is not sent yet. Knows no connection.
"""

from __future__ import annotations

from datastreamer.protocol import messages
from datastreamer.server.streaming.feed import Encoded
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Chunk, Cursor, Span
from datastreamer.storage.stream import DataStream


class RawForm:
    """Entries as they are in the file."""

    most_bytes = 128 * 1024

    def encode(self, stream: DataStream, entries: Chunk, end: Head) -> Encoded | None:
        return Encoded(entries.data)


class CommitsForm(RawForm):
    """The same, after the announcement of their commit."""

    def encode(self, stream: DataStream, entries: Chunk, end: Head) -> Encoded | None:
        if entries.next.number != end.entries:
            return None  # a large commit, which has one announcement
        ahead = messages.encode_commit(end.entries)
        return Encoded(b"".join((ahead, entries.data)), len(ahead))


RAW, COMMITS = RawForm(), CommitsForm()


class SendBounds:
    """At most one of two bounds: the end of the part of the stream that answers a request, or, in
    a stream with commit reports, the end of the announced commit."""

    def __init__(self) -> None:
        self.bound: Cursor | None = None
        """End of the part; None: no part is being sent."""
        self.unannounced = b""
        """The announcement to send before the next entries."""
        self._announced: Cursor | None = None

    @property
    def end(self) -> Cursor | None:
        """Entries up to here are sent before anything else; None: no bound."""
        return self.bound or self._announced

    @property
    def commits(self) -> bool:
        """Whether the ends of commits are announced to the client."""
        return self._announced is not None

    def to_stream(self, start: int, *, commits: bool) -> None:
        """Entries are sent from `start` on as they are committed."""
        self._announced = Cursor(0, start) if commits else None
        self.unannounced = b""

    def to_send_part(self, bound: Cursor) -> None:
        """Only the entries before `bound` are sent."""
        self.bound, self._announced = bound, None

    def announces_at(self, number: int) -> bool:
        """Whether a commit is to be announced before entry `number` is sent."""
        return self._announced is not None and number >= self._announced.number

    def has_more(self, number: int) -> bool:
        """Whether entries from `number` on are a part of what is being sent: of an answer, or of
        the announced commit."""
        return self.bound is not None or (self.commits and not self.announces_at(number))

    def announce(self, head: Head) -> None:
        """The entries that follow belong to commits that end at `head`."""
        self._announced = Cursor(*head)
        self.unannounced = messages.encode_commit(head.entries)

    def was_announced(self, end: Cursor, unannounced: bytes) -> None:
        """The entries up to `end` were announced, and this much of the announcement is not sent
        yet. Nothing in a stream without commit reports."""
        if self._announced is not None:
            self._announced, self.unannounced = end, unannounced

    def cut_span(self, span: Span) -> Span:
        """The part of it that may be sent now."""
        end = self.end
        if end is None or span.next.number < end.number or span.end <= end.offset:
            return span
        return Span(span.start, end.offset, end)

    def cut_chunk(self, chunk: Chunk) -> Chunk:
        end = self.end
        if end is None or chunk.next.number <= end.number:
            return chunk
        return chunk._replace(data=chunk.data[: end.offset - chunk.start], next=end)
