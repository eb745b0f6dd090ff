"""`df.write.format("datastream")`: rows appended to a stream file, all of them or none.

Owns the way of the rows: tasks write them to files of their own beside the stream, and the
driver puts those, in the order of the partitions, into one atomic operation. Nothing is known to
readers before, and nothing is left where a task fails; what a killed driver left goes with the
next write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, IntegralType, StructType

from datastreamer.errors import FileMissing, StreamFileError, UsageError
from datastreamer.format import MAX_BOOKMARK_SIZE, MAX_DATA_SIZE, TYPE_BOOKMARK, U32_MAX
from datastreamer.spark.options import Options
from datastreamer.spark.read.paths import local_path
from datastreamer.spark.write import staging
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.atomic_op import AtomicOp

_STAGED: Final = pa.schema([("type", pa.int64()), ("data", pa.binary())])
_SHARED: Final = (
    "where executors are other machines, give stagingPath a folder that all of them share"
)


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task wrote: the rows of a partition, in a file."""

    partition: int
    path: str
    rows: int


class StreamSink(DataSourceArrowWriter):
    """Appends the columns `type` and `data` to a stream file, which there has to be.

    Made once a write, on the driver. Raises `UsageError` and `FileMissing` for what cannot be
    written.
    """

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise UsageError('a stream is only ever appended to: mode("append"), not overwrite')
        path = local_path(options.paths[0]) if len(options.paths) == 1 else None
        if path is None:
            raise UsageError("a stream is written to one file of this machine: name its path")
        _check_columns(schema)
        if not os.path.isfile(path):
            raise FileMissing(path, "no such file; make the stream first, with its system id")
        self._path = os.path.abspath(path)
        folder, name = os.path.split(self._path)
        # Here and not by the tasks: one that is still at work when another has failed must not
        # make it again.
        self._staging = staging.make(options.staging or folder, name)

    def write(self, iterator: Iterator[Any]) -> Staged:
        """A task: put the rows of a partition aside.

        Raises `UsageError` for a row that is no entry; nothing of the whole write is there then.
        """
        task = TaskContext.get()
        assert task is not None
        return self.stage(task.partitionId(), task.taskAttemptId(), iterator)

    def stage(self, partition: int, attempt: int, iterator: Iterator[Any]) -> Staged:
        """`write`, by an attempt at a partition."""
        path = os.path.join(self._staging, f"{partition:06d}-{attempt}.arrow")
        rows = 0
        try:
            file = pa.OSFile(path, "wb")
        except FileNotFoundError:
            raise StreamFileError(
                path, f"there is no such folder on this machine, or the write is over: {_SHARED}"
            ) from None
        with file, pa.ipc.new_file(file, _STAGED) as output:
            for batch in iterator:
                entries = _entries(batch, partition, rows)
                output.write_batch(entries)
                rows += entries.num_rows
        return Staged(partition, path, rows)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """The driver, when all tasks are done: one atomic operation, synced when this returns.

        Raises what opening the stream and committing raise; nothing is appended then.
        """
        staged = sorted(
            (message for message in messages if isinstance(message, Staged)),
            key=lambda message: message.partition,
        )
        try:
            with DataStream.open(self._path) as stream, stream.atomic_op() as op:
                for part in staged:
                    _append(op, part)
        finally:
            staging.clear(self._staging)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """The driver, when a task failed for good: nothing was appended, nothing stays."""
        staging.clear(self._staging)


def _check_columns(schema: StructType) -> None:
    told = {field.name: field.dataType for field in schema}
    fits = isinstance(told.get("type"), IntegralType) and isinstance(told.get("data"), BinaryType)
    if set(told) != {"type", "data"} or not fits:
        there = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)
        raise UsageError(
            "entries are written from two columns, type (a whole number) and data (binary); these "
            f"are {there}: select the two. Entries get new numbers, in the order of the rows"
        )


def _entries(batch: Any, partition: int, before: int) -> Any:
    """A batch's two columns, checked."""
    kinds = batch.column("type").cast(pa.int64())
    data = batch.column("data").cast(pa.binary())
    sizes = pc.binary_length(data)
    marks = pc.equal(kinds, TYPE_BOOKMARK)
    large = f"its data is above {MAX_DATA_SIZE:,} bytes, or a key not of 1 to {MAX_BOOKMARK_SIZE}"
    most = pc.if_else(marks, MAX_BOOKMARK_SIZE, MAX_DATA_SIZE)
    least = pc.if_else(marks, 1, 0)
    for wrong, why in (
        (pc.or_(pc.is_null(kinds), pc.is_null(data)), "type or data is null"),
        (pc.or_(pc.less(kinds, 0), pc.greater(kinds, U32_MAX)), "its type is no u32"),
        (pc.or_(pc.greater(sizes, most), pc.less(sizes, least)), large),
    ):
        at = pc.index(wrong, pa.scalar(True)).as_py()
        if at >= 0:
            raise UsageError(f"row {before + at} of partition {partition} is no entry: {why}")
    return pa.RecordBatch.from_arrays([kinds, data], schema=_STAGED)


def _append(op: AtomicOp, part: Staged) -> None:
    try:
        with pa.memory_map(part.path) as file:
            batches = pa.ipc.open_file(file)
            rows = 0
            for at in range(batches.num_record_batches):
                rows += _append_batch(op, batches.get_batch(at))
    except (OSError, pa.ArrowException) as error:
        raise StreamFileError(
            part.path,
            f"what a task wrote cannot be read here: {error}; {_SHARED}",
        ) from None
    if rows != part.rows:
        raise StreamFileError(part.path, f"{rows} rows, and the task wrote {part.rows}")


def _append_batch(op: AtomicOp, batch: Any) -> int:
    kinds, data = batch.column("type").to_pylist(), batch.column("data").to_pylist()
    if TYPE_BOOKMARK not in kinds:
        op.add_entries(kinds, data)
        return len(kinds)
    for kind, item in zip(kinds, data, strict=True):
        if kind == TYPE_BOOKMARK:
            op.add_bookmark(item)
        else:
            op.add_entry(kind, item)
    return len(kinds)
