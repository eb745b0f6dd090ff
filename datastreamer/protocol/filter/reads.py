"""Reads entries of some types in batches.

Owns a long read, with the next request sent before the last one is answered. A `Work`, like those
of `flows`: no sockets, tasks or time.
"""

from __future__ import annotations

from collections.abc import Callable

from datastreamer._codec import EntryBatch
from datastreamer.errors import BadRange, ConnectionLost
from datastreamer.format import RESULT_BAD_FROM_ENTRY, U64_MAX
from datastreamer.protocol import flows
from datastreamer.protocol.batches import WAIT_MS, BatchLimits, bytes_to_ask_for, past_the_end
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.events import FilteredBatchReceived, ResultReceived
from datastreamer.protocol.filter.messages import FilteredRead
from datastreamer.protocol.flows import Flow, next_event, unexpected
from datastreamer.protocol.messages import NO_EXTENSIONS


class FilteredReading:
    """The entries of `types` from `start` up to `stop`, from a server that can filter, as
    `BatchReading` reads entries of all types. Batches have gaps, and may be empty.

    Without a `stop`, ends at the stream's total when it begins.
    """

    def __init__(
        self, start: int, stop: int | None, limits: BatchLimits, types: tuple[int, ...]
    ) -> None:
        if stop is not None and stop < start:
            raise BadRange(f"the range {start} to {stop} ends before it begins")
        self.stop = stop
        self._types = types
        self._limits = limits
        self._next = start
        self._size = limits.max_bytes
        self._epoch: int | None = None
        self._stopping = False
        self._connection: ClientConnection
        # As that of `BatchReading`.
        self.on_nothing: Callable[[int], object] = lambda total: None

    def begin(self, connection: ClientConnection) -> Flow[None]:
        self._connection = connection
        total = connection.total_entries
        if total is None or self._next > total:
            total = (yield from flows.header(connection)).total_entries
        if self._next > total:
            raise past_the_end(self._next)
        if self.stop is None:
            self.stop = total
        capabilities = connection.capabilities or NO_EXTENSIONS
        self._size = bytes_to_ask_for(capabilities, self._limits.max_bytes)

    def advance(self) -> Flow[EntryBatch | None]:
        assert self.stop is not None
        connection = self._connection
        while self._next < self.stop and not self._stopping:
            if not connection.outstanding:
                backlog = self._next < (connection.total_entries or 0)
                yield self._request(self._next, 0 if backlog else WAIT_MS)
            while (event := connection.next_event()) is None:
                yield self._ask_ahead() or None
            if isinstance(event, ResultReceived) and event.number == RESULT_BAD_FROM_ENTRY:
                raise ConnectionLost(f"the stream of {connection.peer} was truncated meanwhile")
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
        """The next request, once the beginning of an answer shows where it will end."""
        connection, ahead = self._connection, self._connection.batch_ahead
        until = min(self.stop or 0, connection.total_entries or 0)
        if ahead is None or ahead >= until or self._limits.requests == 1:
            return b""
        return b"" if connection.outstanding > 1 else self._request(ahead)

    def _request(self, number: int, wait_ms: int = 0) -> bytes:
        stop = U64_MAX if self.stop is None else self.stop
        query = FilteredRead(number, self._types, stop, self._limits.max_count, self._size, wait_ms)
        return self._connection.request(query)

    def request_stop(self) -> bytes:
        self._stopping = True
        return b""

    def end(self, limit: int | None) -> Flow[bool]:
        passed = 0
        while self._connection.outstanding:
            event = yield from next_event(self._connection)
            passed += event.batch.nbytes if isinstance(event, FilteredBatchReceived) else 0
            if limit is not None and passed > limit:
                return False
        return True
