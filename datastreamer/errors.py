"""Every exception that datastreamer raises on purpose: one tree, blame first.

::

    DatastreamerError
    +-- UsageError                   our caller's mistake; nothing was changed
    |   +-- NoOperation              no atomic operation is open
    |   +-- OperationOpen            an atomic operation is open already
    |   +-- LeaseHeld                the stream's source publishes from elsewhere
    |   +-- StreamClosed             the stream, client or server is closed
    |   +-- StreamReadOnly           opened for reading only
    |   +-- BadArgument              a number or word that is none of those it may be
    |   +-- EntryTooLarge            data of more than 1,048,559 bytes
    |   +-- BadEntryType             not a u32, or 0xb0 where an event is due
    |   +-- BadBookmark              a key that is not 1 to 16 bytes
    |   +-- BadRange                 a range that runs backwards
    |   +-- BadPosition              text or numbers that are no place in a stream
    |   +-- UpdateRefused            an update that would change more than data
    |   +-- BadCertificate           a certificate or key for TLS that is of no use
    |   +-- BadEvent                 a zkEVM event with a value that its field cannot hold
    |   +-- BadPayload               a payload that cannot be cut into messages
    |   +-- ExtraMissing             an optional package is not installed
    +-- NotFound                     what was asked for is not in the stream
    |   +-- UnknownEntry
    |   +-- UnknownBookmark
    +-- StreamFileError              the file; carries ``path``
    |   +-- FileMissing              there is no such file
    |   +-- FileExists               create found something there
    |   +-- NotAStream               no stream file at all
    |   +-- WrongStreamType          a stream of another type
    |   +-- StreamLocked             another process writes it; carries ``pid``
    |   +-- FileReplaced             its path no longer leads to the open file
    |   +-- StreamBusy               truncated or updated again and again while it was read
    |   +-- WriteFailed              the disk refused; the operation is not there
    |   |   +-- CommitInDoubt        it may or may not be on disk
    |   |       +-- EntriesLost      it is not, and others before it are not either
    |   +-- IndexFailed              the bookmark index cannot be used
    |   +-- CursorFailed             a reader's position cannot be read or kept
    |   +-- UntrustedFile            a link, or another user's file, beside a stream
    |   +-- DamagedFile              carries ``offset``
    |       +-- DamagedHeader        header, commit record or totals
    |       +-- BadFileSize          not 4096 + k x 1 MiB
    |       +-- DamagedEntry         an entry, padding or page
    +-- ServerFailed                 our own serving side
    |   +-- ListenFailed             the address cannot be had
    +-- CorruptEntries               bytes that are no run of entries (the codec;
    |                                carries ``offset`` in its buffer)
    +-- DecodeFailed                 data that is not the event it should be; carries
    |                                ``number``, its entry's
    +-- UpstreamDiffers              a relay's upstream does not hold the relay's entries
    |   +-- UpstreamMismatch         its header is that of another stream
    |   +-- UpstreamShorter          it holds fewer entries; carries ``total``
    |   +-- UpstreamRewritten        it holds other entries; carries ``first_differing``
    +-- PeerError                    the other side of a connection
        +-- ConnectFailed            nobody there, or not in time
        +-- TLSFailed                the two sides do not come to terms on TLS
        +-- ConnectionLost           ended in the middle
        |   +-- NoAnswer             gave no answer in time
        +-- ProtocolViolation        it does not speak the protocol
        +-- HistoryChanged           it tells other entries than before, or has lost some
        |   +-- DifferentStream      it serves another stream
        +-- NotSupported             it does not have the extension that was asked for
        +-- ServerRefused            a Result other than OK: ``number``, ``text``
            +-- AlreadyStarted       1
            +-- AlreadyStopped       2
            +-- BadFromEntry         3
            +-- BadFromBookmark      4
            +-- BadToBookmark        5
            +-- InvalidCommand       9
            +-- PublishingRefused    16 to 26: a publisher's
                +-- NotAllowed       16, its token or certificate; a client's token too
                +-- SourceBusy       17, another source holds the lease
                +-- Fenced           18, another source has taken over
                +-- LeaseLost        19, it was silent for too long
                +-- BadOperation     22
                +-- OperationTooLarge 23
                +-- NotWritten       24, the server's disk refused; try again
                +-- PublishInDoubt   25, it may be on disk; try again
                +-- OperationTooSlow 26, it was open for too long

Where a builtin says the same thing (`ValueError`, `LookupError`,
`FileNotFoundError`, ...) the class is that builtin too.
"""

from __future__ import annotations

import os

__all__ = [
    "AlreadyStarted",
    "AlreadyStopped",
    "BadArgument",
    "BadBookmark",
    "BadCertificate",
    "BadEntryType",
    "BadEvent",
    "BadFileSize",
    "BadFromBookmark",
    "BadFromEntry",
    "BadOperation",
    "BadPayload",
    "BadPosition",
    "BadRange",
    "BadToBookmark",
    "CommitInDoubt",
    "ConnectFailed",
    "ConnectionLost",
    "CorruptEntries",
    "CursorFailed",
    "DamagedEntry",
    "DamagedFile",
    "DamagedHeader",
    "DatastreamerError",
    "DecodeFailed",
    "DifferentStream",
    "EntriesLost",
    "EntryTooLarge",
    "ExtraMissing",
    "Fenced",
    "FileExists",
    "FileMissing",
    "FileReplaced",
    "HistoryChanged",
    "IndexFailed",
    "InvalidCommand",
    "LeaseHeld",
    "LeaseLost",
    "ListenFailed",
    "NoAnswer",
    "NoOperation",
    "NotAStream",
    "NotAllowed",
    "NotFound",
    "NotSupported",
    "NotWritten",
    "OperationOpen",
    "OperationTooLarge",
    "OperationTooSlow",
    "PeerError",
    "ProtocolViolation",
    "PublishInDoubt",
    "PublishingRefused",
    "ServerFailed",
    "ServerRefused",
    "SourceBusy",
    "StreamBusy",
    "StreamClosed",
    "StreamFileError",
    "StreamLocked",
    "StreamReadOnly",
    "TLSFailed",
    "UnknownBookmark",
    "UnknownEntry",
    "UpdateRefused",
    "UpstreamDiffers",
    "UpstreamMismatch",
    "UpstreamRewritten",
    "UpstreamShorter",
    "UsageError",
    "WriteFailed",
    "WrongStreamType",
    "refusal",
]


class DatastreamerError(Exception):
    """Base of all errors of this package. ``str()`` is one line for people."""


class UsageError(DatastreamerError):
    """The call cannot be done as asked. Nothing was changed."""


class NoOperation(UsageError):
    """No atomic operation is open."""


class OperationOpen(UsageError):
    """An atomic operation is open, and this call needs that none is."""


class LeaseHeld(UsageError):
    """The stream's source is another process for now; nobody else writes."""


class StreamClosed(UsageError):
    """The object was closed, or belongs to the parent of a forked process."""


class StreamReadOnly(UsageError):
    """The stream was opened for reading only."""


class BadArgument(UsageError, ValueError):
    """An argument is none of the numbers or words that it may be."""


class EntryTooLarge(UsageError, ValueError):
    """The entry does not fit into one page."""


class BadEntryType(UsageError, ValueError):
    """The entry type is not a u32, or is the bookmarks' own."""


class BadBookmark(UsageError, ValueError):
    """A bookmark key is 1 to 16 bytes."""


class BadRange(UsageError, ValueError):
    """The end of the range stands before its start."""


class BadPosition(UsageError, ValueError):
    """What should say where to go on in a stream does not."""


class UpdateRefused(UsageError, ValueError):
    """An update keeps number, type and length, and never touches a bookmark."""


class BadCertificate(UsageError, ValueError):
    """A file for TLS - a certificate, a key, the certificates of a CA - is of no use."""


class BadEvent(UsageError, ValueError):
    """A value does not fit the field of the event that it was given for."""


class BadPayload(UsageError, ValueError):
    """What was given as a payload, or a part of one, cannot be cut into messages."""


class ExtraMissing(UsageError, ImportError):
    """A package that only some need is not installed; ``str()`` says how to install it."""

    def __init__(self, doing: str, extra: str) -> None:
        super().__init__(f"{doing}: install it with pip install 'datastreamer[{extra}]'")
        self.extra = extra


class NotFound(DatastreamerError, LookupError):
    """The stream does not hold what was asked for."""


class UnknownEntry(NotFound):
    """No committed entry has this number."""

    def __init__(self, number: int, total_entries: int) -> None:
        holds = f"0 to {total_entries - 1}" if total_entries else "none"
        super().__init__(f"no entry {number}: the stream holds {holds}")
        self.number = number
        self.total_entries = total_entries


class UnknownBookmark(NotFound):
    """No committed bookmark has this key (or no event follows it)."""

    def __init__(self, key: bytes, why: str = "") -> None:
        super().__init__(why or f"no bookmark 0x{key.hex()} in the stream")
        self.key = key


class StreamFileError(DatastreamerError):
    """Something is the matter with a file; ``path`` names it."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(f"{os.fspath(path)}: {what}")
        self.path = os.fspath(path)
        self.what = what


class FileMissing(StreamFileError, FileNotFoundError):
    """There is no such file."""


class FileExists(StreamFileError, FileExistsError):
    """A stream is never created over something that exists."""


class NotAStream(StreamFileError):
    """The path is no stream file (a directory, another format, too short)."""


class WrongStreamType(StreamFileError):
    """The file holds a stream of another type than was asked for."""


class StreamLocked(StreamFileError):
    """Another process writes this stream; ``pid`` is its id, 0 if unknown."""

    def __init__(self, path: str | os.PathLike[str], pid: int) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(path, f"locked by another writer, {who}; only one process may write")
        self.pid = pid


class FileReplaced(StreamFileError):
    """The path of an open stream leads to no file any more, or to another one.

    The open file still holds everything that was committed: `DataStream.snapshot` copies it.
    Nothing of the refused operation is visible; it is still open: commit again once the path
    leads to the file again, or roll back.
    """


class StreamBusy(StreamFileError):
    """A writer truncates or updates the stream faster than it can be read. This says nothing
    about damage: try again, or end the writer."""


class WriteFailed(StreamFileError):
    """The system refused a write or sync. The stream stands at its last commit."""


class CommitInDoubt(WriteFailed):
    """A sync failed, or a commit was interrupted: what is on disk is not known.

    Raised by commits, and by a rollback, `sync` or `close` while that is so.
    """


class EntriesLost(CommitInDoubt):
    """After a failed sync, committed entries could not be brought to disk any more.

    The stream went back to `total` entries, as by a truncation.
    """

    def __init__(self, path: str | os.PathLike[str], total: int, before: int) -> None:
        super().__init__(
            path,
            f"a sync failed, and entries {total} to {before - 1} are lost: the disk did not "
            f"take them and the system does not have them any more; the stream goes on with "
            f"entry {total}",
        )
        self.total = total


class IndexFailed(StreamFileError):
    """The bookmark index cannot be opened or written."""


class CursorFailed(StreamFileError):
    """A reader's position cannot be read or kept."""


class UntrustedFile(StreamFileError):
    """A file or folder beside a stream is a link or belongs to another user; it is not used."""


class DamagedFile(StreamFileError):
    """The file breaks the format at byte ``offset``."""

    def __init__(self, path: str | os.PathLike[str], offset: int, what: str) -> None:
        super().__init__(path, f"at byte {offset}: {what}")
        self.offset = offset


class DamagedHeader(DamagedFile):
    """Header, commit record or totals are not possible."""


class BadFileSize(DamagedFile):
    """The size is not 4096 + k x 1 MiB, or too small for the header's total."""


class DamagedEntry(DamagedFile):
    """An entry, the padding or a page's start is not as the format has it."""


class ServerFailed(DatastreamerError):
    """The serving side cannot do its work; the stream is not touched by that."""


class ListenFailed(ServerFailed, OSError):
    """The address to listen on cannot be had."""


class CorruptEntries(DatastreamerError, ValueError):
    """A buffer holds something that is not a run of entries.

    ``offset`` counts from the start of the buffer, ``reason`` is the sentence
    without it.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"at byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


class DecodeFailed(DatastreamerError, ValueError):
    """An entry's data is not the event, or the event not the transaction, it should be.

    ``number`` is the entry's, None where the data came without an entry; ``reason`` is the
    sentence without it.
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
    """The other side of the connection is at fault, or gone."""


class ConnectFailed(PeerError, ConnectionError):
    """The connection could not be made."""


class TLSFailed(PeerError, ConnectionError):
    """One side does not speak TLS as the other does, or does not accept its certificate.

    Another attempt ends in the same way until somebody changes something.
    """


class ConnectionLost(PeerError, ConnectionError):
    """The connection ended in the middle of something."""


class NoAnswer(ConnectionLost):
    """An answer did not come in time."""


class ProtocolViolation(PeerError):
    """The peer sent what the protocol does not allow."""


class HistoryChanged(PeerError):
    """The server does not hold the entries any more that were received before.

    `next_entry` is where the reader stood, `total_entries` what the server holds now,
    `first_differing` the first entry that is gone or another: None where it lies before
    all that is remembered, or the stream is another one altogether.
    """

    def __init__(
        self, what: str, *, next_entry: int, total_entries: int, first_differing: int | None
    ) -> None:
        super().__init__(what)
        self.next_entry = next_entry
        self.total_entries = total_entries
        self.first_differing = first_differing


class DifferentStream(HistoryChanged):
    """The server serves another stream than the one that was read, by what its header says."""


class NotSupported(PeerError):
    """The server does not have the extension, or the client was told not to use it."""


class ServerRefused(PeerError):
    """The server answered with a Result other than OK."""

    def __init__(self, number: int, text: str, doing: str = "") -> None:
        told = f"the server refused{' ' + doing if doing else ''}: {text} (error {number})"
        super().__init__(told)
        self.number = number
        self.text = text


class AlreadyStarted(ServerRefused):
    """Result 1: the connection streams already."""


class AlreadyStopped(ServerRefused):
    """Result 2: the connection does not stream."""


class BadFromEntry(ServerRefused):
    """Result 3: the entry to start from lies past the end."""


class BadFromBookmark(ServerRefused):
    """Result 4: the bookmark to start from is unknown."""


class BadToBookmark(ServerRefused):
    """Result 5: the last bookmark of a range is unknown or before the first."""


class InvalidCommand(ServerRefused):
    """Result 9: the server does not know the command."""


class PublishingRefused(ServerRefused):
    """What a server says to a publisher; below it stands what there is to do."""


class NotAllowed(PublishingRefused):
    """Result 16: neither token nor certificate allows it to publish; or the server does not know
    the token that a client shows."""


class SourceBusy(PublishingRefused):
    """Result 17: another source holds the lease."""


class Fenced(PublishingRefused):
    """Result 18: another source has taken the stream over; this one must not go on."""


class LeaseLost(PublishingRefused):
    """Result 19: it was silent for longer than its lease."""


class BadOperation(PublishingRefused):
    """Result 22: the operation is none."""


class OperationTooLarge(PublishingRefused):
    """Result 23: the operation is larger than the server takes."""


class NotWritten(PublishingRefused):
    """Result 24: the server's disk refused. Nothing of the operation is there; try again."""


class PublishInDoubt(PublishingRefused):
    """Result 25: the server does not know whether it is on disk. To try again settles it."""


class OperationTooSlow(PublishingRefused):
    """Result 26: the operation was open for too long, and was rolled back."""


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
}


def refusal(number: int, text: str, doing: str = "") -> ServerRefused:
    """The exception for a Result ``number`` that is not 0."""
    return _REFUSALS.get(number, ServerRefused)(number, text, doing)
