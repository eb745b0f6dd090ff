"""Entries as JSON, with or without their meaning in a zkEVM stream and their times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

from datastreamer._codec import Entry, EntryBatch
from datastreamer._lines import json_lines
from datastreamer.errors import DecodeFailed
from datastreamer.format import U64_MAX
from datastreamer.selection.times import AskTimes, TimeMarks, moment_text
from datastreamer.zkevm.decoding import as_json, decode, kind_of

_MOST_MARKS: Final = 64


def entry_json(entry: Entry, ms: int | None = None) -> dict[str, Any]:
    """An entry, not decoded; with its time, if that is known."""
    data = entry.data
    time = {} if ms is None else {"time": moment_text(ms)}
    return {
        "number": entry.number,
        "type": entry.type,
        "length": len(data),
        "data": f"0x{data.hex()}",
        **time,
    }


class KnownTimes:
    """The times of the entries of one state of a stream, asked for as they are needed."""

    def __init__(self, ask: AskTimes) -> None:
        self._ask = ask
        self._first, self._known, self._many = 0, TimeMarks(), 1

    def since(self, number: int) -> TimeMarks:
        """The times from an entry on."""
        if not self._first <= number < self._known.next:
            # Few at first, since a page may have a single one.
            self._many = min(2 * self._many, _MOST_MARKS)
            self._first, self._known = number, self._ask(number, self._many)
        return self._known


def timed(batch: EntryBatch, times: KnownTimes) -> Iterator[tuple[EntryBatch, int | None]]:
    """The batch in parts of entries with one time each; None: it is not known."""
    while batch.next_number > (number := batch.first_number):
        marks, _, end = times.since(number)
        later = bisect_right(marks, (number, U64_MAX))
        upto = marks[later][0] if later < len(marks) else end
        # Of what is not known yet, nothing is asked again.
        upto = upto if upto > number else batch.next_number
        yield batch.before(upto), marks[later - 1][1] if later else None
        batch = batch.since(upto)


def timed_lines(batch: EntryBatch, times: KnownTimes) -> bytes:
    """One line of JSON for each entry, with its time if that is known."""
    parts = timed(batch, times)
    return b"".join(
        [json_lines(part, b"" if ms is None else moment_text(ms).encode()) for part, ms in parts]
    )


def meaning_json(entry: Entry, version: int) -> dict[str, Any]:
    """The kind and the fields of an entry; both None if its type is not that of an event. If it
    cannot be decoded, `error` is the reason and `fields` is None."""
    kind = kind_of(entry.type, version)
    if kind is None:
        return {"kind": None, "fields": None}
    try:
        return {"kind": kind, "fields": as_json(decode(entry, version=version))}
    except DecodeFailed as error:
        return {"kind": kind, "fields": None, "error": error.reason}
