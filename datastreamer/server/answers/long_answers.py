"""Answers with many entries: batches, filtered reads, ranges; hashes of ranges, and checksums.

Owns the wait for a commit, during which further commands of the client are read, and the choice
between an answer that is collected with others and one that the sender sends from the file.
"""

from __future__ import annotations

import time
from typing import TypeAlias

import trio

from datastreamer.errors import UNREADABLE
from datastreamer.format import RESULT_BAD_FROM_ENTRY
from datastreamer.protocol import messages
from datastreamer.protocol.commands import (
    BatchQuery,
    FilteredRead,
    HashQuery,
    RangeQuery,
    SumsQuery,
)
from datastreamer.protocol.server import Refuse, ServerConnection
from datastreamer.server import damage
from datastreamer.server.answers.queries import QueryAnswers
from datastreamer.server.read_ahead import ReadAhead
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.catch_up import Sender
from datastreamer.server.streaming.change_reports import hash_of, sums_of
from datastreamer.storage.read.spans import Cursor

# Bytes of further commands that are read while a client waits for a commit.
_HEARD_AHEAD = 64 * 1024

LongQuery: TypeAlias = BatchQuery | FilteredRead | RangeQuery | HashQuery | SumsQuery


class LongAnswers:
    """Answers one client's queries for many entries. The other parts are the client's, too."""

    def __init__(
        self,
        broadcast: Broadcast,
        answers: QueryAnswers,
        sender: Sender,
        read_ahead: ReadAhead,
        protocol: ServerConnection,
    ) -> None:
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._counts = broadcast.counts
        self._answers = answers
        self._sender = sender
        self._read_ahead = read_ahead
        self._protocol = protocol
        # Set by each event that ends the wait for a commit.
        self._news = trio.Event()
        self._finishing = False

    def finish(self) -> None:
        """The server shuts down: end the wait for a commit."""
        self._finishing = True
        self._news.set()

    async def send(self, nursery: trio.Nursery, query: LongQuery) -> Refuse | None:
        """Send the answer, or add it to the collected answers; or return the refusal. Raises what
        the stream and the connection raise."""
        try:
            if isinstance(query, BatchQuery):
                return await self._send_batch(nursery, query)
            if isinstance(query, FilteredRead):
                return await self._send_filtered(nursery, query)
            if isinstance(query, RangeQuery):
                return await self._send_range(query)
            return await self._send_sums(query)
        except UNREADABLE as error:
            if self._sender.streaming:
                raise  # a part of the answer was sent
            return await damage.refusal(self._broadcast, error, query)

    async def _send_batch(self, nursery: trio.Nursery, query: BatchQuery) -> Refuse | None:
        if query.wait_ms and query.from_entry == self._stream.total_entries:
            await self._wait_for_entries(nursery, query.from_entry, query.wait_ms / 1000)
        began = time.perf_counter()
        batch = await self._answers.batches.read(query)
        if batch is not None and batch.data is None and self._answers:
            await self._answers.send()
            batch = await self._answers.batches.read(query)
        if batch is None:
            return Refuse(RESULT_BAD_FROM_ENTRY, close=False)
        if batch.data is None:
            await self._send_part(batch.head, batch.start, batch.stop)
        else:
            self._answers.add(batch.head + batch.data, query)
            self._counts.entries_sent += batch.stop.number - batch.start.number
        self._counts.batch_seconds.add(time.perf_counter() - began)
        self._counts.batch_bytes.add(batch.size)
        return None

    async def _send_filtered(self, nursery: trio.Nursery, query: FilteredRead) -> Refuse | None:
        filters, stream = self._answers.filters, self._stream
        frame = await filters.read(query)
        until = trio.current_time() + query.wait_ms / 1000
        while (
            frame is not None
            and not frame.entries
            and frame.stop.number == stream.total_entries < query.stop
            and (left := until - trio.current_time()) > 0
        ):
            epoch = stream.epoch
            if not await self._wait_for_entries(nursery, frame.stop.number, left):
                until = 0
            frame = await filters.read(query, frame if stream.epoch == epoch else None)
            if stream.epoch != epoch:
                break
        began = time.perf_counter()
        if frame is not None and frame.data is None and self._answers:
            await self._answers.send()
            frame = await filters.read(query)
        if frame is None:
            return Refuse(RESULT_BAD_FROM_ENTRY, close=False)
        head = filters.begins_with(frame)
        if frame.data is None:
            first = frame.stop.number - frame.entries
            await self._send_part(head, Cursor(frame.start, first), frame.stop)
        else:
            self._answers.add(head + frame.data, query)
            self._counts.entries_sent += frame.entries
        self._counts.batch_seconds.add(time.perf_counter() - began)
        self._counts.batch_bytes.add(frame.size)
        return None

    async def _send_range(self, query: RangeQuery) -> Refuse | None:
        if self._answers:
            await self._answers.send()
        place = await self._answers.range(query)
        if isinstance(place, Refuse):
            return place
        start, stop = place
        await self._send_part(messages.encode_range_head(stop.number - 1), start, stop)
        return None

    async def _send_sums(self, query: HashQuery | SumsQuery) -> Refuse | None:
        # Alone: answers collected with it would be read again at each change.
        if self._answers:
            await self._answers.send()
        began = time.perf_counter()
        try:
            if isinstance(query, HashQuery):
                answer = await hash_of(self._broadcast, query)
                self._counts.hash_seconds += time.perf_counter() - began
            else:
                answer = await sums_of(self._broadcast, query)
        finally:
            self._answers.begin()
        if answer is None:
            return Refuse(RESULT_BAD_FROM_ENTRY, close=False)
        self._answers.add(messages.OK + answer)
        await self._answers.send()
        return None

    async def _send_part(self, head: bytes, start: Cursor, stop: Cursor) -> None:
        self._sender.begin_part(start, stop)
        self._answers.add(head)
        await self._answers.send()
        await self._sender.run()
        self._sender.end_part()

    async def _wait_for_entries(self, nursery: trio.Nursery, number: int, seconds: float) -> bool:
        """Wait for entry `number`, the next to be committed: True if it was committed or the stream
        was changed, False if the client is to get an empty answer."""
        if self._answers:
            await self._answers.send()
        stream, broadcast, protocol = self._stream, self._broadcast, self._protocol
        epoch, client_left = stream.epoch, False
        with trio.move_on_after(seconds):
            while number == stream.total_entries and stream.epoch == epoch:
                if self._finishing or client_left:
                    break
                self._news = trio.Event()
                broadcast.watch(self._news)
                if protocol.pending < _HEARD_AHEAD:
                    self._read_ahead.listen(nursery, self._news.set)
                try:
                    await self._news.wait()
                finally:
                    broadcast.watchers.discard(self._news)
                if self._read_ahead.heard:
                    client_left = not await self._read_more()
        await broadcast.turns.settled()
        return number != stream.total_entries or stream.epoch != epoch

    async def _read_more(self) -> bool:
        """Read further commands of the client; False if it has ended its side."""
        try:
            data = await self._read_ahead.receive()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        self._protocol.receive(data)
        return bool(data)
