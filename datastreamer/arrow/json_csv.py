"""Writes rows as lines of text: JSON objects or CSV.

Owns the form of a value: bytes as 0x and hex, an entry as the commands print it, null as null in
JSON and as nothing in CSV.
"""

from __future__ import annotations

import contextlib
import csv
import json
from abc import ABC, abstractmethod
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from datastreamer.storage.disk.access import Access, create_file


class LineWriter(ABC):
    """A text file that is being written at `temporary`, with at most the permissions of the stream
    that has this `access`."""

    def __init__(self, temporary: Path, schema: Any, access: Access) -> None:
        self.temporary = temporary
        self._names = schema.names
        self._file: TextIO = open(  # noqa: SIM115
            create_file(str(temporary), access), "w", encoding="utf-8", newline=""
        )
        self._is_entries = self._names == ["number", "type", "data"]

    @abstractmethod
    def write(self, batch: Any) -> None:
        """Write these rows."""

    def rows(self, batch: Any) -> Any:
        """The values of each row, as text and numbers."""
        return zip(*(map(_plain, column.to_pylist()) for column in batch.columns), strict=True)

    def finish(self) -> None:
        """Close the file after the last row."""
        self._file.close()

    def discard(self) -> None:
        """Remove the file unless it has been renamed."""
        with contextlib.suppress(OSError):
            self._file.close()
        self.temporary.unlink(missing_ok=True)


class JsonWriter(LineWriter):
    """Writes a JSON object per row."""

    def write(self, batch: Any) -> None:
        lines = []
        for row in self.rows(batch):
            values = dict(zip(self._names, row, strict=True))
            if self._is_entries:
                # As `cat` prints entries.
                data = values.pop("data")
                values |= {"length": len(data) // 2 - 1, "data": data}
            lines.append(json.dumps(values) + "\n")
        self._file.write("".join(lines))


class CsvWriter(LineWriter):
    """Writes a line per row, after a line with the names of the columns."""

    def __init__(self, temporary: Path, schema: Any, access: Access) -> None:
        super().__init__(temporary, schema, access)
        self._csv = csv.writer(self._file, lineterminator="\n")
        # csv quotes a CR only with CR LF as line terminator, which is 15 % slower.
        self._with_cr = csv.writer(_EndsInLF(self._file), lineterminator="\r\n")
        self._texts = [field.name for field in schema if pa.types.is_string(field.type)]
        self._csv.writerow(self._names)

    def write(self, batch: Any) -> None:
        found = (pc.any(pc.match_substring(batch[name], "\r")) for name in self._texts)
        has_cr = any(each.as_py() for each in found)
        (self._with_cr if has_cr else self._csv).writerows(self.rows(batch))


class _EndsInLF:
    """A file that ends rows in LF instead of CR LF."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(f"{row[:-2]}\n")


def writer_of(path: Path, temporary: Path, schema: Any, access: Access) -> LineWriter:
    """A writer of the format that the suffix of `path` names."""
    form = CsvWriter if path.suffix.lower() == ".csv" else JsonWriter
    return form(temporary, schema, access)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value)
    return f"0x{value.hex()}" if isinstance(value, bytes) else value
