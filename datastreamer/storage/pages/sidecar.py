"""`FILE.sums`: the checksums of a stream's whole pages, beside the stream file.

Owns the bytes of that file, which ``docs/FILE.md`` specifies, and where a sidecar has the record of
a page. A record that is missing, torn or of another stream says nothing about its page: the page is
*unverified*, never damaged. `keeper.py` knows who writes it, and when.
"""

from __future__ import annotations

import contextlib
import struct
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

from datastreamer.errors import UntrustedFile
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Disk, File, Readable
from datastreamer.storage.header.records import NO_ID
from datastreamer.storage.pages.hashes import NO_CHAIN

SUFFIX: Final = ".sums"
RECORDS_OFFSET: Final = 512
RECORD_SIZE: Final = 64

_LETTERS: Final = b"DSpgsums"
_HEADER: Final = struct.Struct(">8sIIQ16sQQQ")
_RECORD: Final = struct.Struct(">16s16sQIIQ")
_SUM: Final = struct.Struct(">Q")
_UNKNOWN: Final = 1

HEADER_SIZE: Final = _HEADER.size + _SUM.size
R = TypeVar("R")


class SumsHeader(NamedTuple):
    """Which stream the records are about.

    They are those of the stream at `epoch`, and also at epoch `next_epoch` if the change that
    leads to it was begun. `file_id` identifies the file of a stream without an id (0: it has an
    id). Pages from `trusted` on may have been changed by a program that keeps no checksums.
    """

    stream_id: bytes
    file_id: int
    epoch: int
    next_epoch: int
    trusted: int

    def pack(self) -> bytes:
        packed = _HEADER.pack(
            *(_LETTERS, 1, 0, self.file_id, self.stream_id),
            *(self.epoch, self.next_epoch, self.trusted),
        )
        return packed + _SUM.pack(xxh3_64_intdigest(packed))

    @classmethod
    def unpack(cls, packed: bytes) -> SumsHeader | None:
        """None unless it is whole."""
        if len(packed) < HEADER_SIZE:
            return None
        letters, version, _, file_id, stream_id, epoch, next_epoch, trusted = _HEADER.unpack_from(
            packed
        )
        (stored,) = _SUM.unpack_from(packed, _HEADER.size)
        if (letters, version) != (_LETTERS, 1):
            return None
        if stored != xxh3_64_intdigest(packed[: _HEADER.size]):
            return None
        return cls(stream_id, file_id, epoch, next_epoch, trusted)


class PageSum(NamedTuple):
    """The record of a whole page: the chain over the pages up to it, the hash of its entries, the
    number of the first entry after it, where its entries end in it (in bytes), and the xxh3 (64
    bits) of the padding after them.

    If `known` is false the page was about to be changed, and its hash is to be made again.
    """

    chain: bytes
    digest: bytes
    next_number: int
    end: int
    padding: int
    known: bool = True

    def pack(self, page: int, stream_id: bytes) -> bytes:
        flags = 0 if self.known else _UNKNOWN
        packed = _RECORD.pack(
            self.chain, self.digest, self.next_number, self.end, flags, self.padding
        )
        return signed(packed, page, stream_id)

    @classmethod
    def unpack(cls, packed: bytes, page: int, stream_id: bytes) -> PageSum | None:
        """None unless it is the whole record of that page."""
        return cls.fields(packed) if is_signed(packed, page, stream_id) else None

    @classmethod
    def fields(cls, packed: bytes) -> PageSum:
        """Those of a record that something else proves to be whole."""
        chain, digest, next_number, end, flags, padding = _RECORD.unpack_from(packed)
        return cls(chain, digest, next_number, end, padding, not flags & _UNKNOWN)


def signed(packed: bytes, page: int, stream_id: bytes) -> bytes:
    """The record of a page, which ends with the xxh3 of its content, the page and the stream."""
    return packed + _SUM.pack(xxh3_64_intdigest(packed + page.to_bytes(8, "big") + stream_id))


def is_signed(record: bytes, page: int, stream_id: bytes) -> bool:
    """Whether these bytes are the whole record of that page."""
    return record == signed(record[: -_SUM.size], page, stream_id)


def identity_of(file: File, stream_id: bytes) -> int:
    """What distinguishes a stream without an id: the file's device and inode, as a hash."""
    if stream_id != NO_ID:
        return 0
    device, inode = file.identity()
    return xxh3_64_intdigest(struct.pack(">QQ", device, inode)) or 1


class StoredRecords(Generic[R]):
    """The records of pages in an open sidecar that is read."""

    size: ClassVar[int]
    """That of a record."""

    def __init__(self, file: Readable) -> None:
        self._readable = file

    @abstractmethod
    def unpack(self, packed: bytes, page: int, stream_id: bytes) -> R | None:
        """None unless it is the whole record of that page."""

    @classmethod
    def offset_of(cls, page: int) -> int:
        """Where the record of a page begins; the size of a file with those of the pages before."""
        return RECORDS_OFFSET + page * cls.size

    def packed(self, first: int, stop: int) -> bytes:
        """The bytes of the records of the pages from `first` up to, not including, `stop`; zeros
        for those that are not there."""
        size = (stop - first) * self.size
        return self._readable.read(size, self.offset_of(first)).ljust(size, b"\0")

    def each(self, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """The same, with the page of each."""
        packed = self.packed(first, stop)
        for at in range(stop - first):
            yield first + at, packed[at * self.size : (at + 1) * self.size]

    def get(self, page: int, stream_id: bytes) -> R | None:
        """The record of a page; None if there is none, or it is torn."""
        return self.unpack(self.packed(page, page + 1), page, stream_id)

    def get_many(self, first: int, stop: int, stream_id: bytes) -> list[R | None]:
        return [self.unpack(each, page, stream_id) for page, each in self.each(first, stop)]

    def close(self) -> None:
        self._readable.close()


class StoredSums(StoredRecords[PageSum]):
    """The checksums in an open `FILE.sums` that is read."""

    size = RECORD_SIZE

    def unpack(self, packed: bytes, page: int, stream_id: bytes) -> PageSum | None:
        return PageSum.unpack(packed, page, stream_id)

    def header(self) -> SumsHeader | None:
        return SumsHeader.unpack(self._readable.read(HEADER_SIZE, 0))

    def get_many(self, first: int, stop: int, stream_id: bytes) -> list[PageSum | None]:
        """The records of these pages that have a hash."""
        found = super().get_many(first, stop, stream_id)
        return [each if each is not None and each.known else None for each in found]


class SumsFile(StoredSums):
    """An open `FILE.sums` on a disk."""

    def __init__(self, file: File, path: str) -> None:
        super().__init__(file)
        self.file = file
        self.path = path

    @classmethod
    def open(cls, disk: Disk, path: str, beside: Access, *, write: bool = False) -> SumsFile | None:
        """The file at `path`; None if there is none, or it cannot be used.

        Raises `UntrustedFile` for a link, or another user's file.
        """
        if not disk.exists(path):
            return None
        with contextlib.suppress(FileNotFoundError):
            return cls(disk.open(path, write=write, beside=beside), path)
        return None

    def write_header(self, header: SumsHeader) -> None:
        self.file.write(header.pack(), 0)

    def count(self) -> int:
        """The number of records that the size allows."""
        return max(0, self.file.size() - RECORDS_OFFSET) // RECORD_SIZE

    def put(self, page: int, sums: list[PageSum], stream_id: bytes) -> None:
        """Write the records of the pages from `page` on."""
        packed = (each.pack(at, stream_id) for at, each in enumerate(sums, page))
        self.put_packed(page, b"".join(packed))

    def put_packed(self, page: int, records: bytes) -> None:
        self.file.write(records, self.offset_of(page))

    def forget(self, page: int, stream_id: bytes) -> None:
        """The record of a page, if there is one, says nothing of the page from now on; nor does its
        hash lead to a chain, that of a change which is undone."""
        known = self.get(page, stream_id) if page < self.count() else None
        if known is not None:
            self.put(page, [known._replace(digest=NO_CHAIN, known=False)], stream_id)

    def truncate(self, pages: int) -> None:
        """Keep the records of that many pages at most."""
        if self.file.size() > self.offset_of(pages):
            self.file.resize(self.offset_of(pages))


def discard(disk: Disk, path: str, beside: Access) -> None:
    """Remove the sidecar at `path`, durably; what is no file that is used there, such as a folder
    or another user's file, stays. Raises `OSError`, which names it."""
    try:
        with contextlib.suppress(OSError):  # it may be possible to remove it nevertheless
            found = SumsFile.open(disk, path, beside)
            if found is None:
                return
            found.close()
        disk.unlink(path)
    except UntrustedFile:
        pass
    except OSError as error:
        why = f"{path} can be neither written nor removed ({error.strerror or error})"
        raise OSError(error.errno, why) from error
