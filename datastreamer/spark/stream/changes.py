"""`spark.readStream` with the option changes: rows say what was added to a stream and what is no
longer in it.

Owns what a batch of changes is: deletes of the delivered entries that the stream no longer has as
they were, by number alone, and inserts of what it has from there on. Its correctness rests on one
rule: an offset's history is never newer than the entries that its batch has read. So the next batch
deletes and inserts again whatever was changed meanwhile, also in the middle of a batch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from datastreamer.errors import BadPosition, ConnectionLost, DatastreamerError, UsageError
from datastreamer.format import U64_MAX, Header
from datastreamer.position import KEPT, Identity
from datastreamer.protocol.commands import KnownHistory
from datastreamer.spark.failures import one_line
from datastreamer.spark.options import Options
from datastreamer.spark.read.partitions import cut_entries
from datastreamer.spark.read.schemas import number_column
from datastreamer.spark.stream.offsets import Delivered, StreamOffset
from datastreamer.spark.stream.reader import TailReader
from datastreamer.spark.versions import ReadLimit

_log = logging.getLogger(__name__)

CHANGE, EPOCH, ENTRY = "_change", "_epoch", "_entry"
DELETE, INSERT = "delete", "insert"
_ADDED: Final = (
    StructType().add(CHANGE, "string", False).add(EPOCH, "long").add(ENTRY, "long", False)
)
# The most deletes in a record batch.
_ROWS: Final = 1 << 16


def with_changes(schema: StructType) -> StructType:
    """A table's columns, all of which a delete leaves null, and those of its changes."""
    own = [StructField(field.name, field.dataType, True) for field in schema]
    return StructType([*own, *_ADDED])


@dataclass(frozen=True)
class ChangePart(InputPartition):
    """Deletes or inserts of these entries. Inserts are of the stream as it is when they are read:
    of `history`, a later state of it, or else with the same entries before `until`."""

    change: str
    ranges: tuple[tuple[int, int], ...]
    history: KnownHistory | None
    until: int = 0
    digest: str = ""


@one_line
class ChangeReader(TailReader):
    """Follows one stream, and the changes of the entries that it has delivered."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._number = number_column(options.table)
        own = StructType([field for field in schema if field.name not in _ADDED.names])
        known = with_changes(own)
        for it in schema:
            if it.dataType != known[it.name].dataType or known[it.name].nullable > it.nullable:
                what = f"{it.name} is {known[it.name].dataType.simpleString()}, and may be null"
                raise UsageError(f"option changes: the column {what}: leave NOT NULL out")
        if self._number not in own.names:
            own.add(self._number, LongType())
        super().__init__(replace(options, changes=False), own)
        self._options, self._schema = options, to_arrow_schema(schema)
        self._unchanged: object = None

    # In the driver.

    def _offset(
        self, header: Header, entry: int, begin: StreamOffset | None = None, kept: int = 0
    ) -> StreamOffset:
        """The offset at `entry` of a query that begins there, or that was at `begin`, and whose
        entries before `kept` are in the stream."""
        stream, identity = self._stream, Identity.of(header)
        digest = stream.digest_before(entry) if entry <= header.total_entries else ""
        first, marks = entry, dict[int, tuple[int, str]]()
        if begin is not None:
            known = _delivered(begin)
            first = last = known.first
            # The first of those whose distances have the same number of bits.
            for mark in (*known.marks, (begin.entry, begin.digest)):
                if mark[0] <= kept and mark[0] < entry:
                    marks.setdefault((entry - mark[0]).bit_length(), mark)
                    last = mark[0]
            # A large batch has marks within.
            for distance in (KEPT << at for at in range(64)):
                if digest and 2 * distance <= entry - last:
                    within = entry - distance
                    marks[distance.bit_length()] = within, stream.digest_before(within)
        delivered = Delivered(first, stream.history(), tuple(sorted(marks.values())))
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
        history, planned = self._stream.history(), _delivered(stop).history
        alone = history is None and planned is None and len(self._options.servers) < 2
        kept, until = min(kept, stop.entry), min(stop.entry, header.total_entries)
        digest = self._stream.digest_before(until)
        if not (alone or _is_later(history, planned)) and (until, digest) != (
            stop.entry,
            stop.digest,
        ):
            self._refuse(stop.entry)
        old = tuple(_runs(number for number in updated if number < kept))
        gone = (*old, (kept, begin.entry)) if kept < begin.entry else old
        parts: list[InputPartition] = [ChangePart(DELETE, gone, history)] if gone else []
        inserts = [old] if old else []
        if kept < until:
            pieces = cut_entries(header, kept, until, self._options.partition_bytes)
            inserts += [(piece,) for piece in pieces]
        return parts + [ChangePart(INSERT, it, history, until, digest) for it in inserts]

    def _kept(self, begin: StreamOffset, header: Header) -> tuple[int, list[int]]:
        """How far the delivered entries are still in the stream, and those before that that were
        updated."""
        known, stream = _delivered(begin), self._stream
        if self._ensure_kept(StreamOffset(0, "", begin.stream), header):
            # Another stream.
            return known.first, []
        now, then = stream.history(), known.history
        if now is not None and then is not None and now[0] == then[0] and now != then:
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
        assert isinstance(partition, ChangePart)
        try:
            for start, stop in partition.ranges:
                if partition.change == INSERT:
                    yield from self._inserts(partition, start, stop)
                    continue
                for first in range(start, stop, _ROWS):
                    numbers = pa.array(range(first, min(first + _ROWS, stop)), pa.int64())
                    yield self._shaped(DELETE, partition.history, {ENTRY: numbers})
        finally:
            self.stop()

    def _inserts(self, part: ChangePart, due: int, stop: int) -> Iterator[Any]:
        while True:
            history, parts = self._wait_for(partial(self._reading, part, due, stop))
            try:
                for batch in itertools.chain.from_iterable(map(super().read, parts)):
                    numbers = batch.column(self._number)
                    due = max(due, numbers[-1].as_py() + 1)
                    own = dict(zip(batch.schema.names, batch.columns, strict=True))
                    yield self._shaped(INSERT, history, {**own, ENTRY: numbers})
                return
            except DatastreamerError:
                # The next batch deletes what is no longer so, and inserts it again.
                if self._wait_for(lambda _: (self._stream.history(),)) == (history,):
                    raise

    def _reading(
        self, part: ChangePart, due: int, stop: int, header: Header
    ) -> tuple[KnownHistory | None, Sequence[InputPartition]]:
        """How to read the entries from `due` up to `stop` now."""
        stream, total = self._stream, header.total_entries
        now = stream.history()
        if _is_later(now, part.history):
            stop = min(stop, total)
        elif total < part.until or stream.digest_before(part.until) != part.digest:
            self._refuse(part.until)
        return now, stream.parts(due, stop, U64_MAX) if due < stop else ()

    def _refuse(self, entry: int) -> NoReturn:
        """The stream may be older than the one that a batch was planned for."""
        what = (
            "the stream is not the one that this batch was planned for: start the query again; if "
            "the stream was replaced permanently, with a new checkpoint and an empty table"
        )
        if len(self._options.servers) > 1:
            # A relay that lags: try again.
            raise ConnectionLost(f"{self._stream.name}: {what}")
        raise self._stream.changed(what, entry)

    def _shaped(self, change: str, history: KnownHistory | None, columns: dict[str, Any]) -> Any:
        rows = len(columns[ENTRY])
        epoch = pa.scalar(None if history is None else history.epoch, pa.int64())
        columns |= {CHANGE: pa.repeat(pa.scalar(change), rows), EPOCH: pa.repeat(epoch, rows)}
        found = [
            columns[it.name] if it.name in columns else pa.nulls(rows, it.type)
            for it in self._schema
        ]
        return pa.RecordBatch.from_arrays(found, schema=self._schema)


def _is_later(now: KnownHistory | None, then: KnownHistory | None) -> bool:
    """Whether a stream is at a state of its history, or at a later one."""
    return now is not None and then is not None and now[0] == then[0] and now[1] >= then[1]


def _delivered(offset: StreamOffset) -> Delivered:
    if offset.delivered is None:
        raise BadPosition(
            "option changes: the checkpoint is of a query without it: use a new checkpoint"
        )
    return offset.delivered


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive numbers, which rise, as ranges."""
    # The differences of numbers in a row and their places are equal.
    for _, run in itertools.groupby(enumerate(numbers), lambda it: it[1] - it[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1
