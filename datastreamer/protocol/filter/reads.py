"""Reads selected entries in batches.

Owns a long read, with the next request sent before the last one is answered. A `Work`, like those
of `exchanges`: no sockets, tasks or time.
"""

from __future__ import annotations

from datastreamer._codec import EntryBatch
from datastreamer.errors import ConnectionLost
from datastreamer.format import U64_MAX
from datastreamer.protocol.batches import WAIT_MS, BatchLimits, LongReading
from datastreamer.protocol.events import FilteredBatchReceived
from datastreamer.protocol.exchanges import Exchange, unexpected
from datastreamer.protocol.filter.messages import FilteredRead
from datastreamer.selection.clauses import Selection


class FilteredReading(LongReading):
    """Reads the entries that `where` selects from a server that can. Batches have gaps, and may be
    empty.

    The capabilities of the connection's server must be known.
    """

    def __init__(self, start: int, stop: int | None, limits: BatchLimits, where: Selection) -> None:
        super().__init__(start, stop, limits)
        self._where = where
        self._epoch: int | None = None

    def advance(self) -> Exchange[EntryBatch | None]:
        assert self.stop is not None
        connection = self._connection
        while self._next < self.stop and not self._stopping:
            if not connection.outstanding:
                backlog = self._next < (connection.total_entries or 0)
                yield self._request(self._next, 0 if backlog else WAIT_MS)
            event = yield from self._answer()
            if not isinstance(event, FilteredBatchReceived):
                raise unexpected(connection, event)
            if self._epoch not in (None, event.epoch):
                # Comparing the last entries after reconnecting shows which ones.
                raise ConnectionLost(f"{connection.peer} truncated or changed entries meanwhile")
            self._epoch = event.epoch
            self._next = event.batch.next_number
            if event.batch.next_number > event.batch.first_number:
                return event.batch
            self.on_nothing(connection.total_entries or 0)
        return None

    def _ask_ahead(self) -> bytes:
        connection, ahead = self._connection, self._connection.batch_ahead
        if ahead is None or ahead >= self._known_end or self._limits.requests == 1:
            return b""
        return b"" if connection.outstanding > 1 else self._request(ahead)

    def _request(self, number: int, wait_ms: int = 0) -> bytes:
        stop = U64_MAX if self.stop is None else self.stop
        query = FilteredRead(number, self._where, stop, self._limits.max_count, self._size, wait_ms)
        return self._connection.request(query)
