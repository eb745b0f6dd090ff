"""Answers to one client's queries: read from the stream, collected and sent together.

Owns the answers that wait to be sent while the client does not stream, and that each answer
matches the stream when it is passed on to be sent. Knows nothing of streaming.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import trio

from datastreamer._codec import Entry
from datastreamer.errors import UNREADABLE, NotFound, TimeUnknown, UnknownEntry
from datastreamer.format import (
    MAX_TIME_MARKS,
    PACKET_ANSWER,
    RESULT_BAD_FROM_BOOKMARK,
    RESULT_BAD_FROM_ENTRY,
    RESULT_BAD_TO_BOOKMARK,
    RESULT_TIME_UNKNOWN,
)
from datastreamer.metrics.counters import kind_of
from datastreamer.protocol import messages
from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    CommitStart,
    EntryQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    HeaderQuery,
    MarksQuery,
    RangeQuery,
    Start,
    StartBookmark,
    TimeQuery,
)
from datastreamer.protocol.following import encode_times
from datastreamer.protocol.publish.messages import encode_refusal
from datastreamer.protocol.server import Refuse, query_of
from datastreamer.selection.times import LATEST_MS, TimeMarks
from datastreamer.server import damage
from datastreamer.server.answers._at_hand import answers_at_hand
from datastreamer.server.answers.batch_reads import BatchAnswers
from datastreamer.server.answers.bookmark_queries import BookmarkQueries
from datastreamer.server.command_labels import BOOKMARK, ENTRY, HEADER
from datastreamer.server.limits import Limits
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.filtered import FilteredReads
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.storage.read.batch_bounds import KEPT_BYTES
from datastreamer.storage.read.spans import Cursor

if TYPE_CHECKING:
    from datastreamer.protocol._queries import Asked

Times: TypeAlias = TimeQuery | MarksQuery
Question: TypeAlias = (
    EntryQuery | BookmarkQuery | HeaderQuery | CapabilitiesQuery | BatchQuery | FilteredRead | Times
)

AnyStart: TypeAlias = (
    Start | CommitStart | FollowStart | StartBookmark | FilteredStart | FilteredStartBookmark
)

T = TypeVar("T")

# Answers to queries that arrived together are sent together, up to about this many bytes.
_ANSWERS_BYTES = 64 * 1024


class QueryAnswers:
    """The answers to one client's queries that are not sent yet."""

    def __init__(
        self,
        broadcast: Broadcast,
        bookmarks: BookmarkQueries,
        output: ClientOutput,
        limits: Limits,
    ) -> None:
        self.batches = BatchAnswers(broadcast, limits)
        self.filters = FilteredReads(broadcast, limits)
        self._bookmarks = bookmarks
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._output = output
        # Answers, the epoch that they were read at, and the queries, to be answered again if the
        # epoch has changed.
        self._answers: list[bytes] = []
        self._questions: list[Question | Asked | None] = []
        self._epoch = 0
        # Whether a change kept one of them from being read.
        self._unread = False
        # The reader's state that answers of the header and bookmarks show, which `send` compares;
        # None: there are none.
        self._shows: object = None
        self.size = 0
        """Bytes of answers that wait to be sent."""

    def __bool__(self) -> bool:
        return bool(self._answers)

    @property
    def full(self) -> bool:
        """Whether to send before the next query is answered."""
        return self.size >= _ANSWERS_BYTES

    def begin(self) -> None:
        """Call before the next answer is read."""
        if not self._answers:
            self._epoch = self._stream.epoch

    async def answer(self, question: Question) -> None:
        """Read the answer to `question`: a refusal if the entries are damaged. Raises what the
        stream raises."""
        self.add(await self._answer_to(question), question)

    def answer_at_hand(self, queries: list[Asked]) -> int:
        """As `answer` for these queries, until answers are `full`, or one needs more than memory,
        the index and entries that are known to be resident. Returns how many were answered."""
        answers = self._answers
        if not answers:
            self._epoch = self._stream.epoch
        before, commands = len(answers), self._broadcast.counts.commands
        entries, bookmarks, size = self._add_at_hand(queries, answers, _ANSWERS_BYTES - self.size)
        count = len(answers) - before
        self.size += size
        self._questions += queries[:count]
        if entries:
            commands[ENTRY] += entries
        if bookmarks:
            commands[BOOKMARK] += bookmarks
        if count > entries + bookmarks:
            commands[HEADER] += count - entries - bookmarks
        return count

    def _add_at_hand(
        self, queries: list[Asked], answers: list[bytes], most: int
    ) -> tuple[int, int, int]:
        """As `answers_at_hand`, at the reader's state of now."""
        reader, before = self._stream.reader, len(answers)
        state, reads = reader.state, reader.at_hand
        if reads is None or state.turn & 1:
            return 0, 0, 0
        added = answers_at_hand(
            queries,
            reads,
            state,
            self._broadcast.pages.ready,
            self._bookmarks,
            self._header,
            answers,
            most,
        )
        if reader.turn != state.turn:
            del answers[before:]
            return 0, 0, 0
        if self._shows is None and len(answers) - before > added[0]:
            self._shows = state
        return added

    def _header(self) -> bytes:
        return messages.OK + self._stream.header.pack()

    async def _renew(self) -> None:
        """Entries were committed since the answers of the header and bookmarks were read, and may
        have been when these were asked for: read these answers again."""
        for at, asked in enumerate(self._questions):
            question = None if isinstance(asked, int) else _as_query(asked)
            found: bytes | None = None
            if isinstance(question, BookmarkQuery) and not self._broadcast.turns.changing:
                again: list[bytes] = []
                self._add_at_hand([question.key], again, 1)
                found = again[0] if again else None
            elif not isinstance(question, BookmarkQuery | HeaderQuery):
                continue
            if found is None:
                found = await self._answer_to(question)
            self._answers[at] = found

    def add(self, answer: bytes, question: Question | None = None) -> None:
        self._answers.append(answer)
        self._questions.append(question)
        self.size += len(answer)

    async def send(self) -> None:
        """Send the collected answers. After a cancellation or failure the connection is lost."""
        stream = self._stream
        if not stream.writable:
            stream.refresh_open_file()
            shows, now = self._shows, stream.reader.state
            if shows is not None and shows is not now and stream.epoch == self._epoch:
                await self._renew()
                stream.refresh_open_file()
        # The file may have been changed while they were read, by another process or by another
        # task during a wait for the disk.
        while self._unread or stream.epoch != self._epoch:
            await self._broadcast.turns.settled()
            self._epoch = stream.epoch
            self._unread = False
            for at, question in enumerate(map(_as_query, self._questions)):
                if question is not None:
                    self._answers[at] = await self._answer_to(question)
            stream.refresh_open_file()
        self._shows = None
        answers, self._answers, self._questions = self._answers, [], []
        self.size = 0
        data = answers[0] if len(answers) == 1 else b"".join(answers)
        del answers  # keep only one copy for a client that does not read
        await self._output.send(data)

    async def place(self, command: AnyStart) -> int | Refuse:
        """The first entry to send to a client, or the refusal."""
        if isinstance(command, Start | CommitStart | FollowStart | FilteredStart):
            number = command.from_entry
            if number > self._stream.total_entries:
                return Refuse(RESULT_BAD_FROM_ENTRY, close=False)
        else:
            try:
                found = await self._bookmarks.find(command.key)
            except UNREADABLE as error:
                return await damage.refusal(self._broadcast, error, command)
            if found is None:
                return Refuse(RESULT_BAD_FROM_BOOKMARK, close=False)
            number = found
        return await self._damage_at(number, command) or number

    async def _damage_at(self, number: int, command: AnyStart) -> Refuse | None:
        """The refusal if the entry is in a page that is known to be damaged, and still is: better
        than a disconnection when the entry is due."""
        if any(each.first <= number < each.end for each in self._broadcast.pages.damaged):
            try:
                await self._read(self._stream.reader.cursor, number)
            except NotFound:
                pass  # it was truncated meanwhile
            except UNREADABLE as error:
                if not self._broadcast.turns.look():
                    return await damage.refusal(self._broadcast, error, command)
        return None

    async def range(self, query: RangeQuery) -> tuple[Cursor, Cursor] | Refuse:
        """Begin and end of the range in the stream as it is now, or the refusal. No other task runs
        between the last look at the stream and the return."""
        return await self._broadcast.turns.steadily(partial(self._range, query))

    async def _range(self, query: RangeQuery) -> tuple[Cursor, Cursor] | Refuse:
        cursor = self._stream.reader.cursor
        first = await self._bookmarks.find(query.first)
        if first is None:
            return Refuse(RESULT_BAD_FROM_BOOKMARK, close=False)
        last = await self._bookmarks.find(query.last)
        if last is None or last < first:
            return Refuse(RESULT_BAD_TO_BOOKMARK, close=False)
        return await self._read(cursor, first), await self._read(cursor, last + 1)

    async def _answer_to(self, question: Question) -> bytes:
        try:
            return await self._found(question)
        except UNREADABLE as error:
            if self._broadcast.turns.look() or self._stream.epoch != self._epoch:
                self._unread = True  # being changed: it is read again before it is sent
                return b""
            refusal = await damage.refusal(self._broadcast, error, question)
            self._broadcast.counts.errors[kind_of(refusal.number)] += 1
            return encode_refusal(refusal.number, refusal.why)

    async def _found(self, question: Question) -> bytes:
        """The answer to `question`. Raises what the stream raises."""
        if isinstance(question, HeaderQuery):
            return messages.OK + self._stream.header.pack()
        if isinstance(question, CapabilitiesQuery):
            return self.batches.capabilities()
        if isinstance(question, BatchQuery):
            # Only after a change, to answer again; bounded so that it fits into memory.
            most = min(question.max_bytes or KEPT_BYTES, KEPT_BYTES)
            batch = await self.batches.read(dataclasses.replace(question, max_bytes=most))
            if batch is None:
                return messages.encode_result(RESULT_BAD_FROM_ENTRY)
            data = batch.data
            if data is None:  # one large entry
                chunk = self._stream.reader.chunk
                data = await self._broadcast.cold.run(
                    lambda it: bytes(chunk(it, 1).data), batch.start
                )
            return batch.head + data
        if isinstance(question, FilteredRead):
            frame = await self.filters.read(question)
            if frame is None:
                return messages.encode_result(RESULT_BAD_FROM_ENTRY)
            data = frame.data
            if data is None:  # a long run
                raw = self._stream.reader.raw
                data = await self._broadcast.cold.run(lambda it: raw(it, frame.size), frame.start)
            return self.filters.begins_with(frame) + data
        if isinstance(question, EntryQuery):
            return await self._entry(question.number)
        if isinstance(question, Times):
            return await self._times(question)
        return await self._first_event(question.key)

    async def _times(self, query: Times) -> bytes:
        stream = self._stream

        def read(query: Times) -> TimeMarks:
            if isinstance(query, TimeQuery):
                return TimeMarks(next=stream.entry_at(min(query.ms, LATEST_MS)))
            return stream.time_marks(query.from_entry, MAX_TIME_MARKS)

        try:
            found = await self._broadcast.cold.run(read, query)
        except TimeUnknown as error:
            why = str(error).removeprefix(f"{stream.path}: ")
            return encode_refusal(RESULT_TIME_UNKNOWN, why)
        await self._broadcast.turns.settled()
        return messages.OK + encode_times(found)

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

    async def _read(
        self, call: Callable[[int], T], number: int, last: Callable[[T], int] | None = None
    ) -> T:
        """As `Broadcast.read`, for an answer that `send` checks against later changes."""
        found = await self._broadcast.read(call, number, last)
        await self._broadcast.turns.settled()
        return found

    async def _read_event(self, number: int) -> Entry | None:
        first_event = self._stream.reader.first_event
        return await self._read(first_event, number, lambda it: it.number if it else number)

    async def _first_event(self, key: bytes) -> bytes:
        event: Entry | None = None
        while (number := await self._bookmarks.find(key)) is not None:
            try:
                event = await self._read_event(number)
            except UnknownEntry:
                if number < self._stream.reader.head.entries:
                    raise
                # It was truncated since the look-up.
                await trio.lowlevel.checkpoint()
                continue
            break
        if event is None:
            return messages.OK + messages.NOT_FOUND
        return messages.OK + messages.encode_answer(event.number, event.type, event.data)


def _as_query(question: Question | Asked | None) -> Question | None:
    return query_of(question) if isinstance(question, int | bytes) else question
