"""A relay's older entries, compared with its upstream's by hashes while both go on.

Owns the search for entries that differ, its pace, and what it says of its progress. What becomes
of an entry that differs is `applying`'s. Writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from datastreamer._codec import Entry
from datastreamer.errors import PeerError, UnknownEntry
from datastreamer.net.applying import Applying, Compared, Rewritten
from datastreamer.net.client import Client
from datastreamer.net.keeping import Keeping
from datastreamer.storage.ranges import hash_range
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

BYTES_PER_SECOND: Final = 64 << 20
"""How many bytes of entries are compared per second, at most: both sides read them."""

_PIECE_BYTES: Final = 16 << 20
# Ranges of at most this many entries are fetched and compared one by one.
_FEW: Final = 16
_PAUSE_SECONDS: Final = 5.0
_SAY_SECONDS: Final = 10.0

Connect = Callable[[], AbstractAsyncContextManager[Client]]


class Comparing:
    """The comparison of the entries that `applying` calls doubtful, on connections of its own."""

    def __init__(
        self,
        connect: Connect,
        stream: DataStream,
        keeping: Keeping,
        applying: Applying,
        on_progress: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._stream = stream
        self._keeping = keeping
        self._applying = applying
        self._on_progress = on_progress
        self._heard = trio.Event()

    async def run(self) -> None:
        """Compare all of them, from the first to the last. A connection that is lost is made
        again. Raises `Rewritten` where an entry differs by more than an update."""
        agreement = self._applying.agreement
        if agreement is None or not self._applying.doubtful:
            return
        token = trio.lowlevel.current_trio_token()
        self._applying.on_heard = lambda: token.run_sync_soon(self._note_heard)
        low, high, said = agreement.low, agreement.high, ""
        _log.info("entries %d to %d are compared with the upstream's by hashes", low, high - 1)
        spoke = trio.current_time()
        while low < high:
            try:
                async with self._connect() as client:
                    await self._ensure_same(client, agreement.stream_id)
                    while low < high:
                        began, first = trio.current_time(), low
                        found, low = await self._compare_piece(client, low, high)
                        await self._keeping.compared(Compared(tuple(found), low))
                        self._on_progress()
                        if (now := trio.current_time()) - spoke >= _SAY_SECONDS:
                            spoke = now
                            _log.info("compared with the upstream's: entry %d of %d", low, high)
                        await trio.sleep(max(0.0, self._pause(first, low) - (now - began)))
            except (PeerError, UnknownEntry) as error:
                # Where entries were cut off there, the streaming hears of it.
                if said != str(error):
                    said = str(error)
                    _log.warning("the comparison with the upstream waits: %s", said)
                await trio.sleep(_PAUSE_SECONDS)
        _log.info("all %d entries were compared with the upstream's", high)

    def _note_heard(self) -> None:
        self._heard.set()
        self._heard = trio.Event()

    async def _ensure_same(self, client: Client, stream_id: bytes) -> None:
        if (await client.capabilities()).stream_id != stream_id:
            raise PeerError(
                f"{client.peer} answers from another file than the one that is streamed"
            )

    def _pause(self, first: int, end: int) -> float:
        """How many seconds the comparison of these entries is to take, at least."""
        reader = self._stream.reader
        return (reader.cursor(end).offset - reader.cursor(first).offset) / BYTES_PER_SECOND

    async def _compare_piece(self, client: Client, low: int, high: int) -> tuple[list[Entry], int]:
        """The upstream's entries of the next piece that differ from ours, and where it ends."""
        end = await self._differs(client, low, high)
        return ([], end) if end >= 0 else (await self._find(client, low, -end), -end)

    async def _differs(self, client: Client, first: int, end: int) -> int:
        """Where the piece ends that was compared; negative where its hashes differ."""
        theirs = await client.range_hash(first, end, _PIECE_BYTES)
        _, digest = await trio.to_thread.run_sync(
            hash_range, self._stream.reader, first, theirs.end, 1 << 62
        )
        return theirs.end if digest == theirs.digest else -theirs.end

    async def _find(self, client: Client, first: int, end: int) -> list[Entry]:
        """The upstream's entries from `first` up to `end` that differ from ours, by bisection.

        Raises `Rewritten` where these are too many, or no updates.
        """
        found: list[Entry] = []
        ranges = [(first, end)]
        while ranges:
            first, end = ranges.pop()
            if end - first <= _FEW:
                found += await self._fetch(client, first, end)
                if found and not self._applying.takes_as_updates(found):
                    raise Rewritten(
                        f"{client.peer} tells another history: {len(found)} of its entries from "
                        f"entry {found[0].number} on are not those that are here",
                        found[0].number,
                    )
                continue
            middle = (first + end) // 2
            for low, high in ((middle, end), (first, middle)):
                upto = low
                while upto < high:
                    part, upto = upto, await self._differs(client, upto, high)
                    if upto < 0:
                        upto = -upto
                        ranges.append((part, upto))
        return found

    async def _fetch(self, client: Client, first: int, end: int) -> list[Entry]:
        """Those of the upstream's entries that are not ours, and were not changed meanwhile."""
        async with client.entries_by_number(range(first, end)) as entries:
            theirs = [entry async for entry in entries]
        # A change that one of these shows already is reported, sooner or later.
        epoch = (await client.range_hash(first, first + 1)).epoch
        while self._applying.heard_epoch < epoch:
            heard = self._heard
            if self._applying.heard_epoch < epoch:
                await heard.wait()
        ours = await trio.to_thread.run_sync(self._ours, first, end)
        return [
            one
            for one, other in zip(theirs, ours, strict=True)
            if one != other and not self._applying.is_named(one.number)
        ]

    def _ours(self, first: int, end: int) -> list[Entry]:
        return [self._stream.entry(number) for number in range(first, end)]
