"""Bits that change on disks, and the operator who restores their pages.

A bit changes while no program has the file open, or while its page is not in the page cache: in a
page that has a checksum, whose entries another machine has, too, and no other bit of which is
changed anywhere. (An upstream may update or remove these entries later.) A bit behind the padding
mark belongs to nothing: it is not restored, and no log may name its page for it.
The model reads the origin's file as if no bit had changed. Knows machines, their streams and their
disks, and no network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from datastreamer.format import Header
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.pages.compare import differs
from datastreamer.storage.pages.restore import HealedPages
from datastreamer.storage.pages.sidecar import (
    HEADER_SIZE,
    RECORD_SIZE,
    RECORDS_OFFSET,
    SUFFIX,
    PageSum,
    SumsHeader,
)
from datastreamer.storage.stream import DataStream
from tests.storage.lab.image import BLOCK, SECTOR, Image, Wrote
from tests.storage.made import FIRST, PAGE
from tests.world.machines import Machine

StreamOf = Callable[[str], DataStream | None]


@dataclass
class Flip:
    """A bit that changed."""

    name: str
    page: int
    offset: int
    good: int
    bad: int


class ServedStream:
    """What an operator restores pages from: the stream of a machine that serves."""

    only_proven = False

    def __init__(self, name: str, stream: DataStream) -> None:
        self.name = name
        self._stream = stream

    def header(self) -> Header:
        return self._stream.header

    def stream_id(self) -> bytes:
        return self._stream.stream_id

    def entries(self, first: int, stop: int, most: int) -> bytes:
        return b"".join(batch.packed() for batch in self._stream.batches(first, stop))


class Undone(Image):
    """An image as it would be without changed bits."""

    __slots__ = ("_flips",)

    def __init__(self, image: Image, flips: list[Flip]) -> None:
        super().__init__(image.blocks, image.size)
        self._flips = flips

    def read(self, size: int, offset: int) -> bytes:
        data = super().read(size, offset)
        for flip in self._flips:
            at = flip.offset - offset
            if 0 <= at < len(data):
                data = b"%b%c%b" % (data[:at], flip.good, data[at + 1 :])
        return data


@dataclass
class Rot:
    """All bits that have changed, and were not restored."""

    path: str
    stream_of: StreamOf
    """The stream that a machine serves now."""
    flips: list[Flip] = field(default_factory=list)
    spared: set[tuple[str, int]] = field(default_factory=set)
    """Machines and pages of which no bit has changed but some behind the padding mark."""
    flipped: int = 0
    healed: int = 0

    def choose(
        self, machines: list[Machine], holders: list[Machine], pick: int, more: int
    ) -> Flip | None:
        """A bit of one of their disks to change; None if no page is fit for that, with its entries
        on one of the other `holders`."""
        found = [
            (machine, page)
            for machine in machines
            for page in self._fit(machine, [each for each in holders if each is not machine])
        ]
        if not found:
            return None
        machine, page = found[pick % len(found)]
        offset = FIRST + page * PAGE + (more * 7919 + pick) % PAGE
        (good,) = machine.disk.find(self.path).seen.read(1, offset)
        return Flip(machine.name, page, offset, good, good ^ 1 << more % 8)

    def flip(self, machine: Machine, flip: Flip) -> bool:
        """Change the bit; False if the page has no checksum any more, or a bit of it is changed
        elsewhere."""
        taken = {each.page for each in self.flips}
        if flip.page in taken or not self._is_known(machine, flip.page):
            return False
        inode = machine.disk.find(self.path)
        for image in (inode.seen, inode.durable):
            image.write(bytes([flip.bad]), flip.offset)
        if self._is_known(machine, flip.page):
            self.spared.add((flip.name, flip.page))
            return True
        # (A relay may log what its upstream says of the page.)
        self.spared = {place for place in self.spared if place[1] != flip.page}
        self.flips.append(flip)
        self.flipped += 1
        return True

    def _is_known(self, machine: Machine, page: int) -> bool:
        """Whether the page is on the disk and matches a checksum that the next open relies on."""
        image = machine.disk.find(self.path).seen
        header, stop = HeaderPage(image.read(FIRST, 0)), FIRST + (page + 1) * PAGE
        record, sums = header.record, machine.disk.find(self.path + SUFFIX).seen
        if record is None or header.changing or stop > record.base.length:
            return False
        known = PageSum.unpack(
            sums.read(RECORD_SIZE, RECORDS_OFFSET + page * RECORD_SIZE), page, record.stream_id
        )
        about = SumsHeader.unpack(sums.read(HEADER_SIZE, 0))
        if known is None or about is None or record.epoch not in (about.epoch, about.next_epoch):
            return False
        return known.known and not differs(image.read(PAGE, stop - PAGE), known)

    def evict_changed(self, machine: Machine) -> None:
        """Before a program of this machine starts: the server promises to notice what it reads from
        the disk, and not what an earlier process has left in memory."""
        for flip in self.flips:
            if flip.name == machine.name:
                self.evict(machine, flip.page)

    def evict(self, machine: Machine, page: int) -> None:
        """A page leaves the page cache."""
        machine.disk.find(self.path).cold.update(_blocks(page))

    def is_cold(self, machine: Machine, page: int) -> bool:
        """Whether no block of a page is in the page cache."""
        return machine.disk.find(self.path).cold.issuperset(_blocks(page))

    def _fit(self, machine: Machine, others: list[Machine]) -> list[int]:
        stream = self.stream_of(machine.name)
        if stream is None:
            return []
        inode = machine.disk.find(self.path)
        if inode.doubtful:
            return []
        unwritten = {
            (change.sector * SECTOR - FIRST) // PAGE
            for change in inode.pending
            if isinstance(change, Wrote)
        }
        totals = [other.total_entries for each in others if (other := self.stream_of(each.name))]
        taken = {flip.page for flip in self.flips}
        sums = stream._ensure_writable().owned.sums
        pages = []
        for page in range((stream.reader.head.length - FIRST) // PAGE):
            if page in taken or page in unwritten:
                continue
            record = sums.get(page)
            if record is not None and max(totals, default=0) >= record.next_number:
                pages.append(page)
        return pages

    def undone(self, name: str, image: Image) -> Image:
        """The file of a machine without its changed bits."""
        flips = [flip for flip in self.flips if flip.name == name]
        return Undone(image, flips) if flips else image

    def forget_restored(self, machine: Machine) -> list[Flip]:
        """The bits of this machine's disk that programs have restored, or removed with entries."""
        stream = self.stream_of(machine.name)
        if stream is None:
            return []
        found = [
            flip
            for flip in self.flips
            if flip.name == machine.name and self._is_restored(machine, flip)
        ]
        for flip in found:
            self.flips.remove(flip)
        self.healed += len(found)
        return found

    def _is_restored(self, machine: Machine, flip: Flip) -> bool:
        (byte,) = machine.disk.find(self.path).seen.read(1, flip.offset) or b"\0"
        # An update may have written the same byte.
        return byte != flip.bad or self._is_known(machine, flip.page)

    def heal(self, flip: Flip, names: list[str]) -> HealedPages | None:
        """Restore its page from the other machines' streams; called in its machine's program."""
        stream = self.stream_of(flip.name)
        assert stream is not None
        peers = [
            ServedStream(name, other)
            for name in names
            if name != flip.name and (other := self.stream_of(name)) is not None
        ]
        result = stream.parts.pages.heal(flip.page, peers)
        if result is None or result.source:
            self.flips.remove(flip)
            self.healed += 1
        return result


def _blocks(page: int) -> range:
    first = (FIRST + page * PAGE) // BLOCK
    return range(first, first + PAGE // BLOCK)
