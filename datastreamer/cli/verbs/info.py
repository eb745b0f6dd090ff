"""`datastreamer info`: describe a stream."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from datastreamer._codec import EntryBatch
from datastreamer.archive import is_archive
from datastreamer.cli.shared.console import rendered, text
from datastreamer.cli.shared.exit_codes import write_out, write_raw
from datastreamer.cli.shared.options import (
    EntryOutput,
    Format,
    SourceOptions,
    StreamArgument,
)
from datastreamer.cli.shared.output import count, json_line, type_name
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import ServerSource, open_source
from datastreamer.errors import DamagedFile, IndexFailed, StreamFileError
from datastreamer.format import ENTRY_HEAD_SIZE, HEADER_PAGE_SIZE, Header, pages_for

if TYPE_CHECKING:
    from rich.console import RenderableType

    from datastreamer.cli.shared.file_source import FileSource
    from datastreamer.storage.header.inspect import Condition
    from datastreamer.storage.stream import DataStream


def info(source: StreamArgument, *, output: EntryOutput, options: SourceOptions) -> None:
    """Show the header of a stream, and the contents of a file.

    For a file, also shows its pages, bookmarks and entries by type; the table also has its
    records, writer and index. For a damaged file, shows the readable part, then the damage, and
    exits with 1. --format raw and hex write the 38 bytes of the header.

    Examples:
      datastreamer info stream.bin
      datastreamer info stream.example.org:6900 --json | jq .total_entries
    """
    shape = output.chosen()
    rows: list[tuple[str, str]] = []
    try:
        with open_source(source, options) as stream:
            header, name = stream.header(), stream.name
            facts = _header_facts(header)
            if not isinstance(stream, ServerSource) and shape in ("jsonl", "table"):
                from datastreamer.storage.header.inspect import examine

                if shape == "table" and not is_archive(source):
                    # Counting bookmarks may build an index in memory: describe the index first.
                    rows = [*_condition(examine(source)), ("index", _index_state(stream.stream))]
                facts |= _file_facts(stream, header)
    except DamagedFile:
        from datastreamer.storage.header.inspect import examine

        # The damage is reported even if the readable part cannot be shown.
        with contextlib.suppress(StreamFileError, OSError):
            condition = examine(source)
            facts = _header_facts(condition.header) | _readable_facts(source, condition)
            _show(shape, condition.header, source, facts, list(_condition(condition)))
        raise
    _show(shape, header, name, facts, rows)


def _show(
    shape: Format,
    header: Header,
    name: str,
    facts: dict[str, Any],
    rows: list[tuple[str, str]],
) -> None:
    packed = header.pack()
    if shape == "raw":
        write_raw(packed)
    elif shape == "hex":
        write_out(f"{packed.hex()}\n".encode())
    else:
        write_out(json_line(facts) if shape == "jsonl" else _table(name, facts, rows))


_ORDER = ("version", "system_id", "stream_type", "total_length", "total_entries")


def _header_facts(header: Header) -> dict[str, Any]:
    facts = header._asdict()
    return {name: facts[name] for name in _ORDER}


def _file_facts(source: FileSource, header: Header) -> dict[str, Any]:
    stream = source.stream
    with ProgressBar(f"reading {source.name}", header.total_entries) as progress:
        kinds = _kinds(stream.batches(0, header.total_entries), progress)
    return {
        "pages": pages_for(header.total_length),
        "file_size": stream.file_size,
        "bookmarks": len(stream.bookmarks),
        **kinds,
    }


def _readable_facts(path: str, condition: Condition) -> dict[str, Any]:
    """The same of a damaged file, without its number of bookmarks."""
    from datastreamer.storage.header.inspect import readable

    end = min(max(condition.header.total_length, HEADER_PAGE_SIZE), condition.size)
    with ProgressBar(f"reading {path}", condition.header.total_entries) as progress:
        kinds = _kinds(readable(path, end), progress)
    return {"pages": pages_for(end), "file_size": condition.size, **kinds}


def _kinds(batches: Iterable[EntryBatch], progress: ProgressBar) -> dict[str, dict[str, int]]:
    kinds: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        kinds.update(zip(batch.types, batch.lengths, strict=True))
        progress.advance(len(batch))
    entries: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for (kind, length), number in kinds.items():
        entries[kind] += number
        sizes[kind] += number * (ENTRY_HEAD_SIZE + length)
    return {
        "entries_by_type": {str(kind): entries[kind] for kind in sorted(entries)},
        "bytes_by_type": {str(kind): sizes[kind] for kind in sorted(sizes)},
    }


# For support: the records beside the header.


def _condition(found: Condition) -> Iterator[tuple[str, str]]:
    record, mark, writer = found.record, found.mark, found.writer
    ahead = max(0, found.size - found.header.total_length)
    yield "reserved", f"{ahead:,} bytes after the end; {found.allocated:,} bytes allocated on disk"
    if record is None:
        state = "no record matches the header: another program wrote it, or it is damaged"
    else:
        yield "stream id", record.stream_id.hex() if any(record.stream_id) else "none"
        yield "epoch", f"{record.epoch}"
        when = "" if found.this_boot else ", written before the last start of the machine"
        what = "everything" if record.base == record.after else f"{_head(*record.base)}"
        state = f"matches the header{when}; synced: {what}"
    yield "record", state
    if (evicted := found.evicted) is not None:
        yield "evicted", f"the first {evicted.floor:,} pages are in {evicted.url} alone"
    for synced in found.synced[:1]:
        yield "last synced", _head(synced.header.total_length, synced.header.total_entries)
    if mark is not None:
        late = record is not None and mark.epoch < record.epoch
        under_way = "; a truncation or update is in progress" if late else ""
        yield "visible", f"{_head(*mark.head)}{under_way}"
    if found.source is None:
        yield "source", "the record is damaged; `datastreamer repair` clears it"
    elif found.source.epoch:
        yield "source", f"epoch {found.source.epoch}, id {found.source.source_id.hex()}"
    if found.undo:
        yield "undo", "an update is in progress, or a crash interrupted it"
    if writer is None:
        who = "not recorded"
    else:
        who = f"process {writer.pid}, {'alive' if found.writer_alive else 'ended'}"
    yield "writer", f"{who}; the file is {'locked for writing' if found.locked else 'not locked'}"


def _head(length: int, entries: int) -> str:
    return f"{count(entries, 'entry')}, {length:,} bytes"


def _index_state(stream: DataStream) -> str:
    from datastreamer.storage.bookmarks.interface import IndexReadOnly
    from datastreamer.storage.bookmarks.registry import index_opener

    path = os.path.abspath(stream.path)
    lag = stream.bookmarks.lag()
    try:
        index = index_opener(stream.index_name)(path, False, stream.access)
    except IndexReadOnly as error:
        return f"{error.what} ({stream.index_name})"
    try:
        mark = index.watermark()
    except IndexFailed as error:
        return error.what
    finally:
        index.close()
    if mark is None:
        return f"{stream.index_name}, empty"
    if mark.entries and lag == stream.total_entries:
        return f"{stream.index_name}, of another file: the next writer rebuilds it"
    return f"{stream.index_name}, up to entry {mark.entries:,}, lag {count(lag, 'entry')}"


def _table(name: str, facts: dict[str, Any], rows: list[tuple[str, str]]) -> bytes:
    from rich import box
    from rich.table import Table

    shown = Table.grid(padding=(0, 3))
    shown.add_column()
    shown.add_column()
    for title, value in (*_described(facts), *rows):
        shown.add_row(title, text(value))
    parts: list[RenderableType] = [text(name, "bold", wrap=False), shown]
    if facts.get("entries_by_type"):
        everything = sum(facts["bytes_by_type"].values())
        kinds = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        kinds.add_column("type")
        for title in ("entries", "bytes", "share"):
            kinds.add_column(title, justify="right")
        for kind, count in facts["entries_by_type"].items():
            size = facts["bytes_by_type"][kind]
            kinds.add_row(
                type_name(int(kind)), f"{count:,}", f"{size:,}", f"{size / everything:.1%}"
            )
        parts += ["", kinds]
    return rendered(*parts)


def _described(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts that are single numbers."""
    yield "version", f"{facts['version']}"
    yield "system id", f"{facts['system_id']}"
    yield "stream type", f"{facts['stream_type']}"
    yield "entries", f"{facts['total_entries']:,}"
    yield "length", f"{facts['total_length']:,} bytes"
    if "pages" in facts:
        yield "pages", f"{facts['pages']:,} in use"
        yield "file size", f"{facts['file_size']:,} bytes"
    if "bookmarks" in facts:
        yield "bookmarks", f"{facts['bookmarks']:,} different keys"
