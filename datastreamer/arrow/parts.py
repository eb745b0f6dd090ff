"""The Parquet files that a table is exported to: their form, their names, what they say.

Owns how a file is written (row groups, encodings, statistics), what it tells of the entries that
it was made from, and how it appears: under its own name only when it is complete and on disk.
Knows no stream.
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
# What an export that was killed leaves, and only that.
_UNFINISHED: Final = re.compile(rf"\.({'|'.join(NAMES)})\.[0-9]+\.tmp")
_KEY: Final = b"datastreamer"
# Row groups are what readers skip by: large enough for zstd, small against a part.
_GROUP_BYTES: Final = 32 << 20
_GROUP_ROWS: Final = 1 << 20
# Numbers that grow from row to row, and what they are searched by.
_RISING: Final = frozenset(
    ("number", "entry_number", "batch_number", "l2block_number", "timestamp", "value")
)
# The same values come again and again in these alone.
_REPEATED: Final = frozenset(
    (
        *("type", "fork_id", "chain_id", "delta_timestamp", "min_timestamp", "coinbase"),
        *("l1_blockhash", "l1_infotree_index", "global_exit_root", "block_gas_limit", "index"),
        *("effective_gas_price_percentage", "debug", "error", "l1_info_root"),
    )
)


class Part(NamedTuple):
    """A file of a table's folder: the rows of the entries `first` up to, not including, `next`."""

    path: Path
    table: str
    first: int
    next: int


def part_name(table: str, first: int, next: int) -> str:
    """A part's file name: it sorts by the numbers of its entries, the last one included."""
    return f"{table}-{first:012d}-{next - 1:012d}.parquet"


def parts_in(folder: Path, table: str) -> list[Part]:
    """The parts of a table, in order. Raises `StreamFileError` where one is missing between."""
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
                f"it begins with entry {after.first}, and {before.path.name} ends before entry "
                f"{before.next}: remove what does not belong there, or export to another folder",
            )
    return parts


class Told(NamedTuple):
    """What a part tells of itself.

    `position` is the place in the stream behind its last entry, `version` the stream's that its
    events were decoded by: None where it has no events, or does not say.
    """

    schema: Any
    position: Position
    version: int | None


class PartWriter:
    """A Parquet file under way; nothing has its name before `publish`.

    It has no more permissions than the stream that has this `access`.
    Rows are gathered to row groups; one is compressed in a thread while the next is gathered.
    Has to be discarded in the end, published or not. Without another `temporary` the folder has
    to be `locked`.
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
            write_statistics=[field.name for field in schema if pa.types.is_integer(field.type)],
            write_page_index=True,
            sorting_columns=[pq.SortingColumn(0)],
        )

    def write(self, batch: Any) -> None:
        """These rows come next."""
        if not batch.num_rows:
            return
        self._waiting.append(batch)
        self._bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._bytes >= _GROUP_BYTES or self._rows >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        self._settle()
        if self._waiting:
            self._writing = self._thread.submit(self._write_group, self._waiting)
        self._waiting = []
        self._bytes = self._rows = 0

    def _write_group(self, batches: list[Any]) -> None:
        table = pa.Table.from_batches(batches, self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)

    def _settle(self) -> None:
        """Wait for the row group that is being written; what it raised is raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def publish(
        self, path: Path, first: int, position: Position, version: int | None = None
    ) -> None:
        """The rows are all of the entries from `first` to the position; give them this name.

        `version` is as in `Told`. Raises `FileExists` where something has the name.
        """
        self._flush()
        self._settle()
        told = {"table": self._table, "first": first, "position": json.loads(position.to_json())}
        if version is not None:
            told["version"] = version
        self._writer.add_key_value_metadata({_KEY.decode(): json.dumps(told)})
        self._writer.close()
        self._file.close()
        publish(self._temporary, path)

    def discard(self) -> None:
        """Forget what was not published."""
        self._thread.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """Where a single file is written before it has its name: nobody else's, in a folder that is
    anybody's."""
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
        raise FileExists(str(path), "something stands there already") from None


def read_back(part: Part, access: Access) -> Told:
    """What a part tells. Raises `StreamFileError` where it is no part that was written here, and
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
        told = json.loads(metadata[_KEY])
        position = Position.from_json(json.dumps(told["position"]))
        fits = (told["table"], told["first"], position.next_entry) == part[1:]
    except (BadPosition, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise StreamFileError(
            str(part.path), "it was not written by an export under this name: move it away"
        )
    return Told(schema.remove_metadata(), position, told.get("version"))


def reason(error: Exception) -> str:
    """Why a file was not written or read: what the system says, without the path and number
    that Python and Arrow put beside it."""
    number = error.errno if isinstance(error, OSError) else None
    return str(error) if number is None else os.strerror(number)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder for one export alone; what another one left unfinished is removed.

    Raises `StreamFileError` where another one is at work there.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StreamFileError(str(folder), "another export writes there") from None
        for left in folder.iterdir():
            if _UNFINISHED.fullmatch(left.name):
                left.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)
