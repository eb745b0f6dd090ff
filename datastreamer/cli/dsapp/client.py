"""`dsapp client`: query a server, or print what it streams."""

from __future__ import annotations

import logging
from contextlib import closing
from itertools import chain
from typing import Annotated

import typer

from datastreamer._codec import Entry, EntryBatch
from datastreamer.cli.dsapp.options import LogOption
from datastreamer.cli.shared.addresses import address_of
from datastreamer.cli.shared.exit_codes import (
    Failure,
    exit_when_output_closes,
    exit_zero_on_signal,
    write_out,
)
from datastreamer.cli.shared.options import check_start, number_option, read_number, text_option
from datastreamer.cli.shared.source import ServerSource
from datastreamer.format import TYPE_BOOKMARK, U64_MAX, Header
from datastreamer.zkevm.bookmark_keys import BookmarkName, Kind, key_of, name_of_key, raw_key

_log = logging.getLogger(__name__)

ServerOption = Annotated[str, text_option("HOST:PORT", "Server to connect to.")]
FromOption = Annotated[
    str | None,
    text_option(
        "latest|N",
        "Stream from this entry; latest: only later commits [latest; 0 with --sanitycheck].",
        name="--from",
    ),
]
FromBookmarkOption = Annotated[
    int | None, number_option("N", "Stream from this bookmark; overrides --from.")
]
HeaderOption = Annotated[bool, typer.Option("--header", help="Print the header of the stream.")]
EntryOption = Annotated[int | None, number_option("N", "Print this entry.")]
BookmarkOption = Annotated[
    int | None, number_option("N", "Print the first event at or after this bookmark.")
]
BookmarkTypeOption = Annotated[
    int,
    number_option(
        "T",
        "Type in the bookmark's key. Streams of version 1: 0 block, 1 batch; version 2 and "
        "later: 1 batch, 2 block.",
        most=255,
    ),
]
SanityCheckOption = Annotated[
    bool,
    typer.Option(
        "--sanitycheck",
        help="Check the sequence of entries and of block and batch bookmarks up to the head, "
        "and exit.",
    ),
]
DumpBatchOption = Annotated[int | None, number_option("N", "Print the entries of this batch.")]


def client(
    server: ServerOption = "127.0.0.1:6900",
    start: FromOption = None,
    frombookmark: FromBookmarkOption = None,
    header: HeaderOption = False,
    entry: EntryOption = None,
    bookmark: BookmarkOption = None,
    bookmarktype: BookmarkTypeOption = 0,
    sanitycheck: SanityCheckOption = False,
    dumpbatch: DumpBatchOption = None,
    log: LogOption = "info",
) -> None:
    """Print entries as a server streams them, until Ctrl-C.

    --header, --entry, --bookmark and --dumpbatch print one answer and exit.
    """
    address = address_of(server, "--server")
    first = None
    if start not in (None, "latest"):
        first = read_number(start or "", U64_MAX, "--from")
    streams = not (header or sanitycheck) and entry is bookmark is dumpbatch is None
    exit_zero_on_signal()
    with ServerSource(address, follow=streams) as source:
        now = source.header()
        if header:
            _print(_header_line(now))
        if entry is not None:
            _print(_entry_line(source.entry(entry)))
        if bookmark is not None:
            key = raw_key(now.version, bookmarktype, bookmark)
            _print(_entry_line(source.first_event(key)))
        if dumpbatch is not None:
            _dump_batch(source, now, dumpbatch)
        if header or not (entry is bookmark is dumpbatch is None):
            return
        begin: int | bytes
        if frombookmark is not None:
            begin = raw_key(now.version, bookmarktype, frombookmark)
        elif sanitycheck and start is None:
            begin = 0
        else:
            begin = now.total_entries if first is None else first
            check_start(begin, now)
        if sanitycheck:
            _check(source, now, begin)
            return
        _log.info("streaming from %s", begin if isinstance(begin, int) else f"0x{begin.hex()}")
        exit_when_output_closes()
        with closing(source.batches(begin, None)) as batches:
            for batch in batches:
                _print_entries(batch)


def _check(source: ServerSource, header: Header, begin: int | bytes) -> None:
    """Check the committed entries. Raises `Failure` if there are errors."""
    sanity = Sanity(header.version)
    for batch in source.batches(begin, header.total_entries):
        sanity.check(batch)
    _print(f"sanity check: {sanity}")
    if sanity.errors:
        raise Failure(f"the sanity check found {sanity.errors} errors")


class Sanity:
    """Checks that entries, blocks and batches are numbered without gaps.

    Errors are logged and counted in `errors`; ``str()`` is the summary.
    """

    def __init__(self, version: int) -> None:
        self.errors = 0
        self._version = version
        self._entries: tuple[int, int] | None = None
        self._marks: dict[Kind, tuple[int, int]] = {}

    def check(self, batch: EntryBatch) -> None:
        """Check the next entries."""
        if self._entries is None:
            self._entries = batch.first_number, batch.first_number
        first, due = self._entries
        if batch.first_number != due:
            self._report("entry", batch.first_number, batch.first_number, due)
        self._entries = first, batch.next_number
        for key, number in batch.bookmarks():
            mark = name_of_key(self._version, key)
            if mark is None:
                continue
            first, due = self._marks.get(mark.kind, (mark.number, mark.number))
            if mark.number != due:
                self._report(mark.kind, number, mark.number, due)
            self._marks[mark.kind] = first, mark.number + 1

    def _report(self, what: str, entry: int, found: int, due: int) -> None:
        self.errors += 1
        _log.warning("at entry %d: found %s %d, expected %d", entry, what, found, due)

    def __str__(self) -> str:
        seen = {"entries": self._entries, "blocks": self._marks.get("block")}
        seen["batches"] = self._marks.get("batch")
        parts = [
            f"{what} {span[0]} to {span[1] - 1}" if span else f"no {what}"
            for what, span in seen.items()
        ]
        return f"{', '.join(parts)}: {f'{self.errors} errors' if self.errors else 'in order'}"


def _dump_batch(source: ServerSource, header: Header, number: int) -> None:
    """Print the entries from the bookmark of the batch up to that of the next batch."""
    mark = BookmarkName("batch", number)
    batches = source.batches(key_of(header.version, mark), header.total_entries)
    for place, entry in enumerate(chain.from_iterable(batches)):
        if entry.type == TYPE_BOOKMARK:
            found = name_of_key(header.version, entry.data)
            if found is not None and found.kind == "batch" and found != mark:
                return
        if not place:
            _print(f"batch {number}:")
        _print(_entry_line(entry))


def _header_line(header: Header) -> str:
    return (
        f"header: totalLength {header.total_length}, totalEntries {header.total_entries}, "
        f"version {header.version}, systemID {header.system_id}, "
        f"streamType {header.stream_type}"
    )


def _entry_line(entry: Entry) -> str:
    return (
        f"entry: number {entry.number}, type {entry.type}, length {len(entry.data)}, "
        f"data 0x{entry.data.hex()}"
    )


def _print(line: str) -> None:
    write_out(f"{line}\n".encode("ascii"))


def _print_entries(batch: EntryBatch) -> None:
    columns = zip(
        range(batch.first_number, batch.next_number), batch.types, batch.lengths, strict=True
    )
    lines = [f"entry: number {n}, type {kind}, length {size}\n" for n, kind, size in columns]
    write_out("".join(lines).encode("ascii"))
