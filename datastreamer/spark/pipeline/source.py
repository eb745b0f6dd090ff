"""The stream of a pipeline as its driver sees it: how long it is, and whether its entries changed.

Owns how a change of entries is noticed, and where it begins. Executors read the entries; must not
know tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from xxhash import xxh3_128

from datastreamer.errors import DamagedEntry, UsageError
from datastreamer.format import Header
from datastreamer.position import KEPT, Identity
from datastreamer.protocol.commands import KnownHistory
from datastreamer.spark.options import read_options
from datastreamer.spark.read.files import open_location, open_reader, take_snapshot
from datastreamer.spark.read.paths import find, is_single
from datastreamer.spark.read.servers import Servers, history_of
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import NO_ID
from datastreamer.storage.read.range_sums import hash_range


class Seen(NamedTuple):
    """A stream at one moment, with its number of entries. `history` is None if the program that
    writes or serves it does not report one."""

    identity: Identity
    total: int
    history: KnownHistory | None


class Source:
    """The one stream that options of `spark.read` name. Raises `UsageError` for several."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.options = options = read_options(given)
        self.name = ", ".join(map(str, options.servers or options.paths))
        self._servers = Servers.of(options) if options.servers else None
        if self._servers is None:
            found = find(options.paths)
            if len(found) != 1 or not is_single(options.paths):
                raise UsageError(f"{self.name}: tables are of one stream: name one file")
            self._location = found[0]

    def look(self) -> Seen:
        """The stream now. Raises the last server's error if none answers for `retryFor`."""
        if self._servers is None:
            self._snapshot = at = take_snapshot(self._location, self.options.stream_type)
            return _seen(at.header, KnownHistory(at.stream_id, at.epoch))
        _, client = self._servers.connect_any()
        with client:
            found = history_of(client)
            # After the history: what changes between the two is seen the next time.
            return _seen(client.header(), found and KnownHistory(*found))

    @property
    def may_lag(self) -> bool:
        """Whether entries may be missing only because one of several servers lags."""
        return self._servers is not None and len(self._servers.addresses) > 1

    def state(self, seen: Seen, entry: int) -> str:
        """A text that changes when entries before this one change: by the history, or, where none
        is reported, by the last of these entries alone. Empty if the stream lacks them."""
        if seen.total < entry:
            return ""
        if seen.history is not None:
            return f"{seen.history.stream_id.hex()}:{seen.history.epoch}"
        return next(self.hashes([max(0, entry - KEPT), entry]), "") or "damaged"

    def first_change(self, before: str, seen: Seen) -> int | None:
        """The first entry that changed since this state; None if it is not known."""
        stream_id, _, epoch = before.partition(":")
        if seen.history is None or not epoch or stream_id != seen.history.stream_id.hex():
            return None
        known = seen.history._replace(epoch=int(epoch))
        if self._servers is not None:
            _, client = self._servers.connect_any()
            with client:
                changes = client.changes(known, seen.total) if client.history() else None
            return min(change.start for change in changes) if changes else None
        file = open_location(self._location)
        try:
            changes = HeaderPage.of(file).changes_between(known.epoch, seen.history.epoch)
        finally:
            file.close()
        return min(change.start for change in changes) if changes else None

    def hashes(self, edges: Sequence[int]) -> Iterator[str]:
        """A hash of the entries between each two successive `edges`, as of the last `look`; empty
        for entries that are damaged."""
        if self._servers is None:
            with open_reader(self._snapshot, verify=self.options.verify) as reader:
                for start, stop in pairwise(edges):
                    try:
                        yield hash_range(reader, start, stop, 1 << 62)[1].hex()
                    except DamagedEntry:
                        yield ""
            return
        _, client = self._servers.connect_any()
        with client:
            for start, stop in pairwise(edges):
                hasher = xxh3_128()
                with client.batches(from_entry=start, stop=stop) as batches:
                    for batch in batches:
                        hasher.update(batch.packed())
                yield hasher.hexdigest()


def _seen(header: Header, history: KnownHistory | None) -> Seen:
    known = None if history is None or history.stream_id == NO_ID else history
    return Seen(Identity.of(header), header.total_entries, known)
