"""The stream, single entries, and bookmarks: small answers as JSON.

Owns which of them may be cached. `ranges.py` has answers with many entries.
"""

from __future__ import annotations

from typing import Final

from datastreamer.errors import UnknownEntry
from datastreamer.http.answers.reading import HttpSource, Reading
from datastreamer.http.port.messages import Headers, HttpAnswer, HttpRequest, json_answer, number
from datastreamer.zkevm.entry_json import entry_json, meaning_json

_CACHE_SECONDS: Final = 60
_STALE_SECONDS: Final = 300
NOT_CACHED: Final[Headers] = [("Cache-Control", "no-cache")]


class CachePolicy:
    """How long answers may be kept. With `private`, only by the client itself."""

    def __init__(self, *, private: bool) -> None:
        whose = "private" if private else "public"
        times = f"max-age={_CACHE_SECONDS}, stale-while-revalidate={_STALE_SECONDS}"
        self._value = f"{whose}, {times}"

    def headers(self, reading: Reading, what: str) -> Headers:
        """Of an answer that stays the same until entries are truncated or updated: `what` names it
        within the stream."""
        epoch = reading.stream.recorded_epoch
        if epoch is None:
            # A program that keeps no records writes the file: its changes are not counted.
            return NOT_CACHED
        # Weak: the time of an entry may become known later.
        tag = f'W/"{reading.stream.stream_id[:8].hex()}-{epoch}-{what}"'
        return [("ETag", tag), ("Cache-Control", self._value)]


class EntryQueries:
    """Answers queries for what is small."""

    def __init__(self, source: HttpSource, cache: CachePolicy) -> None:
        self._source = source
        self._cache = cache

    async def stream(self, request: HttpRequest) -> HttpAnswer:
        request.parameters()
        reading = self._source.reading()
        header = reading.stream.header
        found = {
            "version": header.version,
            "system_id": header.system_id,
            "stream_type": header.stream_type,
            "total_entries": header.total_entries,
            "total_length": header.total_length,
            "epoch": reading.stream.epoch,
            "first_entry": 0,
            # Entries before it are in the archive alone.
            "floor": reading.stream.floor,
            # Known where the stream is written.
            "sync": reading.stream.sync_policy if reading.stream.writable else None,
        }
        return json_answer(found, NOT_CACHED)

    async def entry(self, request: HttpRequest) -> HttpAnswer:
        decoded = request.parameters("decode").choice("decode", "zkevm")
        wanted = number("the number of an entry", request.found["number"])
        reading = self._source.reading()
        entry = await reading.entry(wanted)
        headers = self._cache.headers(reading, f"{wanted}{decoded or ''}")

        def answer() -> HttpAnswer:
            found = entry_json(entry, reading.stream.time_of(wanted))
            if decoded is not None:
                found |= meaning_json(entry, reading.stream.header.version)
            return json_answer(found, headers)

        return await reading.convert(answer, len(entry.data))

    async def bookmark(self, request: HttpRequest) -> HttpAnswer:
        request.parameters()
        reading = self._source.reading()
        key = request.found["key"]
        while True:
            entry = await reading.bookmark(key)
            try:
                event = await reading.first_event(entry)
            except UnknownEntry:
                continue  # it was truncated since the look-up
            found = {"key": f"0x{reading.key(key).hex()}", "entry": entry, "first_event": event}
            return json_answer(found, NOT_CACHED)
