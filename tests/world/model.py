"""What must hold in a world: one history, and nobody who sees another without being notified.

Owns all operations that publishers made, the history of the origin's file, and what clients saw
of it. Entries are made from numbers, so that each byte is known: an entry names its operation, its
place in it, and how often it was updated. Knows no network and no clock.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from datastreamer.selection.clauses import Selection
from tests.storage.lab.image import Image
from tests.storage.made import BOOKMARK, FIRST, HEADER, PAGE, Item

_HEAD = 24


class Wrong(AssertionError):
    """The world shows what must not be."""


class Piece(NamedTuple):
    """An entry: number `at` of operation `op`."""

    op: int
    at: int


@functools.lru_cache(maxsize=4096)
def _data(op: int, at: int, count: int, version: int, size: int) -> bytes:
    head = b"%08d.%03d.%03d.%05d..." % (op, at, count, version)
    filling = random.Random(f"{op}.{at}.{version}").randbytes(min(size, 256))
    return (head + filling * (1 + size // len(filling)))[: len(head) + size]


@dataclass
class Operation:
    """One atomic operation of a publisher."""

    number: int
    sizes: tuple[int, ...]
    """Of its entries; one of size 0 is a bookmark, at most one of them."""
    source: str
    """The publisher that made it."""
    truncations: int
    """How many truncations there were when it was made."""
    epoch: int = 0
    """That of the lease under which it was sent last."""
    first: int | None = None
    """Its first entry, once it is acknowledged."""

    def item(self, at: int, version: int = 0) -> Item:
        size = self.sizes[at]
        if not size:
            return BOOKMARK, b"b%07d" % self.number
        return 1 + at % 3, _data(self.number, at, len(self.sizes), version, size)

    def items(self) -> list[Item]:
        return [self.item(at) for at in range(len(self.sizes))]

    def pieces(self) -> list[Piece]:
        return [Piece(self.number, at) for at in range(len(self.sizes))]


@dataclass
class Seen:
    """What one client has received and was not notified to discard."""

    name: str
    pieces: list[Piece] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of the entries received, for a client of some entries only."""
    where: Selection = ()
    """What it receives; empty: all."""
    next: int = 0
    rollbacks: int = 0
    restarts: int = 0

    def wants(self, item: Item) -> bool:
        kind, data = item
        return not self.where or any(
            kind == clause
            if isinstance(clause, int)
            else kind == clause.type and data[clause.offset :].startswith(clause.prefix)
            for clause in self.where
        )

    def rewind(self, number: int) -> None:
        """Discard the entries from `number` on."""
        kept = sum(each < number for each in self.numbers)
        del self.numbers[kept:], self.pieces[kept:]
        self.next = number


class Model:
    """The history of one stream, and all that was acknowledged or seen of it."""

    def __init__(self, *, durable: bool) -> None:
        """`durable`: no power cut may take what a client has received."""
        self.operations: list[Operation] = []
        self.history: list[Piece] = []
        """The origin's entries, as far as they were looked at."""
        self.ends: set[int] = {0}
        """Where operations ended, at any time."""
        self.acknowledged: list[Operation] = []
        self.rewritten = False
        """Whether clients may be notified that entries were removed."""
        self.refuses = True
        """Whether a publisher may be refused an operation."""
        self.truncations = 0
        self.in_doubt: int | None = None
        """The total of a truncation that the disk refused in the middle: what it was to remove is
        served, and the file may lack it already."""
        self.delivered = 0
        """How many entries any client has received."""
        self._durable = durable
        # Each entry with its number and the entry before it, at any time; and all versions.
        self._links: set[tuple[int, Piece | None, Piece]] = set()
        self._places: set[tuple[int, Piece]] = set()
        self._versions: dict[Piece, set[int]] = {}
        self._current: dict[Piece, int] = {}
        self._offset = FIRST
        # Leases: the epoch, and the stream's end when it was granted.
        self._barriers: list[tuple[int, int]] = []
        # The last publisher that got one, and its epoch.
        self._granted = "", 0

    # Publishers.

    def make(self, sizes: Iterable[int], source: str) -> Operation:
        made = Operation(len(self.operations), tuple(sizes), source, self.truncations)
        self.operations.append(made)
        return made

    def granted(self, source: str, epoch: int, total: int, image: Image) -> None:
        """A publisher has the lease: from entry `total` on, earlier epochs append nothing."""
        if epoch < self._granted[1] or (epoch == self._granted[1] and source != self._granted[0]):
            raise Wrong(
                f"{source} has epoch {epoch}, and {self._granted[0]} has {self._granted[1]}"
            )
        self._granted = source, epoch
        self.look_anew(image)
        self._barriers.append((epoch, total))
        for number in range(total, len(self.history)):
            self._check_epoch(number, self.operations[self.history[number].op])

    def acknowledge(self, operation: Operation, first: int, image: Image) -> None:
        """A publisher has the receipt for an operation that begins at `first`."""
        if operation.first is not None:
            raise Wrong(f"operation {operation.number} is acknowledged twice")
        self.look(image)
        stop = first + len(operation.sizes)
        if self.history[first:stop] != operation.pieces():
            self.look_anew(image)
        if self.history[first:stop] != operation.pieces():
            if operation.truncations < self.truncations:
                return  # the receipt was still on its way
            raise Wrong(
                f"operation {operation.number} is acknowledged at entry {first}, where the stream "
                f"has {self.history[first:stop]}"
            )
        operation.first = first
        self.acknowledged.append(operation)

    def refused(self, source: str, error: Exception) -> None:
        """An operation was refused, and is sent again."""
        if not self.refuses:
            raise Wrong(f"{source} was refused an operation, and nothing was in its way: {error}")

    # The origin.

    def piece(self, item: Item) -> tuple[Piece, int]:
        """What an entry is, and its version. Raises `Wrong` if a byte of it is wrong."""
        kind, data = item
        try:
            if kind == BOOKMARK:
                number = int(data[1:])
                at, version = self.operations[number].sizes.index(0), 0
            else:
                number, at, _, version = (int(each) for each in data[:22].split(b"."))
            wanted = self.operations[number].item(at, version)
        except (ValueError, IndexError):
            raise Wrong(f"not an entry of any publisher: {data[:_HEAD]!r}") from None
        if item != wanted:
            raise Wrong(f"the bytes of entry {data[:_HEAD]!r} are wrong")
        return Piece(number, at), version

    def look(self, image: Image) -> None:
        """Add what was appended to the origin's file."""
        *_, length, total = HEADER.unpack(image.read(HEADER.size, 16))
        if length < self._offset or total < len(self.history):
            self.look_anew(image)
            return
        for piece, version in self._read(image, total):
            self._add(piece, version)

    def _read(self, image: Image, total: int) -> Iterator[tuple[Piece, int]]:
        number = len(self.history)
        while number < total:
            room = PAGE - (self._offset - FIRST) % PAGE
            head = image.read(17, self._offset)
            if room < 17 or not head[0]:
                self._offset += room
                continue
            size = int.from_bytes(head[1:5], "big")
            data = image.read(size - 17, self._offset + 17)
            self._offset += size
            number += 1
            yield self.piece((int.from_bytes(head[5:9], "big"), data))

    def _add(self, piece: Piece, version: int) -> None:
        number, before = len(self.history), self.history[-1] if self.history else None
        operation = self.operations[piece.op]
        whole = before is None or before.at + 1 == len(self.operations[before.op].sizes)
        follows = whole if not piece.at else before == Piece(piece.op, piece.at - 1)
        if not follows:
            raise Wrong(f"entry {number} is {piece}, after {before}: not whole operations")
        self._check_epoch(number, operation)
        self.history.append(piece)
        self._links.add((number, before, piece))
        self._places.add((number, piece))
        self._versions.setdefault(piece, set()).add(version)
        self._current[piece] = version
        if piece.at + 1 == len(operation.sizes):
            self.ends.add(number + 1)

    def _check_epoch(self, number: int, operation: Operation) -> None:
        for epoch, total in self._barriers:
            if number >= total and operation.epoch < epoch:
                raise Wrong(
                    f"entry {number} was appended by a publisher of epoch {operation.epoch}, but "
                    f"epoch {epoch} began at entry {total}"
                )

    def look_anew(self, image: Image) -> None:
        """Read all of the origin's file, which may have lost entries at its end."""
        *_, total = HEADER.unpack(image.read(HEADER.size, 16))
        before, self.history, self._offset = self.history, [], FIRST
        found = list(self._read(image, total))
        common = 0
        for old, (new, _) in zip(before, found, strict=False):
            if old != new:
                break
            common += 1
        if common < len(before):
            self._lost(common)
        self.history = before[:common]
        for piece, version in found[:common]:
            self._versions[piece].add(version)
            self._current[piece] = version
        for piece, version in found[common:]:
            self._add(piece, version)

    def opened(self, image: Image) -> None:
        """The origin's file was opened, which decides a truncation in doubt."""
        if self.in_doubt is not None:
            self.truncate(self.in_doubt)
            self.in_doubt = None
        self.look_anew(image)

    def _lost(self, common: int) -> None:
        """The file lacks the entries from `common` on: without a truncation, they are lost."""
        if self.in_doubt is not None and common >= self.in_doubt:
            return
        self._barriers = [(epoch, min(total, common)) for epoch, total in self._barriers]
        for operation in self.acknowledged:
            assert operation.first is not None
            if operation.first + len(operation.sizes) > common:
                raise Wrong(
                    f"operation {operation.number} was acknowledged at entry {operation.first} and "
                    f"is lost: {common} entries are left"
                )
        if self.delivered > common:
            if self._durable:
                raise Wrong(f"clients received {self.delivered} entries, {common} are left")
            self.rewritten = True
            self.delivered = common

    def present_ends(self) -> list[int]:
        """Where operations end in the stream as it is, and its start."""
        found = [0]
        for number, (op, at) in enumerate(self.history):
            if at + 1 == len(self.operations[op].sizes):
                found.append(number + 1)
        return found

    def truncate(self, total: int) -> None:
        """An operator is about to truncate the stream to `total` entries."""
        self.rewritten = True
        self.truncations += 1
        self.delivered = min(self.delivered, total)
        self._barriers = [(epoch, min(start, total)) for epoch, start in self._barriers]
        self.acknowledged = [
            each
            for each in self.acknowledged
            if each.first is not None and each.first + len(each.sizes) <= total
        ]

    def update(self, number: int) -> tuple[Item, int]:
        """The next version of entry `number`, which an operator is about to write."""
        # A client that was not connected finds another entry.
        self.rewritten = True
        piece = self.history[number]
        version = self._current[piece] + 1
        self._versions[piece].add(version)
        return self.operations[piece.op].item(piece.at, version), version

    def updated(self, number: int, version: int) -> None:
        self._current[self.history[number]] = version

    # Clients.

    def deliver(self, seen: Seen, number: int, item: Item, image: Image) -> None:
        """A client has received entry `number`."""
        piece, version = self.piece(item)
        if seen.where:
            if not seen.wants(item) or number < seen.next:
                raise Wrong(f"{seen.name} received entry {number} of type {item[0]}")
        elif number != seen.next:
            raise Wrong(f"{seen.name} received entry {number}, and not {seen.next}")
        if not self._known(seen, number, piece):
            self.look(image)
        if not self._known(seen, number, piece):
            self.look_anew(image)
        if not self._known(seen, number, piece):
            before = seen.pieces[-1:]
            raise Wrong(f"{seen.name} received {piece} as entry {number} after {before}")
        self.check_version(piece, version)
        seen.pieces.append(piece)
        seen.numbers.append(number)
        seen.next = number + 1
        self.delivered = max(self.delivered, seen.next)

    def _known(self, seen: Seen, number: int, piece: Piece) -> bool:
        if seen.where:
            return (number, piece) in self._places
        return (number, seen.pieces[-1] if seen.pieces else None, piece) in self._links

    def check_entry(self, number: int, item: Item, image: Image) -> None:
        """A query was answered with this entry."""
        piece, version = self.piece(item)
        if (number, piece) not in self._places:
            self.look(image)
        if (number, piece) not in self._places:
            raise Wrong(f"a query found {piece} as entry {number}")
        self.check_version(piece, version)

    def check_version(self, piece: Piece, version: int) -> None:
        if version not in self._versions[piece]:
            raise Wrong(f"version {version} of {piece} was never written")

    def rewind(self, seen: Seen, number: int) -> None:
        """A client was notified that the entries from `number` on are others now."""
        if not self.rewritten:
            raise Wrong(f"{seen.name} was rewound to entry {number}, but nothing was removed")
        # (A client of some entries may have passed others that it does not receive.)
        if number > seen.next and not seen.where:
            raise Wrong(f"{seen.name} at entry {seen.next} was rewound to {number}")
        seen.rewind(number)
        seen.rollbacks += 1

    # The end.

    def is_complete(self, seen: Seen) -> bool:
        """Whether the client has the whole history."""
        return seen.next == len(self.history) or (bool(seen.where) and not self.missing(seen))

    def missing(self, seen: Seen) -> list[int]:
        """The entries that the client wants and lacks."""
        wanted = [
            number for number, piece in enumerate(self.history) if seen.wants(self._item(piece))
        ]
        return sorted({*wanted} - {*seen.numbers})

    def _item(self, piece: Piece) -> Item:
        return self.operations[piece.op].item(piece.at, self._current[piece])

    def items(self) -> list[Item]:
        """The entries of the origin's file."""
        return [self._item(piece) for piece in self.history]

    def check_end(self) -> None:
        """Everything acknowledged is there, once and in order."""
        places: dict[Piece, int] = {}
        for number, piece in enumerate(self.history):
            if piece in places:
                raise Wrong(f"{piece} is entry {places[piece]} and entry {number}")
            places[piece] = number
        last: dict[str, int] = {}
        for operation in self.acknowledged:
            found = [places.get(piece) for piece in operation.pieces()]
            if found[0] != operation.first or found[0] is None:
                raise Wrong(
                    f"operation {operation.number}, acknowledged at entry {operation.first}, is at "
                    f"{found}"
                )
            if operation.first <= last.get(operation.source, -1):
                raise Wrong(f"operation {operation.number} was acknowledged out of order")
            last[operation.source] = operation.first

    def check_client(self, seen: Seen) -> None:
        """What the client has is the history."""
        for number, piece in zip(seen.numbers, seen.pieces, strict=True):
            if self.history[number] != piece:
                raise Wrong(f"{seen.name} has {piece} as entry {number}: {self.history[number]}")
        if missing := self.missing(seen):
            raise Wrong(f"{seen.name} lacks the entries {missing[:20]}")
