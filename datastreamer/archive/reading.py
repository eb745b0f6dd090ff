"""An archive read as a stream file: its header page is made of the manifest, and its pages are
fetched when they are read.

Owns which pages are in memory and which are fetched ahead, and when a follower looks for a newer
manifest. Loads the store when an archive is opened.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, cast

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import ArchiveChanged, UnknownBookmark
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_of, page_start
from datastreamer.selection.times import Moment, moment_ms
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Buffer, File, boot_id
from datastreamer.storage.header.records import settled_page
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.objects.page_runs import PageRuns, fetching_threads
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.stream import DataStream

if TYPE_CHECKING:
    from datastreamer.archive.check import Checked
    from datastreamer.storage.objects.opened import OpenArchive

INTERVAL: Final = 2.0
"""Seconds between two looks of a follower for a newer manifest."""

_PAUSE_SECONDS: Final = 0.05


class ArchiveFile:
    """The stream file that a manifest describes, a `File` and `Numbered`, read only.

    With `interval` it looks for a newer manifest when its header is read, at most once in that
    many seconds, and continues with it. Raises `ArchiveChanged` for one of another generation, and
    what `OpenArchive` raises.
    """

    def __init__(
        self, archive: OpenArchive, manifest: ArchiveManifest, interval: float | None
    ) -> None:
        self._archive = archive
        self._interval = interval
        self._looking = threading.Lock()
        self._look_at = time.monotonic() + (interval or 0.0)
        # Changes of entries that were never archived raise the stream's epoch, too.
        self._epoch = manifest.stream.epoch
        self._threads = fetching_threads()
        self._show(manifest)

    @property
    def manifest(self) -> ArchiveManifest:
        return self._shown[0].manifest

    def _show(self, manifest: ArchiveManifest) -> None:
        known = manifest.header, manifest.end_sum, manifest.stream_id
        page = bytes(settled_page(*known, self._epoch, boot_id()))
        self._shown = PageRuns(self._archive, manifest, self._threads), page

    def _look(self, interval: float) -> None:
        """Continue with the newest manifest. Requires `_looking`."""
        known = self.manifest
        newest, _ = self._archive.newest(known.number)
        self._look_at = time.monotonic() + interval
        if newest.generation != known.generation:
            raise ArchiveChanged(
                self._archive.url,
                f"entries were truncated or updated ({newest.reason}): generation "
                f"{newest.generation} follows generation {known.generation}, which was read up "
                f"to entry {known.head.entries}; begin again",
            )
        if newest.number != known.number:
            self._show(newest)

    def read(self, size: int, offset: int) -> bytes:
        looks = offset < HEADER_PAGE_SIZE and self._interval is not None
        if looks and time.monotonic() >= self._look_at and self._looking.acquire(blocking=False):
            try:
                self._look(self._interval or 0.0)
            finally:
                self._looking.release()
        pages, header = self._shown
        stop, parts = min(offset + size, page_start(pages.stop)), []
        while offset < stop:
            content, start = header, 0
            if offset >= HEADER_PAGE_SIZE:
                start = page_start(page_of(offset))
                # The last one ends with its entries.
                content = pages.get(page_of(offset)).data.ljust(PAGE_SIZE, b"\0")
            parts.append(content[offset - start : stop - start])
            offset += len(parts[-1])
        return b"".join(parts)

    def page_holding(self, number: int) -> int:
        return self._archive.page_with(self.manifest, number)

    def first_number(self, page: int) -> int:
        return self._archive.first_number(self.manifest, page)

    def size(self) -> int:
        return page_start(self._shown[0].stop)

    def access(self) -> Access:
        return Access.private()

    def locked_elsewhere(self) -> bool:
        return False

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class ArchiveStream(DataStream):
    """The stream of an archive, open for reading: bookmarks and times are those of footers."""

    def __init__(
        self,
        archive: OpenArchive,
        file: StreamFile,
        ended: Callable[[], None] | None,
        *,
        follow: bool,
    ) -> None:
        super().__init__(file, "memory", follow=follow)
        self._archive = archive
        self._ended = ended

    @classmethod
    def of(
        cls,
        archive: OpenArchive,
        manifest: ArchiveManifest,
        interval: float | None = None,
        stream_type: int | None = None,
        ended: Callable[[], None] | None = None,
    ) -> ArchiveStream:
        """That of a manifest; with `interval`, of later ones, too. `ended()` is called at its
        end."""
        file = cast("File", ArchiveFile(archive, manifest, interval))
        opened = StreamFile.judged(file, f"archive:{archive.url}", stream_type)
        return cls(archive, opened, ended, follow=interval is not None)

    def close(self) -> None:
        super().close()
        if self._ended is not None:
            self._ended()

    @property
    def manifest(self) -> ArchiveManifest:
        """The newest one that was read."""
        self.refresh()
        return cast("ArchiveFile", self._file.file).manifest

    def bookmark(self, key: Buffer) -> int:
        number = self._archive.bookmark(self.manifest, bytes(key))
        if number is None:
            raise UnknownBookmark(bytes(key))
        return number

    def entry_at(self, ms: int) -> int:
        """The first entry of a page so early that no entry that was committed at or after a time,
        in Unix ms, is before it; `total_entries` if none was."""
        return self._archive.at_time(self.manifest, ms)


class Archive:
    """A stream in object storage, as its newest manifest describes it when it is opened.

    Made by `open`; a context manager that closes it. Every page is compared with its checksum
    when it is read. Raises what is below `ArchiveError`. Safe to use from several threads.
    """

    def __init__(
        self,
        archive: OpenArchive,
        *,
        stream_type: int | None = None,
        interval: float = INTERVAL,
    ) -> None:
        """Call `open` instead."""
        self._archive = archive
        self._stream_type = stream_type
        self._interval = interval
        self.manifest, _ = archive.newest()
        """Which objects are the stream: number, generation, head, rows."""
        self._stream = self.stream()

    @classmethod
    def open(
        cls, url: str, *, stream_type: int | None = None, interval: float = INTERVAL
    ) -> Archive:
        """Open the archive at `url`: s3://, gs://, az:// or file:///.

        `stream_type` is the expected type. `interval`: the seconds between two looks for a newer
        manifest of what follows. Raises `ArchiveMissing`, `NotAnArchive`, `ExtraMissing`,
        `BadArgument`, `WrongStreamType`.
        """
        from datastreamer.storage.objects.opened import OpenArchive

        return cls(OpenArchive.open(url), stream_type=stream_type, interval=interval)

    def stream(self, *, follow: bool = False, last: bool = False) -> ArchiveStream:
        """The stream, for a reader of its own, who closes it. `follow`: it sees the commits that
        are archived later when it is refreshed. `last`: its end closes the archive, too."""
        return ArchiveStream.of(
            self._archive,
            self.manifest,
            self._interval if follow else None,
            self._stream_type,
            self.close if last else None,
        )

    def header(self) -> Header:
        """The header of the stream."""
        return self._stream.header

    def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return self._stream.entry(number)

    def bookmark(self, key: bytes) -> int:
        """The number of the newest entry that is this bookmark. Raises `UnknownBookmark`."""
        return self._stream.bookmark(key)

    def at_time(self, time: Moment) -> int:
        """The first entry of a page so early that no entry that was committed at or after a time
        is before it; the number of entries if none was."""
        return self._stream.entry_at(moment_ms(time))

    def batches(
        self, start: int = 0, stop: int | None = None, *, follow: bool = False
    ) -> Iterator[EntryBatch]:
        """The entries from `start` up to, not including, `stop` (None: the head), in batches.

        `follow`: also what is archived later, without an end unless there is a `stop`. Raises
        `ArchiveChanged` if archived entries were truncated or updated meanwhile.
        """
        with self.stream(follow=follow) as stream:
            while True:
                for batch in stream.batches(start, stop):
                    start = batch.next_number
                    yield batch
                if not follow or (stop is not None and start >= stop):
                    return
                while not stream.refresh():
                    time.sleep(_PAUSE_SECONDS)

    def verify(self, *, sample: int | None = None) -> Checked:
        """Read all objects of all manifests, or `sample` random ones, and report `problems`."""
        from datastreamer.archive.check import check

        return check(self._archive, sample=sample)

    def restore(self, path: str | os.PathLike[str], *, to_entry: int | None = None) -> Header:
        """Make a stream file of it, with checksums and bookmark index; durable on return.

        It holds the entries before `to_entry` (None: all). Raises `FileExists`, `WriteFailed`,
        `UnknownEntry`, `StreamLocked`.
        """
        from datastreamer.archive.restore import restore

        return restore(self._archive, path, self.manifest, to_entry=to_entry).header

    def close(self) -> None:
        """Release memory and threads, and end its streams. Idempotent."""
        self._stream.close()
        self._archive.store.abandon()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
