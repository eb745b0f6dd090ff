"""The stream of a pipeline as its driver sees it: how long it is, and whether its entries changed.

Owns how a change of entries is noticed, and where it begins. Executors read the entries; must not
know tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from datastreamer.format import Header
from datastreamer.position import Identity
from datastreamer.protocol.commands import KnownHistory
from datastreamer.spark.options import read_options
from datastreamer.spark.stream.sources import Looks, followed_stream


class Seen(NamedTuple):
    """A stream at one moment, with its number of entries. `history` is None if the program that
    writes or serves it does not report one; `state` is that of all entries."""

    identity: Identity
    total: int
    history: KnownHistory | None
    state: str


class Source:
    """The one stream that options of `spark.read` name. Raises `UsageError` for several.

    The methods raise the last server's error if none answers for `retryFor`.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self.options = options = read_options(given)
        # Only with this option servers are asked for the history.
        self._stream = followed_stream(replace(options, changes=True))
        self._looks = Looks(self._stream, options.retry_for)
        self.name = self._stream.name

    def look(self) -> Seen:
        """The stream now."""
        return self._looks.wait_for(self._seen)

    def _seen(self, header: Header) -> Seen:
        total = header.total_entries
        state = self._state(total, header)
        return Seen(Identity.of(header), total, self._stream.history(), state)

    def is_as(self, seen: Seen) -> bool:
        """Whether the stream still has all entries as they were `seen`."""
        return self.state(seen.total) == seen.state

    @property
    def may_lag(self) -> bool:
        """Whether entries may be missing only because one of several servers lags."""
        return len(self.options.servers) > 1

    def state(self, entry: int) -> str:
        """A text that changes when entries before this one change: by the history, or, where none
        is reported, by the last of these entries alone. Empty if the stream lacks them."""
        return self._looks.wait_for(lambda header: (self._state(entry, header),))[0]

    def _state(self, entry: int, header: Header) -> str:
        if entry > header.total_entries:
            return ""
        if (history := self._stream.history()) is not None:
            return f"{history.stream_id.hex()}:{history.epoch}"
        return self._stream.digest_before(entry) or "damaged"

    def first_change(self, before: str, seen: Seen) -> int | None:
        """The first entry that changed since this state; None if it is not known."""
        stream_id, _, epoch = before.partition(":")
        if seen.history is None or not epoch or stream_id != seen.history.stream_id.hex():
            return None
        known = seen.history._replace(epoch=int(epoch))
        (changes,) = self._looks.wait_for(lambda _: (self._stream.changes(known),))
        return min(change.start for change in changes) if changes else None

    def hashes(self, edges: Sequence[int]) -> Iterator[str]:
        """A hash of the entries between each two successive `edges`; empty for entries that are
        damaged or that the stream lacks."""
        for start, stop in pairwise(edges):
            yield self._looks.wait_for(partial(self._hash, start, stop))[0]

    def _hash(self, start: int, stop: int, _: Header) -> tuple[str]:
        return (self._stream.hash_of(start, stop),)

    def close(self) -> None:
        """Close the file or the connection."""
        self._stream.close()
