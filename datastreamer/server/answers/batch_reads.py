"""Answers with many entries: batches.

Owns where an answer begins and ends, within the limits of both sides and of the stream.
`long_answers.py` sends it and waits for a commit.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from datastreamer.errors import DamagedPage
from datastreamer.format import U32_MAX
from datastreamer.protocol import messages
from datastreamer.protocol.commands import BatchQuery
from datastreamer.protocol.messages import Capabilities
from datastreamer.server.limits import Limits
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.read.batch_bounds import Measure
from datastreamer.storage.read.spans import Cursor

# Bytes per entry, assumed until the first batch.
_LIKELY = 200


class BatchAnswer(NamedTuple):
    """The answer to a `BatchQuery`: Result and head, and the entries: as bytes, or, if `data` is
    None, as a place in the file."""

    head: bytes
    data: bytes | None
    start: Cursor
    stop: Cursor
    size: int


class BatchAnswers:
    """Answers one client's batch requests."""

    def __init__(self, broadcast: Broadcast, limits: Limits) -> None:
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._most_entries = min(limits.max_batch_count, U32_MAX)
        self._most_bytes = min(limits.max_batch_bytes, U32_MAX >> 1)
        # The end of the last batch, where the next one begins if the stream is unchanged.
        self._place = Cursor(0, 0)
        self._changes = -1
        self._likely = _LIKELY

    def capabilities(self) -> bytes:
        stream = self._stream
        features = Capabilities().features | self._broadcast.features
        said = Capabilities(
            features=features,
            stream_id=stream.stream_id,
            epoch=stream.epoch,
            max_batch_count=self._most_entries,
            max_batch_bytes=self._most_bytes,
        )
        return messages.OK + said.pack()

    async def read(self, query: BatchQuery) -> BatchAnswer | None:
        """The answer to `query` in the stream as it is now; None if it begins past the end. Raises
        what the stream raises.

        No other task runs between the last look at the stream and the return.
        """
        return await self._broadcast.turns.steadily(partial(self._read, query))

    async def _read(self, query: BatchQuery) -> BatchAnswer | None:
        reader, number = self._stream.reader, query.from_entry
        if number > self._stream.total_entries:
            return None
        if self._place.number == number and self._changes == reader.turn:
            start = self._place
        else:
            start = await self._broadcast.read(reader.cursor, number)
        changes = reader.turn
        limit = min(query.max_bytes or self._most_bytes, self._most_bytes)
        most = min(query.max_count or self._most_entries, self._most_entries)
        size = min(limit, most * self._likely)
        while True:
            wanted = Measure(*start, most, limit, self._likely)
            try:
                portion = await self._broadcast.read_from(
                    reader.portion, wanted, start.offset, size
                )
                break
            except DamagedPage as error:
                # The entries before it; the request for the next ones is refused.
                before = error.first - number
                if not 0 < before < most or self._broadcast.turns.look():
                    raise
                self._broadcast.pages.found(error)
                most = before
        stop = Cursor(portion.offset, portion.number)
        self._place, self._changes = stop, changes
        if portion.entries:
            self._likely = portion.size // portion.entries + 1
        total = reader.head.entries
        head = messages.encode_batch_head(portion.entries, number, total, portion.size)
        return BatchAnswer(head, portion.data, start, stop, portion.size)
