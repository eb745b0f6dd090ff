"""Blocks and batches of a zkEVM stream, decoded, with their transactions.

Owns how much of the stream is read for one answer, and that decoding delays no other task. `zkevm`
knows which entries belong together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar

import trio

from datastreamer._codec import Entry
from datastreamer.errors import DecodeFailed, ExtraMissing
from datastreamer.format import STREAM_TYPE_SEQUENCER
from datastreamer.http.answers.entries import NOT_CACHED
from datastreamer.http.answers.reading import DamagedAnswer, HttpSource, Reading
from datastreamer.http.port.messages import (
    JSON,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    json_answer,
    number,
    unless_gone,
)
from datastreamer.zkevm.block_json import (
    FoundEvent,
    batch_json,
    blocks_json,
    described,
    is_block_start,
    is_transaction,
    marked_entries,
    summary_json,
)
from datastreamer.zkevm.bookmark_keys import Kind
from datastreamer.zkevm.decoding import decode
from datastreamer.zkevm.transactions import load_tools

# What takes one step that others wait for, such as writing the text, is a few milliseconds then.
_MOST_ENTRIES: Final = 2_000
_MOST_BYTES: Final = 1 << 20
_SLICE_SECONDS: Final = 0.001
_ENTRIES_A_STEP: Final = 64
# Blocks in a list.
_LINES: Final = 25
_MOST_LINES: Final = 100

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

    async def recent(self, request: HttpRequest) -> HttpAnswer:
        """A line about each of the newest blocks, or of those before one."""
        parameters = request.parameters("before", "limit")
        before = parameters.number("before")
        limit = parameters.number("limit", most=_MOST_LINES, least=1) or _LINES
        reading = self._source.reading()
        return await self._turn(
            request, "the list of blocks", partial(self._lines, reading, before, limit)
        )

    async def transaction(self, request: HttpRequest) -> HttpAnswer:
        """The transaction that an entry is, with its block."""
        request.parameters()
        wanted = number("the number of an entry", request.found["number"])
        reading = self._source.reading()
        return await self._turn(request, f"entry {wanted}", partial(self._opened, reading, wanted))

    async def _answer(self, request: HttpRequest, kind: Kind) -> HttpAnswer:
        request.parameters()
        wanted = number(f"the number of a {kind}", request.found["number"])
        reading = self._source.reading()
        return await self._turn(
            request, f"{kind} {wanted}", partial(self._decoded, reading, kind, wanted)
        )

    async def _turn(
        self, request: HttpRequest, what: str, answer_it: Callable[[], Awaitable[HttpAnswer]]
    ) -> HttpAnswer:
        async def decode() -> HttpAnswer:
            async with self._decoding:
                return await answer_it()

        try:
            answer = await unless_gone(request.until_gone, decode)
        except DecodeFailed as error:
            raise HttpProblem(422, f"{what} cannot be decoded: {error}; read its entries") from None
        if answer is None:
            raise HttpProblem(400, "the client ended its side before it was answered; keep it open")
        return answer

    async def _decoded(self, reading: Reading, kind: Kind, wanted: int) -> HttpAnswer:
        """Raises `HttpProblem` and `DecodeFailed`."""
        found = await _found(reading, kind, wanted)
        opening = await _can_open()
        events = await _in_slices(described(each, opening) for each in found.events)
        if kind == "batch":
            value = batch_json(events)
        elif blocks := blocks_json(events):
            value = blocks[0]
        else:
            raise HttpProblem(404, f"no block follows the bookmark block:{wanted}")
        parts = await _in_slices(json.JSONEncoder().iterencode({"number": wanted, **value}))
        return HttpAnswer(200, JSON, f"{''.join(parts)}\n".encode(), NOT_CACHED)

    async def _lines(self, reading: Reading, before: int | None, limit: int) -> HttpAnswer:
        """Raises `HttpProblem` and `DecodeFailed`."""
        opening = await _can_open()
        lines: list[dict[str, Any]] = []
        entries = 0

        async def after_newest(stop: int) -> int:
            """The number after that of the newest block before entry `stop`; damage has a line."""
            while True:
                try:
                    newest = await block_before(reading, stop)
                except DamagedAnswer as problem:
                    lines.append({"number": None, "error": problem.detail})
                    stop = min(stop - 1, problem.first)
                else:
                    return 0 if newest is None else int(newest["number"]) + 1

        if before is None:
            before = await after_newest(reading.total)
        while before and len(lines) < limit and entries < _MOST_ENTRIES:
            before -= 1
            try:
                found = await _found(reading, "block", before)
            except DamagedAnswer as problem:
                lines.append({"number": before, "error": problem.detail})
                # The page has many blocks.
                before = min(before, await after_newest(problem.first))
                continue
            except HttpProblem as problem:
                if problem.status == HTTPStatus.NOT_FOUND:
                    # Of an older part of the chain, or truncated since.
                    before = 0
                    break
                if problem.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                    raise
                lines.append({"number": before, "error": problem.detail})
                continue
            except DecodeFailed as error:
                lines.append({"number": before, "error": str(error)})
                continue
            [line] = await _in_slices(summary_json(each.events, opening) for each in [found])
            entries += len(found.events)
            if line is not None:
                lines.append(line)
        return json_answer({"blocks": lines, "before": before or None}, NOT_CACHED)

    async def _opened(self, reading: Reading, wanted: int) -> HttpAnswer:
        """Raises `HttpProblem` and `DecodeFailed`."""
        entry = await reading.entry(wanted)
        event = decode(entry, version=reading.stream.header.version)
        if not is_transaction(event):
            raise HttpProblem(404, f"entry {wanted} is not a transaction")
        _, value = described((entry, event), await _can_open())
        return json_answer({**value, "block": await block_before(reading, wanted)}, NOT_CACHED)


async def block_before(reading: Reading, number: int) -> dict[str, Any] | None:
    """The number, time and entry of the newest block that begins before entry `number`; None if
    no block begins in the entries that are searched. Raises `HttpProblem` and `DecodeFailed`."""
    broadcast, version = reading.broadcast, reading.stream.header.version

    def look(stop: int) -> tuple[Entry | None, int]:
        size, start = 0, stop
        while start and stop - start < _MOST_ENTRIES and size < _MOST_BYTES:
            end, start = start, max(0, start - _ENTRIES_A_STEP)
            for entry in reversed(list(reading.stream.entries(start, end))):
                size += len(entry.data)
                if is_block_start(entry.type, version):
                    return entry, start
        return None, start

    async def read() -> tuple[Entry | None, int]:
        stop = min(number, reading.total)
        if reading.stream.header.stream_type != STREAM_TYPE_SEQUENCER or not stop:
            return None, 0
        return await broadcast.cold.run_verified(
            look, stop, lambda found: broadcast.pages_of(found[1], stop - 1)
        )

    entry, _ = await reading.steadily(read)
    if entry is None:
        return None
    [line] = [summary_json([(entry, decode(entry, version=version))], opening=False)]
    return line and {name: line[name] for name in ("number", "entry", "batch", "timestamp")}


async def _can_open() -> bool:
    """Whether the packages are installed that open transactions."""
    try:
        await trio.to_thread.run_sync(load_tools)
    except ExtraMissing:
        return False
    return True


async def _found(reading: Reading, kind: Kind, wanted: int) -> _Found:
    """The events of a block or batch. Raises `HttpProblem` and `DecodeFailed`."""
    broadcast = reading.broadcast

    async def read() -> _Found:
        first = await reading.bookmark(f"{kind}:{wanted}")
        return await broadcast.cold.run_verified(
            partial(_read, reading, kind),
            first,
            lambda found: broadcast.pages_of(first, found.last),
        )

    return await reading.steadily(read)


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
