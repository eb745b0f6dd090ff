"""`spark.readStream`: a stream followed as it grows, in batches whose parts executors read.

Owns what a batch is: from where to where, and that it is of the history that the query has read
so far. How a file or a server is looked at stands in `upstreams`, how parts are read in `batch`.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from datastreamer.errors import ConnectFailed, ConnectionLost, UnknownEntry, UsageError
from datastreamer.format import U64_MAX, Header
from datastreamer.position import Identity
from datastreamer.protocol.retry import BACKOFF
from datastreamer.spark.options import Options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.stream.offsets import StreamOffset
from datastreamer.spark.stream.sources import FollowedStream, followed_stream
from datastreamer.zkevm.keys import BookmarkName

T = TypeVar("T")

_log = logging.getLogger(__name__)


class TailReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows one stream. The driver looks how far it goes; executors `read` the entries.

    What it keeps between calls spares looking twice, and times how long a server is away.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        if options.stop is not None:
            raise UsageError("endingOffset is for spark.read: a streaming query has no end")
        self._options = options
        self._rows = BatchReader(replace(options, from_latest=False), schema)
        self._followed: FollowedStream | None = None
        # Trigger.AvailableNow: nothing from this entry on.
        self._target = U64_MAX
        self._total: int | None = None
        # The offset at which there was nothing new, and the total of that look.
        self._idle: tuple[dict[str, Any], int] | None = None
        self._away_since: float | None = None
        self._attempts = 0
        self._due = 0.0

    # Where to begin and how far to go.

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a query without a checkpoint begins."""
        return self._patiently(self._first).told()

    def _first(self, header: Header) -> StreamOffset:
        if self._options.from_latest:
            return self._offset(header, header.total_entries)
        start = self._options.start
        entry = self._upstream.entry_of(start) if isinstance(start, BookmarkName) else start
        if entry > header.total_entries:
            raise UnknownEntry(entry, header.total_entries)
        return self._offset(header, entry)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The options' limits. Spark hands on one of them alone, so both are seen to where
        it is the first."""
        if self._options.max_entries is not None:
            return ReadMaxRows(self._options.max_entries)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is committed now is all that this run reads."""
        self._target = self._patiently(lambda header: header.total_entries)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes; `start` where there is nothing new, or the server is away.

        Raises `HistoryChanged` or `StreamFileError` where the stream does not hold the entries
        any more that were read before `start`.
        """

        def following(header: Header) -> dict[str, Any]:
            return self._following(start, limit, header)

        if self._target < U64_MAX:
            # Nothing new would mean that this run is at its end.
            return self._patiently(following)
        return self._attempt(following) or start

    def _following(self, start: dict[str, Any], limit: ReadLimit, header: Header) -> dict[str, Any]:
        if (start, header.total_entries) == self._idle:
            return start
        begin = StreamOffset.read(start)
        lost = self._ensure_kept(begin, header)
        total = min(header.total_entries, max(self._target, begin.entry))
        if begin.entry < total:
            return self._offset(header, self._stop(begin.entry, total, limit)).told()
        if lost:
            # Where a stream was cut back its new end is where to go on.
            return self._offset(header, total).told()
        self._idle = (start, header.total_entries)
        return start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the stream goes, by the last look: what Spark's progress tells beside how far
        the query is."""
        return None if self._total is None else StreamOffset(self._total).told()

    def _stop(self, start: int, total: int, limit: ReadLimit) -> int:
        """Where a batch ends that begins at `start`, with one entry at least."""
        stop = total
        size = None
        if isinstance(limit, ReadMaxRows):
            stop = min(stop, start + limit.max_rows)
            size = self._options.max_bytes
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        if size is not None:
            stop = min(stop, max(start + 1, self._upstream.entry_behind(start, size)))
        return stop

    # A batch.

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The parts of a batch, which may be one that was begun before a crash: of the same
        entries then. Raises as `latestOffset`."""
        begin, stop = StreamOffset.read(start), StreamOffset.read(end)
        if begin.entry >= stop.entry:
            return []
        return self._patiently(lambda header: self._parts(begin, stop, header))

    def _parts(
        self, begin: StreamOffset, stop: StreamOffset, header: Header
    ) -> Sequence[InputPartition]:
        until = min(stop.entry, header.total_entries)
        parts: Sequence[InputPartition] = []
        if begin.entry < until:
            parts = self._upstream.parts(begin.entry, until, self._options.partition_bytes)
        # Behind that: parts tell what changes after they were made, offsets what did before.
        self._ensure_kept(begin, header)
        self._ensure_kept(stop, header)
        return parts

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, as record batches."""
        # A bookmark and the stream's end are no entries that are lost.
        start = self._options.start
        return self._rows.read(partition, 0 if isinstance(start, BookmarkName) else start)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the stream keeps all its entries, and Spark keeps the offset."""

    def stop(self) -> None:
        """Let go of the file or the connection."""
        if self._followed is not None:
            self._followed.close()

    # The stream.

    @property
    def _upstream(self) -> FollowedStream:
        # Not before: a reader is made on executors too, which read parts alone.
        if self._followed is None:
            self._followed = followed_stream(self._options)
        return self._followed

    def _offset(self, header: Header, entry: int) -> StreamOffset:
        return StreamOffset(entry, self._upstream.digest_before(entry), Identity.of(header))

    def _ensure_kept(self, offset: StreamOffset, header: Header) -> bool:
        """Whether entries before the offset are lost, where the query goes on all the same."""
        what = self._loss(offset, header)
        if what is None:
            return False
        if self._options.fail_on_data_loss:
            raise self._upstream.changed(
                f"{what}. Read it anew with another checkpoint, or set failOnDataLoss to false to "
                "go on with what there is",
                offset.entry,
            )
        _log.warning("%s: %s; the query goes on with what there is", self._upstream.name, what)
        return True

    def _loss(self, offset: StreamOffset, header: Header) -> str | None:
        found = Identity.of(header)
        if offset.stream not in (None, found):
            return f"the stream was exchanged: this is {found}, and the query read {offset.stream}"
        if offset.entry > header.total_entries:
            return (
                f"the stream was cut back: it holds {header.total_entries} entries, and the query "
                f"stands before entry {offset.entry}"
            )
        if offset.digest and self._upstream.digest_before(offset.entry) != offset.digest:
            return (
                f"the stream was exchanged: the entries before {offset.entry} are not those that "
                "the query read"
            )
        return None

    def _patiently(self, work: Callable[[Header], T]) -> T:
        """What `work` makes of the stream; waits for a server that is away."""
        while True:
            made = self._attempt(work)
            if made is not None:
                return made
            time.sleep(max(0.0, self._due - time.monotonic()))

    def _attempt(self, work: Callable[[Header], T]) -> T | None:
        """The same; None where the server is away, and not yet for too long.

        Raises `ConnectFailed` or `ConnectionLost` after `retryFor` without an answer.
        """
        if time.monotonic() < self._due:
            return None
        try:
            header = self._upstream.look()
            self._total = header.total_entries
            made = work(header)
        except (ConnectFailed, ConnectionLost) as error:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                _log.warning("%s; it is waited for", error)
            if now - self._away_since >= self._options.retry_for:
                raise
            self._due = now + BACKOFF.wait(self._attempts, random.random())  # noqa: S311
            self._attempts += 1
            return None
        self._away_since, self._attempts, self._due = None, 0, 0.0
        return made


def lag(progress: Any) -> int | None:
    """How many entries a query is behind its stream, by its `lastProgress`; None where it has
    none yet or follows no stream."""
    for source in (progress or {}).get("sources", ()):
        told = [source.get(name) for name in ("endOffset", "latestOffset")]
        read = [json.loads(text) if isinstance(text, str) else text for text in told]
        if all(isinstance(offset, dict) and "entry" in offset for offset in read):
            end, latest = (StreamOffset.read(offset).entry for offset in read)
            return max(0, latest - end)
    return None
