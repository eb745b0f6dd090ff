"""The packets from a server: which there are, and the entries and values in them.

Owns their names and sizes, and what is right in each by itself. Must not know which of them is
legal when (`client`), or how received bytes are stored (`receiving`). A batch keeps the buffer in
which it arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from datastreamer._codec import EntryBatch, scan, scan_chosen
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
    PACKET_TIMES,
    PAGE_SIZE,
    PAGE_SUMS_STRUCT,
    RANGE_HASH_STRUCT,
    RESULT_HEAD_SIZE,
    TIMES_STRUCT,
    U32_MAX,
    U64_MAX,
)
from datastreamer.protocol.commands import BatchQuery
from datastreamer.protocol.following import MAX_CHANGE_SIZE, MAX_SUMS_SIZE, MAX_TIMES_SIZE
from datastreamer.protocol.receiving import Receiving

# The longest known text has 17 bytes.
_MAX_TEXT: Final = 1024
# A later revision may add fields.
_MAX_CAPABILITIES: Final = 4096
# The name of each packet, its smallest and its largest size.
PACKETS: Final = {
    PACKET_RESULT: ("a Result", RESULT_HEAD_SIZE, RESULT_HEAD_SIZE + _MAX_TEXT),
    PACKET_ANSWER: ("an answer", ENTRY_HEAD_SIZE, PAGE_SIZE),
    PACKET_ENTRY: ("an entry", ENTRY_HEAD_SIZE, PAGE_SIZE),
    PACKET_HEADER: ("a header", HEADER_SIZE, HEADER_SIZE),
    PACKET_BATCH: ("a batch", BATCH_HEAD_SIZE, U32_MAX),
    PACKET_CHOSEN: ("chosen entries", CHOSEN_HEAD_SIZE, U32_MAX),
    PACKET_CAPABILITIES: ("a packet of capabilities", CAPABILITIES_STRUCT.size, _MAX_CAPABILITIES),
    PACKET_RANGE_HASH: ("a hash", RANGE_HASH_STRUCT.size, RANGE_HASH_STRUCT.size),
    PACKET_PAGE_SUMS: ("a packet of checksums", PAGE_SUMS_STRUCT.size, MAX_SUMS_SIZE),
    PACKET_TIMES: ("times", TIMES_STRUCT.size, MAX_TIMES_SIZE),
    PACKET_COMMIT: ("a commit boundary", COMMIT_STRUCT.size, COMMIT_STRUCT.size),
    PACKET_FOLLOW: ("the beginning of a report of changes", FOLLOW_STRUCT.size, FOLLOW_STRUCT.size),
    PACKET_CHANGE: ("a change", CHANGE_SIZE, MAX_CHANGE_SIZE),
}
# Their decoders begin before all has arrived.
IN_PIECES: Final = {PACKET_ENTRY, PACKET_BATCH, PACKET_CHOSEN}


class Packets(Receiving):
    """Takes packets from the received bytes. Raises `ProtocolViolation` for those that are invalid.

    `peer` names the server in messages; `total_entries` is the newest total that it has reported,
    or None. `batch_ahead` is where a batch ends of which only the beginning has arrived.
    """

    def __init__(self, peer: str) -> None:
        super().__init__()
        self.peer = peer
        self.total_entries: int | None = None
        self.batch_ahead: int | None = None

    def _unpacked(self, length: int, unpack: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with self._view[self._start : self._start + length] as packet:
                value = unpack(packet, *arguments)
        except ValueError as error:
            raise self._violation(f"an invalid packet: {error}") from None
        self._take(length)
        return value

    def _framed(
        self, command: Any, length: int, due: int | None, most_bytes: int, most: int = U32_MAX
    ) -> tuple[EntryBatch, int, int] | None:
        """The entries in a packet, from number `due` on, with the total and the epoch then; None
        until all of it has arrived."""
        start, chosen = self._start, type(command) is not BatchQuery
        head = CHOSEN_HEAD_STRUCT if chosen else BATCH_HEAD_STRUCT
        _, _, count, first, *ends = head.unpack_from(self._buffer, start)
        following, total, epoch = ends if chosen else (first + count, *ends, 0)
        size = length - head.size
        # A single entry may exceed the requested size.
        if not count * ENTRY_HEAD_SIZE <= size <= max(most_bytes, PAGE_SIZE) or count > most:
            raise self._violation(f"{count} entries in {size} bytes in answer to {command}")
        # The range must advance, unless it is at the end, and must not pass the end.
        until = max(first, min(total, getattr(command, "stop", U64_MAX))) if chosen else total
        stuck = following == first < until
        if due not in (None, first) or not first <= following <= until or stuck:
            raise self._violation(f"entries {first} to {following} of {total} for {command}")
        if self._lacks(length):
            self.batch_ahead = following
            return None
        self.batch_ahead = None
        begin, end = start + head.size, start + length
        try:
            if chosen:
                batch = scan_chosen(self._buffer, first, following, start=begin, end=end)
            else:
                batch = scan(self._buffer, first, start=begin, end=end)
        except CorruptEntries as damage:
            raise self._violation(f"an invalid entry: {damage.reason}") from None
        right = batch.select(command.where) if chosen else batch
        if batch.end != end or not len(right) == len(batch) == count:
            raise self._violation(
                f"{len(batch)} entries in a batch of {count}, or others than selected"
            )
        self._take(length)
        self._lent = self._lent or count > 0
        self.total_entries = total
        return batch, total, epoch

    def _violation(self, what: str) -> ProtocolViolation:
        return ProtocolViolation(f"{self.peer} sent {what}")
