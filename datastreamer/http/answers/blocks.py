"""Blocks and batches of a zkEVM stream, decoded, with their transactions.

Owns how much of the stream is read for one answer, and that decoding delays no other task. `zkevm`
knows which entries belong together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple, TypeVar

import trio

from datastreamer._codec import Entry
from datastreamer.errors import DecodeFailed, ExtraMissing
from datastreamer.http.answers.entries import NOT_CACHED
from datastreamer.http.answers.reading import HttpSource, Reading
from datastreamer.http.port.messages import (
    JSON,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    number,
    unless_gone,
)
from datastreamer.zkevm.block_json import (
    FoundEvent,
    batch_json,
    blocks_json,
    described,
    marked_entries,
)
from datastreamer.zkevm.bookmark_keys import Kind
from datastreamer.zkevm.transactions import load_tools

# What takes one step that others wait for, such as writing the text, is a few milliseconds then.
_MOST_ENTRIES: Final = 2_000
_MOST_BYTES: Final = 1 << 20
_SLICE_SECONDS: Final = 0.001

T = TypeVar("T")


class _Found(NamedTuple):
    events: list[FoundEvent]
    last: int


class BlockQueries:
    """Answers queries for blocks and batches."""

    def __init__(self, source: HttpSource) -> None:
        self._source = source
        # One answer at a time: in between, other tasks run.
        self._decoding = trio.Lock()

    async def block(self, request: HttpRequest) -> HttpAnswer:
        return await self._answer(request, "block")

    async def batch(self, request: HttpRequest) -> HttpAnswer:
        return await self._answer(request, "batch")

    async def _answer(self, request: HttpRequest, kind: Kind) -> HttpAnswer:
        request.parameters()
        wanted = number(f"the number of a {kind}", request.found["number"])
        reading = self._source.reading()

        async def decode() -> HttpAnswer:
            async with self._decoding:
                return await self._decoded(reading, kind, wanted)

        try:
            answer = await unless_gone(request.until_gone, decode)
        except DecodeFailed as error:
            raise HttpProblem(
                422, f"{kind} {wanted} cannot be decoded: {error}; read its entries"
            ) from None
        if answer is None:
            raise HttpProblem(400, "the client ended its side before it was answered; keep it open")
        return answer

    async def _decoded(self, reading: Reading, kind: Kind, wanted: int) -> HttpAnswer:
        """Raises `HttpProblem` and `DecodeFailed`."""
        broadcast = reading.broadcast

        async def read() -> _Found:
            first = await reading.bookmark(f"{kind}:{wanted}")
            return await broadcast.cold.run_verified(
                partial(_read, reading, kind),
                first,
                lambda found: broadcast.pages_of(first, found.last),
            )

        found = await reading.steadily(read)
        opening = True
        try:
            await trio.to_thread.run_sync(load_tools)
        except ExtraMissing:
            opening = False
        events = await _in_slices(described(each, opening) for each in found.events)
        if kind == "batch":
            value = batch_json(events)
        elif blocks := blocks_json(events):
            value = blocks[0]
        else:
            raise HttpProblem(404, f"no block follows the bookmark block:{wanted}")
        parts = await _in_slices(json.JSONEncoder().iterencode({"number": wanted, **value}))
        return HttpAnswer(200, JSON, f"{''.join(parts)}\n".encode(), NOT_CACHED)


def _read(reading: Reading, kind: Kind, first: int) -> _Found:
    """The block or batch whose bookmark is entry `first`. In a thread. Raises `HttpProblem` and
    `DecodeFailed`."""
    last, size = first, 0

    def entries() -> Iterator[Entry]:
        nonlocal last, size
        for entry in reading.stream.entries(first):
            size += len(entry.data)
            if entry.number - first >= _MOST_ENTRIES or size > _MOST_BYTES:
                raise HttpProblem(
                    413,
                    f"the {kind} has more than {_MOST_ENTRIES} entries or {_MOST_BYTES >> 20} MiB; "
                    f"read its entries with /v1/entries?from={first}",
                )
            last = entry.number
            yield entry

    found = list(marked_entries(kind, entries(), reading.stream.header.version))
    return _Found(found, last)


async def _in_slices(items: Iterable[T]) -> list[T]:
    """All items; other tasks run after each millisecond that they take."""
    found: list[T] = []
    begun = time.perf_counter()
    for each in items:
        found.append(each)
        if time.perf_counter() - begun > _SLICE_SECONDS:
            await trio.lowlevel.checkpoint()
            begun = time.perf_counter()
    return found
