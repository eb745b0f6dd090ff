"""Rows as lines of text: JSON objects and CSV.

Owns what a value looks like: bytes as 0x and hex, an entry as the commands print it. Values that
are null are null in JSON and nothing in CSV.
"""

from __future__ import annotations

import contextlib
import csv
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from datastreamer.storage.disk.access import Access, create_file


class LineWriter(ABC):
    """A text file under way at `temporary`, with no more permissions than the stream that has this
    `access`."""

    def __init__(self, temporary: Path, schema: Any, access: Access) -> None:
        self.temporary = temporary
        self._names = schema.names
        self._file: TextIO = open(  # noqa: SIM115
            create_file(str(temporary), access), "w", encoding="utf-8", newline=""
        )
        self._is_entries = self._names == ["number", "type", "data"]

    @abstractmethod
    def write(self, batch: Any) -> None:
        """These rows come next."""

    def rows(self, batch: Any) -> Any:
        """The values of each row, as text and numbers."""
        return zip(*(map(_plain, column.to_pylist()) for column in batch.columns), strict=True)

    def finish(self) -> None:
        """No row comes any more."""
        self._file.close()

    def discard(self) -> None:
        """Forget what was not given another name."""
        with contextlib.suppress(OSError):
            self._file.close()
        self.temporary.unlink(missing_ok=True)


class JsonWriter(LineWriter):
    """A JSON object a row."""

    def write(self, batch: Any) -> None:
        lines = []
        for row in self.rows(batch):
            told = dict(zip(self._names, row, strict=True))
            if self._is_entries:
                # Entries look as `cat` prints them.
                data = told.pop("data")
                told |= {"length": len(data) // 2 - 1, "data": data}
            lines.append(json.dumps(told) + "\n")
        self._file.write("".join(lines))


class CsvWriter(LineWriter):
    """A line a row, under a line with the columns' names."""

    def __init__(self, temporary: Path, schema: Any, access: Access) -> None:
        super().__init__(temporary, schema, access)
        self._csv = csv.writer(self._file, lineterminator="\n")
        # csv quotes a CR only where lines end in one (and those are 15% slower to write).
        self._with_cr = csv.writer(_EndsInLF(self._file), lineterminator="\r\n")
        self._texts = [field.name for field in schema if pa.types.is_string(field.type)]
        self._csv.writerow(self._names)

    def write(self, batch: Any) -> None:
        found = (pc.any(pc.match_substring(batch[name], "\r")) for name in self._texts)
        has_cr = any(each.as_py() for each in found)
        (self._with_cr if has_cr else self._csv).writerows(self.rows(batch))


class _EndsInLF:
    """Takes rows that end in CR LF, and writes them as those that end in LF."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(f"{row[:-2]}\n")


def writer_of(path: Path, temporary: Path, schema: Any, access: Access) -> LineWriter:
    """What writes the form that the name of `path` says, which is not touched."""
    form = CsvWriter if path.suffix.lower() == ".csv" else JsonWriter
    return form(temporary, schema, access)


def _plain(value: Any) -> Any:
    return f"0x{value.hex()}" if isinstance(value, bytes) else value
