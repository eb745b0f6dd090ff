"""The records of a stream's pages for a process that does not write the stream.

Decides when the sidecar is opened and linked with the commit record, and gives only the records
that this proves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

from datastreamer.errors import StreamFileError, UntrustedFile
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import Disk, File, Readable
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.proof import MOST_COMPUTED, Digests, KnownChain, Link
from datastreamer.storage.pages.sidecar import (
    SUFFIX,
    PageSum,
    StoredSums,
    SumsFile,
    SumsHeader,
    identity_of,
)

_log = logging.getLogger(__name__)

# Interval between attempts to open a sidecar that is missing or of another state, and to link
# records that the commit record does not prove.
_AGAIN_SECONDS = 1.0


class RecordReader(RecordSource):
    """The records of a sidecar that are proven. Safe to use from several threads."""

    _path: str
    """The sidecar's, for messages."""

    def __init__(
        self,
        file: Readable,
        chains: Callable[[], Sequence[KnownChain]],
        *,
        most_computed: int | None = MOST_COMPUTED,
        again_seconds: float = _AGAIN_SECONDS,
    ) -> None:
        """`file` is the stream's; `chains()` are those of its commit record."""
        self.on_proven = lambda: None
        self._stream: Readable = file
        self._chains = chains
        self._most_computed = most_computed
        self._again_seconds = again_seconds
        # Held while one thread links, or opens the sidecar.
        self._guard = threading.RLock()
        self._link = Link(Digests())
        # The state that it is about; what was linked last in vain, and when to try that again.
        self._linked_state: object = None
        self._refused: object = None
        self._link_at = 0.0
        self._logged = False

    @abstractmethod
    def _usable(self) -> tuple[StoredSums, SumsHeader, int] | None:
        """The sidecar, its header, and the stream's epoch; None if the header says that the records
        are not about the stream as it is now."""

    @abstractmethod
    def close(self) -> None:
        """Close the sidecar. Idempotent."""

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        proven = Digests()
        with contextlib.suppress(OSError, StreamFileError):
            proven = self._proven(stop)
        return proven.records(first, self.unproven(first, stop))

    def unproven(self, first: int, stop: int) -> list[PageSum | None]:
        """The records of these pages that the sidecar has, whether or not they are proven."""
        with contextlib.suppress(OSError, StreamFileError):
            found = self._usable()
            if found is not None:
                stored, header, _ = found
                return stored.get_many(first, stop, header.stream_id)
        return [None] * (stop - first)

    def _proven(self, stop: int) -> Digests:
        """The hashes that are proven, of the pages up to `stop` if that is possible."""
        found = self._usable()
        if found is None:
            return Digests()
        stored, header, epoch = found
        with self._guard:
            state = header.stream_id, epoch
            if state != self._linked_state:
                self._linked_state, self._link = state, Link(Digests())
                self._refused, self._link_at = None, 0.0
            if self._link.proven.get(stop - 1) is None:
                self._extend(stored, header.stream_id)
            return self._link.proven

    def _extend(self, stored: StoredSums, stream_id: bytes) -> None:
        chains, now = self._chains(), time.monotonic()
        known = chains == self._refused or self._link.reached is None
        if not chains or (known and now < self._link_at):
            return
        again = chains == self._refused
        most = self._most_computed
        before = self._link.reached
        linked = self._link.extend(stored, stream_id, chains, self._content, most=most)
        if self._link.reached != before:
            self.on_proven()
        if linked:
            return
        # The last records may be on their way.
        self._refused, self._link_at = chains, now + self._again_seconds
        if again and not self._logged and self._link.proven.get(chains[0].stop - 1) is None:
            self._logged = True
            _log.warning(
                "%s: the commit record of the stream contradicts the checksums, which are those of "
                "another copy or state, or lack those of pages that are damaged; the pages of the "
                "stream are not verified (`datastreamer verify` says more)",
                self._path,
            )

    def _content(self, page: int) -> bytes:
        return self._stream.read(PAGE_SIZE, page_start(page))


class SidecarRecords(RecordReader):
    """The records beside one stream file."""

    def __init__(
        self,
        disk: Disk,
        path: str,
        file: File,
        state: Callable[[], tuple[bytes, int | None]],
        chains: Callable[[], Sequence[KnownChain]],
        *,
        is_current: Callable[[], bool] = lambda: True,
        most_computed: int | None = MOST_COMPUTED,
        again_seconds: float = _AGAIN_SECONDS,
    ) -> None:
        """`path` is that of the stream, symbolic links resolved. `state()` is the stream's id and
        the epoch in its file (None: a program that keeps no records wrote it last), `chains()` what
        its commit record has; `is_current()` whether the file still is in that state."""
        super().__init__(file, chains, most_computed=most_computed, again_seconds=again_seconds)
        self._disk = disk
        self._path = path + SUFFIX
        self._beside = file
        self._state = state
        self._is_current = is_current
        self._file: SumsFile | None = None
        self._header: SumsHeader | None = None
        # When to look again for a header that is about the stream, and the epoch of the last look.
        self._look_at = 0.0
        self._looked_for: int | None = None
        # Descriptors of files that were replaced: other threads may be reading them.
        self._replaced: list[SumsFile] = []

    def close(self) -> None:
        file, self._file = self._file, None
        for each in [*self._replaced, *([] if file is None else [file])]:
            each.close()
        self._replaced.clear()

    def renew(self) -> bool:
        with self._guard, contextlib.suppress(OSError, UntrustedFile):
            file, old = SumsFile.open(self._disk, self._path, self._beside.access()), self._file
            if file is not None and old is not None and file.file.identity() == old.file.identity():
                file.close()
            else:
                self._file, self._header, self._look_at = file, None, 0.0
                if old is not None:
                    self._replaced.append(old)
        return self._is_current()

    def _usable(self) -> tuple[StoredSums, SumsHeader, int] | None:
        stream_id, epoch = self._state()
        if epoch is None:
            return None
        file, header = self._file, self._header
        if file is None or header is None or not is_about(header, stream_id, epoch):
            with self._guard:
                file, header = self._look_again(stream_id, epoch)
        return None if file is None or header is None else (file, header, epoch)

    def _look_again(
        self, stream_id: bytes, epoch: int
    ) -> tuple[SumsFile | None, SumsHeader | None]:
        """Open the sidecar, or read its header again."""
        file, header = self._file, self._header
        if file is not None and header is not None and is_about(header, stream_id, epoch):
            return file, header
        now = time.monotonic()
        if now < self._look_at and epoch == self._looked_for:
            return None, None
        self._look_at, self._looked_for = now + self._again_seconds, epoch
        try:
            if file is None:
                self._file = file = SumsFile.open(self._disk, self._path, self._beside.access())
            header = None if file is None else file.header()
            if header is None or not is_about(header, stream_id, epoch):
                return None, None
            if header.file_id != identity_of(self._beside, stream_id):
                return None, None
        except UntrustedFile as error:
            _log.warning("%s; the pages of the stream are not verified", error)
            self._look_at = float("inf")
            return None, None
        except OSError:
            return None, None
        self._header = header
        return file, header


def is_about(header: SumsHeader, stream_id: bytes, epoch: int | None) -> bool:
    """Whether the header says that the records are those of the stream with this id at this
    epoch: a hint, which proves nothing."""
    return header.stream_id == stream_id and epoch in (header.epoch, header.next_epoch)
