"""An archive that damaged pages are restored from, as `storage/pages/restore.py` asks it."""

from __future__ import annotations

from datastreamer.archive import PREFIX
from datastreamer.archive.reading import Archive
from datastreamer.format import Header
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import checked_url
from datastreamer.storage.pages.hashes import Sum
from datastreamer.storage.pages.restore import packed_within


class ArchivePeer:
    """A `SourcePeer`, opened at the first question. A context manager that closes it."""

    only_proven = True

    def __init__(self, source: str) -> None:
        """`source` is `PREFIX` and a URL. Raises `BadArgument`."""
        self.name = source
        self._url = checked_url(source.removeprefix(PREFIX))
        self._opened: tuple[OpenArchive, Archive] | None = None

    def _open(self) -> tuple[OpenArchive, Archive]:
        if self._opened is None:
            archive = OpenArchive.open(self._url)
            self._opened = archive, Archive(archive)
        return self._opened

    def header(self) -> Header:
        """Raises `ArchiveError`s, as do the other questions."""
        return self._open()[1].header()

    def stream_id(self) -> bytes:
        return bytes.fromhex(self._open()[1].manifest.stream.stream_id)

    def page_sums(self, pages: int) -> list[Sum]:
        archive, opened = self._open()
        return archive.page_sums(opened.manifest, pages)

    def entries(self, first: int, stop: int, most: int) -> bytes:
        batches = self._open()[1].batches(first, stop)
        return packed_within(most, batches, f"{self.name}: entries {first} to {stop - 1}")

    def close(self) -> None:
        """A later question opens the archive again."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def __enter__(self) -> ArchivePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
