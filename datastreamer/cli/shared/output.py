"""Entries, reports and objects as text and bytes for standard output: the forms of `--format`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from datastreamer._codec import Entry, EntryBatch, scan
from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import write_out, write_raw
from datastreamer.cli.shared.options import Format
from datastreamer.format import TYPE_BOOKMARK, Header
from datastreamer.printable import counted, json_text, one_line
from datastreamer.selection.times import AskTimes
from datastreamer.zkevm.bookmark_keys import name_of_key
from datastreamer.zkevm.entry_json import KnownTimes, timed_lines

_DUMP_LINE = 16
_DUMP_BYTES = 512


class Form:
    """Renders entries in one format: a batch becomes one bytes object, and that one write."""

    heading = b""

    def render(self, batch: EntryBatch) -> bytes:
        return "".join([self._line(entry) for entry in batch]).encode("ascii", "replace")

    def _line(self, entry: Entry) -> str:
        raise NotImplementedError

    def finish(self, source: str) -> None:
        """Raises `Failure` if the form could not render all entries as intended."""


class JsonLines(Form):
    """One JSON object per line, with the time of the entry if it is known."""

    def __init__(self, time_marks: AskTimes) -> None:
        self._times = KnownTimes(time_marks)

    def render(self, batch: EntryBatch) -> bytes:
        return timed_lines(batch, self._times)


class Raw(Form):
    """The bytes of the entries as in the file and on the wire, without padding."""

    def render(self, batch: EntryBatch) -> bytes:
        return batch.packed()


class Hex(Form):
    """The same bytes in hex, one entry per line."""

    def _line(self, entry: Entry) -> str:
        return f"{entry.pack().hex()}\n"


class EntryTable(Form):
    """Columns as wide as the terminal, written row by row; long data is cut."""

    def __init__(
        self, header: Header, kind: str = "TYPE", kind_width: int = 10, data: str = "DATA"
    ) -> None:
        self._version = header.version
        self._number = max(7, len(str(header.total_entries)))
        self._kind = kind_width
        before = self._number + 2 + kind_width + 2 + 7 + 2
        self._width = max(16, shutil.get_terminal_size((100, 25)).columns - before)
        self.heading = (
            f"{'NUMBER':>{self._number}}  {kind:{kind_width}}  {'LENGTH':>7}  {data}\n".encode()
        )

    def _line(self, entry: Entry) -> str:
        data = entry.data
        if entry.type == TYPE_BOOKMARK:
            mark = name_of_key(self._version, data)
            shown = f"0x{data.hex()}" if mark is None else f"0x{data.hex()} ({mark})"
        else:
            shown = f"0x{data[: self._width].hex()}"
        return self._row(entry, type_name(entry.type), shown)

    def _row(self, entry: Entry, kind: str, shown: str) -> str:
        if len(shown) > self._width:
            shown = shown[: self._width - 3] + "..."
        number = f"{entry.number:>{self._number}}"
        return f"{number}  {kind:{self._kind}}  {len(entry.data):>7}  {shown}\n"


def form_of(format: Format, header: Header, time_marks: AskTimes) -> Form:
    if format == "table":
        return EntryTable(header)
    return JsonLines(time_marks) if format == "jsonl" else {"raw": Raw, "hex": Hex}[format]()


def type_name(type: int) -> str:
    """An entry type for people."""
    return "bookmark" if type == TYPE_BOOKMARK else str(type)


def write_entry(entry: Entry, format: Format, version: int, time_marks: AskTimes) -> None:
    """Write a single entry to standard output, as a table with a dump of its data."""
    if format == "raw":
        write_raw(entry.pack())
    elif format == "hex":
        write_out(f"{entry.pack().hex()}\n".encode())
    elif format == "jsonl":
        write_out(timed_lines(scan(entry.pack(), entry.number), KnownTimes(time_marks)))
    else:
        write_out(text_lines(_dumped(entry, version)))


def _dumped(entry: Entry, version: int) -> list[str]:
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
    return lines


def json_line(what: object) -> bytes:
    return f"{json_text(what)}\n".encode("ascii")


@dataclass(frozen=True)
class JsonResult:
    """The option of a command whose result is a line for people on stderr, a group."""

    json: Annotated[
        bool, typer.Option("--json", help="Print the result as a JSON object on standard output.")
    ] = False

    def report(self, text: str, facts: Mapping[str, Any]) -> None:
        """Write the result: the text, or with --json the facts."""
        if self.json:
            write_out(json_line(facts))
        else:
            logs.say(text)


# Reports for people.


def text_lines(lines: list[str]) -> bytes:
    """Lines for standard output, with outside data escaped."""
    text = "".join([f"{one_line(line, None)}\n" for line in lines])
    return text.encode(sys.stdout.encoding or "utf-8", "replace")


def wrapped(text: str) -> list[str]:
    """Indented lines, no longer than the terminal is wide."""
    width = max(40, shutil.get_terminal_size((100, 25)).columns)
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def count(number: int, what: str) -> str:
    """A number with its noun."""
    return counted(number, what, ",")
