"""`spark.readStream` with the option changes: rows say what was added to a stream and what is no
longer in it.

Owns what a batch of changes is: deletes of the delivered entries that the stream no longer has as
they were, by number alone, and inserts of what it has from there on. Its correctness rests on one
rule: an offset's history is never newer than the entries that its batch has read. So the next batch
deletes and inserts again whatever was changed meanwhile, also in the middle of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import LongType, StringType, StructField, StructType

from datastreamer.errors import BadPosition, ConnectionLost, DatastreamerError, UsageError
from datastreamer.format import U64_MAX, Header
from datastreamer.position import KEPT, Identity
from datastreamer.protocol.commands import KnownHistory
from datastreamer.spark.options import Options
from datastreamer.spark.read.partitions import cut_entries
from datastreamer.spark.read.schemas import number_column
from datastreamer.spark.stream.offsets import Delivered, Mark, StreamOffset
from datastreamer.spark.stream.reader import TailReader

_log = logging.getLogger(__name__)

CHANGE, EPOCH, ENTRY = "_change", "_epoch", "_entry"
DELETE, INSERT = "delete", "insert"
_FIELDS: Final = (
    StructField(CHANGE, StringType(), False),
    StructField(EPOCH, LongType(), True),
    StructField(ENTRY, LongType(), False),
)

# The most deletes in a record batch, and in a part.
_ROWS: Final = 1 << 16
_DELETES: Final = 1 << 20

Range = tuple[int, int]
"""The first entry, and the one after the last."""


def with_changes(schema: StructType) -> StructType:
    """A table's columns, all of which a delete leaves null, and those of its changes."""
    own = [StructField(field.name, field.dataType, True) for field in schema]
    return StructType([*own, *_FIELDS])


@dataclass(frozen=True)
class Deleted(InputPartition):
    """Deletes of these entries, found at this epoch."""

    entries: Range
    epoch: int | None


@dataclass(frozen=True)
class Inserted(InputPartition):
    """Entries to read from the stream as it is when they are read: of `history` or a later state
    of it, or else with these entries before `until`."""

    ranges: tuple[Range, ...]
    history: KnownHistory | None
    until: int
    digest: str


class ChangeReader(TailReader):
    """Follows one stream, and the changes of the entries that it has delivered."""

    def __init__(self, options: Options, schema: StructType) -> None:
        added = {field.name: field for field in _FIELDS}
        own = StructType()
        for field in schema:
            known = added.get(field.name)
            if known is not None and known.dataType != field.dataType:
                raise UsageError(f"the column {field.name} is {known.dataType.simpleString()}")
            if known is None and not field.nullable:
                raise UsageError(f"option changes: {field.name} may be null: leave NOT NULL out")
            if known is None:
                own.add(field)
        self._number = number_column(options.table)
        if self._number not in own.names:
            own.add(self._number, LongType())
        super().__init__(replace(options, changes=False), own)
        self._options = options
        self._schema = to_arrow_schema(schema)
        self._unchanged: object = None

    # In the driver.

    def _offset(
        self, header: Header, entry: int, begin: StreamOffset | None = None, kept: int = 0
    ) -> StreamOffset:
        """The offset at `entry` of a query that begins there, or that was at `begin`, and whose
        entries before `kept` are in the stream."""
        stream, identity = self._stream, Identity.of(header)
        digest = stream.digest_before(entry) if entry <= header.total_entries else ""
        first, marks = entry, list[Mark]()
        if begin is not None:
            known = _delivered(begin)
            first = known.first
            marks += known.before(kept, (begin.entry, begin.digest), entry)
            # A large batch has marks within.
            distance, near = KEPT, list[int]()
            last = marks[-1][0] if marks else first
            while 2 * distance <= entry - last:
                near.append(entry - distance)
                distance *= 2
            if digest:
                marks += [(number, stream.digest_before(number)) for number in reversed(near)]
        delivered = Delivered(first, stream.history(), tuple(marks))
        return StreamOffset(entry, digest, identity, delivered)

    def _next_end(self, start: dict[str, Any], limit: ReadLimit, header: Header) -> dict[str, Any]:
        state = (start, header, self._stream.history())
        if state == self._unchanged:
            return start
        begin = StreamOffset.from_json(start)
        kept, _ = self._kept(begin, header)
        total = min(header.total_entries, max(self._target, kept))
        stop = self._stop(kept, total, limit) if kept < total else kept
        end = self._offset(header, stop, begin, kept).as_json()
        if end == start:
            self._unchanged = state
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, stop = StreamOffset.from_json(start), StreamOffset.from_json(end)
        return self._wait_for(lambda header: self._changes(begin, stop, header))

    def _changes(
        self, begin: StreamOffset, stop: StreamOffset, header: Header
    ) -> list[InputPartition]:
        """The changes from one offset to the other, of which the second may be of an earlier
        history than the stream has now."""
        kept, updated = self._kept(begin, header)
        kept = min(kept, stop.entry)
        history, until = self._stream.history(), min(stop.entry, header.total_entries)
        epoch = None if history is None else history.epoch
        old = tuple(_runs(number for number in updated if number < kept))
        parts: list[InputPartition] = [
            Deleted((at, min(at + _DELETES, last)), epoch)
            for first, last in (*old, (kept, begin.entry))
            for at in range(first, last, _DELETES)
        ]
        insert: Callable[[tuple[Range, ...]], Inserted] = partial(
            Inserted, history=history, until=until, digest=self._stream.digest_before(until)
        )
        if old:
            parts.append(insert(old))
        if kept < until:
            size = self._options.partition_bytes
            parts += [insert((piece,)) for piece in cut_entries(header, kept, until, size)]
        return parts

    def _kept(self, begin: StreamOffset, header: Header) -> tuple[int, list[int]]:
        """How far the delivered entries are still in the stream, and those before that that were
        updated."""
        known, stream = _delivered(begin), self._stream
        if begin.stream != Identity.of(header):
            what = f"the stream was replaced: it is {Identity.of(header)}, the query read"
            if self._options.fail_on_data_loss:
                raise stream.changed(
                    f"{what} {begin.stream}. Start again with a new checkpoint, or set "
                    "failOnDataLoss to false to delete its entries",
                    begin.entry,
                )
            _log.warning("%s: %s %s; deleting its entries", stream.name, what, begin.stream)
            return known.first, []
        now, then = stream.history(), known.history
        if now is not None and then is not None and now.stream_id == then.stream_id and now != then:
            changes = stream.changes(then)
            if changes is None:
                _log.warning(
                    "%s: more was changed since epoch %d than is known: all entries are delivered "
                    "again",
                    *(stream.name, then.epoch),
                )
                return known.first, []
            cuts = (change.start for change in changes if change.stop is None)
            kept = max(known.first, min((begin.entry, *cuts)))
            updates = (range(it.start, it.stop) for it in changes if it.stop is not None)
            return kept, sorted({n for run in updates for n in run if known.first <= n < kept})
        for number, digest in ((begin.entry, begin.digest), *reversed(known.marks)):
            if number <= header.total_entries and stream.digest_before(number) == digest:
                return max(known.first, number), []
        return known.first, []

    # In executors.

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The changes of a part, as record batches."""
        if isinstance(partition, Deleted):
            for first in range(*partition.entries, _ROWS):
                numbers = pa.array(range(first, min(first + _ROWS, partition.entries[1])))
                yield self._shaped(DELETE, partition.epoch, numbers, {})
        elif isinstance(partition, Inserted):
            try:
                for first, last in partition.ranges:
                    yield from self._inserts(partition, first, last)
            finally:
                self.stop()

    def _inserts(self, part: Inserted, due: int, stop: int) -> Iterator[Any]:
        while True:
            history, parts = self._wait_for(partial(self._reading, part, due, stop))
            try:
                for each in parts:
                    for batch in super().read(each):
                        numbers = batch.column(self._number)
                        due = max(due, numbers[-1].as_py() + 1)
                        epoch = None if history is None else history.epoch
                        own = {name: batch.column(name) for name in batch.schema.names}
                        yield self._shaped(INSERT, epoch, numbers, own)
                return
            except DatastreamerError:
                # The next batch deletes what is no longer so, and inserts it again.
                if self._wait_for(lambda _: (self._stream.history(),)) == (history,):
                    raise

    def _reading(
        self, part: Inserted, due: int, stop: int, header: Header
    ) -> tuple[KnownHistory | None, Sequence[InputPartition]]:
        """How to read the entries from `due` up to `stop` now."""
        stream, planned = self._stream, part.history
        now, total = stream.history(), header.total_entries
        if now is not None and planned is not None and now.stream_id == planned.stream_id:
            stop, known = min(stop, total), now >= planned
        else:
            known = total >= part.until and stream.digest_before(part.until) == part.digest
        if not known:
            what = "the stream was changed since this batch was planned; start the query again"
            if len(self._options.servers) > 1:
                # A relay that lags.
                raise ConnectionLost(f"{stream.name}: {what}")
            raise stream.changed(what, part.until)
        return now, stream.parts(due, stop, U64_MAX) if due < stop else ()

    def _shaped(
        self, change: str, epoch: int | None, numbers: Any, own: Mapping[str, Any]
    ) -> pa.RecordBatch:
        rows = len(numbers)
        columns = {
            CHANGE: pa.repeat(pa.scalar(change), rows),
            EPOCH: pa.repeat(pa.scalar(epoch, pa.int64()), rows),
            ENTRY: numbers,
            **own,
        }
        found = [
            columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(found, schema=self._schema)


def _delivered(offset: StreamOffset) -> Delivered:
    if offset.delivered is None:
        raise BadPosition(
            "option changes: the checkpoint is of a query without it: use a new checkpoint"
        )
    return offset.delivered


def _runs(numbers: Iterable[int]) -> Iterator[Range]:
    """Consecutive numbers, which rise, as ranges."""
    first: int | None = None
    last = 0
    for number in numbers:
        if first is not None and number != last:
            yield first, last
            first = None
        first, last = number if first is None else first, number + 1
    if first is not None:
        yield first, last
