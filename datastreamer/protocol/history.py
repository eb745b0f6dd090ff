"""The last entries received, which distinguish one history of a stream from another.

Owns the hashing of entries and their comparison. One entry proves little (the end of a replaced
block has the same bytes), so the last 256 of a streaming are remembered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Final

from xxhash import xxh3_64_digest

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import DifferentStream, HistoryChanged, UnknownEntry
from datastreamer.format import ENTRY_HEAD_SIZE, Header
from datastreamer.position import HASH_SIZE, KEPT, SPAN, Chosen, Identity, Position
from datastreamer.protocol import exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Exchange
from datastreamer.selection.clauses import Selection

HELD: Final = 8
"""Batches that are held unhashed, at most; each holds a buffer of up to some MiB."""


class Trail:
    """The hashes of the last entries received before `next_number`: of up to `KEPT`, among the last
    `SPAN` of all.

    It claims that the entries from `first_number` on are these, and no others; with `where`, those
    of the entries that this selects.
    """

    def __init__(self, next_number: int, where: Selection | None = None) -> None:
        self.next_number = next_number
        self.where = where
        self._first = next_number
        self._numbers: list[int] = []
        self._hashes = b""
        # Hashed when needed: in a fast stream, the next batches replace them anyway.
        self._unhashed: list[EntryBatch] = []

    @classmethod
    def of(cls, position: Position) -> Trail:
        trail, chosen = cls(position.next_entry), position.chosen
        trail._hashes = position.trail
        if chosen is None:
            trail._first -= len(position.trail) // HASH_SIZE
            trail._numbers = list(range(trail._first, position.next_entry))
        else:
            trail.where, trail._first = chosen.where, chosen.first_entry
            trail._numbers = list(chosen.numbers)
        return trail

    def position(self, stream: Identity | None) -> Position:
        """The position after the remembered entries."""
        hashes, chosen = self.hashes, None
        if self.where is not None:
            chosen = Chosen(self.where, self._first, tuple(self._numbers))
        return Position(self.next_number, hashes, stream, chosen)

    @property
    def hashes(self) -> bytes:
        """8 bytes per entry, oldest first."""
        self._hash_all()
        return self._hashes

    @property
    def first_number(self) -> int:
        """The beginning of the remembered range of the stream; `next_number` if there is none."""
        self._hash_all()
        return self._first

    def certain(self, differing: int) -> bool:
        """Whether an entry before this one is remembered, and was therefore found to be equal."""
        self._hash_all()
        return bisect_left(self._numbers, differing) > 0

    def extend(self, batch: EntryBatch) -> None:
        """Add the next entries, all of them selected. The batch and its buffer may be held until
        more are added."""
        self.next_number = batch.next_number
        if len(batch) >= KEPT:
            self._begin_with([batch[-KEPT:]])
            return
        self._unhashed.append(batch)
        if len(self._unhashed) > HELD:
            self._reduce()

    def _begin_with(self, batches: list[EntryBatch]) -> None:
        """Forget what is before these."""
        self._numbers, self._hashes, self._unhashed = [], b"", batches
        self._first = batches[0].first_number

    def _reduce(self) -> None:
        """Drop the batches that later ones have replaced; hash all if there is none."""
        entries = 0
        for at in range(len(self._unhashed) - 1, 0, -1):
            entries += len(self._unhashed[at])
            if entries >= KEPT:
                self._begin_with(self._unhashed[at:])
                return
        self._hash_all()

    def _hash_all(self) -> None:
        for batch in self._unhashed:
            self._numbers += batch.numbers
            self._hashes += hashes_of(batch)
        self._unhashed = []
        first = self.next_number - SPAN
        if len(self._numbers) > KEPT:
            first = max(first, self._numbers[-KEPT])
        if first > self._first:
            at = bisect_left(self._numbers, first)
            self._numbers, self._hashes = self._numbers[at:], self._hashes[at * HASH_SIZE :]
            self._first = first

    def extended(self, batch: EntryBatch) -> Trail:
        longer = Trail.of(self.position(None))
        longer.extend(batch)
        return longer

    def cut(self, number: int) -> None:
        """Forget the entries from `number` on."""
        self._hash_all()
        at = bisect_left(self._numbers, number)
        self._numbers, self._hashes = self._numbers[:at], self._hashes[: at * HASH_SIZE]
        self.next_number, self._first = number, min(self._first, number)

    def first_difference(self, batch: EntryBatch) -> int | None:
        """The first entry that differs in the range of `batch`: another one, a missing one or an
        additional one. The range must be remembered, and the batch hold only selected entries."""
        self._hash_all()
        begin, end = (
            bisect_left(self._numbers, number) for number in (batch.first_number, batch.next_number)
        )
        known = _pairs(self._numbers[begin:end], self._hashes[begin * HASH_SIZE : end * HASH_SIZE])
        for there, remembered in zip_longest(_pairs(batch.numbers, hashes_of(batch)), known):
            if there != remembered:
                return int(min(each[0] for each in (there, remembered) if each is not None))
        return None


def _pairs(numbers: Iterable[int], hashes: bytes) -> Iterator[tuple[int, bytes]]:
    for at, number in enumerate(numbers):
        yield number, hashes[at * HASH_SIZE : (at + 1) * HASH_SIZE]


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
