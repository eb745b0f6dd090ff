"""Archives as the place of a table: which manifest a query reads, and where its pages are.

Owns the pin: all tasks of a query read the manifest that the plan has found, whatever is published
meanwhile. Loads the store when an archive is read.
"""

from __future__ import annotations

import base64
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from datastreamer.archive import PREFIX
from datastreamer.archive.reading import ArchiveFile
from datastreamer.errors import ArchiveMissing, FileMissing
from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.pages.records import RecordReader
from datastreamer.storage.pages.sidecar import PageSum, StoredSums, SumsHeader

if TYPE_CHECKING:
    from datastreamer.storage.objects.opened import OpenArchive

# The object of a page, by its place among the plan's, its offset and its size there.
_FRAME: Final = struct.Struct(">IQI")


@lru_cache(maxsize=16)
def _opened(url: str) -> OpenArchive:
    from datastreamer.storage.objects.opened import OpenArchive

    return OpenArchive.open(url)


@lru_cache(maxsize=16)
def _manifest(url: str, number: int) -> ArchiveManifest:
    return _opened(url).manifest(number)[0]


def newest(url: str, generation: int | None) -> int:
    """The number of the newest manifest, or of the newest one of a generation."""
    return _opened(url).chosen(generation=generation).number


def entry_at(url: str, number: int, ms: int) -> int:
    """As `Archive.at_time`."""
    return _opened(url).at_time(_manifest(url, number), ms)


def opened(url: str, number: int) -> ArchiveFile:
    """The stream of a manifest as a file. Raises `FileMissing`."""
    try:
        return ArchiveFile(_opened(url), _manifest(url, number), None)
    except ArchiveMissing as error:
        raise FileMissing(f"{PREFIX}{url}", error.what) from None


class ArchivedSums(RecordReader):
    """The checksums in the footers, which the manifest proves."""

    def __init__(self, url: str, number: int, file: Readable) -> None:
        super().__init__(file, list)
        self._url, self._manifest = url, _manifest(url, number)

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        found: list[PageSum | None] = []
        while first < stop:
            row = self._manifest.row_of(first)
            end, at = min(stop, row.stop), row.frame - row.first_page
            pages = _opened(self._url).footer(row).pages
            found += [page.sum for page in pages[first + at : end + at]]
            first = end
        return found

    def _usable(self) -> tuple[StoredSums, SumsHeader, int] | None:
        return None

    def close(self) -> None:
        """There is nothing to close."""


def for_java(url: str, number: int, file: Readable) -> dict[str, Any]:
    """What the reader in Java needs of an archive: the header page, and the names of its objects
    for Hadoop's file systems."""
    base = f"s3a{url.removeprefix('s3')}" if url.startswith("s3:") else url
    objects = sorted({row.object for row in _manifest(url, number).rows})
    header = base64.b64encode(file.read(HEADER_PAGE_SIZE, 0)).decode()
    return {"header": header, "objects": [f"{base}/{name}" for name in objects]}


def frames(url: str, number: int, first: int, stop: int) -> str:
    """Where the pages from `first` up to, not including, `stop` are."""
    archive, manifest = _opened(url), _manifest(url, number)
    places = {name: at for at, name in enumerate(sorted({row.object for row in manifest.rows}))}
    packed = b""
    for page in range(first, stop):
        row = manifest.row_of(page)
        offset, size = archive.footer(row).places[page - row.first_page + row.frame]
        packed += _FRAME.pack(places[row.object], offset, size)
    return base64.b64encode(packed).decode()
