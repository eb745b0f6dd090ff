"""Compares what a relay has received with the checksums of its upstream's pages, before a commit.

Owns which entries were compared, and what a difference means: damage, or a change that the upstream
has not reported yet. Asks the upstream on a connection of its own. `writer.py` commits, or drops
the operation.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Final, Protocol, TypeVar

import trio

from datastreamer.errors import (
    BadFromEntry,
    ConnectionLost,
    NoAnswer,
    PeerError,
    UpstreamDamaged,
)
from datastreamer.protocol.following import RangeSum, SumsFound
from datastreamer.relay.apply_changes import ChangeApplier, ensure_whole, reading
from datastreamer.relay.client import RelayClient
from datastreamer.storage.pages.hashes import PageHash
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

T = TypeVar("T")

ASIDE = "relay: checksums"
"""The name of the relay's second connection in the upstream's list of clients."""

# An idle connection is closed after this time: the upstream may have use for its slot.
_IDLE_SECONDS: Final = 5.0
# The writer of the upstream's file may make a checksum a moment after the commit.
_MOMENT_SECONDS: Final = 0.01
# Time after which checksums that the upstream did not have are requested again.
_AGAIN_SECONDS: Final = 1.0
# The same after requests that failed: a commit may have waited for the answer.
_REFUSED_SECONDS: Final = 30.0
_ATTEMPTS: Final = 3


class OpenOperation(Protocol):
    """The part of an atomic operation that is compared."""

    @property
    def next_number(self) -> int: ...
    def finished_pages(self) -> list[PageHash]: ...
    def preview(self) -> Reader: ...


class SumsClient:
    """Requests an upstream's checksums and times, on a connection that is closed when it is not
    used."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[RelayClient]],
        peer: str,
        timeout: float,
    ) -> None:
        self.peer = peer
        self._connect = connect
        self._timeout = timeout
        self._turn = trio.Lock()
        self._stack = AsyncExitStack()
        self._client: RelayClient | None = None
        self._used_at = 0.0

    async def ask(self, question: Callable[[RelayClient], Awaitable[T]]) -> T:
        """The answer to a question. Raises `PeerError`."""
        async with self._turn:
            reused = self._client is not None
            with trio.move_on_after(self._timeout):
                try:
                    return await self._ask(question)
                except ConnectionLost:
                    await self._close()
                    if not reused:
                        raise
                return await self._ask(question)
            await self._close()
            raise NoAnswer(f"no answer from {self.peer} within {self._timeout:g} s")

    async def _ask(self, question: Callable[[RelayClient], Awaitable[T]]) -> T:
        if self._client is None:
            self._client = await self._stack.enter_async_context(self._connect())
        found = await question(self._client)
        self._used_at = trio.current_time()
        return found

    async def run(self) -> None:
        """Close idle connections until cancelled, and at the end the last one."""
        try:
            while True:
                await trio.sleep(_IDLE_SECONDS)
                if trio.current_time() - self._used_at >= _IDLE_SECONDS:
                    async with self._turn:
                        await self._close()
        finally:
            with trio.CancelScope(shield=True):
                await self._close()

    async def _close(self) -> None:
        self._client = None
        await self._stack.aclose()


class ReceivedCheck:
    """Compares the entries that one upstream sends after a join. One thread at a time."""

    def __init__(
        self, client: SumsClient, stream: DataStream, change_applier: ChangeApplier
    ) -> None:
        self.client = client
        self._stream = stream
        self._change_applier = change_applier
        # Known checksums of what was not compared yet, in order; and where they end.
        self._ranges: deque[RangeSum] = deque()
        self._known_to = self._next = stream.total_entries
        # The upstream's epoch when these were sent.
        self._epoch = 0
        # Whether entries before `_next` are to be compared, and since when that may be tried.
        self._again = False
        self._ask_at = 0.0
        self._logged = ""

    async def begin(self) -> None:
        """Request the checksums of the upstream's entries that the file lacks."""
        self._extend(await self._request(self._next), with_tail=True)

    def is_due(self, next_number: int, size: int) -> bool:
        """Whether `before_commit` has anything to do for an operation of `size` packed bytes that
        ends before entry `next_number`."""
        if self._ranges and self._ranges[0].end <= next_number:
            return True
        if time.monotonic() < self._ask_at:
            return False
        return self._again or self._stream.parts.writer.fills_page(size)

    def before_commit(self, op: OpenOperation) -> None:
        """Compare what the commit of `op` makes complete. In a thread that Trio has started.

        Raises `UpstreamDamaged`, and what the file raises. If the upstream does not send
        checksums, nothing is compared.
        """
        finished = {page.next_number: page.digest for page in op.finished_pages()}
        due = self._compare(op, finished)
        while due and self._learn(max(finished, default=0), op.next_number):
            due = self._compare(op, finished)

    def _compare(self, op: OpenOperation, finished: dict[int, bytes]) -> bool:
        """Compare the known ranges that end with `op` at the latest; `finished` are the checksums
        of pages, by the entry after each. False if one is to be compared again later."""
        preview: Reader | None = None
        while self._ranges and (known := self._ranges[0]).end <= op.next_number:
            # (Where pages do not begin with the same entries, the entries are read again.)
            if finished.get(known.end) != known.digest:
                preview = preview or op.preview()
                with reading(self._stream, known.first, self._stored(known)):
                    _, digest = hash_range(preview, known.first, known.end, 1 << 62)
                if digest != known.digest and not self._is_explained(known, digest):
                    self._ranges.clear()
                    self._known_to = self._next
                    self._try_later(again=True)
                    return False
            self._ranges.popleft()
            self._next = known.end
        return True

    def _stored(self, known: RangeSum) -> int:
        """The end of those entries of a range that were stored by an earlier commit."""
        return min(self._stream.parts.writer.next_entry, known.end)

    def _learn(self, finished: int, stop: int) -> bool:
        """Request checksums if those of the pages up to entry `finished` are not known, or others
        are to be compared; whether more are known now. `stop` is the end of what was received."""
        if time.monotonic() < self._ask_at or not (self._again or finished > self._known_to):
            return False
        if not self._again and not self._ranges:
            # Pages without a checksum are left uncompared.
            self._next = max(self._next, self._stream.parts.writer.next_entry)
        self._again, before = False, self._known_to
        for _ in range(2):
            found = trio.from_thread.run(self._request, self._next)
            self._extend(found, with_tail=found is not None and found.tail.end > stop)
            if found is None or self._known_to > before or not finished:
                break
            time.sleep(_MOMENT_SECONDS)
        if finished > self._known_to and self._known_to <= before:
            self._try_later(again=False)
        return bool(self._ranges)

    def _try_later(self, *, again: bool) -> None:
        self._again = again
        self._ask_at = time.monotonic() + _AGAIN_SECONDS

    async def _request(self, number: int) -> SumsFound | None:
        """The upstream's answer; None if there is none."""
        agreement = self._change_applier.agreement
        try:
            found = await self._ask(number)
            if agreement is None or found.stream_id != agreement.stream_id:
                raise PeerError(f"{self.client.peer} serves another stream on this connection")
        except BadFromEntry:
            return None  # it was truncated, which it reports
        except PeerError as error:
            if str(error) != self._logged:
                self._logged = str(error)
                _log.warning("what is received is not compared with checksums: %s", error)
            self._ask_at = time.monotonic() + _REFUSED_SECONDS
            return None
        self._logged = ""
        return found

    async def _ask(self, number: int) -> SumsFound:
        """As `SumsClient.ask`; a lost connection and a late answer are no reason to store what
        was not compared, unless they are the rule."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(ConnectionLost, NoAnswer):
                return await self.client.ask(lambda client: client.page_sums(number))
        return await self.client.ask(lambda client: client.page_sums(number))

    def _extend(self, found: SumsFound | None, *, with_tail: bool) -> None:
        """The checksums of `found` replace those that are known."""
        if found is None:
            return
        sums = found.ranges if with_tail else found.pages
        self._ranges = deque(each for each in sums if each.end > self._next)
        self._known_to = found.pages[-1].end if found.pages else self._next
        self._epoch = found.epoch

    def _is_explained(self, known: RangeSum, digest: bytes) -> bool:
        """Whether entries with another checksum than the upstream's are the upstream's entries
        nevertheless; False if that is not known yet. Raises `UpstreamDamaged` if they are not, and
        `DamagedEntry` if those of the file are damaged."""
        found = trio.from_thread.run(self._request, known.first)
        if found is None:
            raise ConnectionLost(
                f"{self.client.peer} does not confirm its checksum of entries {known.first} to "
                f"{known.end - 1}, which differs; receiving them again"
            )
        if found.epoch != self._epoch:
            now = [each for each in found.ranges if each[:2] == known[:2]]
            if not now:
                return False
            if now[0].digest == digest:
                return True
        applier = self._change_applier
        if applier.waiting or applier.reported_epoch != found.epoch:
            return False
        agreement = applier.agreement
        if agreement is not None and applier.uncompared and known.first < agreement.high:
            # These may have missed an update: they are compared by hashes.
            return True
        stored = self._stored(known)
        ensure_whole(self._stream, known.first, stored)
        what = (
            f"entries {known.first} to {known.end - 1} received from {self.client.peer} do not "
            "match its checksum: they are damaged in its file, or were damaged on their way here"
        )
        if known.first < stored:
            what += f"; entries {known.first} to {stored - 1} had been stored before"
        raise UpstreamDamaged(what)
