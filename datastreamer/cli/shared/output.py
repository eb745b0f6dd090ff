"""Entries as text and bytes: the forms of `--format`.

A run of entries becomes one bytes object, and that one write.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Protocol

from datastreamer._codec import Entry, EntryBatch
from datastreamer._lines import json_lines
from datastreamer.cli.shared.options import Format
from datastreamer.format import TYPE_BOOKMARK, Header
from datastreamer.printable import json_text
from datastreamer.zkevm.bookmark_keys import name_of_key

Entries = EntryBatch | Sequence[Entry]

_DUMP_LINE = 16
_DUMP_BYTES = 512


class Form(Protocol):
    """Renders entries in one format."""

    def begin(self) -> bytes:
        """The heading."""

    def render(self, entries: Entries) -> bytes:
        """A run of entries."""


class JsonLines:
    """One JSON object per line."""

    def begin(self) -> bytes:
        return b""

    def render(self, entries: Entries) -> bytes:
        if isinstance(entries, EntryBatch):
            return json_lines(entries)
        return "".join(
            [
                f'{{"number": {entry.number}, "type": {entry.type}, "length": {len(data)}, '
                f'"data": "0x{data.hex()}"}}\n'
                for entry in entries
                for data in (entry.data,)
            ]
        ).encode("ascii")


class Raw:
    """The bytes of the entries as in the file and on the wire, without padding."""

    def begin(self) -> bytes:
        return b""

    def render(self, entries: Entries) -> bytes:
        if isinstance(entries, EntryBatch):
            return entries.packed()
        return b"".join([entry.pack() for entry in entries])


class Hex:
    """The same bytes in hex, one entry per line."""

    def begin(self) -> bytes:
        return b""

    def render(self, entries: Entries) -> bytes:
        return "".join([f"{entry.pack().hex()}\n" for entry in entries]).encode("ascii")


class EntryTable:
    """Columns as wide as the terminal, written row by row; long data is cut."""

    def __init__(self, header: Header) -> None:
        self._version = header.version
        self._number = max(7, len(str(header.total_entries)))
        before = self._number + 2 + 10 + 2 + 7 + 2
        self._data = max(16, shutil.get_terminal_size((100, 25)).columns - before)

    def begin(self) -> bytes:
        return f"{'NUMBER':>{self._number}}  {'TYPE':10}  {'LENGTH':>7}  DATA\n".encode()

    def render(self, entries: Entries) -> bytes:
        return "".join([self._row(entry) for entry in entries]).encode("ascii")

    def _row(self, entry: Entry) -> str:
        data = entry.data
        if entry.type == TYPE_BOOKMARK:
            mark = name_of_key(self._version, data)
            shown = f"0x{data.hex()}" if mark is None else f"0x{data.hex()} ({mark})"
        else:
            shown = f"0x{data[: self._data].hex()}"
        if len(shown) > self._data:
            shown = shown[: self._data - 3] + "..."
        number, kind = entry.number, type_name(entry.type)
        return f"{number:>{self._number}}  {kind:10}  {len(data):>7}  {shown}\n"


def form_of(format: Format, header: Header) -> Form:
    """The form of entries in this format."""
    if format is Format.table:
        return EntryTable(header)
    if format is Format.raw:
        return Raw()
    return Hex() if format is Format.hex else JsonLines()


def type_name(type: int) -> str:
    """An entry type for people."""
    return "bookmark" if type == TYPE_BOOKMARK else str(type)


def one_entry(entry: Entry, format: Format, version: int) -> bytes:
    """A single entry, with a dump of its data."""
    if format is not Format.table:
        return form_of(format, Header()).render([entry])
    lines = [
        f"number  {entry.number}",
        f"type    {type_name(entry.type)}",
        f"length  {len(entry.data)}",
    ]
    mark = name_of_key(version, entry.data) if entry.type == TYPE_BOOKMARK else None
    if mark is not None:
        lines.append(f"key     {mark}")
    shown = entry.data[:_DUMP_BYTES]
    for at in range(0, len(shown), _DUMP_LINE):
        part = shown[at : at + _DUMP_LINE]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{'' if at else 'data':6}  {at:04x}  {part.hex(' '):47}  {text}")
    rest = len(entry.data) - len(shown)
    if rest:
        lines.append(f"        ... and {rest} more bytes; --format hex shows them")
    return ("\n".join(lines) + "\n").encode("ascii")


def json_line(what: object) -> bytes:
    """An object as a line of JSON."""
    return f"{json_text(what)}\n".encode("ascii")
