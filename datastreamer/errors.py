"""All exceptions that datastreamer raises, as one tree, sorted by who is at fault.

- `UsageError`: the caller; nothing was changed
- `NotFound`: the stream does not have the entry or bookmark
- `StreamFileError`: the stream file or a file beside it; `WriteFailed`, `DamagedFile` and their
  subclasses are below it
- `CorruptEntries`, `DecodeFailed`: the bytes that were passed
- `ArchiveError`: an archive in object storage
- `ServerFailed`: the server of this process
- `UpstreamDiffers`: a relay's upstream
- `PeerError`: the other side of a connection; `ServerRefused` and its subclasses are below it

A class also inherits the matching builtin exception (`ValueError`, `LookupError`,
`FileNotFoundError`, ...), if there is one.
"""

from __future__ import annotations

import os
from typing import Final


class DatastreamerError(Exception):
    """Base of all errors of this package. ``str()`` is a message of one line."""


class UsageError(DatastreamerError):
    """The call is not valid. Nothing was changed."""


class NoOperation(UsageError):
    """No atomic operation is open."""


class OperationOpen(UsageError):
    """An atomic operation is open; the call is allowed only without one."""


class LeaseHeld(UsageError):
    """A publisher has the lease; only its operations can be written."""


class StreamClosed(UsageError):
    """The object was closed, or belongs to the parent of a forked process."""


class StreamReadOnly(UsageError):
    """The stream was opened for reading only."""


class BadArgument(UsageError, ValueError):
    """An argument is out of range, or not one of the allowed values."""


class EntryTooLarge(UsageError, ValueError):
    """The entry does not fit into one page."""


class BadEntryType(UsageError, ValueError):
    """The entry type is not a u32, or is that of bookmarks."""


class BadBookmark(UsageError, ValueError):
    """A bookmark key is 1 to 16 bytes."""


class BadRange(UsageError, ValueError):
    """The end of the range precedes its start."""


class BadPosition(UsageError, ValueError):
    """The value is not a valid position in a stream."""


class UpdateRefused(UsageError, ValueError):
    """An update keeps number, type and length, and never touches a bookmark."""


class BadCertificate(UsageError, ValueError):
    """A file for TLS - a certificate, a key, the certificates of a CA - cannot be used."""


class BadEvent(UsageError, ValueError):
    """A value does not fit its field of the event."""


class BadPayload(UsageError, ValueError):
    """The payload, or a part of one, cannot be split into messages."""


class ExtraMissing(UsageError, ImportError):
    """An optional package is not installed; ``str()`` says how to install it."""

    def __init__(self, doing: str, extra: str) -> None:
        super().__init__(f"{doing}: install it with pip install 'datastreamer[{extra}]'")
        self.extra = extra


class NotFound(DatastreamerError, LookupError):
    """The stream does not have what was requested."""


class UnknownEntry(NotFound):
    """No committed entry has this number."""

    def __init__(self, number: int, total_entries: int) -> None:
        holds = f"0 to {total_entries - 1}" if total_entries else "none"
        super().__init__(f"no entry {number}: the stream holds {holds}")
        self.number = number
        self.total_entries = total_entries


class UnknownBookmark(NotFound):
    """No committed bookmark has this key, or no event follows it."""

    def __init__(self, key: bytes, why: str = "") -> None:
        super().__init__(why or f"no bookmark 0x{key.hex()} in the stream")
        self.key = key


class TimeUnknown(NotFound):
    """It is not known which entry was committed first at or after a time.

    `before` and `after` are the nearest entries whose times are known, (entry, Unix ms).
    """

    def __init__(
        self,
        what: str,
        before: tuple[int, int] | None = None,
        after: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(what)
        self.before = before
        self.after = after


class StreamFileError(DatastreamerError):
    """A problem with a file; ``path`` names it."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(f"{os.fspath(path)}: {what}")
        self.path = os.fspath(path)
        self.what = what


class FileMissing(StreamFileError, FileNotFoundError):
    """There is no such file."""


class FileExists(StreamFileError, FileExistsError):
    """A stream is never created over something that exists."""


class NotAStream(StreamFileError):
    """The path is not a stream file (a directory, another format, too short)."""


class WrongStreamType(StreamFileError):
    """The file holds a stream of another type than requested."""


class StreamLocked(StreamFileError):
    """Another process has the stream open for writing; ``pid`` is its id, 0 if unknown."""

    def __init__(self, path: str | os.PathLike[str], pid: int) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(
            path,
            f"locked by another writer, {who}; only one process may write: first stop that server, "
            "relay or other program",
        )
        self.pid = pid


class FileReplaced(StreamFileError):
    """The path of an open stream does not lead to the open file any more.

    The open file still has all committed entries: `DataStream.snapshot` copies it. The refused
    operation is not visible and still open: commit again once the path leads to the file again,
    or roll back.
    """


class StreamBusy(StreamFileError):
    """A writer truncates or updates the stream faster than it can be read. The file need not be
    damaged: try again, or stop the writer."""


class WriteFailed(StreamFileError):
    """A write or sync failed. The stream is at its last commit."""


class CommitInDoubt(WriteFailed):
    """A sync failed, or a commit was interrupted: it is not known what is on disk.

    Raised by commits, and by a rollback, `sync` or `close` until that is resolved.
    """


class EntriesLost(CommitInDoubt):
    """After a failed sync, committed entries could not be written to disk any more.

    The stream was truncated to `total` entries.
    """

    def __init__(self, path: str | os.PathLike[str], total: int, before: int) -> None:
        super().__init__(
            path,
            f"a sync failed, and entries {total} to {before - 1} are lost: they are neither on "
            f"disk nor in the page cache; the stream continues with entry {total}",
        )
        self.total = total


class IndexFailed(StreamFileError):
    """The bookmark index cannot be opened or written."""


class CursorFailed(StreamFileError):
    """A reader's position cannot be read or stored."""


class UntrustedFile(StreamFileError):
    """A file or folder beside a stream is a link or belongs to another user; it is not used."""


class DamagedFile(StreamFileError):
    """The file breaks the format at byte ``offset``."""

    def __init__(self, path: str | os.PathLike[str], offset: int, what: str) -> None:
        super().__init__(path, f"at byte {offset}: {what}")
        self.offset = offset


class DamagedHeader(DamagedFile):
    """Header, commit record or totals are not valid."""


class BadFileSize(DamagedFile):
    """The size is not 4096 + k x 1 MiB, or too small for the header's total."""


class DamagedEntry(DamagedFile):
    """An entry, the padding or the start of a page breaks the format."""


class DamagedPage(DamagedEntry):
    """The bytes of a page are not those that were written: they do not match its checksum.

    `page` is its number from 0, `offset` its start; it holds the entries from `first` up to, not
    including, `end`. `why` says how it differs.
    """

    def __init__(
        self, path: str | os.PathLike[str], offset: int, what: str, page: int, first: int, end: int
    ) -> None:
        entries = f"entry {first}" if end == first + 1 else f"entries {first} to {end - 1}"
        super().__init__(path, offset, f"page {page} ({entries}): {what}")
        self.page = page
        self.first = first
        self.end = end
        self.why = what


class EvictedEntry(StreamFileError):
    """An entry is in the stream's archive alone, and cannot be read there now."""


class RetentionNotPossible(UsageError):
    """The pages of the file cannot be evicted."""


UNREADABLE: Final = (DamagedFile, EvictedEntry)
"""Entries that a server cannot send, while it serves others."""


class ArchiveError(DatastreamerError):
    """A problem with an archive in object storage; ``url`` names it."""

    def __init__(self, url: str, what: str) -> None:
        super().__init__(f"{url}: {what}")
        self.url = url
        self.what = what


class ArchiveMissing(ArchiveError, FileNotFoundError):
    """There is no archive at the URL: no bucket, or nothing in it that begins one."""


class NotAnArchive(ArchiveError):
    """What is at the URL is no archive that this version reads."""


class ArchiveUnreachable(ArchiveError, ConnectionError):
    """The store did not answer, also after retries."""


class ArchiveDenied(ArchiveError, PermissionError):
    """The store refuses the credentials, or they lack a right."""


class DamagedArchive(ArchiveError):
    """An object is missing, or is not what was put there."""


class ArchiveUnsafe(ArchiveError):
    """The store replaces objects although a writer only creates them: two writers would destroy
    each other's work."""


class ArchiveBusy(ArchiveError):
    """Another stream file was archived there a short time ago."""


class ArchiveFenced(ArchiveError):
    """Another writer has taken the archive over; this one publishes nothing more."""


class ArchiveDiverged(ArchiveError):
    """The archive has other entries than the file, or more of them."""


class ArchiveChanged(ArchiveError):
    """Entries that are being read were truncated or updated: open the archive again."""


class ServerFailed(DatastreamerError):
    """The server has failed; the stream is not affected."""


class ListenFailed(ServerFailed, OSError):
    """Cannot listen on the address."""


class CorruptEntries(DatastreamerError, ValueError):
    """A buffer has bytes that are not a run of entries.

    ``offset`` counts from the start of the buffer, ``reason`` is the message without it.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"at byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


class DecodeFailed(DatastreamerError, ValueError):
    """An entry's data is not a valid event, or the event not a valid transaction.

    ``number`` is the entry's, None for data without an entry; ``reason`` is the message without
    it.
    """

    def __init__(self, number: int | None, reason: str) -> None:
        super().__init__(reason if number is None else f"entry {number}: {reason}")
        self.number = number
        self.reason = reason


class UpstreamDiffers(DatastreamerError):
    """A relay's upstream does not hold what the relay's file holds."""


class UpstreamMismatch(UpstreamDiffers):
    """The upstream's version, system id or stream type is not that of the relay's file."""


class UpstreamShorter(UpstreamDiffers):
    """The upstream holds the first `total` entries of the relay's file, and no more."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(what)
        self.total = total


class UpstreamRewritten(UpstreamDiffers):
    """The upstream holds other entries than the relay's file.

    `first_differing` is the first of them; None if it lies before the entries that were compared.
    """

    def __init__(self, what: str, first_differing: int | None) -> None:
        super().__init__(what)
        self.first_differing = first_differing


class PeerError(DatastreamerError):
    """The other side of the connection is at fault, or cannot be reached."""


class ConnectFailed(PeerError, ConnectionError):
    """The connection could not be made."""


class TLSFailed(PeerError, ConnectionError):
    """One side does not support the other's TLS, or does not accept its certificate.

    Another attempt fails in the same way until the configuration changes.
    """


class ConnectionLost(PeerError, ConnectionError):
    """The connection ended during an exchange or a stream."""


class NoAnswer(ConnectionLost):
    """No answer arrived in time."""


class ServerBehind(ConnectionLost):
    """The server of several lacks entries that another holds or has sent: ``total`` is the number
    of entries that it holds."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(what)
        self.total = total


class ProtocolViolation(PeerError):
    """The peer sent what the protocol does not allow."""


class HistoryChanged(PeerError):
    """The server does not have the entries any more that were received before.

    `next_entry` is the reader's next entry, `total_entries` the number of entries on the server,
    `first_differing` the first entry that was truncated or replaced: None if it precedes all
    entries that the reader remembers, or the server has another stream.
    """

    def __init__(
        self, what: str, *, next_entry: int, total_entries: int, first_differing: int | None
    ) -> None:
        super().__init__(what)
        self.next_entry = next_entry
        self.total_entries = total_entries
        self.first_differing = first_differing


class DifferentStream(HistoryChanged):
    """The server has another stream than the one that was read, according to its header."""


class NotSupported(PeerError):
    """The server lacks the extension, or an option of the client turned it off."""


class UpstreamDamaged(PeerError):
    """The entries that a relay received do not match the checksums of its upstream. The relay
    stored no entry of the operation."""


class ServerRefused(PeerError):
    """The server answered with a Result other than OK."""

    _hint = ""

    def __init__(self, number: int, text: str, doing: str = "") -> None:
        what = f" {doing}" if doing else ""
        super().__init__(f"the server refused{what}: {text} (error {number}){self._hint}")
        self.number = number
        self.text = text


class AlreadyStarted(ServerRefused):
    """Result 1: the connection is already streaming."""


class AlreadyStopped(ServerRefused):
    """Result 2: the connection is not streaming."""


class BadFromEntry(ServerRefused):
    """Result 3: the entry to start from is past the end."""


class BadFromBookmark(ServerRefused):
    """Result 4: the bookmark to start from is unknown."""


class BadToBookmark(ServerRefused):
    """Result 5: the last bookmark of a range is unknown or before the first."""


class InvalidCommand(ServerRefused):
    """Result 9: the server does not know the command."""


class PublishingRefused(ServerRefused):
    """The server refused a publisher; the subclass is the reason."""


class NotAllowed(PublishingRefused):
    """Result 16: the publisher's token or certificate is not accepted, or a client's token."""


class SourceBusy(PublishingRefused):
    """Result 17: another publisher has the lease."""


class Fenced(PublishingRefused):
    """Result 18: another publisher has taken over the stream; this one must stop."""


class LeaseLost(PublishingRefused):
    """Result 19: nothing was received within the lease."""


class BadOperation(PublishingRefused):
    """Result 22: the operation is not valid."""


class OperationTooLarge(PublishingRefused):
    """Result 23: the operation is larger than the server's limit."""


class NotWritten(PublishingRefused):
    """Result 24: the server could not write the operation. None of it is stored; try again."""


class PublishInDoubt(PublishingRefused):
    """Result 25: the server does not know whether the operation is on disk; try again."""


class OperationTooSlow(PublishingRefused):
    """Result 26: the operation was open for too long, and was rolled back."""


class EntriesDamaged(ServerRefused):
    """Result 27: the server's copy of the entries is damaged. The text names the page, and its
    entries if they are known; the entries of other pages can be read."""

    _hint = (
        "; the server's copy of these entries is damaged, and its other entries can be read: "
        "request these from another server; `datastreamer repair --from` restores them"
    )


__all__ = [name for name, value in globals().items() if isinstance(value, type)]

_REFUSALS: dict[int, type[ServerRefused]] = {
    1: AlreadyStarted,
    2: AlreadyStopped,
    3: BadFromEntry,
    4: BadFromBookmark,
    5: BadToBookmark,
    9: InvalidCommand,
    16: NotAllowed,
    17: SourceBusy,
    18: Fenced,
    19: LeaseLost,
    22: BadOperation,
    23: OperationTooLarge,
    24: NotWritten,
    25: PublishInDoubt,
    26: OperationTooSlow,
    27: EntriesDamaged,
}


def refusal(number: int, text: str, doing: str = "") -> ServerRefused:
    """The exception for a Result ``number`` that is not 0."""
    return _REFUSALS.get(number, ServerRefused)(number, text, doing)
