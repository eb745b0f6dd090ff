"""Search for blocks and transactions by hash or address: /v1/search.

Owns when the index is built, and at which part of a processor. `hash_index.py` has the index.
"""

from __future__ import annotations

import math
import re
import sqlite3
import time
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import trio

from datastreamer.errors import DatastreamerError, DecodeFailed, ExtraMissing
from datastreamer.format import STREAM_TYPE_SEQUENCER, U64_MAX
from datastreamer.http.answers.entries import NOT_CACHED
from datastreamer.http.answers.hash_index import HashIndex, IndexState, key_of, names_of, pairs_of
from datastreamer.http.answers.reading import DamagedAnswer, HttpSource, Reading
from datastreamer.http.port.messages import HttpAnswer, HttpProblem, HttpRequest, json_answer
from datastreamer.printable import counted
from datastreamer.server.ticks import until_tick
from datastreamer.storage.read.spans import Cursor
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.block_json import is_transaction
from datastreamer.zkevm.decoding import as_json, decode
from datastreamer.zkevm.transactions import load_tools

_NAME: Final = re.compile("0x([0-9a-f]{40}|[0-9a-f]{64})", re.IGNORECASE)
_PIECE: Final = 16 * 1024
_COMMIT_SECONDS: Final = 2.0
# Interval between attempts to read what was damaged.
_AGAIN_SECONDS: Final = 60.0
# It sleeps this many times as long as it works: a fifth of one processor.
_REST: Final = 4
_ROWS: Final = 25
_MOST_ROWS: Final = 100


class Explorer:
    """Answers /v1/search; `run` builds the index."""

    def __init__(self, source: HttpSource, *, at_once: bool) -> None:
        """`at_once`: build the index now, not when something is searched for."""
        self._source = source
        self._wanted = trio.Event()
        self._at_once = at_once
        self._index: HashIndex | None = None
        self._stream: DataStream | None = None
        # The entries below `next` are in the index, as they were at the epoch that is `seen`.
        self._next = 0
        self._seen: int | None = None
        # What this process has committed last.
        self._epoch: int | None = None
        self._trouble = ""
        # When to try the entries again that could not be read.
        self._again = 0.0

    async def run(self) -> None:
        """Build the index until cancelled, from the first search on."""
        if not self._at_once:
            await self._wanted.wait()
        try:
            while True:
                try:
                    more = await self._extend()
                    self._trouble = ""
                except HttpProblem as problem:
                    more, self._trouble = False, problem.detail
                except (DatastreamerError, OSError, sqlite3.Error) as error:
                    more, self._trouble = False, f"the index of hashes cannot be built: {error}"
                if not more:
                    await until_tick()
        finally:
            if self._index is not None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._index.close)

    async def _extend(self) -> bool:
        """Add entries for some seconds; whether there are more. Raises what the index raises."""
        reading = self._source.reading()
        stream = reading.stream
        if stream.header.stream_type != STREAM_TYPE_SEQUENCER:
            raise HttpProblem(
                422,
                f"only streams of type {STREAM_TYPE_SEQUENCER}, a sequencer's, can be searched for "
                f"hashes and addresses, and this one is of type {stream.header.stream_type}",
            )
        index = self._index
        if index is None or stream is not self._stream:
            await trio.to_thread.run_sync(load_tools)
            if index is not None:
                await trio.to_thread.run_sync(index.close)
            index = await trio.to_thread.run_sync(HashIndex, str(stream.path))
            self._index, self._stream, self._epoch, self._seen = index, stream, None, None
            self._again = 0.0
        due = time.monotonic() >= self._again
        if (self._epoch, self._next) == (stream.epoch, reading.total) and not due:
            return False
        if not await trio.to_thread.run_sync(index.begin):
            state = await trio.to_thread.run_sync(index.state)
            if state is not None:
                self._next, self._seen = state.next, state.epoch
            return False
        committed = False
        try:
            first, epoch = await trio.to_thread.run_sync(self._agree, index, stream)
            self._next, self._seen = first, epoch
            until = time.monotonic() + _COMMIT_SECONDS
            gaps = await trio.to_thread.run_sync(index.unread) if due else []
            pause = _AGAIN_SECONDS
            for start, stop in gaps:
                at = start
                while at < stop and time.monotonic() < until:
                    at = await _add(reading, index, at, stop, gap=True)
                pause = pause if at == stop else 0.0
            while self._next < reading.total and time.monotonic() < until:
                self._next = await _add(reading, index, self._next, reading.total)
            reading.refresh()
            if stream.epoch == epoch and not reading.gone:
                # Without records in the file, the epoch is this process's own.
                recorded = stream.recorded_epoch
                state = IndexState(stream.stream_id, -1 if recorded is None else epoch, self._next)
                if self._next > first or epoch != self._epoch or gaps:
                    await trio.to_thread.run_sync(index.commit, state)
                unread = await trio.to_thread.run_sync(index.unread)
                self._again = time.monotonic() + pause if unread else math.inf
                self._epoch, committed = epoch, True
        finally:
            if not committed:
                self._seen = None
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(index.roll_back)
        return self._next < reading.total or not committed

    def _agree(self, index: HashIndex, stream: DataStream) -> tuple[int, int]:
        """Forget what is not in the stream any more; the next entry to add, and the epoch."""
        state, epoch = index.state(), stream.epoch
        first = 0
        if state is not None and state.stream == stream.stream_id:
            known = state.epoch if state.epoch >= 0 else self._epoch
            if epoch == known:
                first = state.next
            elif state.epoch >= 0 and (changes := stream.recorded_changes(state.epoch)) is not None:
                first = min([state.next, *(change.start for change in changes)])
            if first > stream.total_entries:
                first = 0
        if state is None or first < state.next:
            index.cut(first)
        return first, epoch

    async def search(self, request: HttpRequest) -> HttpAnswer:
        """The newest blocks and transactions that a hash or an address leads to."""
        parameters = request.parameters("before", "limit")
        before = parameters.number("before", most=U64_MAX >> 1)
        limit = parameters.number("limit", most=_MOST_ROWS, least=1) or _ROWS
        text = request.found["key"]
        if not _NAME.fullmatch(text):
            raise HttpProblem(
                400, f"a hash is 0x and 64 hex digits, an address 40, not {text!r:.80}"
            )
        wanted = bytes.fromhex(text[2:])
        reading = self._source.reading()
        self._wanted.set()
        rows: list[dict[str, Any]] = []
        entries: list[int] = []
        unread: list[tuple[int, int]] = []
        # Before the search: what is added meanwhile may not be found.
        searched = self._next if self._seen == reading.stream.epoch else 0
        if self._index is not None:
            most = U64_MAX >> 1 if before is None else before
            try:
                unread = await trio.to_thread.run_sync(self._index.unread)
                entries = await trio.to_thread.run_sync(
                    self._index.find, key_of(wanted), most, limit
                )
            except sqlite3.Error as error:
                raise HttpProblem(503, f"the index of hashes cannot be read: {error}") from None
        for entry in entries:
            if (row := await _row(reading, entry, wanted)) is not None:
                rows.append(row)
            await trio.lowlevel.checkpoint()
        total, lacking = reading.total, sum(stop - first for first, stop in unread)
        complete = searched >= total and not lacking
        # (Until all is committed, it is that of the last attempt.)
        trouble = "" if complete and total else self._trouble
        if lacking and not trouble:
            trouble = (
                f"{counted(lacking)} from entry {unread[0][0]} on cannot be read, since their "
                "pages are damaged; they are searched once these are restored"
            )
        value = {
            "found": rows,
            "before": entries[-1] if len(entries) == limit else None,
            "complete": complete,
            "searched_entries": min(searched, total),
            "unread_entries": lacking,
            "total_entries": total,
            "trouble": trouble,
        }
        return json_answer(value, NOT_CACHED)


async def _add(
    reading: Reading, index: HashIndex, first: int, stop: int, *, gap: bool = False
) -> int:
    """Add entries from `first` on, or note that they cannot be read; the next one to add, `stop` at
    most. `gap`: those up to `stop` could not be read before. Raises what the index raises, and
    `HttpProblem`."""
    began, pairs = time.monotonic(), None
    encode = partial(pairs_of, reading.stream.header.version)
    try:
        pairs, _, end = await reading.piece(encode, Cursor(0, first), stop, _PIECE, inline=False)
    except DamagedAnswer as problem:
        end = min(stop, await reading.after_damage(problem, first))
    await trio.to_thread.run_sync(index.add, pairs, first, end, stop if gap else end)
    await trio.sleep(_REST * (time.monotonic() - began))
    return end


async def _row(reading: Reading, number: int, wanted: bytes) -> dict[str, Any] | None:
    """What entry `number` is; None if it has not the hash or address, or cannot be decoded. Raises
    `HttpProblem`."""
    try:
        entry = await reading.entry(number)
        event = decode(entry, version=reading.stream.header.version)
        if wanted not in names_of(event):
            return None
    except (DecodeFailed, ExtraMissing):
        return None
    except DamagedAnswer as problem:
        return {"kind": "damaged", "entry": number, "error": problem.detail}
    except HttpProblem as problem:
        if problem.status != HTTPStatus.NOT_FOUND:
            raise
        return None  # truncated since
    if is_transaction(event):
        values = event.open().as_json()
        names = ("hash", "sender", "to", "value", "gas", "nonce")
        return {"kind": "transaction", "entry": number, **{name: values[name] for name in names}}
    return {"kind": "block", "entry": number, "number": as_json(event)["number"]}
