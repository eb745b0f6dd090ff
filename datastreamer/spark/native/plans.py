"""The plans of scans, and the rows of parts that Java does not read.

Owns what Java learns of a plan: numbers and bytes that let it decide whether a page is as it has to
be. Java reads such pages; for all other pages it asks for the rows of the part, so that there is
one authority on damage, and on what is done about it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql.types import StructType

from datastreamer.arrow.fixed_layouts import fixed_columns
from datastreamer.arrow.tables import NAMES, TABLES
from datastreamer.errors import DatastreamerError, UsageError
from datastreamer.format import U64_MAX
from datastreamer.position import Identity
from datastreamer.selection.clauses import Where
from datastreamer.spark.native import aggregates
from datastreamer.spark.options import PARTITION_BYTES, Options, read_options
from datastreamer.spark.read import archives
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.read.column_comments import with_comments
from datastreamer.spark.read.files import FileSnapshot, ensure_same, open_location
from datastreamer.spark.read.page_sums import open_records
from datastreamer.spark.read.partitions import OPEN_COST, FilePart, PackedParts
from datastreamer.spark.read.paths import FileLocation
from datastreamer.spark.read.planning import narrowed, plan_files
from datastreamer.spark.read.schemas import number_column, wanted_columns
from datastreamer.spark.source import DatastreamSource
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import VISIBLE_LAYOUT
from datastreamer.storage.pages.hashes import last_page
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION

# The hash of a page's entries, and where they end.
_SUM: Final = struct.Struct(">16sI")
_NO_SUM: Final = _SUM.pack(bytes(16), 0)

_MOST: Final = U64_MAX >> 1

_LEAST_BYTES: Final = 8 << 20
"""Cutting further costs more for the start of tasks than it saves."""

_TOTALS_OFFSET, _TOTALS_END, _ENDS_OFFSET = VISIBLE_LAYOUT[:3]


def options_of(request: Mapping[str, Any], part_bytes: int = PARTITION_BYTES) -> Options:
    """The options of a request. Raises `UsageError` for those of a server."""
    options = read_options(request["options"], part_bytes)
    if options.servers:
        raise UsageError("option reader: the native reader reads files, not servers: leave it out")
    return options


def schema_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """All columns of the table, with `comments` on them for a catalog."""
    found = DatastreamSource(request["options"]).schema()
    if request["comments"]:
        found = with_comments(read_options(request["options"]).table, found)
    return {"schema": found.json()}


def tables(_: Mapping[str, Any]) -> dict[str, Any]:
    """The names of the tables that every stream has."""
    return {"tables": NAMES}


def scan(request: Mapping[str, Any]) -> dict[str, Any]:
    """A plan of one scan of the columns `schema`; those of the `table` are checked too.

    All scans of a table read the same entries: those of the `plan` that the answer to the first one
    has.
    """
    options = options_of(request)
    schema = StructType.fromJson(json.loads(request["schema"]))
    wanted_columns(options, StructType.fromJson(json.loads(request["table"])))
    reader = BatchReader(options, schema if schema.fields else _least(options))
    parts = _parts(request, options)
    plan = packed(parts) if request["plan"] is None else request["plan"]
    # In the other modes, what is lost in a damaged page also depends on the pages before it.
    filters = request["filters"] if options.mode == "FAILFAST" else []
    found = [narrowed(options, part, filters) for part in parts]
    needed = _spread(
        [part for left, _ in found for part in left], options.partition_bytes, request["tasks"]
    )
    return {
        "plan": plan,
        **_held(reader, needed, [rows for _, rows in found]),
        **for_tasks(options, reader),
        **described(options, needed),
    }


def for_tasks(options: Options, reader: BatchReader) -> dict[str, Any]:
    """What all tasks of a query need: the reader in Python for what Java does not read, and by
    type and offset the prefixes that select entries (None: all of the table are rows)."""
    clauses = [Where(it) if isinstance(it, int) else it for it in options.where or ()]
    where = [
        [*place, [clause.prefix.hex() for clause in together]]
        for place, together in itertools.groupby(clauses, key=lambda clause: clause[:2])
    ]
    return {"reader": packed(reader), "where": where or None}


def described(options: Options, parts: list[FilePart], begin: int | None = None) -> dict[str, Any]:
    """The files and the parts of a plan.

    Damage before entry `begin` (None: before the plan's first one) is not reported.
    """
    files: list[dict[str, Any]] = []
    described = []
    for snapshot, of_file in _by_snapshot(parts):
        with contextlib.closing(open_location(snapshot.location)) as file:
            sums = _sums(options, snapshot, file, of_file)
            described += [
                {
                    "file": len(files),
                    "first": part.first_page,
                    "stop": part.stop_page,
                    "start": part.start,
                    "end": part.stop,
                    "begin": of_file[0].start if begin is None else begin,
                    "sums": base64.b64encode(of_part).decode(),
                    "part": packed(part),
                    "frames": _frames(snapshot, part),
                }
                for part, of_part in zip(of_file, sums, strict=True)
            ]
            files.append(_file(options, snapshot, file))
    return {
        "files": files,
        "parts": described,
        "partBytes": options.partition_bytes,
        "openCost": OPEN_COST,
    }


def aggregate(request: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `functions` over all rows; None if tasks have to find them.

    Of the `plan` of a scan of the table, if there is one: raises `StreamFileError` for a file that
    was truncated or changed since.
    """
    options = options_of(request)
    wanted_columns(options, StructType.fromJson(json.loads(request["table"])))
    parts = _parts(request, options)
    values = aggregates.values_of(options, parts, request["functions"])
    if values is not None and request["plan"] is not None:
        for part in parts:
            with contextlib.closing(open_location(part.snapshot.location)) as file:
                ensure_same(file, part.snapshot)
    return {"values": values, "plan": request["plan"] or packed(parts)}


def read(request: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of a part, as record batches."""
    reader: BatchReader = unpacked(request["reader"])
    yield from reader.read(unpacked(request["part"]), request["begin"])


def flat(parts: Sequence[Any]) -> list[FilePart]:
    """The parts without their packing: Java packs what it reads itself."""
    return [part for it in parts for part in (it.parts if isinstance(it, PackedParts) else (it,))]


def _parts(request: Mapping[str, Any], options: Options) -> list[FilePart]:
    """Those of the request's plan; without one, of what is there now: one for each file."""
    if request["plan"] is not None:
        found: list[FilePart] = unpacked(request["plan"])
        return found
    return list(plan_files(options))


def _held(
    reader: BatchReader, parts: list[FilePart], rows: list[float | None]
) -> dict[str, int | None]:
    """About how many rows the parts hold (None: not known), and how many bytes in the columns that
    are read, as a page in the middle has them."""
    size = sum(part.cost - OPEN_COST for part in parts)
    known = [each for each in rows if each is not None]
    if len(known) < len(rows):
        return {"rows": None, "bytes": size}
    total = round(sum(known))
    if total and parts:
        part = parts[len(parts) // 2]
        middle = part.pages[len(part.pages) // 2]
        with contextlib.suppress(DatastreamerError):
            found = list(reader.read(replace(part, first_page=middle, stop_page=middle + 1)))
            if count := sum(batch.num_rows for batch in found):
                size = total * sum(batch.nbytes for batch in found) // count
    return {"rows": total, "bytes": size if total else 0}


def _spread(parts: list[FilePart], most: int, tasks: int) -> list[FilePart]:
    """The parts cut to at most about `most` bytes, or to smaller ones, so that each of `tasks` at a
    time has the same work.

    Parts of `most` bytes may leave all but one of them without work at the end.
    """
    total = sum(part.cost for part in parts)
    turns = max(1, math.ceil(total / most / tasks))
    size = min(most, max(_LEAST_BYTES, total // (turns * tasks)))
    return [smaller for part in parts for smaller in part.cut(size)]


def _least(options: Options) -> StructType:
    """The columns for rows of which only the number matters."""
    return StructType().add(number_column(options.table), "long", False)


def packed(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    # Only what `_packed` made in the driver's process comes back.
    return pickle.loads(base64.b64decode(text))  # noqa: S301


def _by_snapshot(parts: list[FilePart]) -> list[tuple[FileSnapshot, list[FilePart]]]:
    found: dict[FileSnapshot, list[FilePart]] = {}
    for part in parts:
        found.setdefault(part.snapshot, []).append(part)
    return list(found.items())


def _file(options: Options, snapshot: FileSnapshot, opened: Readable) -> dict[str, Any]:
    header = snapshot.header
    compared = options.verify and snapshot.recorded and snapshot.end_sum is not None
    return {
        "path": snapshot.location.path,
        # Without keys and parameters, which are pyarrow's: Spark's configuration has Hadoop's.
        "isRemote": snapshot.location.uri is not None,
        "archive": _archive(snapshot.location, opened),
        # Python says that a system id is too large for its column.
        "fixed": "" if header.system_id > _MOST else _fixed(snapshot, opened).hex(),
        "length": header.total_length,
        "entries": header.total_entries,
        "systemId": min(header.system_id, _MOST),
        "tail": snapshot.end_sum.tail.hex() if compared and snapshot.end_sum else "",
        "events": _events(options.table, options.version_of(header)),
    }


def _archive(location: FileLocation, opened: Readable) -> dict[str, Any] | None:
    if location.archive is None or location.uri is None:
        return None
    return archives.for_java(location.uri, location.archive, opened)


def _frames(snapshot: FileSnapshot, part: FilePart) -> str:
    """Of an archive, where the part's pages and the one after them are."""
    location = snapshot.location
    if location.archive is None or location.uri is None:
        return ""
    stop = min(part.stop_page + 1, snapshot.pages)
    return archives.frames(location.uri, location.archive, part.first_page, stop)


def _fixed(snapshot: FileSnapshot, opened: Readable) -> bytes:
    """The bytes of the header page that commits leave as they are; none if they are no longer those
    of the snapshot, or Python has to read evicted pages from their archive."""
    page = HeaderPage.of(opened)
    record = page.record
    known = None if record is None else (record.stream_id, record.epoch)
    same = known == ((snapshot.stream_id, snapshot.epoch) if snapshot.recorded else None)
    if page.marked or not same or Identity.of(page.raw) != Identity.of(snapshot.header):
        return b""
    return page[:_TOTALS_OFFSET] + page[_TOTALS_END:_ENDS_OFFSET]


def _sums(
    options: Options, snapshot: FileSnapshot, opened: Readable, parts: list[FilePart]
) -> list[bytes]:
    """For each part, the checksums of its whole pages."""
    if not (parts and options.verify and snapshot.recorded):
        return [b""] * len(parts)
    last = last_page(snapshot.head.length)
    found = open_records(snapshot.location, opened, snapshot.sums_state)
    with contextlib.closing(found) as records:
        return [
            b"".join(
                _NO_SUM if known is None else _SUM.pack(known.digest, known.end)
                for known in records.get_many(part.first_page, min(part.stop_page, last))
            )
            for part in parts
        ]


def _events(table: str, version: int) -> dict[str, Any] | None:
    """How entries become rows of a table of events; None for the table of entries.

    `kinds` and `layouts` are those of the compiled decoder (`arrow._columns`).
    """
    events = TABLES.get(table)
    if events is None:
        return None
    names, kinds, layouts = events.message_names, events.kinds, None
    kind = events.entry_type(version)
    if version < FIRST_PROTOBUF_VERSION and kind is not None:
        names, kinds, layouts = fixed_columns(events)
    return {"type": kind, "names": names, "kinds": list(kinds), "layouts": layouts}
