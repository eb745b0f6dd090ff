"""What a client connection tells: answers, streamed entries, and the server's end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from datastreamer._codec import Entry, EntryBatch
from datastreamer.format import Header
from datastreamer.protocol.filter.messages import FilteredRead
from datastreamer.protocol.following import ChangeReceived, FollowBegun, HashQuery, RangeHash
from datastreamer.protocol.messages import (
    BatchQuery,
    BookmarkQuery,
    Capabilities,
    Command,
    EntryQuery,
    RangeQuery,
)


@dataclass(slots=True)
class ResultReceived:
    """OK to a Start, StartBookmark or Stop; or a refusal of any command.

    The OK that precedes an answer is part of the answer's own event.
    """

    command: Command
    number: int
    text: str


@dataclass(slots=True)
class HeaderReceived:
    """The answer to a `HeaderQuery`."""

    header: Header


@dataclass(slots=True)
class EntryReceived:
    """The answer to an `EntryQuery` or `BookmarkQuery`; `entry` is None: not found."""

    command: EntryQuery | BookmarkQuery
    entry: Entry | None


@dataclass(slots=True)
class EntriesReceived:
    """A run of streamed entries, or of a range, one or more; they follow those before. In a
    filtered streaming a part of the stream, which follows that before: maybe without any."""

    batch: EntryBatch


@dataclass(slots=True)
class CapabilitiesReceived:
    """The answer to a `CapabilitiesQuery`."""

    capabilities: Capabilities


@dataclass(slots=True)
class BatchReceived:
    """The answer to a `BatchQuery`: no entries only where `from_entry` is the total."""

    command: BatchQuery
    batch: EntryBatch
    total_entries: int


@dataclass(slots=True)
class ChosenReceived:
    """The answer to a `FilteredRead`: what there is of the types up to `batch.next_number`."""

    command: FilteredRead
    batch: EntryBatch
    total_entries: int
    epoch: int


@dataclass(slots=True)
class RangeReceived:
    """The entries of a range follow, up to number `last`."""

    command: RangeQuery
    last: int


@dataclass(slots=True)
class HashReceived:
    """The answer to a `HashQuery`."""

    command: HashQuery
    hashed: RangeHash


@dataclass(slots=True)
class PeerEnded:
    """The server sends no more. `unread` bytes of a packet were there without its rest."""

    unread: int


Event: TypeAlias = (
    ResultReceived
    | HeaderReceived
    | EntryReceived
    | EntriesReceived
    | CapabilitiesReceived
    | BatchReceived
    | ChosenReceived
    | RangeReceived
    | FollowBegun
    | ChangeReceived
    | HashReceived
    | PeerEnded
)
