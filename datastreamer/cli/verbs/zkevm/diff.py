"""`datastreamer zkevm diff`: find the first difference of two streams.

Compares bytes, run by run; only the entries that differ are decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datastreamer._codec import Entry, EntryBatch
from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import ReportOutput, SourceOptions, StreamVersionOption
from datastreamer.cli.shared.output import json_line, text_lines, wrapped
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import open_source
from datastreamer.errors import DecodeFailed
from datastreamer.format import Header
from datastreamer.zkevm.bookmark_keys import Kind, name_of_key
from datastreamer.zkevm.decoding import as_json, decode, kind_of
from datastreamer.zkevm.entry_json import entry_json

if TYPE_CHECKING:
    from datastreamer.cli.shared.source import Source

_LOOK_BACK = 4096
_TLS = "tcps://"

AArgument = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help="Stream file, or server: HOST:PORT, tcps://HOST:PORT with TLS, unix:PATH.",
    ),
]
BArgument = Annotated[str, typer.Argument(metavar="B", help="The other stream file or server.")]


def diff(
    a: AArgument,
    b: BArgument,
    *,
    stream_version: StreamVersionOption = None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Compare two streams and show the first difference.

    Shows the first entry that differs, with its batch and block. Also compares version, system id
    and stream type of the headers. Exit code 1 if anything differs.

    Examples:
      datastreamer zkevm diff a.bin b.bin
      datastreamer zkevm diff stream.bin 127.0.0.1:6900 --json
    """
    shape = output.chosen()
    # The options of TLS apply to the sources that use TLS.
    without = SourceOptions(stream_type=options.stream_type)
    for_a, for_b = (
        options if one.startswith(_TLS) or not other.startswith(_TLS) else without
        for one, other in ((a, b), (b, a))
    )
    with open_source(a, for_a) as first, open_source(b, for_b) as second:
        headers = first.header(), second.header()
        totals = headers[0].total_entries, headers[1].total_entries
        with ProgressBar(f"comparing {a} and {b}", min(totals)) as progress:
            at = _first_difference(first, second, min(totals), progress)
        if at is None and totals[0] != totals[1]:
            at = min(totals)
        found = {
            "equal": at is None and not _header_differences(*headers),
            "entries": list(totals),
            "header": _header_differences(*headers),
            "first_difference": None,
        }
        if at is not None:
            versions = [stream_version or header.version for header in headers]
            found["first_difference"] = _difference((first, second), totals, versions, at)
    write_out(json_line(found) if shape == "jsonl" else _table(a, b, found))
    if at is not None:
        raise Failure(f"{a} and {b} differ from entry {at} on")
    if not found["equal"]:
        raise Failure(f"{a} and {b} have the same entries, but their headers differ")


def _header_differences(a: Header, b: Header) -> dict[str, list[int]]:
    names = ("version", "system_id", "stream_type")
    pairs = {name: [getattr(a, name), getattr(b, name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _first_difference(a: Source, b: Source, stop: int, progress: ProgressBar) -> int | None:
    """The number of the first entry below `stop` that differs."""
    if not stop:
        return None
    for left, right in _in_step(a.batches(0, stop), b.batches(0, stop)):
        if left.packed() != right.packed():
            for one, other in zip(left, right, strict=True):
                if one != other:
                    return one.number
        progress.advance(len(left))
    return None


def _in_step(
    a: Iterator[EntryBatch], b: Iterator[EntryBatch]
) -> Iterator[tuple[EntryBatch, EntryBatch]]:
    """Batches of the same entries of both."""
    left = right = None
    while True:
        if not left:
            left = next(a, None)
        if not right:
            right = next(b, None)
        if left is None or right is None:
            return
        size = min(len(left), len(right))
        yield left[:size], right[:size]
        left, right = left[size:], right[size:]


def _difference(
    sources: tuple[Source, Source],
    totals: tuple[int, int],
    versions: list[int],
    at: int,
) -> dict[str, Any]:
    """The two entries, decoded, and their batch and block."""
    sides = [
        _side(source.entry(at), version) if at < total else None
        for source, total, version in zip(sources, totals, versions, strict=True)
    ]
    fields: list[str] = []
    left, right = sides
    if left is not None and right is not None and left["kind"] == right["kind"]:
        mine, other = left["fields"] or {}, right["fields"] or {}
        fields = [name for name in mine | other if mine.get(name) != other.get(name)]
    where = _where(sources[0], versions[0], at)
    return {"entry": at, **where, "fields": fields, "a": left, "b": right}


def _side(entry: Entry, version: int) -> dict[str, Any]:
    fields = None
    # An entry that cannot be decoded is shown as bytes.
    with contextlib.suppress(DecodeFailed):
        fields = as_json(decode(entry, version=version))
    return {**entry_json(entry), "kind": kind_of(entry.type, version), "fields": fields}


def _where(source: Source, version: int, at: int) -> dict[str, int | None]:
    """The batch and block of the last bookmarks before the entry."""
    found: dict[Kind, int | None] = {"batch": None, "block": None}
    stop = at
    while stop and None in found.values():
        start = max(0, stop - _LOOK_BACK)
        keys = [key for batch in source.batches(start, stop) for key, _ in batch.bookmarks()]
        for key in reversed(keys):
            mark = name_of_key(version, key)
            if mark is not None and found[mark.kind] is None:
                found[mark.kind] = mark.number
            if mark is not None and mark.kind == "batch" and found["block"] is None:
                # The entry is before the first block of the batch.
                return {"batch": mark.number, "block": None}
        stop = start
    return {"batch": found["batch"], "block": found["block"]}


def _table(a: str, b: str, found: dict[str, Any]) -> bytes:
    totals = found["entries"]
    lines = [f"{a} and {b}: {'the same' if found['equal'] else 'different'}", ""]
    lines.append(f"entries       {totals[0]:,} and {totals[1]:,}")
    for name, (mine, other) in found["header"].items():
        lines.append(f"{name:12}  {mine} and {other}")
    difference = found["first_difference"]
    if difference is None:
        return text_lines(lines)
    where = [
        f"{kind} {difference[kind]}" for kind in ("batch", "block") if difference[kind] is not None
    ]
    lines += ["", f"entry {difference['entry']}{', ' if where else ''}{', '.join(where)}:"]
    for name, side in ((a, difference["a"]), (b, difference["b"])):
        if side is None:
            lines += wrapped(f"{name}: no such entry")
            continue
        kind = side["kind"] or f"type {side['type']}"
        lines += wrapped(f"{name}: {kind}, {side['length']} bytes")
        shown = difference["fields"] or (["data"] if not side["fields"] else [])
        values = side["fields"] or side
        lines += [line for field in shown for line in wrapped(f"  {field} = {values.get(field)}")]
    return text_lines(lines)
