"""Reads the checksums of a stream that this process does not write.

Owns when the sidecar is opened, and whether its records are about the stream as it is now.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from datastreamer.errors import StreamFileError, UntrustedFile
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.sums.chain import KnownChain, contradicts
from datastreamer.storage.sums.sidecar import (
    SUFFIX,
    PageSum,
    StoredSums,
    SumsFile,
    SumsHeader,
    identity_of,
)

_log = logging.getLogger(__name__)

# Interval between attempts to open a sidecar that is missing or of another state.
_AGAIN_SECONDS = 1.0


class RecordReader(ABC):
    """The records of a sidecar, as far as they can be relied on; a `RecordSource`."""

    @abstractmethod
    def _usable(self) -> tuple[StoredSums, SumsHeader] | None:
        """The sidecar and its header; None if its records are not about the stream as it is now."""

    @abstractmethod
    def close(self) -> None:
        """Close the sidecar. Idempotent."""

    def get(self, page: int) -> PageSum | None:
        """The record of a page, if it is known and can be relied on."""
        return self.get_many(page, page + 1)[0]

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        """The same for the pages from `first` up to, not including, `stop`, with one read."""
        found = self._usable()
        if found is not None:
            stored, header = found
            with contextlib.suppress(OSError, StreamFileError):
                records = stored.get_many(first, stop, header.stream_id)
                return [
                    each if each is not None and each.known and page < header.trusted else None
                    for page, each in enumerate(records, first)
                ]
        return [None] * (stop - first)

    def first_number(self, page: int) -> int:
        """The first entry of a page, as far as records say; else 0."""
        before = self.get(page - 1) if page else None
        return 0 if before is None else before.next_number

    @abstractmethod
    def renew(self) -> None:
        """A page differs from its record: make sure that the record is not an outdated one."""


class SidecarRecords(RecordReader):
    """The records beside one stream file. Safe to use from several threads."""

    def __init__(
        self,
        disk: Disk,
        path: str,
        file: File,
        state: Callable[[], tuple[bytes, int | None]],
        chains: Callable[[], Sequence[KnownChain]],
        *,
        again_seconds: float = _AGAIN_SECONDS,
    ) -> None:
        """`path` is that of the stream, symbolic links resolved. `state()` is the stream's id and
        the epoch in its file (None: a program that keeps no records wrote it last), `chains()` what
        its commit record has."""
        self._disk = disk
        self._path = path + SUFFIX
        self._stream = file
        self._state = state
        self._chains = chains
        self._file: SumsFile | None = None
        self._header: SumsHeader | None = None
        # When to look again for a header that is about the stream, and the epoch of the last look.
        self._look_at = 0.0
        self._looked_for: int | None = None
        # Held while the sidecar is opened: a second descriptor would never be closed.
        self._opening = threading.Lock()
        self._again_seconds = again_seconds
        # Descriptors of files that were replaced: other threads may be reading them.
        self._replaced: list[SumsFile] = []
        self.contradicted = False
        """Whether the commit record contradicted the records when it was compared last."""
        self._logged = False

    def close(self) -> None:
        file, self._file = self._file, None
        for each in [*self._replaced, *([] if file is None else [file])]:
            each.close()
        self._replaced.clear()

    def renew(self) -> None:
        with self._opening, contextlib.suppress(OSError, UntrustedFile):
            file = SumsFile.open(self._disk, self._path, self._stream.access())
            old = self._file
            if file is None or (old is not None and file.file.identity() == old.file.identity()):
                if file is not None:
                    file.close()
                return
            self._file, self._header, self._look_at = file, None, 0.0
            if old is not None:
                self._replaced.append(old)

    def _usable(self) -> tuple[StoredSums, SumsHeader] | None:
        stream_id, epoch = self._state()
        file, header = self._file, self._header
        if file is not None and header is not None and is_about(header, stream_id, epoch):
            return file, header
        if epoch is None:
            return None
        with self._opening:
            return self._look_again(stream_id, epoch)

    def _look_again(self, stream_id: bytes, epoch: int) -> tuple[StoredSums, SumsHeader] | None:
        """Open the sidecar, or read its header again."""
        file, header = self._file, self._header
        if file is not None and header is not None and is_about(header, stream_id, epoch):
            return file, header
        now = time.monotonic()
        if now < self._look_at and epoch == self._looked_for:
            return None
        self._look_at, self._looked_for = now + self._again_seconds, epoch
        try:
            if file is None:
                self._file = file = SumsFile.open(self._disk, self._path, self._stream.access())
            header = None if file is None else file.header()
            if file is None or header is None or not is_about(header, stream_id, epoch):
                return None
            if header.file_id != identity_of(self._stream, stream_id):
                return None
            if self._is_contradicted(file, stream_id):
                return None
        except UntrustedFile as error:
            _log.warning("%s; the pages of the stream are not verified", error)
            self._look_at = float("inf")
            return None
        except OSError:
            return None
        self._header = header
        return file, header

    def _is_contradicted(self, file: SumsFile, stream_id: bytes) -> bool:
        before = self.contradicted
        self.contradicted = contradicts(file, stream_id, self._chains())
        # The first time, a change of entries may be in progress.
        if self.contradicted and before and not self._logged:
            self._logged = True
            _log.warning(
                "%s: the commit record of the stream contradicts these checksums, which are those "
                "of another copy or state; the pages of the stream are not verified (`datastreamer "
                "verify` says more)",
                self._path,
            )
        return self.contradicted


def is_about(header: SumsHeader, stream_id: bytes, epoch: int | None) -> bool:
    """Whether the records are those of the stream with this id at this epoch."""
    return header.stream_id == stream_id and epoch in (header.epoch, header.next_epoch)
