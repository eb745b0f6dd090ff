"""`df.write.format("datastream")` and `df.writeStream`: append rows to a stream.

Tasks pack their rows; the driver appends them, in the order of the partitions. Into a file
`df.write` takes any number of rows: tasks write theirs to files in a staging folder, and the next
write removes what a killed driver left. All other rows go through the driver's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import methodcaller
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from datastreamer.errors import FileMissing, StreamFileError, UsageError
from datastreamer.spark.failures import one_line
from datastreamer.spark.options import Options
from datastreamer.spark.read.paths import local_path
from datastreamer.spark.versions import VERSION, DataSourceStreamArrowWriter
from datastreamer.spark.write import staging
from datastreamer.spark.write.rows import PACKED, check_columns, packed
from datastreamer.spark.write.target import Fences, append, file_output, server_output

_SHARED: Final = (
    "if executors run on other machines, set stagingPath to a folder that all of them share"
)
# A local property of the tasks of a streaming query.
_ROWS: Final = 1000
_QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """A task's rows of a partition: packed as an Arrow file, or where that file is."""

    partition: int
    rows: int
    content: bytes | str
    query: str | None
    """The id of the streaming query that they are a part of."""


@one_line
class _Sink:
    """What both kinds of writes have in common. Raises `UsageError` and `FileMissing`."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise UsageError('a stream can only be appended to: use mode("append"), not overwrite')
        check_columns(schema)
        self._options = options
        self._path = None if options.servers else _existing(options.paths)
        self._staging: str | None = None

    def write(self, iterator: Iterator[Any]) -> Written:
        """In a task: pack the rows of a partition.

        Raises `UsageError` for a row that is not an entry; the whole write is aborted then.
        """
        task = TaskContext.get()
        assert task is not None
        query = task.getLocalProperty(_QUERY_ID)
        return self.pack(task.partitionId(), task.taskAttemptId(), query, iterator)

    def pack(
        self, partition: int, attempt: int, query: str | None, iterator: Iterator[Any]
    ) -> Written:
        """In a task: the rows of an attempt at a partition."""
        path, rows = None, 0
        if self._staging is None:
            file = pa.BufferOutputStream()
        else:
            path = os.path.join(self._staging, f"{partition:06d}-{attempt}.arrow")
            try:
                file = pa.OSFile(path, "wb")
            except FileNotFoundError:
                raise StreamFileError(
                    path, f"no such folder on this machine, or the write has ended: {_SHARED}"
                ) from None
        with pa.ipc.new_file(file, PACKED) as output:
            for batch in iterator:
                output.write_batch(packed(batch, partition, rows))
                rows += batch.num_rows
        content = path or file.getvalue().to_pybytes()
        file.close()
        return Written(partition, rows, content, query)

    def _append(
        self, messages: Sequence[WriterCommitMessage | None], version: tuple[str, int] | None
    ) -> None:
        written = sorted(
            (it for it in messages if isinstance(it, Written) and it.rows),
            key=lambda it: it.partition,
        )
        if not written:
            return
        fences = None if version is None else Fences(*version)
        target = server_output(self._options) if self._path is None else file_output(self._path)
        with target as output:
            append(output, _batches(written), fences)


@one_line
class StreamSink(_Sink, DataSourceArrowWriter):
    """Appends rows to a stream. The driver makes one per write."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        if self._path is not None:
            folder, name = os.path.split(self._path)
            # By the driver, not by tasks: a task that outlives a failed write must not create the
            # folder again.
            self._staging = staging.create(options.staging or folder, name)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """In the driver, after all tasks: append the rows, on disk on return.

        Raises what opening the stream and committing raise. Without `operation` the rows are one
        atomic operation, so that nothing is appended then.
        """
        try:
            self._append(messages, self._options.transaction)
        finally:
            self.abort(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """In the driver, after the last attempt of a task has failed: remove the staged rows."""
        if self._staging is not None:
            staging.remove(self._staging)


@one_line
class QuerySink(_Sink, DataSourceStreamArrowWriter):
    """Appends the batches of a streaming query to a stream, each once."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self._schema = to_arrow_schema(schema)

    def write(self, iterator: Iterator[Any]) -> Written:
        """In a task: pack the rows of a partition. Raises as the other sink."""
        if VERSION < (4, 1):  # which passes rows
            rows = map(methodcaller("asDict", recursive=True), iterator)
            runs = iter(lambda: list(islice(rows, _ROWS)), [])
            iterator = (pa.RecordBatch.from_pylist(run, self._schema) for run in runs)
        return super().write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """In the driver, after all tasks of a batch: append it, on disk on return, unless it is in
        the stream. Raises what opening the stream and committing raise."""
        queries = {it.query for it in messages if isinstance(it, Written)}
        for query in queries:
            assert query is not None
            self._append(messages, (query, batchId))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """In the driver, after a batch has failed: nothing was appended."""


def _existing(paths: Sequence[str]) -> str:
    path = local_path(paths[0]) if len(paths) == 1 else None
    if path is None:
        raise UsageError("a stream is written to one local file: name its path, or a server")
    if not os.path.isfile(path):
        what = "a folder, not a file" if os.path.isdir(path) else "no such file"
        raise FileMissing(
            path,
            f"{what}; create the stream first: datastreamer append FILE --create --system-id N "
            "--stream-version V </dev/null",
        )
    return os.path.abspath(path)


def _batches(written: Sequence[Written]) -> Iterator[Any]:
    for part in written:
        content = part.content
        try:
            staged = pa.memory_map(content) if isinstance(content, str) else content
            batches = pa.ipc.open_file(staged)
            for at in range(batches.num_record_batches):
                yield batches.get_batch(at)
        except (OSError, pa.ArrowException) as error:
            raise StreamFileError(
                content if isinstance(content, str) else "",
                f"the rows of a task cannot be read: {error}; {_SHARED}",
            ) from None
