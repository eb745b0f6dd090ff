"""The last entries received, which distinguish one history of a stream from another.

Owns the hashing of entries and their comparison. One entry proves little (the end of a replaced
block has the same bytes), so the last 256 of a streaming are remembered.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_digest

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import DifferentStream, HistoryChanged, UnknownEntry
from datastreamer.format import ENTRY_HEAD_SIZE, Header
from datastreamer.position import HASH_SIZE, KEPT, Identity, Position
from datastreamer.protocol import exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Exchange
from datastreamer.selection.clauses import Selection

HELD: Final = 8
"""Batches that are held unhashed, at most; each holds a buffer of up to some MiB."""


class Trail:
    """The hashes of up to 256 entries before `next_number`."""

    where: Selection | None = None
    """The entries that are remembered; None: all."""

    def __init__(self, next_number: int, hashes: bytes = b"") -> None:
        self.next_number = next_number
        self._hashes = hashes
        # Hashed when needed: in a fast stream, the next batches replace them anyway.
        self._unhashed: list[EntryBatch] = []

    @classmethod
    def of(cls, position: Position) -> Trail:
        """The trail of a position."""
        return cls(position.next_entry, position.trail)

    def position(self, stream: Identity | None) -> Position:
        """The position after the remembered entries."""
        return Position(self.next_number, self.hashes, stream)

    def certain(self, differing: int) -> bool:
        """Whether an entry before this one is remembered, and was therefore found to be equal."""
        return differing > self.first_number

    @property
    def hashes(self) -> bytes:
        """8 bytes per entry, oldest first."""
        if self._unhashed:
            found = b"".join([hashes_of(batch[-KEPT:]) for batch in self._unhashed])
            self._hashes = (self._hashes + found)[-KEPT * HASH_SIZE :]
            self._unhashed = []
        return self._hashes

    @property
    def first_number(self) -> int:
        """The oldest remembered entry; `next_number` if there is none."""
        return self.next_number - len(self.hashes) // HASH_SIZE

    def extend(self, batch: EntryBatch) -> None:
        """Add the next entries. The batch and its buffer may be held until more are added."""
        if len(batch) >= KEPT:
            self._hashes, self._unhashed = b"", [batch]
        else:
            self._unhashed.append(batch)
            if len(self._unhashed) > HELD:
                self._reduce()
        self.next_number = batch.next_number

    def _reduce(self) -> None:
        """Drop the batches that later ones have replaced; hash all if there is none."""
        entries = 0
        for at in range(len(self._unhashed) - 1, 0, -1):
            entries += len(self._unhashed[at])
            if entries >= KEPT:
                self._hashes, self._unhashed = b"", self._unhashed[at:]
                return
        _ = self.hashes

    def extended(self, batch: EntryBatch) -> Trail:
        """A copy with these entries added."""
        longer = Trail(self.next_number, self.hashes)
        longer.extend(batch)
        return longer

    def cut(self, number: int) -> None:
        """Forget the entries from `number` on, which must be remembered."""
        self._hashes = self.hashes[: (number - self.first_number) * HASH_SIZE]
        self.next_number = number

    def first_difference(self, batch: EntryBatch) -> int | None:
        """The first entry of `batch` that differs from the remembered one; all must be
        remembered."""
        at = (batch.first_number - self.first_number) * HASH_SIZE
        found = hashes_of(batch)
        known = self.hashes[at : at + len(found)]
        if found == known:
            return None
        places = range(0, len(found), HASH_SIZE)
        differing = next(
            place
            for place in places
            if found[place : place + HASH_SIZE] != known[place : place + HASH_SIZE]
        )
        return batch.first_number + differing // HASH_SIZE


class LastRead:
    """The stream that a client read from, and the highest entry of it that was received.

    With these, answers of several servers are of one history.
    """

    def __init__(self) -> None:
        self._stream: Identity | None = None
        # Its number and hash.
        self._entry: tuple[int, bytes] | None = None

    def note(self, answer: object) -> None:
        """An answer, which may be or hold entries, or a position after some."""
        if isinstance(answer, EntryBatch | list) and answer:
            answer = answer[-1]
        known = -1 if self._entry is None else self._entry[0]
        if isinstance(answer, Entry):
            if answer.number >= known:
                self._entry = answer.number, xxh3_64_digest(answer.pack())
        elif isinstance(answer, Position) and answer.trail and answer.last_number >= known:
            self._entry = answer.last_number, answer.trail[-HASH_SIZE:]

    def ahead(self, connection: ClientConnection, number: int) -> Exchange[Header | None]:
        """The header of a server that holds entry `number`. Raises `HistoryChanged`."""
        header = yield from self._compared(connection)
        return header if header.total_entries > number else None

    def compare(self, connection: ClientConnection) -> Exchange[None]:
        """Compare the server of a new connection. One that lacks the entry lags, and differs in
        nothing else.

        Raises `DifferentStream`, and `HistoryChanged` if it holds another entry, once.
        """
        try:
            yield from self._compared(connection)
        except DifferentStream:
            raise
        except HistoryChanged:
            self._entry = None
            raise

    def _compared(self, connection: ClientConnection) -> Exchange[Header]:
        header = yield from exchanges.header(connection)
        known = self._entry
        due = 0 if known is None else known[0] + 1
        if self._stream is None:
            self._stream = Identity.of(header)
        elif Identity.of(header) != self._stream:
            raise different_stream(connection.peer, self._stream, header, due)
        if known is None or due > header.total_entries:
            return header
        try:
            found = yield from exchanges.entry(connection, known[0])
        except UnknownEntry:
            # Truncated since the header.
            return header
        if xxh3_64_digest(found.pack()) != known[1]:
            raise HistoryChanged(
                f"{connection.peer} changed its history: entry {known[0]} is not the one that "
                "was received",
                next_entry=due,
                total_entries=header.total_entries,
                first_differing=known[0],
            )
        return header


def different_stream(peer: str, read: Identity, header: Header, due: int) -> DifferentStream:
    """The exception for a header of a stream other than `read`."""
    return DifferentStream(
        f"{peer} serves another stream: {Identity.of(header)}, not {read}",
        next_entry=due,
        total_entries=header.total_entries,
        first_differing=None,
    )


def hashes_of(batch: EntryBatch) -> bytes:
    """8 bytes for each entry, of its head and data."""
    packed = memoryview(batch.packed())
    hashes = []
    begin = 0
    for length in batch.lengths:
        end = begin + ENTRY_HEAD_SIZE + length
        hashes.append(xxh3_64_digest(packed[begin:end]))
        begin = end
    return b"".join(hashes)
