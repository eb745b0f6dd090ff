"""The read side of the Durable Streams protocol, version 1.0, in its JSON mode.

Owns the offsets of that protocol. An offset is the beginning of the stream's id, its epoch and an
entry's number, so that a client whose entries were truncated meanwhile, or whose stream was
replaced, is not sent others in their place unnoticed.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import trio

from datastreamer.errors import UnknownEntry
from datastreamer.http.answers.entries import CachePolicy
from datastreamer.http.answers.follow import EVENT_HEADERS, EVENT_STREAM, EventForm, Follower
from datastreamer.http.answers.formats import json_items
from datastreamer.http.answers.reading import HttpSource, Reading, Received
from datastreamer.http.port.messages import (
    JSON,
    Headers,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    unless_gone,
)
from datastreamer.printable import counted, json_text
from datastreamer.storage.read.spans import Cursor
from datastreamer.zkevm.entry_json import KnownTimes

_NAME: Final = "default"
_OFFSET: Final = re.compile("([0-9a-f]{8})_([0-9a-f]{16})_([0-9]{20})")
_CHUNK_BYTES: Final = 256 * 1024
_POLL_SECONDS: Final = 20.0
_SSE_SECONDS: Final = 60.0
# The protocol counts intervals of 20 s from 9 October 2024; clients send back what they got.
_CURSOR_EPOCH: Final = 1_728_432_000
_CURSOR_SECONDS: Final = 20
_MOST_JITTER: Final = 180


class DurableStreams:
    """Answers `GET /v1/streams/default`."""

    def __init__(self, source: HttpSource, cache: CachePolicy) -> None:
        self._source = source
        self._cache = cache
        self._waiting: dict[trio.Event, None] = {}
        self._finishing = False

    def finish(self) -> None:
        """End the waits of clients that poll."""
        self._finishing = True
        for waiting in self._waiting:
            waiting.set()

    async def stream(self, request: HttpRequest) -> HttpAnswer:
        parameters = request.parameters("offset", "live", "cursor")
        if (name := request.found["name"]) != _NAME:
            raise HttpProblem(404, f"there is no stream {name!r:.80}; there is {_NAME}")
        reading = self._source.reading()
        offset, live = parameters.text("offset"), parameters.choice("live", "long-poll", "sse")
        if request.method == "HEAD":
            tail = [("Stream-Next-Offset", offset_of(reading.received(reading.total)))]
            return HttpAnswer(200, JSON, b"", [*tail, ("Cache-Control", "no-store")])
        if live is not None and offset is None:
            raise HttpProblem(400, f"offset is required with live={live}")
        at = _received(reading, "-1" if offset is None else offset)
        _verify(reading, at)
        seen = _beyond(parameters.text("cursor"))
        if live == "sse":
            follower = Follower(reading, at, DurableEvents(cursor=seen), seconds=_SSE_SECONDS)
            return HttpAnswer(200, EVENT_STREAM, follower.send, EVENT_HEADERS, follows=True)
        if live is None:
            return await self._chunk(reading, at, offset == "now", ())
        found = [("Stream-Cursor", _cursor(seen))]
        if at.number >= reading.total:
            with request.follower():
                await unless_gone(request.until_gone, partial(self._wait, reading, at))
            _verify(reading, at)
        if at.number >= reading.total:
            return HttpAnswer(204, "", b"", [*_tail(reading, at.number), *found, *_NOT_STORED])
        return await self._chunk(reading, at, False, found)

    async def _wait(self, reading: Reading, at: Received) -> None:
        """Wait until there are entries from `at` on, or others were changed, for some seconds."""
        with trio.move_on_after(_POLL_SECONDS):
            while (
                reading.total <= at.number
                and reading.stream.epoch == at.epoch
                and not (self._finishing or reading.gone)
            ):
                news = trio.Event()
                self._waiting[news] = None
                try:
                    await reading.wait(news)
                finally:
                    del self._waiting[news]
        await reading.broadcast.turns.settled()

    async def _chunk(self, reading: Reading, at: Received, now: bool, found: Headers) -> HttpAnswer:
        """The entries from `at` on, as many as an answer may have."""
        first, total = at.number, reading.total
        stop, items = first, b""
        if first < total:
            try:
                form = partial(json_items, times=KnownTimes(reading.stream.time_marks))
                piece = await reading.piece(
                    form, Cursor(0, first), total, _CHUNK_BYTES, inline=total - first < 100
                )
            except UnknownEntry:
                raise HttpProblem(409, "the stream was truncated here; ask again") from None
            _verify(reading, at)
            stop, items = piece.number, piece.data
        headers = [("Stream-Next-Offset", offset_of(reading.received(stop))), *found]
        if stop >= total:
            headers.append(("Stream-Up-To-Date", "true"))
        kept = self._cache.headers(reading, f"durable-{first}-{stop}-{int(stop >= total)}")
        if now:
            headers += _NOT_STORED
        elif stop >= total:
            headers += [each for each in kept if each[0] == "ETag"]
            headers.append(("Cache-Control", "no-cache"))
        else:
            headers += kept
        return HttpAnswer(200, JSON, b"[%b]\n" % items, headers)


_NOT_STORED: Final = [("Cache-Control", "no-store")]


def _tail(reading: Reading, first: int) -> list[tuple[str, str]]:
    at = reading.received(first)
    return [("Stream-Next-Offset", offset_of(at)), ("Stream-Up-To-Date", "true")]


def offset_of(at: Received) -> str:
    """The offset of a position; offsets are in the order of the entries."""
    return f"{at.stream.hex()}_{at.epoch:016x}_{at.number:020d}"


def _received(reading: Reading, offset: str) -> Received:
    """The position that an offset names. Raises `HttpProblem`."""
    if offset == "-1":
        return reading.received(0)
    if offset == "now":
        return reading.received(reading.total)
    found = _OFFSET.fullmatch(offset)
    if found is None:
        raise HttpProblem(400, f"offset is -1, now, or an earlier answer's, not {offset!r:.80}")
    return Received(int(found[2], 16), int(found[3]), bytes.fromhex(found[1]))


def _verify(reading: Reading, at: Received) -> None:
    """Raises `HttpProblem` if an entry before a client's position was truncated or updated since,
    if it is of another stream, or if there is no such position."""
    if at.stream != reading.received(0).stream:
        raise HttpProblem(
            410, "this offset is of another stream, which was here before; begin with offset=-1"
        )
    changes = reading.missed(at.epoch)
    if changes is None or any(change.start < at.number for change in changes):
        raise HttpProblem(
            410,
            f"entries before {at.number} were truncated or updated since; begin again with "
            "offset=-1",
        )
    if at.number > reading.total:
        raise HttpProblem(400, f"the stream has {counted(reading.total)}, and none at this offset")


def _interval() -> int:
    return int(time.time() - _CURSOR_EPOCH) // _CURSOR_SECONDS


def _beyond(seen: str | None) -> int:
    """A cursor beyond the one that a client has; 0 if the current interval is beyond it."""
    if seen is None or not (seen.isascii() and seen.isdigit() and len(seen) <= 18):
        return 0
    if int(seen) < _interval():
        return 0
    return int(seen) + random.randint(1, _MOST_JITTER)  # noqa: S311 - it spreads load


def _cursor(least: int) -> str:
    """The cursor of a live answer: the current interval, or `least`."""
    return str(max(_interval(), least))


@dataclass(frozen=True)
class DurableEvents(EventForm):
    """The events of `live=sse`: entries, and after them a control event with the next offset. The
    protocol's clients look for data without a space before it."""

    cursor: int = 0
    """The least cursor that the client is sent."""
    reports_changes: ClassVar[bool] = False

    def begin(self, at: Received, total: int) -> bytes:
        return self._control(at, up_to_date=True) if at.number >= total else b""

    def entries(self, items: bytes, at: Received, up_to_date: bool) -> bytes:
        return b"event: data\ndata:[%b]\n\n%b" % (items, self._control(at, up_to_date))

    def _control(self, at: Received, up_to_date: bool) -> bytes:
        control = {
            "streamNextOffset": offset_of(at),
            "streamCursor": _cursor(self.cursor),
            **({"upToDate": True} if up_to_date else {}),
        }
        return f"event: control\ndata:{json_text(control)}\n\n".encode()
