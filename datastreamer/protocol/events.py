"""The events of a client connection: answers, streamed entries, and the end of the connection.

A value that says all of an answer is the event itself: a `Header`, `Capabilities`, a `RangeHash`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from datastreamer._codec import Entry, EntryBatch
from datastreamer.format import Header
from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    Command,
    EntryQuery,
    FilteredRead,
    RangeQuery,
)
from datastreamer.protocol.following import ChangeReceived, FollowBegun, RangeHash, SumsFound
from datastreamer.protocol.messages import Capabilities
from datastreamer.selection.times import TimeMarks


@dataclass(slots=True)
class ResultReceived:
    """OK to a Start, StartBookmark or Stop; or the refusal of any command. A server may end a
    streaming because the next entries are damaged; `command` is the one that began it then.

    The OK before an answer is part of the answer's event.
    """

    command: Command
    number: int
    text: str


@dataclass(slots=True)
class EntryReceived:
    """The answer to an `EntryQuery` or `BookmarkQuery`; `entry` is None if not found."""

    command: EntryQuery | BookmarkQuery
    entry: Entry | None


@dataclass(slots=True)
class EntriesReceived:
    """Entries of a streaming or a range, which follow those before. In a filtered streaming, a
    range of the stream, possibly without entries."""

    batch: EntryBatch


@dataclass(slots=True)
class BatchReceived:
    """The answer to a `BatchQuery`, empty only if `from_entry` is the total; or to a
    `FilteredRead`: the selected entries before `batch.next_number`, and the stream's epoch."""

    command: BatchQuery | FilteredRead
    batch: EntryBatch
    total_entries: int
    epoch: int = 0


@dataclass(slots=True)
class RangeReceived:
    """The entries of a range follow, up to number `last`."""

    command: RangeQuery
    last: int


@dataclass(slots=True)
class PeerEnded:
    """The server has closed its side, `unread` bytes into an incomplete packet."""

    unread: int


Event: TypeAlias = (
    ResultReceived
    | Header
    | EntryReceived
    | EntriesReceived
    | Capabilities
    | BatchReceived
    | RangeReceived
    | FollowBegun
    | ChangeReceived
    | RangeHash
    | SumsFound
    | TimeMarks
    | PeerEnded
)
