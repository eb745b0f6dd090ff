"""The client's side of a connection: requests out, the server's bytes in.

Owns the matching of answers with requests. Must not know sockets or clocks, when to send which
request (`exchanges`), or how received bytes are stored (`receiving`). One scanner finds streamed
entries; a batch keeps the buffer in which it arrived.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from datastreamer._codec import Entry, EntryBatch, scan, scan_chosen
from datastreamer.errors import CorruptEntries, ProtocolViolation
from datastreamer.format import (
    BATCH_HEAD_SIZE,
    BATCH_HEAD_STRUCT,
    CAPABILITIES_STRUCT,
    CHANGE_SIZE,
    CHOSEN_HEAD_SIZE,
    CHOSEN_HEAD_STRUCT,
    COMMIT_STRUCT,
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    FOLLOW_STRUCT,
    HEADER_SIZE,
    PACKET_ANSWER,
    PACKET_BATCH,
    PACKET_CAPABILITIES,
    PACKET_CHANGE,
    PACKET_CHOSEN,
    PACKET_COMMIT,
    PACKET_ENTRY,
    PACKET_FOLLOW,
    PACKET_HEADER,
    PACKET_PAGE_SUMS,
    PACKET_RANGE_HASH,
    PACKET_RESULT,
    PAGE_SIZE,
    PAGE_SUMS_STRUCT,
    RANGE_HASH_STRUCT,
    RESULT_DAMAGED,
    RESULT_HEAD_SIZE,
    RESULT_HEAD_STRUCT,
    RESULT_OK,
    TYPE_NOT_FOUND,
    U64_MAX,
    Header,
)
from datastreamer.protocol.events import (
    BatchReceived,
    EntriesReceived,
    EntryReceived,
    Event,
    FilteredBatchReceived,
    PeerEnded,
    RangeReceived,
    ResultReceived,
)
from datastreamer.protocol.filter.messages import FilteredRead, FilteredStart, FilteredStartBookmark
from datastreamer.protocol.following import (
    MAX_CHANGE_SIZE,
    MAX_SUMS_SIZE,
    FollowBegun,
    FollowStart,
    HashQuery,
    RangeHash,
    SumsFound,
    SumsQuery,
    decode_change,
)
from datastreamer.protocol.messages import (
    NO_EXTENSIONS,
    OK,
    BatchQuery,
    BookmarkQuery,
    Capabilities,
    CapabilitiesQuery,
    Command,
    CommitStart,
    EntryQuery,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
    encode_command,
)
from datastreamer.protocol.receiving import LARGE_BUFFER, STREAM_BUFFER, Receiving

T = TypeVar("T")
QueryT = TypeVar("QueryT", HeaderQuery, CapabilitiesQuery, BatchQuery, HashQuery, SumsQuery)

# Tuples of types, since a union would be built at each comparison.
_QUERIES: Final = (EntryQuery, BookmarkQuery)
_ANSWERED: Final = (
    *(*_QUERIES, HeaderQuery, CapabilitiesQuery, BatchQuery, FilteredRead),
    *(HashQuery, SumsQuery),
)
_OF_MANY_ENTRIES: Final = {
    *(Start, CommitStart, StartBookmark, RangeQuery, BatchQuery),
    *(FilteredRead, FilteredStart, FilteredStartBookmark, FollowStart),
}
_NUMBERED: Final = (Start, CommitStart, FilteredStart, FollowStart)
_READS: Final = (BatchQuery, FilteredRead)
_NUMBER: Final = struct.Struct(">Q")
_REPLY_STRUCT: Final = struct.Struct(f">BII{len(OK) - RESULT_HEAD_SIZE}sBIIQ")
# The longest known text has 17 bytes.
_MAX_TEXT: Final = 1024
# A later revision may add fields.
_MAX_CAPABILITIES: Final = 4096
# Maximum answer to a batch request without a limit of bytes.
_MAX_BATCH_BYTES: Final = 64 << 20


class ClientConnection(Receiving):
    """The state of one connection.

    Send what `request` returns. Receive into `receive_buffer` and pass the number of bytes to
    `received` (0: the server closed its side), then call `next_event` until it returns None.
    Answers come in the order of the requests; several may be in flight.

    A batch of entries stays valid as long as it is referenced, and keeps a receive buffer of up to
    1 MiB: copy a few entries of many batches if they are kept.

    `peer` names the server in messages. `capabilities` is what it has reported; `total_entries` is
    the newest total that it has reported, or None. Without `extensions` the capabilities are not
    requested, and no extension is used.
    """

    def __init__(
        self, stream_type: int = 1, *, peer: str = "the server", extensions: bool = True
    ) -> None:
        super().__init__()
        self.stream_type = stream_type
        self.peer = peer
        self.streaming = False
        self.capabilities: Capabilities | None = None if extensions else NO_EXTENSIONS
        self.asked_at: int | None = None
        """The number of bytes received when the capabilities were requested, until they are
        answered."""
        self.refused = False
        """Whether the server refused the capabilities query."""
        self.out_of_step = False
        """Whether the server reads parameters as commands: send no further requests."""
        self.total_entries: int | None = None
        self.batch_ahead: int | None = None
        """Where a batch ends of which only the beginning has arrived."""
        self.commit_ahead: int | None = None
        """Where the operations of the next entries end, if the streaming reports it; no entry
        after it is returned before the next end is reported."""
        self._commits = False
        # The epoch up to which changes were reported; -1 before the first packet; None if this
        # streaming reports no changes.
        self._epoch: int | None = None
        # The types of a filtered streaming.
        self._types: tuple[int, ...] | None = None
        self._commands: deque[Command] = deque()
        # The last request to stream, or to stop, that was accepted.
        self._started: Command | None = None
        self._answer_due = False
        self._stopped = False
        self._next_number: int | None = None
        self._range_last: int | None = None
        self._failure: ProtocolViolation | None = None

    @property
    def next_number(self) -> int | None:
        """The next entry of a streaming; None if unknown."""
        return self._next_number

    @property
    def outstanding(self) -> int:
        """The number of requests without a complete answer."""
        return len(self._commands)

    @property
    def probing(self) -> bool:
        """Whether the capabilities query has no answer yet: if the connection ends now, the query
        may be why."""
        return self.asked_at is not None and (self.refused or self.received_bytes == self.asked_at)

    @property
    def hungry(self) -> bool:
        """Whether the next event needs more bytes, or the end of the connection."""
        return self._end - self._start < self._need and not self.over

    @property
    def over(self) -> bool:
        """Whether no further event can arrive: the connection ended, or the server broke the
        protocol."""
        return self._ended or self._failure is not None

    def request(self, command: Command) -> bytes:
        """The bytes to send for `command`, whose answer is expected from now on.

        Raises `UsageError` or `BadBookmark` for invalid parameters.
        """
        sent = encode_command(command, self.stream_type)
        self._commands.append(command)
        if type(command) in _OF_MANY_ENTRIES:
            self.expect_pieces(LARGE_BUFFER if isinstance(command, _READS) else STREAM_BUFFER)
        return sent

    def next_event(self) -> Event | None:
        """The next event; None until more bytes arrive.

        Raises `ProtocolViolation`, then at each further call.
        """
        if self._failure is not None:
            raise self._failure
        try:
            while self._end - self._start >= self._need:
                packet = self._buffer[self._start]
                if packet == PACKET_RESULT:
                    event = self._quick_answer() or self._result()
                elif packet == PACKET_ANSWER:
                    event = self._answer()
                elif packet == PACKET_ENTRY:
                    event = self._entries()
                elif packet == PACKET_BATCH:
                    event = self._batch()
                elif packet == PACKET_CHOSEN:
                    event = self._chosen()
                elif packet == PACKET_COMMIT:
                    event = self._commit()
                elif packet == PACKET_CHANGE:
                    event = self._change()
                elif packet == PACKET_FOLLOW:
                    event = self._follow_begun()
                elif packet == PACKET_RANGE_HASH:
                    event = self._hash()
                elif packet == PACKET_PAGE_SUMS:
                    event = self._sums()
                elif packet == PACKET_HEADER:
                    event = self._header()
                elif packet == PACKET_CAPABILITIES:
                    event = self._capabilities()
                else:
                    raise self._violation(f"a packet of unknown type {packet}")
                if event is not None:
                    return event
        except ProtocolViolation as failure:
            self._failure = failure
            raise
        return PeerEnded(self._end - self._start) if self._ended else None

    def next_run(self) -> EntryBatch | None:
        """The next streamed entries, as `next_event` would return them; None if the next event is
        another one or has not arrived.

        Raises `ProtocolViolation`, then at each further call.
        """
        if self._failure is not None:
            raise self._failure
        if not self.streaming or self._types is not None or self._range_last is not None:
            return None
        if self._end - self._start < self._need or self._buffer[self._start] != PACKET_ENTRY:
            return None
        try:
            return self._run()
        except ProtocolViolation as failure:
            self._failure = failure
            raise

    def _result(self) -> Event | None:
        if self._lacks(RESULT_HEAD_SIZE):
            return None
        start = self._start
        _, length, number = RESULT_HEAD_STRUCT.unpack_from(self._buffer, start)
        # Without a request, damage of the next entries ends the streaming.
        unasked = not self._commands
        command = self._started if unasked else self._commands[0]
        if command is None or (unasked and not (number == RESULT_DAMAGED and self.streaming)):
            raise self._violation(f"a Result ({number}) that nothing was asked for")
        if self._answer_due or self._range_last is not None:
            raise self._violation(f"a Result ({number}) where the answer to {command} was due")
        if not RESULT_HEAD_SIZE <= length <= RESULT_HEAD_SIZE + _MAX_TEXT:
            raise self._violation(f"a Result of {length} bytes")
        if self._lacks(length):
            return None
        if number == RESULT_OK and type(command) is RangeQuery:
            return self._range(command, length)
        self._take(length)
        if number == RESULT_OK:
            if isinstance(command, _ANSWERED):
                self._answer_due = True
                return None
            self._streaming_changed(command)
        if unasked:
            self.streaming, self._stopped = False, True
        else:
            self._commands.popleft()
        text = self._buffer[start + RESULT_HEAD_SIZE : start + length].decode("ascii", "replace")
        # A terminal may show it.
        shown = "".join([each if each.isprintable() else "?" for each in text])
        return ResultReceived(command, number, shown)

    def _streaming_changed(self, command: Command) -> None:
        self.streaming = not isinstance(command, Stop)
        self._stopped = not self.streaming
        self._started = command
        # After a StartBookmark, the first entry shows its number.
        self._next_number = command.from_entry if isinstance(command, _NUMBERED) else None
        self._commits = isinstance(command, (CommitStart, FollowStart))
        self._epoch = -1 if isinstance(command, FollowStart) else None
        self.commit_ahead = self._next_number if self._commits else None
        self._types = (
            command.types if isinstance(command, (FilteredStart, FilteredStartBookmark)) else None
        )

    def _header(self) -> Event | None:
        self._due(HeaderQuery, "a header")
        header = self._decoded(HEADER_SIZE, Header.unpack)
        if header is not None:
            self._answered_whole()
            self.total_entries = header.total_entries
        return header

    def _capabilities(self) -> Event | None:
        self._due(CapabilitiesQuery, "a packet of capabilities")
        if self._lacks(CAPABILITIES_STRUCT.size):
            return None
        length = self._packet_length()
        if not CAPABILITIES_STRUCT.size <= length <= _MAX_CAPABILITIES:
            raise self._violation(f"capabilities of {length} bytes")
        capabilities = self._decoded(length, Capabilities.unpack)
        if capabilities is not None:
            self._answered_whole()
        return capabilities

    def _due(self, kind: type[QueryT], what: str) -> QueryT:
        """The query of this kind whose answer is due."""
        command = self._commands[0] if self._answer_due else None
        if not isinstance(command, kind):
            raise self._violation(f"{what} that was not asked for")
        return command

    def _packet_length(self) -> int:
        return int.from_bytes(self._view[self._start + 1 : self._start + 5], "big")

    def _decoded(self, size: int, decode: Callable[..., T], *arguments: Any) -> T | None:
        """The packet of `size` bytes; None until it has arrived."""
        if self._lacks(size):
            return None
        try:
            with self._view[self._start : self._start + size] as packet:
                decoded = decode(packet, *arguments)
        except ValueError as error:
            raise self._violation(f"an invalid packet: {error}") from None
        self._take(size)
        return decoded

    def _batch(self) -> Event | None:
        command = self._due(BatchQuery, "a batch")
        if self._lacks(BATCH_HEAD_SIZE):
            return None
        start = self._start
        _, length, count, first, total = BATCH_HEAD_STRUCT.unpack_from(self._buffer, start)
        size = length - BATCH_HEAD_SIZE
        # A single entry may exceed the requested size.
        longest = max(command.max_bytes or _MAX_BATCH_BYTES, PAGE_SIZE)
        if not count * ENTRY_HEAD_SIZE <= size <= longest or count > (command.max_count or count):
            raise self._violation(f"{count} entries in {size} bytes in answer to {command}")
        lacking = not count and first < total
        if first != command.from_entry or first + count > total or lacking:
            raise self._violation(f"{count} entries from {first} of {total} for {command}")
        if self._lacks(length):
            self.batch_ahead = first + count
            return None
        self.batch_ahead = None
        try:
            batch = scan(self._buffer, first, start=start + BATCH_HEAD_SIZE, end=start + length)
        except CorruptEntries as damage:
            raise self._violation(f"an invalid entry: {damage.reason}") from None
        if len(batch) != count or batch.end != start + length:
            raise self._violation(f"{len(batch)} entries in a batch of {count}")
        self._take(length)
        self._answered_whole()
        self._lent = self._lent or count > 0
        self.total_entries = total
        return BatchReceived(command, batch, total)

    def _chosen(self) -> Event | None:
        command = self._commands[0] if self._answer_due else None
        due: int | None
        if type(command) is FilteredRead:
            types, due, stop = command.types, command.from_entry, command.stop
            most_bytes, most = command.max_bytes or _MAX_BATCH_BYTES, command.max_count
        elif self.streaming and self._types is not None:
            types, due, stop, most_bytes, most = self._types, self._next_number, U64_MAX, 0, 0
        else:
            raise self._violation("chosen entries that were not asked for")
        if self._lacks(CHOSEN_HEAD_SIZE):
            return None
        start = self._start
        head = CHOSEN_HEAD_STRUCT.unpack_from(self._buffer, start)
        _, length, count, first, following, total, epoch = head
        size = length - CHOSEN_HEAD_SIZE
        if not count * ENTRY_HEAD_SIZE <= size <= max(most_bytes, PAGE_SIZE) or (
            count > (most or count) or bool(count) != bool(size)
        ):
            raise self._violation(f"{count} chosen entries in {size} bytes")
        # The range must advance, unless it is at the end, and must not pass the end.
        until = max(first, min(total, stop))
        stuck = following == first < until or (command is None and following == first)
        if first != (first if due is None else due) or not first <= following <= until or stuck:
            raise self._violation(f"the entries chosen from {first} to {following} of {total}")
        if self._lacks(length):
            self.batch_ahead = following
            return None
        self.batch_ahead = None
        begin, end = start + CHOSEN_HEAD_SIZE, start + length
        try:
            batch = scan_chosen(self._buffer, first, following, start=begin, end=end)
        except CorruptEntries as damage:
            raise self._violation(f"an invalid entry: {damage.reason}") from None
        if len(batch) != count or len(batch.select(types)) != count:
            raise self._violation(f"{len(batch)} entries, some of them not chosen, for {count}")
        self._take(length)
        self._lent = self._lent or count > 0
        self.total_entries = total
        if type(command) is FilteredRead:
            self._answered_whole()
            return FilteredBatchReceived(command, batch, total, epoch)
        self._next_number = following
        return EntriesReceived(batch)

    def _commit(self) -> Event | None:
        """The packet with the end of the operations of the next entries."""
        if not self._commits:
            raise self._violation("a commit boundary that was not requested")
        if self._lacks(COMMIT_STRUCT.size):
            return None
        _, size, total = COMMIT_STRUCT.unpack_from(self._buffer, self._start)
        due = self._next_number
        if size != COMMIT_STRUCT.size or due is None or self.commit_ahead != due or total <= due:
            raise self._violation(
                f"a commit ({size} bytes) to entry {total} before entry {due}, where entries up to "
                f"{self.commit_ahead} were due"
            )
        self._take(size)
        self.commit_ahead = self.total_entries = total
        return None

    def _follow_begun(self) -> Event | None:
        if self._epoch != -1:
            raise self._violation("the beginning of a report of changes that was not asked for")
        begun = self._decoded(FOLLOW_STRUCT.size, FollowBegun.unpack)
        if begun is not None:
            self._epoch = begun.since
        return begun

    def _change(self) -> Event | None:
        """The report of a change of committed entries."""
        if self._epoch is None or self._epoch < 0 or not self.streaming:
            raise self._violation("a change, though none is to be reported")
        if self._lacks(CHANGE_SIZE):
            return None
        length = self._packet_length()
        if not CHANGE_SIZE <= length <= MAX_CHANGE_SIZE:
            raise self._violation(f"a change of {length} bytes")
        change = self._decoded(length, decode_change)
        if change is not None:
            if change.epoch <= self._epoch:
                raise self._violation(f"a change to epoch {change.epoch} after epoch {self._epoch}")
            self._epoch = change.epoch
        return change

    def _hash(self) -> Event | None:
        command = self._due(HashQuery, "a hash")
        hashed = self._decoded(RANGE_HASH_STRUCT.size, RangeHash.unpack, command)
        if hashed is not None:
            self._answered_whole()
        return hashed

    def _sums(self) -> Event | None:
        command = self._due(SumsQuery, "a packet of checksums")
        if self._lacks(PAGE_SUMS_STRUCT.size):
            return None
        length = self._packet_length()
        if not PAGE_SUMS_STRUCT.size <= length <= MAX_SUMS_SIZE:
            raise self._violation(f"checksums of {length} bytes")
        sums = self._decoded(length, SumsFound.unpack, command)
        if sums is not None:
            self._answered_whole()
        return sums

    def _answered_whole(self) -> None:
        self._answer_due = False
        self._commands.popleft()

    def _range(self, command: RangeQuery, result_size: int) -> Event | None:
        """The number of a range's last entry, which follows the Result without a packet type."""
        if self._lacks(result_size + _NUMBER.size):
            return None
        (last,) = _NUMBER.unpack_from(self._buffer, self._start + result_size)
        self._take(result_size + _NUMBER.size)
        self._range_last, self._next_number = last, None
        return RangeReceived(command, last)

    def _answer(self) -> Event | None:
        command = self._commands[0] if self._answer_due else None
        if not isinstance(command, _QUERIES):
            raise self._violation("the answer to a query that was not asked")
        if self._lacks(ENTRY_HEAD_SIZE):
            return None
        start = self._start
        _, length, kind, number = ENTRY_HEAD_STRUCT.unpack_from(self._buffer, start)
        if not ENTRY_HEAD_SIZE <= length <= PAGE_SIZE:
            raise self._violation(f"an answer of {length} bytes to {command}")
        if self._lacks(length):
            return None
        return self._answered(command, start, length, kind, number)

    def _quick_answer(self) -> Event | None:
        """A Result OK with its answer, if both are complete and regular."""
        start = self._start
        have = self._end - start
        if have < _REPLY_STRUCT.size or not self._commands or self._answer_due:
            return None
        command = self._commands[0]
        _, size, error, _, packet, length, kind, number = _REPLY_STRUCT.unpack_from(
            self._buffer, start
        )
        if size != len(OK) or error or packet != PACKET_ANSWER:
            return None
        if not isinstance(command, _QUERIES):
            return None
        if not ENTRY_HEAD_SIZE <= length <= min(have - len(OK), PAGE_SIZE):
            return None
        return self._answered(command, start + len(OK), length, kind, number)

    def _answered(
        self, command: EntryQuery | BookmarkQuery, start: int, length: int, kind: int, number: int
    ) -> Event:
        entry: Entry | None = None
        if kind != TYPE_NOT_FOUND or number or length != ENTRY_HEAD_SIZE:
            if type(command) is EntryQuery and number != command.number:
                raise self._violation(f"entry {number} in answer to {command}")
            data = bytes(self._view[start + ENTRY_HEAD_SIZE : start + length])
            entry = Entry(number, kind, data)
        self._start = start + length
        self._need = 1
        self._answer_due = False
        self._commands.popleft()
        return EntryReceived(command, entry)

    def _entries(self) -> Event | None:
        if not self.streaming and self._range_last is None:
            return self._stray_entry()
        if self._types is not None and self._range_last is None:
            raise self._violation("an entry outside of the frames of a filtered streaming")
        batch = self._run()
        if batch is None:
            return None
        if self._range_last is not None:
            self._advance_range(batch, self._range_last)
        return EntriesReceived(batch)

    def _run(self) -> EntryBatch | None:
        try:
            batch = scan(self._buffer, self._next_number, start=self._start, end=self._end)
        except CorruptEntries as damage:
            if damage.offset == self._start:
                raise self._violation(f"an invalid entry: {damage.reason}") from None
            # Return the entries before the damage first; the next call finds the damage again.
            batch = scan(self._buffer, self._next_number, start=self._start, end=damage.offset)
        self._start = batch.end
        self._need = max(1, batch.needed)
        if not batch:
            return None
        self._lent = True
        self._next_number = batch.next_number
        if self._commits and batch.next_number > (self.commit_ahead or 0):
            raise self._violation(
                f"entry {batch.next_number - 1}, where a commit ends at entry {self.commit_ahead}"
            )
        return batch

    def _advance_range(self, batch: EntryBatch, last: int) -> None:
        if batch.next_number > last + 1:
            raise self._violation(f"entry {batch.next_number - 1} in a range that ends at {last}")
        if batch.next_number == last + 1:
            self._range_last = None
            self._commands.popleft()

    def _stray_entry(self) -> Event | None:
        """Skip the rest of an operation that old servers send after a Stop's Result."""
        if not self._stopped:
            raise self._violation("an entry, though no streaming was asked for")
        if self._lacks(ENTRY_HEAD_SIZE):
            return None
        _, length, _, number = ENTRY_HEAD_STRUCT.unpack_from(self._buffer, self._start)
        if not ENTRY_HEAD_SIZE <= length <= PAGE_SIZE:
            raise self._violation(f"an entry ({number}) of {length} bytes")
        if not self._lacks(length):
            self._take(length)
        return None

    def _violation(self, what: str) -> ProtocolViolation:
        return ProtocolViolation(f"{self.peer} sent {what}")
