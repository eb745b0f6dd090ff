"""A relay's older entries, compared with its upstream's by hashes while both go on.

Owns the search for entries that differ, its pace, and what it says of its progress. What becomes
of an entry that differs is `applying`'s. Writes nothing.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from datastreamer._codec import Entry
from datastreamer.client.async_client import Client
from datastreamer.errors import DamagedFile, NotFound, PeerError, UpstreamRewritten
from datastreamer.relay.apply_changes import ChangeApplier, Compared
from datastreamer.relay.writer import RelayWriter
from datastreamer.storage.read.range_hash import hash_range
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

BYTES_PER_SECOND: Final = 64 << 20
"""How many bytes of entries are compared per second, at most: both sides read them."""

_PIECE_BYTES: Final = 16 << 20
# Ranges of at most this many entries are fetched and compared one by one.
_FEW: Final = 16
_PAUSE_SECONDS: Final = 5.0
_WAIT_SECONDS: Final = 0.05
_SAY_SECONDS: Final = 10.0

Connect = Callable[[], AbstractAsyncContextManager[Client]]


class Comparison:
    """The comparison of the entries that `applying` calls doubtful, on connections of its own."""

    def __init__(
        self,
        connect: Connect,
        stream: DataStream,
        keeping: RelayWriter,
        applying: ChangeApplier,
        on_progress: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._stream = stream
        self._keeping = keeping
        self._applying = applying
        self._on_progress = on_progress
        self._heard = trio.Event()
        # The next entry to compare, and the numbers of those before it that differ: at most as
        # many as may be updates.
        self._low = 0
        self._found = array("Q")

    async def run(self) -> None:
        """Compare all of them, from the first to the last, then replace those that differ. A
        connection that is lost is made again.

        Raises `UpstreamRewritten` if entries differ by more than updates; then no entry is
        replaced.
        """
        agreement = self._applying.agreement
        if agreement is None or not self._applying.doubtful:
            return
        token = trio.lowlevel.current_trio_token()
        self._applying.on_heard = lambda: token.run_sync_soon(self._note_heard)
        self._low, high, said = agreement.low, agreement.high, ""
        _log.info(
            "entries %d to %d are compared with the upstream's by hashes", self._low, high - 1
        )
        while self._applying.doubtful:
            try:
                async with self._connect() as client:
                    await self._ensure_same(client, agreement.stream_id)
                    await self._compare(client, high)
                    await self._replace(client, high)
            except (PeerError, NotFound) as error:
                # Where entries were cut off there, the streaming hears of it.
                if said != str(error):
                    said = str(error)
                    _log.warning("the comparison with the upstream waits: %s", said)
                await trio.sleep(_PAUSE_SECONDS)
        _log.info("all %d entries were compared with the upstream's", high)

    async def _compare(self, client: Client, high: int) -> None:
        """Find those that differ, from where this is on."""
        spoke = trio.current_time()
        while self._low < high:
            began, first = trio.current_time(), self._low
            found, low = await self._compare_piece(client, first, high)
            self._found.extend(found)
            self._low = low
            if not self._found:
                await self._keeping.compared(Compared((), low))
            self._on_progress()
            if (now := trio.current_time()) - spoke >= _SAY_SECONDS:
                spoke = now
                _log.info("compared with the upstream's: entry %d of %d", low, high)
            await trio.sleep(max(0.0, self._pause(first, low) - (now - began)))

    async def _replace(self, client: Client, high: int) -> None:
        """Replace those that differ, now that all are known to be updates."""
        while self._found:
            updates = await self._fetch(client, self._found[:_FEW])
            await self._apply(Compared(tuple(updates), None))
            del self._found[:_FEW]
        await self._apply(Compared((), high))
        self._on_progress()

    async def _apply(self, found: Compared) -> None:
        await self._keeping.compared(found)
        # Where an operation is being received, for its end.
        while self._applying.waiting:  # noqa: ASYNC110 - a thread may have its end
            await trio.sleep(_WAIT_SECONDS)

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

    async def _compare_piece(self, client: Client, low: int, high: int) -> tuple[array[int], int]:
        """The numbers of the entries of the next piece that differ, and where it ends."""
        end = await self._differs(client, low, high)
        return (array("Q"), end) if end >= 0 else (await self._find(client, low, -end), -end)

    async def _differs(self, client: Client, first: int, end: int) -> int:
        """Where the piece ends that was compared; negative where its hashes differ."""
        size, reader = _PIECE_BYTES, self._stream.reader
        while True:
            theirs = await client.range_hash(first, end, size)
            changes = reader.changes
            try:
                _, digest = await trio.to_thread.run_sync(
                    hash_range, reader, first, theirs.end, 1 << 62
                )
                break
            except (DamagedFile, NotFound):
                if reader.changes == changes:
                    raise
            # An update was applied meanwhile: what is read faster is more likely to be left alone.
            size = max(1, size // 4)
        return theirs.end if digest == theirs.digest else -theirs.end

    async def _find(self, client: Client, first: int, end: int) -> array[int]:
        """The numbers from `first` up to `end` of the entries that differ, by bisection.

        Raises `UpstreamRewritten` where these are too many, or no updates.
        """
        found = array("Q")
        ranges = [(first, end)]
        while ranges:
            first, end = ranges.pop()
            if end - first <= _FEW:
                differing = await self._fetch(client, range(first, end))
                others = len(self._found) + len(found)
                found.extend(entry.number for entry in differing)
                if differing and not self._applying.takes_as_updates(differing, others):
                    number = (self._found or found)[0]
                    raise UpstreamRewritten(
                        f"{client.peer} tells another history: {others + len(differing)} of its "
                        f"entries from entry {number} on are not those that are here",
                        number,
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

    async def _fetch(self, client: Client, numbers: Sequence[int]) -> list[Entry]:
        """Those of the upstream's entries that are not ours, and were not changed meanwhile."""
        async with client.entries_by_number(numbers) as entries:
            theirs = [entry async for entry in entries]
        # A change that one of these shows already is reported, sooner or later.
        epoch = (await client.range_hash(numbers[0], numbers[0] + 1)).epoch
        while self._applying.heard_epoch < epoch:
            heard = self._heard
            if self._applying.heard_epoch < epoch:
                await heard.wait()
        ours = await trio.to_thread.run_sync(self._ours, numbers)
        return [
            one
            for one, other in zip(theirs, ours, strict=True)
            if one != other and not self._applying.is_named(one.number)
        ]

    def _ours(self, numbers: Sequence[int]) -> list[Entry]:
        return [self._stream.entry(number) for number in numbers]
