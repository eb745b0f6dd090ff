"""The labels under which a server counts its clients' commands."""

from __future__ import annotations

from typing import Final

from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    CommitStart,
    EntryQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    HashQuery,
    HeaderQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
    SumsQuery,
)

ENTRY: Final = "entry"
BOOKMARK: Final = "bookmark"
HEADER: Final = "header"
KINDS: Final = {
    EntryQuery: ENTRY,
    BookmarkQuery: BOOKMARK,
    HeaderQuery: HEADER,
    CapabilitiesQuery: "capabilities",
    BatchQuery: "batch_read",
    FilteredRead: "filtered_read",
    FilteredStart: "filtered_start",
    FilteredStartBookmark: "filtered_start_bookmark",
    RangeQuery: "range_bookmark",
    Start: "start",
    CommitStart: "commit_start",
    FollowStart: "follow_start",
    HashQuery: "range_hash",
    SumsQuery: "page_sums",
    StartBookmark: "start_bookmark",
    Stop: "stop",
}
PUBLISH: Final = "publish"
AUTHENTICATE: Final = "authenticate"
HTTP: Final = "http"
"""Label under which rejected tokens of HTTP requests are counted."""
COMMANDS: Final = tuple(KINDS.values())
"""Labels under which commands are counted; also `PUBLISH` and `AUTHENTICATE` if the server accepts
them."""
