"""Decoded entries, for `cat --decode`.

An entry that cannot be decoded is written with the reason in place of its fields, and the
command fails at the end.
"""

from __future__ import annotations

from typing import Any

from datastreamer._codec import Entry, EntryBatch
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import Format
from datastreamer.cli.shared.output import EntryTable
from datastreamer.errors import DecodeFailed
from datastreamer.format import Header
from datastreamer.printable import json_text
from datastreamer.selection.times import AskTimes
from datastreamer.zkevm.entry_json import KnownTimes, entry_json, meaning_json, timed


class Decoded(EntryTable):
    """Decodes the entries of a stream: a table, or one JSON object per line."""

    def __init__(self, format: Format, header: Header, time_marks: AskTimes) -> None:
        super().__init__(header, "KIND", 12, "FIELDS")
        self._times = KnownTimes(time_marks)
        self._ms: int | None = None
        self._as_table = format == "table"
        if not self._as_table:
            self.heading = b""
        self._failed = 0
        self._first: DecodeFailed | None = None

    def render(self, batch: EntryBatch) -> bytes:
        if self._as_table:
            return super().render(batch)
        rendered = []
        for part, ms in timed(batch, self._times):
            self._ms = ms
            rendered.append(super().render(part))
        return b"".join(rendered)

    def finish(self, source: str) -> None:
        """Raises `Failure` if entries could not be decoded."""
        if self._first is not None:
            more = f", and {self._failed - 1:,} more" if self._failed > 1 else ""
            raise Failure(f"{source}: {self._first}{more}")

    def _line(self, entry: Entry) -> str:
        meaning = self._meaning(entry)
        if not self._as_table:
            return json_text(entry_json(entry, self._ms) | meaning) + "\n"
        fields = meaning["fields"]
        if fields is None:
            shown = meaning.get("error", f"0x{entry.data[: self._width].hex()}")
        else:
            parts = [
                f"{name}={_short(value)}"
                for name, value in fields.items()
                if value not in (None, "0x")
            ]
            shown = " ".join(parts).encode("unicode_escape").decode("ascii")
        return self._row(entry, meaning["kind"] or f"type {entry.type}", shown)

    def _meaning(self, entry: Entry) -> dict[str, Any]:
        """The kind and the fields of an entry; both None if its type is not that of an event."""
        meaning = meaning_json(entry, self._version)
        if "error" in meaning:
            self._failed += 1
            self._first = self._first or DecodeFailed(entry.number, meaning["error"])
        return meaning


def _short(value: Any) -> str:
    if isinstance(value, str) and value.startswith("0x") and len(value) > 14:
        return f"{value[:10]}..."
    return str(value)
