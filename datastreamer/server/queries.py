"""Answers to one client's questions: read from the stream, kept together, sent together.

Owns what waits to be sent while the client does not stream, and that an answer is of the
stream as it is when it is sent. Knows nothing of streaming.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import trio

from datastreamer.errors import DamagedFile, UnknownBookmark, UnknownEntry
from datastreamer.format import (
    PACKET_ANSWER,
    RESULT_BAD_FROM_BOOKMARK,
    RESULT_BAD_FROM_ENTRY,
    RESULT_BAD_TO_BOOKMARK,
)
from datastreamer.protocol import messages
from datastreamer.protocol.filter.messages import FilteredRead, FilteredStart, FilteredStartBookmark
from datastreamer.protocol.following import FollowStart
from datastreamer.protocol.messages import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    CommitStart,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
)
from datastreamer.protocol.server import Event, Refuse
from datastreamer.server.batch_reads import BatchAnswers
from datastreamer.server.limits import Limits
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.filtered import FilteredReads
from datastreamer.storage.bookmarks.keeper import NotAtHandError
from datastreamer.storage.read.batch_bounds import KEPT_BYTES
from datastreamer.storage.read.spans import Cursor
from datastreamer.transport.server_stream import Transport

Question: TypeAlias = (
    EntryQuery | BookmarkQuery | HeaderQuery | CapabilitiesQuery | BatchQuery | FilteredRead
)

T = TypeVar("T")

# Answers to queries that came together are sent together, up to about so much.
_ANSWERS_BYTES = 64 * 1024
# A look-up that has to read more than this from the stream is done in a thread.
_INLINE_SCAN = 1 << 20


class QueryAnswers:
    """What one client has asked and was not sent yet."""

    def __init__(self, live: Broadcast, transport: Transport, limits: Limits) -> None:
        self.batches = BatchAnswers(live, limits)
        self.filters = FilteredReads(live, limits)
        self._live = live
        self._stream = live.stream
        self._transport = transport
        # Answers, the epoch that they were read in, and what was asked, to be read again
        # should that have changed.
        self._answers: list[bytes] = []
        self._questions: list[Question | None] = []
        self._epoch = 0
        # Whether one of them could not be read because of a change.
        self._unread = False
        self.size = 0
        """Bytes that wait to be sent."""
        self.sent = 0
        """Bytes of all that was sent."""
        self.blocked = False
        """Whether the client has not taken what was there for it."""

    def __bool__(self) -> bool:
        return bool(self._answers)

    @property
    def full(self) -> bool:
        """Whether these go out before anything else is asked."""
        return self.size >= _ANSWERS_BYTES

    def begin(self) -> None:
        """What comes next is read now: before the first since the last `send`."""
        if not self._answers:
            self._epoch = self._stream.epoch

    async def answer(self, question: Question) -> None:
        """Read the answer to `question`. Raises what the stream raises."""
        self.add(await self._answer_to(question), question)

    def answer_entries(
        self, question: EntryQuery, next_event: Callable[[], Event | None], most: int
    ) -> tuple[int, Event | None]:
        """As `answer`, this question and those like it behind it, up to `most` and until
        answers are `full`, while they are about entries known to be in memory; how many, and
        the event that is left to be dealt with, if any."""
        packed_from, warm = self._stream.reader.packed_from, self._live.cold.warm
        answers, questions = self._answers, self._questions
        if not answers:
            self._epoch = self._stream.epoch
        size, before = self.size, len(answers)
        most += before
        left: Event | None = question
        while type(left) is EntryQuery:
            found = packed_from(warm, left.number, messages.OK, PACKET_ANSWER)
            if found is None:
                break
            answers.append(found)
            questions.append(left)
            size += len(found)
            left = next_event()
            if size >= _ANSWERS_BYTES or len(answers) >= most:
                break
        self.size = size
        return len(answers) - before, left

    def add(self, answer: bytes, question: Question | None = None) -> None:
        self._answers.append(answer)
        self._questions.append(question)
        self.size += len(answer)

    async def send(self) -> None:
        """Send what waits. Cancelled or failed, the connection is of no more use."""
        stream = self._stream
        if not stream.writable:
            stream.refresh_open_file()
        # Another process, or this one beside a wait for the disk, may have changed the file
        # while they were read.
        while self._unread or stream.epoch != self._epoch:
            await self._live.settled()
            self._epoch = stream.epoch
            self._unread = False
            for at, question in enumerate(self._questions):
                if question is not None:
                    self._answers[at] = await self._answer_to(question)
            stream.refresh_open_file()
        answers, self._answers, self._questions = self._answers, [], []
        self.size = 0
        data = answers[0] if len(answers) == 1 else b"".join(answers)
        del answers  # who does not read holds them once
        sent = self._transport.send_now(data)
        self.sent += sent
        if sent < len(data):
            self.blocked = True
            await self._transport.send(memoryview(data)[sent:])
            self.blocked = False
            self.sent += len(data) - sent
        self._live.counts.bytes_sent += len(data)

    async def place(
        self,
        command: (
            Start
            | CommitStart
            | FollowStart
            | StartBookmark
            | FilteredStart
            | FilteredStartBookmark
        ),
    ) -> int | Refuse:
        """The entry that a client is to be sent first, or what it is told instead."""
        if isinstance(command, Start | CommitStart | FollowStart | FilteredStart):
            if command.from_entry > self._stream.total_entries:
                return Refuse(RESULT_BAD_FROM_ENTRY, close=False)
            return command.from_entry
        number = await self._bookmark(command.key)
        return Refuse(RESULT_BAD_FROM_BOOKMARK, close=False) if number is None else number

    async def range(self, query: RangeQuery) -> tuple[Cursor, Cursor] | Refuse:
        """Where the entries of the range begin and end, in the stream as it is now, or what
        the client is told instead. Nobody else had a turn since the last look."""
        stream, live = self._stream, self._live
        while True:
            epoch = stream.epoch
            first = await self._bookmark(query.first)
            if first is None:
                return Refuse(RESULT_BAD_FROM_BOOKMARK, close=False)
            last = await self._bookmark(query.last)
            if last is None or last < first:
                return Refuse(RESULT_BAD_TO_BOOKMARK, close=False)
            try:
                start = await self._read(stream.reader.cursor, first)
                stop = await self._read(stream.reader.cursor, last + 1)
            except (DamagedFile, UnknownEntry):
                if not live.outdated() and stream.epoch == epoch:
                    raise
            else:
                if not live.outdated() and stream.epoch == epoch:
                    return start, stop
            await live.settled()

    async def _answer_to(self, question: Question) -> bytes:
        if isinstance(question, HeaderQuery):
            return messages.OK + self._stream.header.pack()
        if isinstance(question, CapabilitiesQuery):
            return self.batches.capabilities()
        if isinstance(question, BatchQuery):
            # Here only to be read again; what has become of it fits into memory.
            most = min(question.max_bytes or KEPT_BYTES, KEPT_BYTES)
            batch = await self.batches.read(dataclasses.replace(question, max_bytes=most))
            if batch is None:
                return messages.encode_result(RESULT_BAD_FROM_ENTRY)
            data = batch.data
            if data is None:  # one entry, a large one
                data = bytes(self._stream.reader.chunk(batch.start, 1).data)
            return batch.head + data
        if isinstance(question, FilteredRead):
            frame = await self.filters.read(question)
            if frame is None:
                return messages.encode_result(RESULT_BAD_FROM_ENTRY)
            data = frame.data
            if data is None:  # a long run
                data = self._stream.reader.raw(frame.start, frame.size)
            return self.filters.begins_with(frame) + data
        try:
            if isinstance(question, EntryQuery):
                return await self._entry(question.number)
            return await self._first_event(question.key)
        except DamagedFile:
            if not self._live.outdated() and self._stream.epoch == self._epoch:
                raise
            self._unread = True  # changed just now: it is read again before it is sent
            return b""

    async def _entry(self, number: int) -> bytes:
        stream = self._stream
        if number >= stream.total_entries:
            stream.refresh_open_file()
        try:
            return await self._read(self._packed, number)
        except UnknownEntry:
            return messages.OK + messages.NOT_FOUND

    def _packed(self, number: int) -> bytes:
        return self._stream.reader.packed(number, prefix=messages.OK, packet_type=PACKET_ANSWER)

    async def _read(self, call: Callable[[int], T], number: int) -> T:
        """`call(number)`, in a thread where entry `number` may have to come from the disk."""
        if number >= self._stream.reader.head.entries or self._is_warm(number):
            return call(number)
        found = await self._live.cold.run(call, number)
        await self._live.settled()
        return found

    def _is_warm(self, number: int) -> bool:
        """Whether entry `number` is known to be in memory."""
        page = self._stream.reader.page_with(number)
        return page is not None and self._live.cold.is_warm(*page)

    async def _bookmark(self, key: bytes) -> int | None:
        """The newest entry with this key. A way to it that is long, or may lead to the disk,
        is gone in a thread, and again where the stream was changed meanwhile."""
        stream, live = self._stream, self._live
        while True:
            epoch = stream.epoch
            number: int | None = None
            try:
                with contextlib.suppress(UnknownBookmark):
                    if stream.bookmarks.unread() > _INLINE_SCAN:
                        number = await trio.to_thread.run_sync(stream.bookmark, key)
                    elif not live.cold.index_at_hand:
                        number = await live.cold.run(self._look_up, key)
                    else:
                        with contextlib.suppress(NotAtHandError):
                            found = live.cold.look_up(stream.bookmarks.newest_at_hand, key)
                            if found is None:
                                return None
                            if self._is_warm(found) and stream.carries(found, key):
                                return found
                        # In the disk's hands, or the index has to be mended first.
                        number = await live.cold.run(stream.bookmark, key)
            except DamagedFile:
                if not live.outdated() and stream.epoch == epoch:
                    raise
                epoch = -1
            await live.settled()
            if stream.epoch == epoch:
                return number

    def _look_up(self, key: bytes) -> int:
        return self._live.cold.look_up(self._stream.bookmark, key)

    async def _first_event(self, key: bytes) -> bytes:
        number = await self._bookmark(key)
        event = None
        if number is not None:
            event = await self._read(self._stream.reader.first_event, number)
        if event is None:
            return messages.OK + messages.NOT_FOUND
        return messages.OK + messages.encode_answer(event.number, event.type, event.data)
