"""How far a client was promised entries: to where an answer goes, or the commit that it was told.

Owns these ends, and the words for a commit that are not sent yet. Knows no connection.
"""

from __future__ import annotations

from datastreamer.protocol import messages
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.spans import Chunk, Cursor, Span


class SendBounds:
    """At most one of the two: a part of the stream is sent as an answer, and ends there; or
    entries are sent as they are committed, and the ends of commits are told before them."""

    def __init__(self) -> None:
        self.bound: Cursor | None = None
        """Where the part ends; None: no part is sent."""
        self.untold = b""
        """What is to be told before the next entries, and is not sent yet."""
        self._told: Cursor | None = None

    @property
    def end(self) -> Cursor | None:
        """How far entries may be sent before anything else is; None: nobody was told."""
        return self.bound or self._told

    @property
    def commits(self) -> bool:
        """Whether the client is told where commits end."""
        return self._told is not None

    def to_stream(self, start: int, *, commits: bool) -> None:
        """The client is sent all from entry `start` on."""
        self._told = Cursor(0, start) if commits else None
        self.untold = b""

    def to_send_part(self, bound: Cursor) -> None:
        """The client is sent no more than the entries before `bound`."""
        self.bound, self._told = bound, None

    def is_told_at(self, number: int) -> bool:
        """Whether a commit is to be told before entry `number` is sent."""
        return self._told is not None and number >= self._told.number

    def tell(self, head: Head) -> None:
        """What is sent next belongs to the operations that end at `head`."""
        self._told = Cursor(*head)
        self.untold = messages.encode_commit(head.entries)

    def cut_span(self, span: Span) -> Span:
        """What of it may be sent now."""
        end = self.end
        if end is None or span.next.number < end.number or span.end <= end.offset:
            return span
        return Span(span.start, end.offset, end)

    def cut_chunk(self, chunk: Chunk) -> Chunk:
        """What of it may be sent now."""
        end = self.end
        if end is None or chunk.next.number <= end.number:
            return chunk
        return chunk._replace(data=chunk.data[: end.offset - chunk.start], next=end)
