"""The client's side of a connection: requests out, the server's bytes in.

Owns the matching of answers with requests. A packet is legal only if a table at the end has a cell
for it: it answers the oldest command that is outstanding, or belongs to what is streamed. The cell
names its decoder, which moves on to the next state. Must not know sockets or clocks, or when to
send which request (`exchanges`).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer.errors import CorruptEntries, ProtocolViolation
from datastreamer.format import (
    COMMIT_STRUCT,
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
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
    PACKET_TIMES,
    PAGE_SIZE,
    RESULT_ARCHIVED,
    RESULT_DAMAGED,
    RESULT_HEAD_SIZE,
    RESULT_HEAD_STRUCT,
    RESULT_OK,
    TYPE_NOT_FOUND,
    U32_MAX,
    Header,
)
from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    Command,
    CommitStart,
    EntryQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    HashQuery,
    HeaderQuery,
    MarksQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
    SumsQuery,
    TimeQuery,
    encode_command,
)
from datastreamer.protocol.events import (
    BatchReceived,
    EntriesReceived,
    EntryReceived,
    Event,
    PeerEnded,
    RangeReceived,
    ResultReceived,
)
from datastreamer.protocol.following import (
    ChangeReceived,
    FollowBegun,
    RangeHash,
    SumsFound,
    decode_change,
    decode_times,
)
from datastreamer.protocol.messages import NO_EXTENSIONS, OK, Capabilities
from datastreamer.protocol.packets import IN_PIECES, PACKETS, Packets
from datastreamer.protocol.receiving import LARGE_BUFFER, STREAM_BUFFER

# The type and the length with which each packet begins.
_HEAD_STRUCT: Final = struct.Struct(">BI")
_TLS_ALERT: Final = b"\x15\x03"
_NUMBER: Final = struct.Struct(">Q")
_REPLY_STRUCT: Final = struct.Struct(f">BII{len(OK) - RESULT_HEAD_SIZE}sBIIQ")
# Maximum answer to a batch request without a limit of bytes.
_MAX_BATCH_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Streamed:
    """What the server streams since it accepted the last command to begin a streaming or to end it.

    `command` is the one that began it; None if nothing is streamed. `cells` are the packets that
    are legal without being an answer. `next_number` is None if it is unknown: after a
    `StartBookmark`, until the first entry shows it. The operations of the next entries end at
    `commit_ahead`, if the server reports that; no entry after it is returned before the next end
    is reported. Changes up to `epoch` were reported.
    """

    command: Any
    cells: Cells
    next_number: int | None = None
    commit_ahead: int | None = None
    epoch: int = 0


class ClientConnection(Packets):
    """The state of one connection.

    Send what `request` returns. Receive into `receive_buffer` and pass the number of bytes to
    `received` (0: the server closed its side), then call `next_event` until it returns None.
    Answers come in the order of the requests; several may be in flight.

    A batch of entries stays valid as long as it is referenced, and keeps a receive buffer of up to
    1 MiB: copy a few entries of many batches if they are kept.

    `capabilities` is what the server has reported. Without `extensions` the capabilities are not
    requested, and no extension is used.
    """

    def __init__(
        self, stream_type: int = 1, *, peer: str = "the server", extensions: bool = True
    ) -> None:
        super().__init__(peer)
        self.stream_type = stream_type
        self.capabilities: Capabilities | None = None if extensions else NO_EXTENSIONS
        self.asked_at: int | None = None
        """The number of bytes received when the capabilities were requested, until they are
        answered."""
        self.ended_at: int | None = None
        """The entry for which a wait has just ended; another one begins with a pause."""
        self.refused = False
        """Whether the server refused the capabilities query."""
        self.streamed = Streamed(None, {})
        self._commands: deque[Command] = deque()
        # What may answer the first of these now.
        self._due = _RESULT
        # The last entry of the range that is due.
        self._range_last = 0
        self._failure: ProtocolViolation | None = None

    @property
    def outstanding(self) -> int:
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
        if type(command) in _BUFFERS:
            self.expect_pieces(_BUFFERS[type(command)])
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
                event = self._quick_answer() if packet == PACKET_RESULT else None
                if event is None:
                    event = self._decode(packet)
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
        entries = self.streamed.cells.get(PACKET_ENTRY)
        if entries is not ClientConnection._entries or PACKET_ENTRY in self._due:
            return None
        if self._end - self._start < self._need or self._buffer[self._start] != PACKET_ENTRY:
            return None
        try:
            return self._run()
        except ProtocolViolation as failure:
            self._failure = failure
            raise

    def _decode(self, packet: int) -> Event | None:
        """What the cell of this packet makes of it. An answer comes first."""
        cell = self._due.get(packet) if self._commands else None
        if cell is None:
            cell = self.streamed.cells.get(packet)
            if cell is None:
                raise self._illegal(packet)
        name, least, most = PACKETS[packet]
        if self._lacks(least):
            return None
        _, length = _HEAD_STRUCT.unpack_from(self._buffer, self._start)
        if not least <= length <= most:
            raise self._violation(f"{name} of {length} bytes")
        return None if packet not in IN_PIECES and self._lacks(length) else cell(self, length)

    # Answers

    def _result(self, length: int) -> Event | None:
        command: Any = self._commands[0]
        _, _, number = RESULT_HEAD_STRUCT.unpack_from(self._buffer, self._start)
        if number != RESULT_OK:
            self._answered_whole()
            return self._result_of(command, number, length)
        streamed = _STREAMED.get(type(command))
        if streamed is not None:
            self._answered_whole()
            self.streamed = streamed(command)
            return self._result_of(command, number, length)
        event = None
        if type(command) is RangeQuery:
            # The number of its last entry follows without a packet type.
            if self._lacks(length + _NUMBER.size):
                return None
            (last,) = _NUMBER.unpack_from(self._buffer, self._start + length)
            length += _NUMBER.size
            self._range_last, self.streamed.next_number = last, None
            event = RangeReceived(command, last)
        self._take(length)
        self._due = _BODIES[type(command)]
        return event

    def _damaged(self, length: int) -> Event | None:
        """A Result that is no answer: damage of the next entries ends the streaming."""
        _, _, number = RESULT_HEAD_STRUCT.unpack_from(self._buffer, self._start)
        if number not in (RESULT_ARCHIVED, RESULT_DAMAGED) or self._commands:
            raise self._illegal(PACKET_RESULT)
        command = self.streamed.command
        self.streamed.command, self.streamed.cells = None, _STOPPED
        return self._result_of(command, number, length)

    def _result_of(self, command: Command, number: int, length: int) -> Event:
        start, end = self._start + RESULT_HEAD_SIZE, self._start + length
        text = self._buffer[start:end].decode("ascii", "replace")
        self._take(length)
        # A terminal may show it.
        shown = "".join([each if each.isprintable() else "?" for each in text])
        return ResultReceived(command, number, shown)

    def _value(self, length: int) -> Event:
        """An answer that is a value of its own."""
        unpack = _VALUES[type(self._commands[0])]
        value: Event = self._unpacked(length, unpack, self._commands[0])
        self._answered_whole()
        if isinstance(value, Header):
            self.total_entries = value.total_entries
        return value

    def _read(self, length: int) -> Event | None:
        command: Any = self._commands[0]
        most = command.max_bytes or _MAX_BATCH_BYTES, command.max_count or U32_MAX
        framed = self._framed(command, length, command.from_entry, *most)
        if framed is None:
            return None
        self._answered_whole()
        return BatchReceived(command, *framed)

    def _range_entries(self, _: int) -> Event | None:
        batch, last = self._run(), self._range_last
        if batch is None:
            return None
        if batch.next_number > last + 1:
            raise self._violation(f"entry {batch.next_number - 1} in a range that ends at {last}")
        if batch.next_number == last + 1:
            self._answered_whole()
        return EntriesReceived(batch)

    def _answered_whole(self) -> None:
        self._due = _RESULT
        self._commands.popleft()

    def _answer(self, length: int) -> Event:
        _, _, kind, number = ENTRY_HEAD_STRUCT.unpack_from(self._buffer, self._start)
        return self._answered(self._commands[0], self._start, length, kind, number)

    def _quick_answer(self) -> Event | None:
        """A Result OK with its answer, if both are complete and regular."""
        start = self._start
        have = self._end - start
        if have < _REPLY_STRUCT.size or self._due is not _RESULT or not self._commands:
            return None
        command = self._commands[0]
        _, size, error, _, packet, length, kind, number = _REPLY_STRUCT.unpack_from(
            self._buffer, start
        )
        if size != len(OK) or error or packet != PACKET_ANSWER:
            return None
        if type(command) is not EntryQuery and type(command) is not BookmarkQuery:
            return None
        if not ENTRY_HEAD_SIZE <= length <= min(have - len(OK), PAGE_SIZE):
            return None
        return self._answered(command, start + len(OK), length, kind, number)

    def _answered(self, command: Any, start: int, length: int, kind: int, number: int) -> Event:
        entry: Entry | None = None
        if kind != TYPE_NOT_FOUND or number or length != ENTRY_HEAD_SIZE:
            if type(command) is EntryQuery and number != command.number:
                raise self._violation(f"entry {number} in answer to {command}")
            data = bytes(self._view[start + ENTRY_HEAD_SIZE : start + length])
            entry = Entry(number, kind, data)
        self._start = start + length
        self._need = 1
        self._due = _RESULT
        self._commands.popleft()
        return EntryReceived(command, entry)

    # What is streamed

    def _entries(self, _: int) -> Event | None:
        batch = self._run()
        return None if batch is None else EntriesReceived(batch)

    def _run(self) -> EntryBatch | None:
        streamed = self.streamed
        try:
            batch = scan(self._buffer, streamed.next_number, start=self._start, end=self._end)
        except CorruptEntries as damage:
            if damage.offset == self._start:
                raise self._violation(f"an invalid entry: {damage.reason}") from None
            # Return the entries before the damage first; the next call finds the damage again.
            batch = scan(self._buffer, streamed.next_number, start=self._start, end=damage.offset)
        self._start = batch.end
        self._need = max(1, batch.needed)
        if not batch:
            return None
        self._lent = True
        streamed.next_number = batch.next_number
        ahead = streamed.commit_ahead
        if ahead is not None and batch.next_number > ahead:
            raise self._violation(
                f"entry {batch.next_number - 1}, where a commit ends at entry {ahead}"
            )
        return batch

    def _stray_entry(self, length: int) -> None:
        if not self._lacks(length):
            self._take(length)

    def _chosen_entries(self, length: int) -> Event | None:
        streamed = self.streamed
        framed = self._framed(streamed.command, length, streamed.next_number, PAGE_SIZE)
        if framed is None:
            return None
        batch, *_ = framed
        if batch.next_number == batch.first_number:
            raise self._violation(f"no entries from {batch.first_number} on")
        streamed.next_number = batch.next_number
        return EntriesReceived(batch)

    def _commit(self, length: int) -> None:
        """The packet with the end of the operations of the next entries."""
        _, _, total = COMMIT_STRUCT.unpack_from(self._buffer, self._start)
        due, ahead = self.streamed.next_number, self.streamed.commit_ahead
        if due is None or ahead != due or total <= due:
            raise self._violation(f"a commit to {total} at entry {due}, entries due up to {ahead}")
        self._take(length)
        self.streamed.commit_ahead = self.total_entries = total

    def _follow_begun(self, length: int) -> Event:
        begun: FollowBegun = self._unpacked(length, FollowBegun.unpack)
        self.streamed.epoch, self.streamed.cells = begun.since, _FOLLOWING
        return begun

    def _change(self, length: int) -> Event:
        change: ChangeReceived = self._unpacked(length, decode_change)
        known, self.streamed.epoch = self.streamed.epoch, change.epoch
        if change.epoch <= known:
            raise self._violation(f"a change to epoch {change.epoch} after epoch {known}")
        return change

    def _illegal(self, packet: int) -> ProtocolViolation:
        """The error for a packet without a cell."""
        begin = bytes(self._buffer[self._start : min(self._start + 5, self._end)])
        if b"HTTP/".startswith(begin):
            return ProtocolViolation(
                f"{self.peer} answers HTTP: is it the HTTP or metrics port of this server?"
            )
        if begin[:2] == _TLS_ALERT:
            return ProtocolViolation(f"{self.peer} answers TLS: connect with tcps://")
        name, *_ = PACKETS.get(packet, (f"a packet of unknown type {packet}",))
        if packet == PACKET_RESULT and self._commands:
            return self._violation(f"{name} where the answer to {self._commands[0]} was due")
        return self._violation(f"{name} that was not asked for")


Cells: TypeAlias = Mapping[int, Callable[[ClientConnection, int], Event | None]]

# The answer to a command: a Result, then this if the Result is OK. A cell is the decoder of a
# packet in a state, and moves on to the next state.
_RESULT: Final[Cells] = {PACKET_RESULT: ClientConnection._result}
_BODIES: Final[dict[type, Cells]] = {
    EntryQuery: {PACKET_ANSWER: ClientConnection._answer},
    BookmarkQuery: {PACKET_ANSWER: ClientConnection._answer},
    HeaderQuery: {PACKET_HEADER: ClientConnection._value},
    BatchQuery: {PACKET_BATCH: ClientConnection._read},
    FilteredRead: {PACKET_CHOSEN: ClientConnection._read},
    CapabilitiesQuery: {PACKET_CAPABILITIES: ClientConnection._value},
    HashQuery: {PACKET_RANGE_HASH: ClientConnection._value},
    SumsQuery: {PACKET_PAGE_SUMS: ClientConnection._value},
    TimeQuery: {PACKET_TIMES: ClientConnection._value},
    MarksQuery: {PACKET_TIMES: ClientConnection._value},
    RangeQuery: {PACKET_ENTRY: ClientConnection._range_entries},
}
_VALUES: Final[dict[type, Callable[..., Any]]] = {
    HeaderQuery: lambda packet, _: Header.unpack(packet),
    CapabilitiesQuery: lambda packet, _: Capabilities.unpack(packet),
    HashQuery: RangeHash.unpack,
    SumsQuery: SumsFound.unpack,
    TimeQuery: decode_times,
    MarksQuery: decode_times,
}

# What may arrive without being an answer.
_DAMAGED: Final[Cells] = {PACKET_RESULT: ClientConnection._damaged}
_RAW: Final[Cells] = {**_DAMAGED, PACKET_ENTRY: ClientConnection._entries}
_COMMITS: Final[Cells] = {**_RAW, PACKET_COMMIT: ClientConnection._commit}
_FOLLOW: Final[Cells] = {**_DAMAGED, PACKET_FOLLOW: ClientConnection._follow_begun}
_FOLLOWING: Final[Cells] = {**_COMMITS, PACKET_CHANGE: ClientConnection._change}
_FILTERED: Final[Cells] = {**_DAMAGED, PACKET_CHOSEN: ClientConnection._chosen_entries}
# Old servers send the rest of an operation after the Result of a Stop.
_STOPPED: Final[Cells] = {PACKET_ENTRY: ClientConnection._stray_entry}
_STREAMED: Final[dict[type, Callable[[Any], Streamed]]] = {
    Start: lambda start: Streamed(start, _RAW, start.from_entry),
    StartBookmark: lambda start: Streamed(start, _RAW),
    CommitStart: lambda start: Streamed(start, _COMMITS, start.from_entry, start.from_entry),
    FollowStart: lambda start: Streamed(start, _FOLLOW, start.from_entry, start.from_entry),
    FilteredStart: lambda start: Streamed(start, _FILTERED, start.from_entry),
    FilteredStartBookmark: lambda start: Streamed(start, _FILTERED),
    Stop: lambda stop: Streamed(None, _STOPPED),
}
_BUFFERS: Final[dict[type, int]] = {
    **dict.fromkeys((*_STREAMED, RangeQuery), STREAM_BUFFER),
    **dict.fromkeys((BatchQuery, FilteredRead), LARGE_BUFFER),
}
