"""The Parquet files of a table: their format, their names, their metadata.

Owns how a file is written (row groups, encodings, statistics), what it records about the entries
that it was made from, and that it gets its name only when it is complete and synced.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from datastreamer.arrow.tables import NAMES
from datastreamer.errors import BadPosition, FileExists, StreamFileError
from datastreamer.position import Position
from datastreamer.storage.disk.access import Access, create_file, open_file
from datastreamer.storage.disk.file_ops import OsDisk

_NAME: Final = re.compile(
    r"(?P<table>[a-z_]+)-(?P<first>[0-9]{12,20})-(?P<last>[0-9]{12,20})\.parquet"
)
# Names of files that a killed export leaves.
_UNFINISHED: Final = re.compile(rf"\.({'|'.join(NAMES)})\.[0-9]+\.tmp")
_KEY: Final = b"datastreamer"
# Readers skip whole row groups: large enough for zstd, small compared with a part.
_GROUP_BYTES: Final = 32 << 20
_GROUP_ROWS: Final = 1 << 20
# Columns whose numbers rise from row to row.
_RISING: Final = frozenset(
    ("number", "entry_number", "batch_number", "l2block_number", "timestamp", "value")
)
# Columns with few distinct values.
_REPEATED: Final = frozenset(
    (
        *("type", "fork_id", "chain_id", "delta_timestamp", "min_timestamp", "coinbase"),
        *("l1_blockhash", "l1_infotree_index", "global_exit_root", "block_gas_limit", "index"),
        *("effective_gas_price_percentage", "debug", "error", "l1_info_root"),
    )
)


def _is_number(type: Any) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_decimal(type))


class Part(NamedTuple):
    """A file of a table: the rows of the entries from `first` up to, not including, `next`."""

    path: Path
    table: str
    first: int
    next: int


def part_name(table: str, first: int, next: int) -> str:
    """The file name of a part, with its first and last entry; names sort by entry."""
    return f"{table}-{first:012d}-{next - 1:012d}.parquet"


def parts_in(folder: Path, table: str) -> list[Part]:
    """The parts of a table, in order. Raises `StreamFileError` if there is a gap."""
    parts = []
    for path in folder.iterdir() if folder.is_dir() else ():
        found = _NAME.fullmatch(path.name)
        if found is not None and found["table"] == table:
            parts.append(Part(path, table, int(found["first"]), int(found["last"]) + 1))
    parts.sort(key=lambda part: (part.first, part.next))
    for before, after in itertools.pairwise(parts):
        if after.first != before.next:
            raise StreamFileError(
                str(after.path),
                f"it begins with entry {after.first}, but {before.path.name} ends before entry "
                f"{before.next}: remove what does not belong there, or export to another folder",
            )
    return parts


class PartMetadata(NamedTuple):
    """What a part records.

    `position` is the position in the stream after its last entry; `version` the stream version by
    which its events were decoded, None if it has no events or does not record it; `where` the
    clauses that selected its entries, as text, none for all.
    """

    schema: Any
    position: Position
    version: int | None
    where: list[str]


class PartWriter:
    """A Parquet file that is being written; it has no name before `publish`.

    It has at most the permissions of the stream that has this `access`. A thread compresses a row
    group while the next one is collected. Call `discard` in any case, published or not. Without a
    `temporary` path, the folder must be `locked`.
    """

    def __init__(
        self,
        folder: Path,
        table: str,
        schema: Any,
        access: Access,
        *,
        temporary: Path | None = None,
    ) -> None:
        self._table = table
        self._schema = schema
        self._temporary = temporary or folder / f".{table}.{os.getpid()}.tmp"
        self._waiting: list[Any] = []
        self._bytes = self._rows = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"parquet-{table}")
        self._writing: Future[None] | None = None
        names = schema.names
        self._file = open(create_file(str(self._temporary), access), "wb")  # noqa: SIM115
        self._writer: Any = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            use_dictionary=[name for name in names if name in _REPEATED],
            column_encoding={name: "DELTA_BINARY_PACKED" for name in names if name in _RISING},
            write_statistics=[field.name for field in schema if _is_number(field.type)],
            write_page_index=True,
            sorting_columns=[pq.SortingColumn(0)],
        )

    def write(self, batch: Any) -> None:
        """Append these rows."""
        if not batch.num_rows:
            return
        self._waiting.append(batch)
        self._bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._bytes >= _GROUP_BYTES or self._rows >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        self._wait_for_group()
        if self._waiting:
            self._writing = self._thread.submit(self._write_group, self._waiting)
        self._waiting = []
        self._bytes = self._rows = 0

    def _write_group(self, batches: list[Any]) -> None:
        table = pa.Table.from_batches(batches, self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)

    def _wait_for_group(self) -> None:
        """Wait for the row group that is being written. Raises what writing it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def publish(
        self, path: Path, first: int, position: Position, version: int | None, where: list[str]
    ) -> None:
        """Complete the file and give it this name; `first` and the position are of all its rows.

        `version` and `where` are as in `PartMetadata`. Raises `FileExists`.
        """
        self._flush()
        self._wait_for_group()
        metadata = {
            "table": self._table,
            "first": first,
            "position": json.loads(position.to_json()),
        }
        if version is not None:
            metadata["version"] = version
        if where:
            metadata["where"] = where
        self._writer.add_key_value_metadata({_KEY.decode(): json.dumps(metadata)})
        self._writer.close()
        self._file.close()
        publish(self._temporary, path)

    def discard(self) -> None:
        """Remove the file unless it was published."""
        self._thread.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """A unique path for writing a single file in a folder that others may use."""
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"


def publish(temporary: Path, path: Path) -> None:
    """Sync a file and give it its name, durably. Raises `FileExists`."""
    descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        OsDisk().publish(str(temporary), str(path))
    except FileExistsError:
        raise FileExists(str(path), "it exists already") from None


def read_metadata(part: Part, access: Access) -> PartMetadata:
    """What a part records. Raises `StreamFileError` if no export wrote it under this name, and
    `UntrustedFile`."""
    try:
        with (
            open(open_file(str(part.path), access, write=False), "rb") as opened,
            pq.ParquetFile(opened) as file,
        ):
            schema, metadata = file.schema_arrow, file.metadata.metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise StreamFileError(str(part.path), f"it cannot be read: {reason(error)}") from None
    try:
        stored = json.loads(metadata[_KEY])
        position = Position.from_json(json.dumps(stored["position"]))
        fits = (stored["table"], stored["first"], position.next_entry) == part[1:]
    except (BadPosition, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise StreamFileError(str(part.path), "no export wrote it under this name: move it away")
    version, where = stored.get("version"), stored.get("where", [])
    return PartMetadata(schema.remove_metadata(), position, version, where)


def reason(error: Exception) -> str:
    """The system's message of an error, without the path and number that Python and Arrow add."""
    number = error.errno if isinstance(error, OSError) else None
    return str(error) if number is None else os.strerror(number)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one export, and remove the unfinished files of killed exports.

    Raises `StreamFileError` if another export holds the lock.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StreamFileError(str(folder), "another export is writing to it") from None
        for left in folder.iterdir():
            if _UNFINISHED.fullmatch(left.name):
                left.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)
