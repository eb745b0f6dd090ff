"""An archive that damaged pages are restored from, as `storage/pages/restore.py` asks it."""

from __future__ import annotations

from datastreamer.archive import PREFIX
from datastreamer.archive.opened import OpenArchive
from datastreamer.archive.reading import INTERVAL, Archive
from datastreamer.archive.store import checked_url
from datastreamer.errors import PeerError
from datastreamer.format import Header
from datastreamer.storage.read.range_sums import Sum


class ArchivePeer:
    """A `Peer`, opened at the first question. A context manager that closes it."""

    only_proven = True

    def __init__(self, source: str) -> None:
        """`source` is `PREFIX` and a URL. Raises `BadArgument`."""
        self.name = source
        self._url = checked_url(source.removeprefix(PREFIX))
        self._opened: tuple[OpenArchive, Archive] | None = None

    def _open(self) -> tuple[OpenArchive, Archive]:
        if self._opened is None:
            archive = OpenArchive.open(self._url)
            self._opened = archive, Archive(archive, None, INTERVAL)
        return self._opened

    def header(self) -> Header:
        """Raises `ArchiveError`s, as do the other questions."""
        return self._open()[1].header()

    def stream_id(self) -> bytes:
        return bytes.fromhex(self._open()[1].manifest.stream.stream_id)

    def page_sums(self, pages: int) -> list[Sum]:
        """The checksums of its first whole pages, at most that many."""
        archive, opened = self._open()
        sums: list[Sum] = []
        for row in opened.manifest.segments:
            for page in archive.footer(row).pages[row.frame : row.frame + row.pages]:
                first = sums[-1][1] if sums else 0
                sums.append((first, page.sum.next_number, page.sum.digest))
            if len(sums) >= pages:
                break
        return sums[:pages]

    def entries(self, first: int, stop: int, most: int) -> bytes:
        parts, size = [], 0
        for batch in self._open()[1].batches(first, stop):
            parts.append(batch.packed())
            size += len(parts[-1])
            if size > most:
                raise PeerError(
                    f"{self.name}: entries {first} to {stop - 1} have over {most} bytes"
                )
        return b"".join(parts)

    def close(self) -> None:
        """A later question opens the archive again."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def __enter__(self) -> ArchivePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
