"""Compares a relay's older entries with its upstream's by hashes, while streaming continues.

Owns the search for entries that differ, its rate, and its progress in the log. `apply_changes.py`
replaces entries that differ. Writes nothing.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from datastreamer._codec import Entry
from datastreamer.errors import DamagedFile, EntriesDamaged, NotFound, PeerError, UpstreamRewritten
from datastreamer.printable import counted
from datastreamer.relay.apply_changes import ChangeApplier, Compared, ensure_whole, reading
from datastreamer.relay.client import RelayClient
from datastreamer.relay.writer import RelayWriter
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

BYTES_PER_SECOND: Final = 64 << 20
"""Maximum bytes of entries compared per second: both sides read them."""

_PIECE_BYTES: Final = 16 << 20
# Ranges of at most this many entries are fetched and compared one by one.
_FEW: Final = 16
_PAUSE_SECONDS: Final = 5.0
_DAMAGED_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = 0.05
_SAY_SECONDS: Final = 10.0

Connect = Callable[[], AbstractAsyncContextManager[RelayClient]]


class Comparison:
    """Compares the entries that `change_applier` lists as uncompared, on connections of its own."""

    def __init__(
        self,
        connect: Connect,
        stream: DataStream,
        writer: RelayWriter,
        change_applier: ChangeApplier,
        on_progress: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._stream = stream
        self._writer = writer
        self._change_applier = change_applier
        self._on_progress = on_progress
        self._report_arrived = trio.Event()
        # The next entry to compare, and the numbers of entries before it that differ: at most as
        # many as can be updates.
        self._low = 0
        self._found = array("Q")

    async def run(self) -> None:
        """Compare all of them, from the first to the last, then replace those that differ.
        Reconnects when the connection is lost.

        Raises `UpstreamRewritten` if entries differ by more than updates; then no entry is
        replaced.
        """
        agreement = self._change_applier.agreement
        if agreement is None or not self._change_applier.uncompared:
            return
        token = trio.lowlevel.current_trio_token()
        self._change_applier.on_report = lambda: token.run_sync_soon(self._notify_report)
        self._low, high, logged = agreement.low, agreement.high, ""
        _log.info("comparing entries %d to %d with the upstream's by hashes", self._low, high - 1)
        while self._change_applier.uncompared:
            try:
                async with self._connect() as client:
                    await self._ensure_same(client, agreement.stream_id)
                    await self._compare(client, high)
                    await self._replace(client, high)
            except EntriesDamaged as error:
                # They must not replace entries here.
                if logged != str(error):
                    logged = str(error)
                    _log.error(
                        "entries %d to %d are left uncompared: the upstream reports damage: %s",
                        *(self._low, high - 1, error),
                    )
                await trio.sleep(_DAMAGED_SECONDS)
            except (PeerError, NotFound) as error:
                # If the upstream truncated entries, the stream reports it.
                if logged != str(error):
                    logged = str(error)
                    _log.warning(
                        "comparison with the upstream interrupted, trying again: %s", logged
                    )
                await trio.sleep(_PAUSE_SECONDS)
        _log.info("compared all %d entries with the upstream's", high)

    async def _compare(self, client: RelayClient, high: int) -> None:
        """Find entries that differ, from the next one on."""
        logged_at = trio.current_time()
        while self._low < high:
            began, first = trio.current_time(), self._low
            low = await self._differs(client, first, high)
            if low < 0:
                low = -low
                self._found.extend(await self._find(client, first, low))
            self._low = low
            if not self._found:
                await self._writer.compared(Compared((), low))
            self._on_progress()
            if (now := trio.current_time()) - logged_at >= _SAY_SECONDS:
                logged_at = now
                _log.info("comparing with the upstream's entries: %d of %d", low, high)
            await trio.sleep(max(0.0, self._pause(first, low) - (now - began)))

    async def _replace(self, client: RelayClient, high: int) -> None:
        """Replace entries that differ, now that all of them can be updates."""
        while self._found:
            updates = await self._fetch(client, self._found[:_FEW])
            await self._apply(Compared(tuple(updates), None))
            del self._found[:_FEW]
        await self._apply(Compared((), high))
        self._on_progress()

    async def _apply(self, found: Compared) -> None:
        await self._writer.compared(found)
        # If an operation is being received, they are applied at its end.
        while self._change_applier.waiting:  # noqa: ASYNC110 - a thread may apply them
            await trio.sleep(_WAIT_SECONDS)

    def _notify_report(self) -> None:
        self._report_arrived.set()
        self._report_arrived = trio.Event()

    async def _ensure_same(self, client: RelayClient, stream_id: bytes) -> None:
        if (await client.capabilities()).stream_id != stream_id:
            raise PeerError(
                f"{client.peer} serves another stream on this connection than on its other one"
            )

    def _pause(self, first: int, end: int) -> float:
        """The minimum time of the comparison of these entries, in seconds."""
        reader = self._stream.reader
        return (reader.cursor(end).offset - reader.cursor(first).offset) / BYTES_PER_SECOND

    async def _differs(self, client: RelayClient, first: int, end: int) -> int:
        """The end of the compared piece; negative if the hashes differ."""
        size, reader = _PIECE_BYTES, self._stream.reader
        while True:
            theirs = await client.range_hash(first, end, size)
            changes = reader.turn
            try:
                with reading(self._stream, first, theirs.end):
                    _, digest = await trio.to_thread.run_sync(
                        hash_range, reader, first, theirs.end, 1 << 62
                    )
                break
            except (DamagedFile, NotFound):
                if reader.turn == changes:
                    raise
            # An update was applied meanwhile: a shorter piece is more likely to be read between
            # updates.
            size = max(1, size // 4)
        return theirs.end if digest == theirs.digest else -theirs.end

    async def _find(self, client: RelayClient, first: int, end: int) -> array[int]:
        """The numbers of differing entries from `first` up to `end`, by bisection.

        Raises `UpstreamRewritten` if there are too many, or some cannot be updates.
        """
        found = array("Q")
        ranges = [(first, end)]
        while ranges:
            first, end = ranges.pop()
            if end - first <= _FEW:
                differing = await self._fetch(client, range(first, end))
                if differing:
                    await trio.to_thread.run_sync(ensure_whole, self._stream, first, end)
                others = len(self._found) + len(found)
                found.extend(entry.number for entry in differing)
                if differing and not self._change_applier.can_be_updates(differing, others):
                    number = (self._found or found)[0]
                    raise UpstreamRewritten(
                        f"{client.peer} has another history: it differs from this relay's in "
                        f"{counted(others + len(differing))}, from entry {number} on",
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

    async def _fetch(self, client: RelayClient, numbers: Sequence[int]) -> list[Entry]:
        """The upstream's entries that differ from the file's and were not reported meanwhile."""
        async with client.entries_by_number(numbers) as entries:
            theirs = [entry async for entry in entries]
        # A change that these entries already contain will be reported.
        epoch = (await client.range_hash(numbers[0], numbers[0] + 1)).epoch
        while self._change_applier.reported_epoch < epoch:
            heard = self._report_arrived
            if self._change_applier.reported_epoch < epoch:
                await heard.wait()
        ours = await trio.to_thread.run_sync(
            lambda: [self._stream.entry(number) for number in numbers]
        )
        return [
            one
            for one, other in zip(theirs, ours, strict=True)
            if one != other and not self._change_applier.was_reported(one.number)
        ]
