"""Blocks and batches of a zkEVM stream, decoded, with their transactions.

Owns how much of the stream is read for one answer. `zkevm` knows which entries belong together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from datastreamer._codec import Entry
from datastreamer.errors import DecodeFailed, ExtraMissing
from datastreamer.http.answers.entries import NOT_CACHED
from datastreamer.http.answers.reading import HttpSource, Reading
from datastreamer.http.port.messages import (
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    json_answer,
    number,
)
from datastreamer.zkevm.block_json import batch_json, blocks_json, marked_entries
from datastreamer.zkevm.bookmark_keys import Kind

_MOST_ENTRIES: Final = 10_000
_MOST_BYTES: Final = 4 << 20


class _Decoded(NamedTuple):
    answer: HttpAnswer | None
    last: int


class BlockQueries:
    """Answers queries for blocks and batches."""

    def __init__(self, source: HttpSource) -> None:
        self._source = source

    async def block(self, request: HttpRequest) -> HttpAnswer:
        return await self._answer(request, "block")

    async def batch(self, request: HttpRequest) -> HttpAnswer:
        return await self._answer(request, "batch")

    async def _answer(self, request: HttpRequest, kind: Kind) -> HttpAnswer:
        request.parameters()
        wanted = number(f"the number of a {kind}", request.found["number"])
        reading = self._source.reading()
        broadcast = reading.broadcast

        async def read() -> _Decoded:
            first = await reading.bookmark(f"{kind}:{wanted}")
            decode = partial(_decoded, reading, kind, wanted)
            return await broadcast.cold.run_verified(
                decode, first, lambda found: broadcast.pages_of(first, found.last)
            )

        try:
            found = await reading.consistently(read)
        except DecodeFailed as error:
            raise HttpProblem(
                422, f"{kind} {wanted} cannot be decoded: {error}; read its entries"
            ) from None
        if found.answer is None:
            raise HttpProblem(404, f"no block follows the bookmark block:{wanted}")
        return found.answer


def _decoded(reading: Reading, kind: Kind, wanted: int, first: int) -> _Decoded:
    """The block or batch `wanted`, whose bookmark is entry `first`. In a thread."""
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
    try:
        value = _json(kind, found, opening=True)
    except ExtraMissing:
        value = _json(kind, found, opening=False)
    if value is None:
        return _Decoded(None, last)
    return _Decoded(json_answer({"number": wanted, **value}, NOT_CACHED), last)


def _json(kind: Kind, found: list[Any], *, opening: bool) -> dict[str, Any] | None:
    if kind == "batch":
        return batch_json(found, opening)
    blocks = blocks_json(found, opening)
    return blocks[0] if blocks else None
