"""`df.write.format("datastream")`: appends rows to a stream file, all of them or none.

Tasks write their rows to files in a staging folder; the driver appends those, in the order of the
partitions, in one atomic operation. Readers see nothing before, and a failed write leaves nothing.
The next write removes what a killed driver left.
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
    "if executors run on other machines, set stagingPath to a folder that all of them share"
)


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """A task's rows of a partition, in a file."""

    partition: int
    path: str
    rows: int


class StreamSink(DataSourceArrowWriter):
    """Appends the columns `type` and `data` to an existing stream file.

    The driver makes one per write. Raises `UsageError` and `FileMissing`.
    """

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise UsageError('a stream can only be appended to: use mode("append"), not overwrite')
        path = local_path(options.paths[0]) if len(options.paths) == 1 else None
        if path is None:
            raise UsageError("a stream is written to one local file: name its path")
        _check_columns(schema)
        if not os.path.isfile(path):
            raise FileMissing(path, "no such file; create the stream first, with its system id")
        self._path = os.path.abspath(path)
        folder, name = os.path.split(self._path)
        # By the driver, not by tasks: a task that outlives a failed write must not create the
        # folder again.
        self._staging = staging.create(options.staging or folder, name)

    def write(self, iterator: Iterator[Any]) -> Staged:
        """In a task: write the rows of a partition to a file.

        Raises `UsageError` for a row that is not an entry; the whole write is aborted then.
        """
        task = TaskContext.get()
        assert task is not None
        return self.stage(task.partitionId(), task.taskAttemptId(), iterator)

    def stage(self, partition: int, attempt: int, iterator: Iterator[Any]) -> Staged:
        """`write`, for an attempt at a partition."""
        path = os.path.join(self._staging, f"{partition:06d}-{attempt}.arrow")
        rows = 0
        try:
            file = pa.OSFile(path, "wb")
        except FileNotFoundError:
            raise StreamFileError(
                path, f"no such folder on this machine, or the write has ended: {_SHARED}"
            ) from None
        with file, pa.ipc.new_file(file, _STAGED) as output:
            for batch in iterator:
                entries = _entries(batch, partition, rows)
                output.write_batch(entries)
                rows += entries.num_rows
        return Staged(partition, path, rows)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """In the driver, after all tasks: append in one atomic operation, synced on return.

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
            staging.remove(self._staging)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """In the driver, after the last attempt of a task has failed: remove the staged rows."""
        staging.remove(self._staging)


def _check_columns(schema: StructType) -> None:
    found = {field.name: field.dataType for field in schema}
    fits = isinstance(found.get("type"), IntegralType) and isinstance(found.get("data"), BinaryType)
    if set(found) != {"type", "data"} or not fits:
        there = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)
        raise UsageError(
            f"a stream is written from the columns type (an integer) and data (binary), not from "
            f"{there}: select these two. Entries are numbered anew, in the order of the rows"
        )


def _entries(batch: Any, partition: int, row: int) -> Any:
    """The two columns of a batch, checked. `row` is the number of its first row."""
    kinds = batch.column("type").cast(pa.int64())
    data = batch.column("data").cast(pa.binary())
    sizes = pc.binary_length(data)
    bookmarks = pc.equal(kinds, TYPE_BOOKMARK)
    size = f"its data exceeds {MAX_DATA_SIZE:,} bytes, or its key is not 1 to {MAX_BOOKMARK_SIZE}"
    most = pc.if_else(bookmarks, MAX_BOOKMARK_SIZE, MAX_DATA_SIZE)
    least = pc.if_else(bookmarks, 1, 0)
    for wrong, why in (
        (pc.or_(pc.is_null(kinds), pc.is_null(data)), "type or data is null"),
        (pc.or_(pc.less(kinds, 0), pc.greater(kinds, U32_MAX)), "its type is not a u32"),
        (pc.or_(pc.greater(sizes, most), pc.less(sizes, least)), size),
    ):
        at = pc.index(wrong, pa.scalar(True)).as_py()
        if at >= 0:
            raise UsageError(f"row {row + at} of partition {partition} is not an entry: {why}")
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
            f"the rows of a task cannot be read: {error}; {_SHARED}",
        ) from None
    if rows != part.rows:
        raise StreamFileError(part.path, f"it holds {rows} rows, but the task wrote {part.rows}")


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
