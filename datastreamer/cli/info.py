"""`datastreamer info`: what a stream is and what it holds."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from datastreamer.cli.options import (
    Format,
    FormatOption,
    JsonOption,
    LogFormatOption,
    LogLevelOption,
    SourceArgument,
    StreamTypeOption,
    chosen_format,
)
from datastreamer.cli.outcome import write_out
from datastreamer.cli.output import json_line, type_name
from datastreamer.cli.progress import Progress
from datastreamer.cli.source import FileSource, open_source
from datastreamer.format import ENTRY_HEAD_SIZE, Header, pages_for


def info(
    source: SourceArgument,
    format: FormatOption = None,
    json: JsonOption = False,
    stream_type: StreamTypeOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Show what a stream is and what it holds.

    Of a server the header; of a file also pages, bookmarks, entries and bytes by type.
    """
    shape = chosen_format(format, json)
    with open_source(source, stream_type) as stream:
        header = stream.header()
        if shape in (Format.raw, Format.hex):
            packed = header.pack()
            write_out(packed if shape is Format.raw else f"{packed.hex()}\n".encode())
            return
        facts: dict[str, Any] = dict(header._asdict())
        facts = {name: facts[name] for name in _ORDER}
        if isinstance(stream, FileSource):
            facts |= _file_facts(stream, header)
        name = stream.name
    write_out(json_line(facts) if shape is Format.jsonl else _table(name, facts))


_ORDER = ("version", "system_id", "stream_type", "total_length", "total_entries")


def _file_facts(source: FileSource, header: Header) -> dict[str, Any]:
    stream = source.stream
    kinds: Counter[tuple[int, int]] = Counter()
    with Progress(f"reading {source.name}", header.total_entries) as progress:
        for batch in stream.batches(0, header.total_entries):
            kinds.update(zip(batch.types, batch.lengths, strict=True))
            progress.advance(len(batch))
    entries: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for (kind, length), count in kinds.items():
        entries[kind] += count
        sizes[kind] += count * (ENTRY_HEAD_SIZE + length)
    return {
        "pages": pages_for(header.total_length),
        "file_size": stream.file_size,
        "bookmarks": len(stream.bookmarks),
        "entries_by_type": {str(kind): entries[kind] for kind in sorted(entries)},
        "bytes_by_type": {str(kind): sizes[kind] for kind in sorted(sizes)},
    }


def _table(name: str, facts: dict[str, Any]) -> bytes:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    text = io.StringIO()
    on_terminal = sys.stdout.isatty()
    console = Console(
        file=text, force_terminal=on_terminal, no_color=not on_terminal, highlight=False
    )
    shown = Table.grid(padding=(0, 3))
    shown.add_column()
    shown.add_column()
    for title, value in _described(facts):
        shown.add_row(title, value)
    console.print(f"[bold]{_printable(name)}[/bold]")
    console.print(shown)
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
        console.print()
        console.print(kinds)
    return text.getvalue().encode(sys.stdout.encoding or "utf-8", "replace")


def _described(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts that are one number each, in words."""
    yield "version", f"{facts['version']}"
    yield "system id", f"{facts['system_id']}"
    yield "stream type", f"{facts['stream_type']}"
    yield "entries", f"{facts['total_entries']:,}"
    yield "length", f"{facts['total_length']:,} bytes"
    if "pages" in facts:
        yield "pages", f"{facts['pages']:,} in use"
        yield "file size", f"{facts['file_size']:,} bytes"
        yield "bookmarks", f"{facts['bookmarks']:,} different keys"


def _printable(name: str) -> str:
    from rich.markup import escape

    return escape(name.encode("utf-8", "replace").decode())
