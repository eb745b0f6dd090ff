"""`spark.readStream`: follows a stream in micro-batches whose parts executors read.

Owns the bounds of a batch, and that it belongs to the history that the query has read so far.
`sources` knows files and servers, `spark.read.batch` reads parts.
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from datastreamer.errors import DatastreamerError, UnknownEntry, UsageError
from datastreamer.format import U64_MAX, Header
from datastreamer.position import Identity
from datastreamer.spark.failures import one_line
from datastreamer.spark.options import Options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.stream.offsets import StreamOffset
from datastreamer.spark.stream.sources import FollowedStream, Looks, followed_stream
from datastreamer.spark.versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)


@one_line
class TailReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows one stream. The driver determines how far it goes; executors `read` the entries."""

    def __init__(self, options: Options, schema: StructType) -> None:
        if options.stop is not None:
            raise UsageError("endingOffset is for spark.read: a streaming query has no end")
        self._options = options
        self._rows = BatchReader(replace(options, from_latest=False), schema)
        self._opened: Looks | None = None
        # With Trigger.AvailableNow, the end of what this run reads.
        self._target = U64_MAX
        # The offset after which nothing was new, and the total number of entries then.
        self._idle: tuple[dict[str, Any], int] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The first offset of a query without a checkpoint."""
        return self._wait_for(self._first).as_json()

    def _first(self, header: Header) -> StreamOffset:
        if self._options.from_latest:
            return self._offset(header, header.total_entries)
        start = self._options.start
        entry = start if isinstance(start, int) else self._stream.entry_of(start)
        if entry > header.total_entries:
            raise UnknownEntry(entry, header.total_entries)
        return self._offset(header, entry)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit that the options set. Spark passes on only one, so with both limits it is the
        one of entries, and `_stop` applies the other."""
        if self._options.max_entries is not None:
            return ReadMaxRows(self._options.max_entries)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit this run to what is committed now."""
        self._target = self._wait_for(lambda header: header.total_entries)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch; `start` if nothing is new or the server does not answer.

        Raises `HistoryChanged` or `StreamFileError` if the stream no longer holds the entries
        that were read before `start`.
        """

        def next_end(header: Header) -> dict[str, Any]:
            return self._next_end(start, limit, header)

        if self._target < U64_MAX:
            # Spark ends this run at the first report that nothing is new.
            return self._wait_for(next_end)
        return self._looks.attempt(next_end) or start

    def _next_end(self, start: dict[str, Any], limit: ReadLimit, header: Header) -> dict[str, Any]:
        if (start, header.total_entries) == self._idle:
            return start
        begin = StreamOffset.from_json(start)
        lost = self._ensure_kept(begin, header)
        total = min(header.total_entries, max(self._target, begin.entry))
        if begin.entry < total:
            return self._offset(header, self._stop(begin.entry, total, limit)).as_json()
        if lost:
            # Continue at the end of the truncated stream.
            return self._offset(header, total).as_json()
        self._idle = (start, header.total_entries)
        return start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The end of the stream when it was last read, which Spark adds to the query's
        progress."""
        total = None if self._opened is None else self._opened.total
        return None if total is None else StreamOffset(total).as_json()

    def _stop(self, start: int, total: int, limit: ReadLimit) -> int:
        """The end of the batch that begins at `start`; a batch has at least one entry."""
        stop = total
        size = None
        if isinstance(limit, ReadMaxRows):
            stop = min(stop, start + limit.max_rows)
            size = self._options.max_bytes
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        if size is not None:
            stop = min(stop, max(start + 1, self._stream.entry_after(start, size)))
        return stop

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The parts of a batch, which Spark may have begun before a crash; it has the same entries
        then. Raises as `latestOffset`."""
        begin, stop = StreamOffset.from_json(start), StreamOffset.from_json(end)
        if begin.entry >= stop.entry:
            return []
        return self._wait_for(lambda header: self._parts(begin, stop, header))

    def _parts(
        self, begin: StreamOffset, stop: StreamOffset, header: Header
    ) -> Sequence[InputPartition]:
        until = min(stop.entry, header.total_entries)
        parts: Sequence[InputPartition] = []
        if begin.entry < until:
            parts = self._stream.parts(begin.entry, until, self._options.partition_bytes)
        # After planning: the parts detect later changes, the offsets earlier ones.
        self._ensure_kept(begin, header)
        self._ensure_kept(stop, header)
        return parts

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, as record batches."""
        # Damaged entries before the start offset are reported as rows from that entry on.
        start = self._options.start
        return self._rows.read(partition, start if isinstance(start, int) else 0)

    def reach(self) -> None:
        """Wait until the stream answers. Raises as `initialOffset`."""
        self._wait_for(lambda header: header)

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: the stream keeps all entries, and Spark keeps the offset."""

    def stop(self) -> None:
        """Close the file or the connection."""
        if self._opened is not None:
            self._opened.stream.close()

    @property
    def _looks(self) -> Looks:
        # Opened on first use: executors also make a reader, but only read parts.
        if self._opened is None:
            self._opened = Looks(followed_stream(self._options), self._options.retry_for)
        return self._opened

    @property
    def _stream(self) -> FollowedStream:
        return self._looks.stream

    def kept(self, start: dict[str, Any]) -> int:
        """The entry from which a query that has read up to an offset continues. Raises as
        `latestOffset`."""
        begin = StreamOffset.from_json(start)

        def entry(header: Header) -> int:
            self._ensure_kept(begin, header)
            return min(begin.entry, header.total_entries)

        return self._wait_for(entry)

    def offset_of(self, entry: int) -> dict[str, Any]:
        """The offset of a query that has read all entries before this one."""
        return self._wait_for(lambda header: self._offset(header, entry)).as_json()

    def _offset(self, header: Header, entry: int) -> StreamOffset:
        return StreamOffset(entry, self._stream.digest_before(entry), Identity.of(header))

    def _ensure_kept(self, offset: StreamOffset, header: Header) -> bool:
        """Whether entries before the offset are lost and the query may continue without them.

        Raises `HistoryChanged` or `StreamFileError` if it may not.
        """
        what = self._loss(offset, header)
        if what is None:
            return False
        if self._options.fail_on_data_loss:
            raise self._stream.changed(
                f"{what}. Start again with a new checkpoint, or set failOnDataLoss to false to "
                "continue with the entries that exist",
                offset.entry,
            )
        _log.warning("%s: %s; continuing with the entries that exist", self._stream.name, what)
        return True

    def _loss(self, offset: StreamOffset, header: Header) -> str | None:
        found = Identity.of(header)
        if offset.stream not in (None, found):
            return f"the stream was replaced: it is {found}, and the query read {offset.stream}"
        if offset.entry > header.total_entries:
            return (
                f"the stream was truncated: it holds {header.total_entries} entries, and the query "
                f"has read {offset.entry}"
            )
        if offset.digest and self._stream.digest_before(offset.entry) != offset.digest:
            return (
                f"the stream was replaced: the entries before {offset.entry} are not those that "
                "the query read"
            )
        return None

    def _wait_for(self, work: Callable[[Header], T]) -> T:
        return self._looks.wait_for(work)


@one_line
class RefusedReader(DataSourceStreamReader):
    """In the place of a reader that cannot be made: raises why, when Spark first uses it."""

    def __init__(self, error: DatastreamerError) -> None:
        self._error = error

    def _raise(self, *_: Any) -> Any:
        raise self._error

    _refuse: Any = _raise
    # The first call for a query without a checkpoint, and with one; and all others.
    initialOffset = getDefaultReadLimit = _refuse  # noqa: N815
    latestOffset = partitions = read = _refuse  # noqa: N815


def lag(progress: Any) -> int | None:
    """How many entries a query lags its stream, from its `lastProgress`; None if there is no
    progress yet or the query follows no stream."""
    for source in (progress or {}).get("sources", ()):
        texts = [source.get(name) for name in ("endOffset", "latestOffset")]
        read = [_offset_of(text) if isinstance(text, str) else text for text in texts]
        if all(isinstance(offset, dict) and "entry" in offset for offset in read):
            end, latest = (StreamOffset.from_json(offset).entry for offset in read)
            return max(0, latest - end)
    return None


def _offset_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)  # Spark 4.0 gives Python's form of it
