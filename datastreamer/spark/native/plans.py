"""The plans of scans, and the rows of parts that Java does not read.

Owns what Java learns of a plan: numbers and bytes that let it decide whether a page is as it has to
be. Java reads such pages; for all other pages it asks for the rows of the part, so that there is
one authority on damage, and on what is done about it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import math
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql.types import StructType

from datastreamer.arrow.fixed_layouts import fixed_columns
from datastreamer.arrow.tables import ENTRIES, TABLES
from datastreamer.errors import UsageError
from datastreamer.format import U64_MAX
from datastreamer.position import Identity
from datastreamer.selection.clauses import Where
from datastreamer.spark.native.pushdown import ALL, NumberRange, wanted
from datastreamer.spark.options import PARTITION_BYTES, Options, read_options
from datastreamer.spark.read.batch import BatchReader
from datastreamer.spark.read.files import (
    FileSnapshot,
    ensure_same,
    open_location,
    open_reader,
)
from datastreamer.spark.read.page_sums import open_records
from datastreamer.spark.read.partitions import OPEN_COST, FilePart, PackedParts, cut_pages
from datastreamer.spark.read.planning import pages_of
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
    """All columns of the table."""
    options_of(request)
    return {"schema": DatastreamSource(request["options"]).schema().json()}


def scan(request: Mapping[str, Any]) -> dict[str, Any]:
    """A plan of one scan of the columns `schema`; those of the `table` are checked too.

    All scans of a table read the same entries: those of the `plan` that the answer to the first one
    has.
    """
    options = options_of(request)
    schema = StructType.fromJson(json.loads(request["schema"]))
    wanted_columns(options, StructType.fromJson(json.loads(request["table"])))
    reader = BatchReader(options, schema if schema.fields else _least(options))
    parts = _parts(request, options, reader)
    plan = packed(parts) if request["plan"] is None else request["plan"]
    # In the other modes, what is lost in a damaged page also depends on the pages before it.
    entries = wanted(options.table, request["filters"]) if options.mode == "FAILFAST" else ALL
    return {"plan": plan, **for_tasks(options, reader), **described(options, parts, entries)}


def for_tasks(options: Options, reader: BatchReader) -> dict[str, Any]:
    """What all tasks of a query need: the reader in Python for what Java does not read, and by
    type and offset the prefixes that select entries (None: all of the table are rows)."""
    clauses = [Where(it) if isinstance(it, int) else it for it in options.where or ()]
    where = [
        [*place, [clause.prefix.hex() for clause in together]]
        for place, together in itertools.groupby(clauses, key=lambda clause: clause[:2])
    ]
    return {"reader": packed(reader), "where": where or None}


def described(
    options: Options, parts: list[FilePart], entries: NumberRange = ALL, begin: int | None = None
) -> dict[str, Any]:
    """The files and the parts of a plan, without the entries that a scan does not need.

    Damage before entry `begin` (None: before the plan's first one) is not reported.
    """
    files: list[dict[str, Any]] = []
    described = []
    for snapshot, of_file in _by_snapshot(parts):
        needed = of_file if entries == ALL else _narrowed(options, snapshot, of_file, entries)
        with _opened(snapshot) as file:
            sums = _sums(options, snapshot, file, needed)
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
                }
                for part, of_part in zip(needed, sums, strict=True)
            ]
            files.append(_file(options, snapshot, file))
    return {
        "files": files,
        "parts": described,
        "partBytes": options.partition_bytes,
        "openCost": OPEN_COST,
    }


def count(request: Mapping[str, Any]) -> dict[str, Any]:
    """The number of rows, which the headers of the files have; None if the entries decide it.

    Of the `plan` of a scan of the table, if there is one: raises `StreamFileError` for a file that
    was truncated or changed since.
    """
    options = options_of(request)
    if options.table != ENTRIES or options.mode != "FAILFAST" or options.where:
        return {"count": None}
    wanted_columns(options, StructType.fromJson(json.loads(request["table"])))
    parts = _parts(request, options, BatchReader(options, _least(options)))
    found = 0
    for snapshot, (part, *_) in _by_snapshot(parts):
        if request["plan"] is not None:
            with _opened(snapshot) as file:
                ensure_same(file, snapshot)
        found += part.stop - part.start
    return {"count": found, "plan": request["plan"] or packed(parts)}


def read(request: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of a part, as record batches."""
    reader: BatchReader = unpacked(request["reader"])
    yield from reader.read(unpacked(request["part"]), request["begin"])


def flat(parts: Sequence[Any]) -> list[FilePart]:
    """The parts without their packing: Java packs what it reads itself."""
    return [part for it in parts for part in (it.parts if isinstance(it, PackedParts) else (it,))]


def _parts(request: Mapping[str, Any], options: Options, reader: BatchReader) -> list[FilePart]:
    """Those of the request's plan; without one, of what is there now."""
    if request["plan"] is not None:
        found: list[FilePart] = unpacked(request["plan"])
        return found
    return _spread(flat(reader.partitions()), options.partition_bytes, request["tasks"])


def _spread(parts: list[FilePart], most: int, tasks: int) -> list[FilePart]:
    """The parts, or smaller ones, so that each of `tasks` at a time has the same work.

    Parts of `most` bytes may leave all but one of them without work at the end.
    """
    total = sum(part.cost for part in parts)
    turns = max(1, math.ceil(total / most / tasks))
    size = max(_LEAST_BYTES, total // (turns * tasks))
    if size >= most:
        return parts
    return [
        smaller
        for snapshot, of_file in _by_snapshot(parts)
        for smaller in cut_pages(
            snapshot,
            range(of_file[0].first_page, of_file[-1].stop_page),
            of_file[0].start,
            of_file[0].stop,
            size,
        )
    ]


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


@contextlib.contextmanager
def _opened(snapshot: FileSnapshot) -> Iterator[Readable]:
    file = open_location(snapshot.location)
    try:
        yield file
    finally:
        file.close()


def _narrowed(
    options: Options, snapshot: FileSnapshot, parts: list[FilePart], entries: NumberRange
) -> list[FilePart]:
    """The parts without entries that a scan does not need."""
    with open_reader(snapshot, verify=options.verify) as reader:
        # Parts of a file have the same entries.
        pages = functools.cache(functools.partial(pages_of, reader, snapshot))
        narrowed = []
        for part in parts:
            start, stop = max(part.start, entries.first), min(part.stop, entries.last + 1)
            if start < stop:
                needed = pages(start, stop)
                first = max(part.first_page, needed.start)
                end = min(part.stop_page, needed.stop)
                if first < end:
                    narrowed.append(FilePart(snapshot, first, end, start, stop))
        return narrowed


def _file(options: Options, snapshot: FileSnapshot, opened: Readable) -> dict[str, Any]:
    header, version = snapshot.header, options.version or snapshot.header.version
    compared = options.verify and snapshot.recorded and snapshot.end_sum is not None
    return {
        "path": snapshot.location.path,
        # Without keys and parameters, which are pyarrow's: Spark's configuration has Hadoop's.
        "isRemote": snapshot.location.uri is not None,
        # Python says that a system id is too large for its column.
        "fixed": "" if header.system_id > _MOST else _hex(_fixed(snapshot, opened)),
        "length": header.total_length,
        "entries": header.total_entries,
        "systemId": min(header.system_id, _MOST),
        "tail": snapshot.end_sum.tail.hex() if compared and snapshot.end_sum else "",
        "events": _events(options.table, version),
    }


def _hex(found: bytes | None) -> str:
    return "" if found is None else found.hex()


def _fixed(snapshot: FileSnapshot, opened: Readable) -> bytes | None:
    """The bytes of the header page that commits leave as they are; None if they are no longer those
    of the snapshot."""
    page = HeaderPage.of(opened)
    record = page.record
    known = None if record is None else (record.stream_id, record.epoch)
    same = known == ((snapshot.stream_id, snapshot.epoch) if snapshot.recorded else None)
    if not same or Identity.of(page.raw) != Identity.of(snapshot.header):
        return None
    return page[:_TOTALS_OFFSET] + page[_TOTALS_END:_ENDS_OFFSET]


def _sums(
    options: Options, snapshot: FileSnapshot, opened: Readable, parts: list[FilePart]
) -> list[bytes]:
    """For each part, the checksums of its whole pages."""
    if not (parts and options.verify and snapshot.recorded):
        return [b""] * len(parts)
    records = open_records(snapshot.location, opened, snapshot.sums_state)
    last = last_page(snapshot.head.length)
    try:
        return [
            b"".join(
                _NO_SUM if known is None else _SUM.pack(known.digest, known.end)
                for known in records.get_many(part.first_page, min(part.stop_page, last))
            )
            for part in parts
        ]
    finally:
        records.close()


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
