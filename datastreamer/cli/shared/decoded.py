"""Decoded entries, for `cat --decode`.

An entry that cannot be decoded is written with the reason in place of its fields, and the
command fails at the end.
"""

from __future__ import annotations

import shutil
from enum import Enum
from typing import Any

from datastreamer._codec import Entry
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import Format
from datastreamer.cli.shared.output import Entries
from datastreamer.errors import DecodeFailed
from datastreamer.format import Header
from datastreamer.printable import json_text
from datastreamer.zkevm.decoding import as_json, decode, kind_of


class Decoding(str, Enum):
    """How entries are decoded."""

    zkevm = "zkevm"


class Decoded:
    """A form that decodes the entries of a stream of `version`."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._failed = 0
        self._first: DecodeFailed | None = None

    def begin(self) -> bytes:
        return b""

    def render(self, entries: Entries) -> bytes:
        return "".join([self._line(entry) for entry in entries]).encode("ascii", "replace")

    def finish(self, source: str) -> None:
        """Raises `Failure` if entries could not be decoded."""
        if self._first is not None:
            more = f", and {self._failed - 1:,} more" if self._failed > 1 else ""
            raise Failure(f"{source}: {self._first}{more}")

    def _line(self, entry: Entry) -> str:
        raise NotImplementedError

    def _meaning(self, entry: Entry) -> dict[str, Any]:
        """The kind and the fields of an entry; both None if its type is not that of an event."""
        kind = kind_of(entry.type, self._version)
        if kind is None:
            return {"kind": None, "fields": None}
        try:
            return {"kind": kind, "fields": as_json(decode(entry, version=self._version))}
        except DecodeFailed as error:
            self._failed += 1
            self._first = self._first or error
            return {"kind": kind, "fields": None, "error": error.reason}


class DecodedLines(Decoded):
    """One JSON object per line."""

    def _line(self, entry: Entry) -> str:
        return json_text(described(entry) | self._meaning(entry)) + "\n"


class DecodedTable(Decoded):
    """Columns as wide as the terminal; fields that do not fit are cut."""

    def __init__(self, header: Header) -> None:
        super().__init__(header.version)
        self._number = max(7, len(str(header.total_entries)))
        before = self._number + 2 + 12 + 2 + 7 + 2
        self._width = max(16, shutil.get_terminal_size((100, 25)).columns - before)

    def begin(self) -> bytes:
        return f"{'NUMBER':>{self._number}}  {'KIND':12}  {'LENGTH':>7}  FIELDS\n".encode()

    def _line(self, entry: Entry) -> str:
        meaning = self._meaning(entry)
        fields = meaning["fields"]
        if fields is None:
            shown = meaning.get("error", f"0x{entry.data[: self._width].hex()}")
        else:
            parts = [
                f"{name}={_short(value)}" for name, value in fields.items() if not _empty(value)
            ]
            shown = " ".join(parts).encode("unicode_escape").decode("ascii")
        if len(shown) > self._width:
            shown = shown[: self._width - 3] + "..."
        kind = meaning["kind"] or f"type {entry.type}"
        return f"{entry.number:>{self._number}}  {kind:12}  {len(entry.data):>7}  {shown}\n"


def _empty(value: Any) -> bool:
    return value is None or value == "0x"


def _short(value: Any) -> str:
    if isinstance(value, str) and value.startswith("0x") and len(value) > 14:
        return f"{value[:10]}..."
    return str(value)


def described(entry: Entry) -> dict[str, Any]:
    """An entry for JSON, not decoded."""
    data = entry.data
    return {
        "number": entry.number,
        "type": entry.type,
        "length": len(data),
        "data": f"0x{data.hex()}",
    }


def decoded_form_of(format: Format, header: Header) -> Decoded:
    """The form of decoded entries in this format."""
    return DecodedTable(header) if format is Format.table else DecodedLines(header.version)
