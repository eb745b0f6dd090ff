"""Answers with many entries, in the form that the client asks for.

Owns where an answer begins and ends, its caching, and that it holds one piece while it is sent.
Entries as they are on the wire are sent from the file, as to TCP clients.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import trio
from xxhash import xxh3_128_hexdigest

from datastreamer._codec import EntryBatch
from datastreamer.errors import DamagedFile, StreamClosed, UnknownEntry
from datastreamer.format import U32_MAX, U64_MAX
from datastreamer.http.answers.entries import NOT_CACHED, CachePolicy
from datastreamer.http.answers.formats import (
    NAMES,
    NDJSON,
    OCTETS,
    Compressor,
    EntryForm,
    chosen_encoding,
    chosen_kind,
    compressor_of,
    form_of,
    name_of,
)
from datastreamer.http.answers.reading import Encode, HttpSource, Piece, Reading
from datastreamer.http.port.messages import (
    JSON,
    AnswerCut,
    BodyOutput,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
    Parameters,
)
from datastreamer.protocol.commands import BatchQuery
from datastreamer.selection.clauses import Selection
from datastreamer.server.answers.batch_reads import BatchAnswers
from datastreamer.server.streaming.catch_up import Sender
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.server.streaming.turns import EntryChange
from datastreamer.storage.read.spans import Cursor

MOST_JSON: Final = 10_000
"""The most entries in an answer of JSON."""

# The first piece is read at once and in the event loop, the others in threads.
_FIRST_BYTES: Final = 32 * 1024
_PIECE_BYTES: Final = 256 * 1024
_RAW_BYTES: Final = 16 << 20
# Smaller answers are not compressed.
_COMPRESSED_BYTES: Final = 1024
# The first look at whether a client has all of an answer is after this; each later one waits twice
# as long, up to the second.
_ACKNOWLEDGE_SECONDS: Final = (0.0005, 0.01)


class WantedRange(NamedTuple):
    """The entries that a client asks for; None: all of the range. `closed`: later commits
    do not change it. `rest` is where a further request continues; None if there is nothing."""

    entries: range
    where: Selection | None
    closed: bool
    rest: str | None


class EntryRanges:
    """Answers `GET /v1/entries`."""

    def __init__(self, source: HttpSource, cache: CachePolicy) -> None:
        self._source = source
        self._cache = cache

    async def entries(self, request: HttpRequest) -> HttpAnswer:
        parameters = request.parameters(
            "from", "to", "limit", "format", repeated=["type", "prefix"]
        )
        kind = chosen_kind(request, parameters.choice("format", *NAMES))
        encoding = chosen_encoding(request) if kind in (JSON, NDJSON) else None
        reading = self._source.reading()
        wanted = await self._range(reading, parameters, kind)
        if kind == OCTETS and wanted.where:
            raise HttpProblem(
                400, "type and prefix are for the other formats; leave them out for raw"
            )
        answer = None
        if kind != OCTETS and request.method != "HEAD":
            form = await trio.to_thread.run_sync(form_of, kind, reading.stream.time_marks)
            answer = FormedRange(reading, wanted, form)
            await answer.begin()
        # Now: the tag is of the epoch of what was read.
        headers = list(NOT_CACHED)
        if wanted.closed:
            kinds = _tagged(wanted.where)
            first, stop = wanted.entries.start, wanted.entries.stop
            named = f"{first}-{stop}{kinds}-{name_of(kind)}-{encoding or ''}"
            headers = list(self._cache.headers(reading, named))
        if wanted.rest is not None:
            headers.append(("Link", f'<{wanted.rest}>; rel="next"'))
        if answer is None:
            return HttpAnswer(200, kind, RawRange(reading, wanted.entries).send, headers)
        if encoding is not None and (answer.unfinished or answer.size > _COMPRESSED_BYTES):
            headers.append(("Content-Encoding", encoding))
            answer.compressor = compressor_of(encoding)
        elif not answer.unfinished:
            return HttpAnswer(200, kind, answer.whole, headers)
        return HttpAnswer(200, kind, answer.send, headers)

    async def _range(self, reading: Reading, parameters: Parameters, kind: str) -> WantedRange:
        """Raises `HttpProblem` for parameters that make no range."""
        begin = parameters.text("from") or "0"
        first = await reading.first(begin)
        last = parameters.number("to")
        most = MOST_JSON if kind == JSON else None
        limit = parameters.number("limit", least=1, most=most or U64_MAX) or most
        where = parameters.selection()
        total = reading.total
        if first > total:
            raise HttpProblem(
                416,
                f"the stream has {total} entries, so there is none from {first} on; wait for "
                f"later commits with /v1/follow?from={total}",
                [("Content-Range", f"entries */{total}")],
            )
        if last is not None and last < first:
            raise HttpProblem(400, f"to ({last}) precedes from ({first})")
        end = total if last is None else min(last + 1, total)
        stop = end if limit is None else min(end, first + limit)
        closed = begin.isdigit() and (stop < end or (last is not None and stop == last + 1))
        rest = None
        if stop < end:
            named = f"/v1/entries?from={stop}"
            named += "" if last is None else f"&to={last}"
            named += "" if limit is None else f"&limit={limit}"
            named += f"&format={name_of(kind)}"
            for name in ("type", "prefix"):
                named += "".join(f"&{name}={each}" for each in parameters.texts(name))
            rest = named
        return WantedRange(range(first, stop), where, closed, rest)


class FormedRange:
    """A range in a form that is made of the entries' bytes."""

    def __init__(self, reading: Reading, wanted: WantedRange, form: EntryForm) -> None:
        self._reading = reading
        self._range = wanted.entries
        self._form = form
        self._encode = _selecting(form.piece, wanted.where)
        self._epoch = 0
        # Read, and not sent yet.
        self._piece = Piece(b"", 0, wanted.entries.start)
        self.compressor: Compressor | None = None

    async def begin(self) -> None:
        """Read the first piece. Raises `HttpProblem`."""
        with self._reading.kept(self._range):
            try:
                if self._range:
                    begin = Cursor(0, self._range.start)
                    self._piece = await self._reading.piece(
                        self._encode, begin, self._range.stop, _FIRST_BYTES, inline=True
                    )
            except UnknownEntry:
                self._reading.broken = True
            self._epoch = self._reading.stream.epoch
            if self._reading.broken:
                raise HttpProblem(
                    409, "the stream was truncated or updated in this range; ask again"
                )

    @property
    def unfinished(self) -> bool:
        """Whether the first piece is not all."""
        return self._piece.number < self._range.stop

    @property
    def size(self) -> int:
        """Bytes of the first piece."""
        return len(self._piece.data)

    @property
    def whole(self) -> bytes:
        """The body, if the first piece is all."""
        return self._form.begin + self._piece.data + self._form.end

    async def send(self, output: BodyOutput) -> None:
        """Send the body. Raises `AnswerCut` if an entry of the range was changed meanwhile, or is
        damaged."""
        reading, form = self._reading, self._form
        # A change that is under way was announced before this range is among the readers.
        await reading.broadcast.turns.settled()
        with reading.kept(self._range):
            # Of changes since the first piece it is not known which entries they affect.
            reading.broken = reading.broken or reading.stream.epoch != self._epoch
            await self._pass(output, form.begin)
            begun = False
            while not reading.broken:
                place = Cursor(self._piece.offset, self._piece.number)
                if self._piece.data:
                    await self._pass(output, self._taken(form.separator if begun else b""))
                    begun = True
                if place.number >= self._range.stop:
                    await self._pass(output, form.end, last=True)
                    return
                try:
                    self._piece = await reading.piece(
                        self._encode, place, self._range.stop, _PIECE_BYTES, inline=False
                    )
                except (HttpProblem, UnknownEntry):
                    break
            raise AnswerCut

    def _taken(self, separator: bytes) -> bytes:
        """The piece after `separator`. Nothing else holds it then: a client that reads nothing
        costs one piece."""
        data = separator + self._piece.data
        self._piece = self._piece._replace(data=b"")
        return data

    async def _pass(self, output: BodyOutput, data: bytes, *, last: bool = False) -> None:
        compressor = self.compressor
        if compressor is not None and (data or last):

            def compress() -> bytes:
                packed = compressor.compress(data)
                return packed + compressor.flush() if last else packed

            data = await self._reading.compress(compress, len(data))
        await output.send(data)


def _tagged(where: Selection | None) -> str:
    """A selection as a part of a tag."""
    if where is None:
        return ""
    if all(isinstance(clause, int) for clause in where):
        return "".join(f".{each}" for each in where)
    return f".{xxh3_128_hexdigest(repr(where).encode())}"


def _selecting(encode: Encode, where: Selection | None) -> Encode:
    """`encode` of the selected entries; nothing if there is none."""
    if where is None:
        return encode

    def selecting(batch: EntryBatch) -> bytes:
        found = batch.select(where)
        return encode(found) if len(found) else b""

    return selecting


class RawRange:
    """A range as it is on the wire, sent from the file."""

    def __init__(self, reading: Reading, entries: range) -> None:
        self._reading = reading
        self._range = entries
        self._sender: Sender | None = None
        self._output: BodyOutput | None = None
        self._epoch = reading.stream.epoch

    def changed(self, change: EntryChange) -> None:
        """The client must not receive a part of one version and a part of another, also of bytes
        that the kernel holds by reference."""
        before = change.stop is not None and change.stop <= self._range.start
        if before or change.start >= self._range.stop:
            return
        self.lost()

    def lost(self) -> None:
        if self._output is not None:
            self._output.transport.reset()

    async def send(self, output: BodyOutput) -> None:
        """Send the body. Raises `AnswerCut` if the range was changed before, and for damage; the
        connection is reset if it is changed meanwhile."""
        broadcast, server = self._reading.broadcast, self._reading.server
        transport = output.transport
        sender = Sender(broadcast, transport, ClientOutput(transport, output.counts))
        limits = dataclasses.replace(
            server.limits, max_batch_bytes=_RAW_BYTES, max_batch_count=U32_MAX
        )
        answers = BatchAnswers(broadcast, limits)
        self._output, at = output, self._range.start
        await broadcast.turns.settled()
        server.other_readers[self] = None
        try:
            if broadcast.stream.epoch != self._epoch:
                raise AnswerCut
            while at < self._range.stop:
                query = BatchQuery(at, max_count=self._range.stop - at)
                answer = await answers.read(query)
                if answer is None:
                    raise AnswerCut
                if answer.data is not None:
                    await output.send(answer.data)
                else:
                    await output.begin_piece(answer.size)
                    sender.begin_part(answer.start, answer.stop)
                    await sender.run()
                    sender.end_part()
                    await output.end_piece()
                at = answer.stop.number
            await output.end()
            # Until the client has all of it, a change resets the connection.
            wait, longest = _ACKNOWLEDGE_SECONDS
            while sender.refers:  # the kernel reports no event
                await trio.sleep(wait)
                wait = min(2 * wait, longest)
        except (DamagedFile, StreamClosed) as error:
            if isinstance(error, DamagedFile):
                await self._reading.damaged(error)
            raise AnswerCut from None
        finally:
            del server.other_readers[self]
            broadcast.forget(sender)
